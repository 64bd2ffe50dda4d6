"""`dampen report`: the page that says which method is worth it, or the table in another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dampen.cli.common import Json, command, print_json
from dampen.names import printable


@command(
    """dampen report runs/demo -o report.html
dampen report runs/demo --serve
dampen report runs/table_1 runs/table_5 -o report.html
dampen report runs/demo --format md
dampen report runs/demo -o table.tex
dampen report runs/demo --format pack -o demo.json
dampen report demo.json bench.json -o report.html"""
)
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that dampen run, compare or demo wrote, packs, or bench results."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write; default: report.html, or the screen."),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            help="html, md, csv, json, latex, or pack (all "
            "results in one file); default: by the name."
        ),
    ] = None,
    split: Annotated[
        bool, typer.Option("--split", help="One table per protocol, where a folder holds several.")
    ] = False,
    title: Annotated[str | None, typer.Option(help="The title of the page.")] = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Show the page on 127.0.0.1 and refresh it while runs finish."
        ),
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for --serve; 0 takes a free one.")
    ] = 8765,
    as_json: Json = False,
) -> None:
    """Report which method to use, its cost and how far to trust the result:
    one page, no network."""
    if serve:
        _serve(runs, port, split)
        return
    from dampen.studies.report import PACK, make_report, write_report

    if format == PACK and output is None:
        raise typer.BadParameter("--format pack needs an output file, as in -o runs.json")
    if output is None and format not in (None, "html"):
        text = make_report(runs, split).render(format)
        text = "\r\n".join(map(printable, text.split("\r\n")))  # the line ends of CSV
        print(text, end="" if text.endswith("\n") else "\n")
        return
    path = output or Path("report.html")
    made = write_report(
        runs, path, format or ("html" if output is None else None), split, title=title or ""
    )
    if as_json:
        rows = sum(len(t.entries) for t in made.tables)
        skipped = [{"path": s.path, "reason": s.reason} for s in made.skipped]
        print_json(
            {"output": str(path), "tables": len(made.tables), "rows": rows, "skipped": skipped}
        )
        return
    for s in made.skipped:
        print(printable(f"skipped {s.path}: {s.reason}"), file=sys.stderr)
    from dampen.studies.report.summary import advise

    for table in made.tables:
        advice = advise(table)
        print(
            printable(
                f"{table.study.title}\n  {advice.which.headline}. {' '.join(advice.which.details)}"
            )
        )
        print(f"  Cost: {advice.cost.headline}. Trust: {advice.trust.headline}.")
    html = (format or path.suffix.lstrip(".")) in ("html", "htm")
    print(f"Written to {path}." + (" Open it in any browser; it needs no network." if html else ""))


def _serve(runs: list[Path], port: int, split: bool) -> None:
    from dampen.studies.report.serve import address, make_server

    server = make_server(runs, port, split)
    print(f"The report is at {address(server)} and follows the runs. Ctrl-C stops it.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("Stopped.")
    finally:
        server.server_close()
