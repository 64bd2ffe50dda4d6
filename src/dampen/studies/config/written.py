"""Methods in plain data, written as one would type them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dampen.studies.config.methods_text import OBJECT


def describe(methods: Iterable[Mapping[str, Any]]) -> str:
    """Methods as one would write them on the command line.

    >>> describe([{"name": "drop_key", "rate": {"linear": [0.3, 0]}}, {"name": "drop_path"}])
    'drop_key(rate=linear(0.3, 0)) + drop_path'
    >>> describe([])
    'plain'
    """
    parts = []
    for method in methods:
        if OBJECT in method:  # one of the user's own, which knows how it wants to be shown
            parts.append(str(method.get("shown", method["name"])))
            continue
        arguments = ", ".join(f"{k}={_argument(v)}" for k, v in method.items() if k != "name")
        parts.append(f"{method['name']}({arguments})" if arguments else str(method["name"]))
    return " + ".join(parts) or "plain"


def _argument(value: Any) -> str:
    if isinstance(value, Mapping) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, Mapping):
            return f"{name}({', '.join(f'{k}={_argument(v)}' for k, v in arguments.items())})"
        items = arguments if isinstance(arguments, list | tuple) else [arguments]
        return f"{name}({', '.join(map(_argument, items))})"
    return json.dumps(value) if isinstance(value, str) else str(value)
