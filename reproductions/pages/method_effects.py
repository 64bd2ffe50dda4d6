"""What the committed records measured of each method: a line for every table in which it stands alone in a row."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dampen.studies import LabError, sentence
from reproductions.pages import design
from reproductions.pages.which_method import RECORDS, read


@dataclass(frozen=True)
class Effect:
    """One row of one record, judged against its reference."""

    record: str
    data: str
    row: str
    reference: str
    n: int
    limits: str
    verdict: str
    told: str


@functools.cache
def effects() -> dict[str, list[Effect]]:
    """By method, from every packed study; rows of several methods count for none of them."""
    found: dict[str, list[Effect]] = {}
    for path in sorted([*RECORDS.rglob("*.json"), *RECORDS.rglob("*.json.xz")]):
        try:
            table, entries = read(path)
        except (
            LabError
        ):  # not a pack of runs: the small records of other benchmarks lie beside them
            continue
        for entry in entries:
            names = {m["name"] for m in entry.config.methods}
            if entry.comparison is None or len(names) != 1 or entry.comparison.n < 2:
                continue
            told = f"{table.metric.label}: {sentence(entry.comparison, table.metric)}"
            how = design.summary(table, path)
            where = str(path.relative_to(RECORDS))
            effect = Effect(
                where,
                table.study.title,
                entry.name,
                entry.reference or "",
                entry.comparison.n,
                how,
                entry.comparison.verdict,
                told,
            )
            found.setdefault(names.pop(), []).append(effect)
    return found
