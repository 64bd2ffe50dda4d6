"""What `dampen audit` suggests where a model overfits: a small table for the wheel, from studies with a tuned baseline.

python -m reproductions.pages.advice [--check]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dampen.studies import Entry, ResultTable, methods_as_text
from reproductions.pages import answers
from reproductions.pages.design import overfits
from reproductions.pages.planned import result
from reproductions.pages.publish import committed_report, publish
from reproductions.pages.which_method import PANELS

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "src" / "dampen" / "studies" / "advice.json"
WORDS = {
    "small_data/digits_strength": "337 images of digits, the strength alone tuned",
    "language/epochs_1": "180,000 characters in one epoch, GPT of 3 layers",
    "language/epochs_4": "180,000 characters in 4 epochs, GPT of 3 layers",
    "language/epochs_16": "180,000 characters in 16 epochs, GPT of 3 layers",
}
"""Data in words that stand alone, where the table of the page refers to the line above."""
UNTUNED = "baseline, weight decay"
"""How the configuration begins that is the baseline at the usual weight decay."""


def study(name: str, data: str, page: str) -> dict[str, Any]:
    """One experiment as a row of the table.

    Args:
        name: of the experiment.
        data: in words.
        page: of its results, below docs/results.
    """
    table = committed_report(result(name)).tables[0]
    baseline = next(e for e in table.entries if e.config.baseline)
    finals = [run.final for run in baseline.setting.finished().values() if run.final]
    train = statistics.fmean(f.train["task"] for f in finals)  # type: ignore[type-var]
    test = statistics.fmean(f.test["nll"] for f in finals)  # type: ignore[type-var]
    found = answers.verdicts(table)
    methods = [_method(e, table) for e in table.ranked() if e.name in found and _has_methods(e)]
    usual = [c for key, c in found.items() if key.startswith(UNTUNED)]
    return {
        "experiment": name,
        "data": WORDS.get(name, data),
        "page": f"results/{page}.md",
        "seeds": max(c.n for c in found.values()),
        "train_loss": round(train, 4),
        "test_loss": round(test, 4),
        "overfits": overfits(train, test),
        "unit": "points" if table.metric.percent else table.metric.title,
        "tuned_weight_decay": [round(-x, 4) for x in (c.difference, c.high, c.low)]
        if (c := next(iter(usual), None))
        else None,
        "methods": methods,
    }


def _has_methods(entry: Entry) -> bool:
    return bool(next(iter(entry.setting.logged.values())).config["methods"])


def _method(entry: Entry, table: ResultTable) -> dict[str, Any]:
    c = answers.verdicts(table)[entry.name]
    specs = next(iter(entry.setting.logged.values())).config["methods"]
    short = [
        {k: float(f"{v:.2g}") if isinstance(v, float) else v for k, v in spec.items()}
        for spec in specs
    ]
    return {
        "name": entry.name,
        "methods": methods_as_text(short),
        "tune": " + ".join(map(_without_numbers, specs)),
        "verdict": c.verdict,
        "difference": [round(x, 4) for x in (c.difference, c.low, c.high)],
    }


def _without_numbers(spec: dict[str, Any]) -> str:
    """A method as one types it where `--tune` chooses its numbers."""
    kept = [f"{k}={v}" for k, v in spec.items() if k != "name" and isinstance(v, bool | str)]
    return f"{spec['name']}({', '.join(kept)})" if kept else str(spec["name"])


def content() -> str:
    """The table as JSON. Experiments that have not run are left out."""
    rows = [study(name, *told) for name, told in PANELS.items() if result(name).is_file()]
    return json.dumps({"schema": 1, "studies": rows}, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="only say whether the table is up to date"
    )
    options = parser.parse_args(arguments)
    return publish({TABLE: content()}, options.check)


if __name__ == "__main__":
    raise SystemExit(main())
