"""What the generated pages share: renew what stands between two marks, and write pages or say whether they are out of
date."""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dampen.studies import Report, make_report

PADDING = {"left": 70, "right": 10, "top": 5, "bottom": 5}
"""Around charts: the reader's fonts may be wider than those that the picture was laid out with."""


def renew(text: str, start: str, end: str, content: str, where: str) -> str:
    """The text with `content` between the lines `start` and `end`.

    >>> renew("a\\n<!-- x -->\\nold\\n<!-- /x -->\\nb\\n", "<!-- x -->", "<!-- /x -->", "new", "page.md")
    'a\\n<!-- x -->\\nnew\\n<!-- /x -->\\nb\\n'
    """
    if start not in text or end not in text:
        raise ValueError(
            f"{where} has no place for what is generated: add the lines {start} and {end}."
        )
    head, rest = text.split(start, 1)
    return f"{head}{start}\n{content}\n{end}{rest.split(end, 1)[1]}"


def committed_report(path: Path) -> Report:
    """The report of a committed result file; several pages read the same one.

    Args:
        path: the packed study.
    """
    return _report(path, path.stat().st_mtime_ns)


@functools.cache
def _report(path: Path, changed: int) -> Report:
    return make_report([path])


ANSWERED = ("## ", "- **Which method?**", "- **What does it cost?**", "- **Can I trust it?**")
"""How the lines begin that a question's page has in other words."""


JUDGED = ("Verdict", "Difference (corrected interval)", "p (Holm)")
"""The columns of a report's table that hold verdicts."""


def folded(report: Report, judged: bool = True) -> list[str]:
    """The whole table of a report, its measurements and differences from the paper, folded.

    Args:
        report: the report of the study.
        judged: keep the verdicts of the report; without them on a page that has a correction family of its own.
    """
    lines = [line for line in report.render("md").splitlines() if not line.startswith(ANSWERED)]
    lines = lines if judged else unjudged(lines)
    summary = (
        "<summary>All methods and metrics, published numbers, differences from the paper</summary>"
    )
    return ['<details markdown="1">', summary, "", *lines, "", "</details>", ""]


def unjudged(lines: Sequence[str]) -> list[str]:
    """Markdown without the columns, marks and notes that hold verdicts.

    >>> unjudged(["| a | Verdict | NLL |", "|---|---|---|", "| x | better | 0.1 ▲ |", "Differences to x, seed by seed."])
    ['| a | NLL |', '|---|---|', '| x | 0.1 |']
    """
    kept: list[int] = []
    found = []
    for line in lines:
        if line.startswith("Differences to "):
            continue
        if not line.startswith("|"):
            kept = []
        else:
            cells = line.strip("|").split("|")
            kept = kept or [i for i, cell in enumerate(cells) if cell.strip() not in JUDGED]
            cells = [re.sub(r" [▲▼=](?= *$)", "", cells[i]) for i in kept]
            line = f"|{'|'.join(cells)}|"
        found.append(line)
    return found


def stated(sentence: str, *facts: bool) -> str:
    """A sentence written by hand; the build fails where the records no longer bear it out."""
    if not all(facts):
        raise ValueError(f"The records no longer bear this sentence out; write it anew: {sentence}")
    return sentence


def publish(pages: Mapping[Path, str], check: bool) -> int:
    """Write the pages, or with `check` write nothing: 1 if any is out of date."""
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text() != text]
    if check:
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pages[path])
    return 0


def measure_and_publish(
    told: str | None,
    measure: Callable[[Path], None],
    page: Callable[[], str],
    path: Path,
    arguments: Sequence[str] | None,
) -> int:
    """The command of a page whose record is made by training first: `--measure RUNS`, then the page, or `--check`."""
    parser = argparse.ArgumentParser(
        description=told, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure",
        type=Path,
        metavar="RUNS",
        help="train in this folder and write the record first",
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the page is up to date"
    )
    options = parser.parse_args(arguments)
    if options.measure:
        import torch

        torch.set_num_threads(1)
        measure(options.measure)
    return publish({path: page()}, options.check)
