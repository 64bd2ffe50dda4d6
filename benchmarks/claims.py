"""Every published claim beside what our records say of it: shown, contradicted, equal, not decided, or not testable.

A claim (`benchmarks.claimed`) names a record, two of its rows and the direction; the verdict is computed from the
record each time the page is made (`python -m benchmarks.questions`). Claims of one record with one reference and one
metric are one family (Holm).
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.claimed import CLAIMS, CONVOLUTIONS, DEPTH, PAPERS, ROBUST, SWEEPS, Claim
from benchmarks.curves import read as read_curves
from dampen.studies.records.metric import describe
from dampen.studies.records.verdict import Comparison, judge, sentence
from dampen.studies.report import make_report

RECORDS = Path(__file__).resolve().parents[1] / "records"

Values = dict[str, dict[str, dict[str, float]]]
"""Of a record: row, metric, seed."""


def read(path: Path) -> Values:
    """A packed study, or one of the small records of `benchmarks.skip_story`."""
    if path.suffix == ".json" and "rows" in (content := json.loads(path.read_text())):
        return {
            row: {"accuracy": {str(t["seed"]): describe("accuracy").scale * t["accuracy"] for t in trials}}
            for row, trials in content["rows"].items()
        }
    table = make_report([path]).tables[0]
    if not table.study.show_all:
        return {e.name: e.by_seed for e in table.entries}
    curves = read_curves(path, path.name)  # every row at the value that validation chose on a tuning seed
    return {row: curves.entry(row).by_seed for row in dict.fromkeys(e.row.name for e in table.entries)}


def judged(values: Values, claims: list[Claim]) -> dict[Claim, Comparison]:
    """The comparisons of claims with one reference and one metric, corrected over them."""
    metric, reference = claims[0].metric, claims[0].reference
    rows = {name: values[name].get(metric, {}) for name in (reference, *(c.row for c in claims))}
    found = judge(rows, reference, metric, better=describe(metric).better or "max")  # else: more, in the claim's words
    return {c: found[c.row] for c in claims}


def told(claim: Claim, found: Comparison | None) -> str:
    """The claim's fate in words."""
    if claim.untestable:
        return f"not testable here: {claim.untestable}"
    if found is None:
        return "not run yet"
    words = sentence(found, describe(claim.metric))
    if claim.says == "no worse" and found.verdict in ("better", "equal"):
        return f"shown: {words}"
    if found.verdict not in ("better", "worse"):
        return words
    return f"{'shown' if found.verdict == claim.says else 'contradicted'}: {words}"


def _asked(record: str, start: str = "") -> dict[Claim, Comparison] | None:
    """The claims of a record on rows whose names begin so; None where there is no record."""
    if not (RECORDS / record).is_file():
        return None
    return {c: found for c, found in of_record(record).items() if c.row.startswith(start)}


def of_record(record: str) -> dict[Claim, Comparison]:
    """The claims on a record, judged: those with one reference and one metric are one family."""
    families: dict[tuple[str, str], list[Claim]] = {}
    for claim in (c for c in CLAIMS if c.record == record):
        families.setdefault((claim.reference, claim.metric), []).append(claim)
    values = read(RECORDS / record)
    return {c: found for claims in families.values() for c, found in judged(values, claims).items()}


def _differences(found: dict[Claim, Comparison]) -> str:
    return ", ".join(f"{c.difference:+.1f}" for c in found.values())


def _worse(found: dict[Claim, Comparison]) -> str:
    return f"{sum(c.verdict == 'worse' for c in found.values())} of {len(found)}"


def depth() -> str | None:
    """What attention loses without its skip, over the number of layers."""
    if (found := _asked(DEPTH)) is None:
        return None
    depths = ", ".join(c.reference.split()[0] for c in found)
    told = f"**Without its skip, attention fails with depth**: {_differences(found)} points at {depths} layers, shown "
    return f"{told}for {_worse(found)} depths (digits, {max(c.n for c in found.values())} seeds)"


def convolutions() -> str | None:
    """What convolutions lose without their skips, over the number of layers."""
    kinds = {kind: _asked(CONVOLUTIONS, kind) for kind in ("ConvMixer", "CNN")}
    parts = [
        f"{kind} {_differences(found)} points, shown worse at {_worse(found)}" for kind, found in kinds.items() if found
    ]
    return f"**Without skips**, at 4, 8 and 12 layers: {'; '.join(parts)} (digits)" if parts else None


def sweeps() -> str | None:
    """What larger rates and windows than the paper's limits cost."""
    rates, widths = _asked(SWEEPS, "hard masking"), _asked(SWEEPS, "blur")
    if rates is None or widths is None:
        return None
    told = f"**Beyond p 0.5**, at 0.6, 0.7 and 0.9: {_differences(rates)} points against 0.5, shown worse at "
    told += f"{_worse(rates)}. **Beyond w 9**, at 11, 13 and 15: {_differences(widths)} points against 9, shown worse "
    return f"{told}at {_worse(widths)} (digits)"


def attacked() -> str | None:
    """Which rows stand an attack better than dropout."""
    if (found := _asked(ROBUST)) is None:
        return None
    told = "; ".join(f"{c.row} {sentence(v, describe(c.metric))}" for c, v in found.items())
    return f"**PGD at 16/255, against dropout**: {told} (digits)"


def page() -> str:
    """A table for each paper."""
    found: dict[Claim, Comparison] = {}
    for record in dict.fromkeys(c.record for c in CLAIMS if c.record and (RECORDS / c.record).is_file()):
        found |= of_record(record)
    lines = ["# The papers' claims, one by one", ""]
    lines += ["Generated by `python -m benchmarks.questions` from the records in `records/`; do not edit.", ""]
    lines += ["Small models and little data: a claim that is contradicted here is contradicted in this regime.", ""]
    for paper, name in PAPERS.items():
        lines += [f"## {name} ({paper})", "", "| claim | here | record |", "|---|---|---|"]
        for claim in (c for c in CLAIMS if c.paper == paper):
            record = f"`{claim.record}`" if claim.record else ""
            lines.append(f"| {claim.text} | {told(claim, found.get(claim))} | {record} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"
