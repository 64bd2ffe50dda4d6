"""docs/models.md from the result file of the sweep."""

from __future__ import annotations

from typing import Any


def page(record: dict[str, Any]) -> str:
    return ""
