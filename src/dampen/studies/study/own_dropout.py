"""What a saved model drops by itself: every row of a comparison has it, the one called plain too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def own_dropout(folder: str | None, model: Mapping[str, Any]) -> dict[str, float]:
    """The rates above 0 of the model's configuration, as the trial changes them; none for a model that is no folder."""
    path = Path(folder or "") / "config.json"
    if folder is None or not path.is_file():
        return {}
    try:
        config = {**json.loads(path.read_text(encoding="utf-8")), **model}
    except (ValueError, TypeError):  # no JSON, or no table: the library that loads it says so better
        return {}
    found = {k: v for k, v in config.items() if "drop" in k and isinstance(v, float)}
    return {key: value for key, value in found.items() if value > 0}


def told(rates: Mapping[str, float], name: str) -> str:
    """In a sentence, with what to write instead; empty where nothing is dropped.

    >>> print(told({"hidden_dropout_prob": 0.1}, "hf/bert"))
    hf/bert drops by itself (hidden_dropout_prob=0.1), in every row, plain too; to compare with a model that does not, \
write --set model.hidden_dropout_prob=0.0
    """
    if not rates:
        return ""
    said = ", ".join(f"{key}={value:g}" for key, value in rates.items())
    off = " ".join(f"--set model.{key}=0.0" for key in rates)
    return (
        f"{name} drops by itself ({said}), in every row, plain too; to compare with a model that does not, write {off}"
    )
