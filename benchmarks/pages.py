"""What the generated pages share: renew what stands between two marks, and write pages or say whether they are out of
date."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def renew(text: str, start: str, end: str, content: str, where: str) -> str:
    """The text with `content` between the lines `start` and `end`.

    >>> renew("a\\n<!-- x -->\\nold\\n<!-- /x -->\\nb\\n", "<!-- x -->", "<!-- /x -->", "new", "page.md")
    'a\\n<!-- x -->\\nnew\\n<!-- /x -->\\nb\\n'
    """
    if start not in text or end not in text:
        raise ValueError(f"{where} has no place for what is generated: add the lines {start} and {end}.")
    head, rest = text.split(start, 1)
    return f"{head}{start}\n{content}\n{end}{rest.split(end, 1)[1]}"


def publish(pages: Mapping[Path, str], check: bool) -> int:
    """Write the pages, or with `check` write nothing: 1 if any is out of date."""
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if check:
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])
    return 0
