"""For mkdocs: the examples of docstrings as blocks of code. Without it `>>>` is Markdown for a quotation in a
quotation in a quotation, because our docstrings have no heading "Examples:" above them."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*(?:\n\n>>> .*(?:\n(?!\s*$).*)*)*", re.MULTILINE)
"""Lines from `>>>` to the next empty one, and those after it that go on."""


def fenced(text: str) -> str:
    """Examples between fences.

    >>> fenced("Add.\\n\\n>>> 1 + 1\\n2\\n").splitlines()
    ['Add.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Doctests(griffe.Extension):
    """Every docstring that griffe has read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
