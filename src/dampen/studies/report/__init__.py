"""From run folders to a page, or a table in another format: which method, at what
cost, how far to trust it.

read -> study (one protocol per table) -> table (statistics, verdicts) -> advice -> page, Markdown,
CSV, JSON, LaTeX
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dampen.studies.errors import ConfigError, LabError

if TYPE_CHECKING:
    from dampen.studies.report.figures import Figure
    from dampen.studies.report.read import Skipped
    from dampen.studies.table import ResultTable

FORMATS = {"html": ".html", "md": ".md", "csv": ".csv", "json": ".json", "latex": ".tex"}


PACK = "pack"
"""Not a report: the records themselves, in one file that `make_report` reads."""


@dataclass
class Report:
    """The tables of some run folders, what was left out and why, and what
    `dampen bench` measured."""

    tables: list[ResultTable]
    skipped: list[Skipped]
    benches: list[dict[str, Any]] = field(default_factory=list)
    across: Figure | None = None  # the answer over all tables, see `dampen.combine`

    def render(self, format: str = "html", live: str = "", title: str = "") -> str:
        """The report in one of `FORMATS`. `live` is for pages that a server shows: the
        version of their content.

        Args:
            format: one of `FORMATS`, or "pack".
            live: the version of the content, for a page that a server shows.
            title: of the page; default: of its table.
        """
        if format not in FORMATS:
            raise ConfigError(
                "--format", [f"unknown format {format!r}; known: {', '.join(FORMATS)}, pack"]
            )
        from dampen.studies.report import formats

        if format == "html":
            from dampen.studies.report.page import make_page

            return make_page(self.tables, self.skipped, live, self.benches, title, self.across)
        if format == "md":
            return formats.to_markdown(self.tables, self.skipped, self.benches)
        if format == "csv":
            return formats.to_csv(self.tables)
        if format == "json":
            return formats.to_json(self.tables, self.skipped)
        return formats.to_latex(self.tables)


def make_report(runs: Sequence[Path | str], split: bool = False) -> Report:
    """Read run folders and judge every row.

    Damaged and empty folders are listed and skipped. Raises ProtocolMismatch where a table would
    mix protocols (with `split` each protocol gets its own table), LabError where
    nothing is left to show.

    Args:
        runs: the folders, packs or bench results to read.
        split: make one table per protocol.
    """
    from dampen.studies.report.read import collect, make_studies
    from dampen.studies.table import make_table

    found = collect(runs)
    studies, skipped = make_studies(found, split)
    if not studies and not found.benches:
        reasons = "".join(f"\n  - {s.path}: {s.reason}" for s in skipped[:20])
        seen = reasons or "\n  - no plan.json and no run folder (config.json) anywhere below"
        raise LabError(
            f"Nothing to report in {', '.join(map(str, runs))}:{seen}\n"
            "Run something first, such as: dampen demo, or dampen run RECIPE."
        )
    return Report([make_table(study) for study in studies], skipped, found.benches)


def write_report(
    runs: Sequence[Path | str],
    output: Path | str,
    format: str | None = None,
    split: bool = False,
    curves: bool = True,
    title: str = "",
    across: Figure | None = None,
) -> Report:
    """Make a report and write it to `output`, in the format said or the one
    that the name's ending says.

    A pack is compressed where the name ends in .xz, and smaller by far without
    the `curves` of its trials.

    Args:
        runs: the folders, packs or bench results to read.
        output: the file to write.
        format: one of `FORMATS`, or "pack".
        split: make one table per protocol.
        curves: keep the logs of the runs.
        title: of the page; default: of its table.
        across: the answer over all tables, drawn before them on a page.
    """
    from dampen.studies.files import atomic_file
    from dampen.studies.report.packs import pack, packed_bytes, to_text

    output = Path(output)
    chosen = format or format_of(output)
    report = make_report(runs, split)
    report.across = across
    text = to_text(pack(runs, curves)) if chosen == PACK else report.render(chosen, title=title)
    with atomic_file(output) as file:
        file.write(packed_bytes(text, output) if chosen == PACK else text.encode())
    return report


def format_of(path: Path) -> str:
    """The format that a file's name implies.

    Args:
        path: the file.

    >>> format_of(Path("table.tex"))
    'latex'
    """
    known = {ending: name for name, ending in FORMATS.items()} | {".htm": "html", ".markdown": "md"}
    if path.suffix.lower() not in known:
        raise ConfigError(
            "--output", [f"unknown format of {path.name!r}; pass --format {'|'.join(FORMATS)}"]
        )
    return known[path.suffix.lower()]
