"""What a study did not vary or tune, read from its record: the note at the top of its page.

Splits, tuning seeds, the baseline's own tuning, values at an end of their range, ties, confounded methods, few seeds
and training that had not converged are all derived; nothing here is typed for one study.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dampen.studies import Entry, ResultTable
from reproductions.pages.curves import search_of

FEW_SEEDS = 3
FALLING = 0.05
"""Training ended too early if the baseline's loss fell by this share from the fifth of the epochs before the last to
the last, and validation was best after the last epoch."""
PLAIN = "plain"


@dataclass(frozen=True)
class Choice:
    """How a method got its value on the tuning seeds."""

    value: float
    lowest: bool
    highest: bool
    tied: bool


def plain(entries: Sequence[Entry]) -> Entry | None:
    """The baseline; a study of several models has none of that name."""
    return next((e for e in entries if e.config.name == PLAIN), None)


def losses(entries: Sequence[Entry]) -> tuple[float, float] | None:
    """The baseline's loss over its last epoch and its NLL on the test set.

    None where they are not recorded, or differ by more than the examples: smoothed labels, wrong ones.
    """
    reference = plain(entries)
    runs = [run for run in reference.setting.finished().values() if run.final] if reference else []
    if any(
        run.config["train"].get("label_smoothing") or run.config["data"].get("noise")
        for run in runs
    ):
        return None
    finals = [run.final for run in runs]
    pairs = [(f.train.get("task"), f.test.get("nll")) for f in finals if f]
    if not pairs or any(None in pair for pair in pairs):
        return None
    train, test = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))  # type: ignore[arg-type]
    return train, test


def overfits(train: float, test: float) -> bool:
    """Whether the loss in training ends at less than half of that on the test set."""
    return train <= test / 2


def split_varies(table: ResultTable) -> bool:
    """Whether each seed trains on examples of its own."""
    data = [run.config.get("data", {}) for run in table.study.runs()]
    return bool(data) and all(d.get("split_seed") == "seed" or d.get("folds") for d in data)


def choices(search: Mapping[str, Any]) -> dict[str, Choice]:
    """What validation chose for every method with more than one value."""
    found = {}
    for row, tried in search["rows"].items():
        done = [t for t in tried["trials"] if t["valid"] is not None]
        axes = (
            [k for k in done[0]["values"] if len({t["values"][k] for t in done}) > 1]
            if done
            else []
        )
        if not axes:
            continue
        best = (max if search["mode"] == "max" else min)(t["valid"] for t in done)
        winners = [t["values"][axes[0]] for t in done if t["valid"] == best]
        values = [t["values"][axes[0]] for t in done]
        found[row] = Choice(
            winners[0], winners[0] == min(values), winners[0] == max(values), len(winners) > 1
        )
    return found


def tuning_seeds(table: ResultTable, path: Path) -> int | None:
    """How many tuning seeds chose the settings; 0 where nothing was tuned, None where the table's own seeds chose."""
    if (search := search_of(path)) is not None:
        return len(search["seeds"])
    grid = not table.study.show_all and any(len(row.settings) > 1 for row in table.study.configs)
    return None if grid else 0


def baseline_tuned(path: Path) -> bool:
    """Whether the row without methods had more than one setting to choose from."""
    search = search_of(path)
    return search is not None and PLAIN in choices(search)


def confounded(table: ResultTable) -> list[str]:
    """Methods whose reference runs the same part at another strength: the difference is of both."""
    reference = table.main_reference
    if reference is None:
        return []
    own = {m["name"]: m for m in _methods(reference)}
    found = []
    for entry in table.compared():
        shared = [
            (m, own[m["name"]])
            for m in _methods(entry)
            if m["name"] in own and entry.reference == reference.name
        ]
        parts = [
            _strengths(mine, theirs) for mine, theirs in shared if len(_methods(entry)) > len(own)
        ]
        found += [f"{entry.name} ({', '.join(p)})" for p in [[x for x in parts if x]] if p]
    return found


def _methods(entry: Entry) -> list[dict[str, Any]]:
    run = next(iter(entry.setting.logged.values()), None)
    return run.config["methods"] if run else []


def _strengths(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    keys = [k for k in mine if k in theirs and mine[k] != theirs[k]]
    return ", ".join(
        f"{k} {mine[k]:g} against {theirs[k]:g}" for k in keys if isinstance(mine[k], int | float)
    )


def still_falling(entries: Sequence[Entry]) -> bool:
    """Whether the baseline's training loss still fell when training ended, where the record keeps the losses."""
    reference = plain(entries)
    ends = []
    for run in reference.setting.finished().values() if reference else ():
        curve = [line.train["task"] for line in run.lines() if line.train.get("task") is not None]
        if len(curve) >= 20 and run.final and run.final.selected_epoch == run.final.epochs:
            fifth = len(curve) // 5
            ends.append(
                (statistics.fmean(curve[-2 * fifth : -fifth]), statistics.fmean(curve[-fifth:]))
            )
    return bool(ends) and statistics.fmean(1 - last / before for before, last in ends) > FALLING


def summary(table: ResultTable, path: Path) -> str:
    """Splits and tuning in a few words, for a cell of a table."""
    seeds = tuning_seeds(table, path)
    tuned = (
        "not tuned"
        if seeds == 0
        else "tuned on its own seeds"
        if seeds is None
        else f"{_count(seeds, 'tuning seed')}"
    )
    return f"{'new splits' if split_varies(table) else 'one split'}, {tuned}"


def limits(
    table: ResultTable, path: Path, entries: Sequence[Entry] | None = None
) -> list[tuple[str, str]]:
    """The limits of a study, each in a few words and as a sentence."""
    entries = table.entries if entries is None else entries
    found = (
        []
        if split_varies(table)
        else [("one split", "One split: every seed trains on the same examples.")]
    )
    seeds = tuning_seeds(table, path)
    if seeds == 0:
        found.append(
            (
                "not tuned",
                "Hyperparameters were not tuned: each method was run at the setting listed.",
            )
        )
    elif seeds is None:
        found.append(("tuned on its own seeds", "Settings were chosen on the table's own seeds."))
    elif seeds == 1:
        found.append(
            (
                "one tuning seed",
                "One tuning seed: a single run decided between two settings of a method.",
            )
        )
    if plain(entries) is not None and not baseline_tuned(path):
        found.append(
            ("baseline not tuned", "The baseline was not tuned (learning rate, weight decay).")
        )
    found += _edges(path)
    if wrong := confounded(table):
        told = f"Confounded, the shared part has another strength than in the reference: {'; '.join(wrong)}."
        found.append(("confounded", told))
    most = max((e.summary.n for e in entries), default=0)
    if most <= FEW_SEEDS:
        found.append((_count(most, "seed"), f"Only {_count(most, 'seed')}."))
    if still_falling(entries):
        found.append(("loss still falls", "The training loss still fell when training ended."))
    if (ends := losses(entries)) is not None and not overfits(*ends):
        told = f"The baseline underfits (training loss {ends[0]:.2f}, test NLL {ends[1]:.2f})."
        found.append(("baseline underfits", told))
    return found


def _edges(path: Path) -> list[tuple[str, str]]:
    search = search_of(path)
    found = choices(search) if search else {}
    ends = [f"{row} ({c.value:g})" for row, c in found.items() if c.lowest or c.highest]
    lowest, tied = sum(c.lowest for c in found.values()), sum(c.tied for c in found.values())
    limits = []
    if 2 * lowest > len(found):
        told = f"{lowest} of {len(found)} methods ran at the weakest setting searched: there is little to compare."
        limits.append(("weakest settings", told))
    elif ends:
        limits.append(
            (
                "values at an end of the range",
                f"Chosen at an end of the range searched: {', '.join(ends)}.",
            )
        )
    if tied:
        limits.append(("ties", f"{tied} of {len(found)} choices were ties on validation."))
    return limits


def note(table: ResultTable, path: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """The limits as the lines at the top of a page; none without a limit."""
    told = " ".join(sentence for _, sentence in limits(table, path, entries))
    return [f"> **Limits of this study.** {told}", ""] if told else []


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"
