"""How things are called in tables, sentences and charts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dampen.studies.records.table import Entry, ResultTable


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "seed"), plural(1200, "run")
    ('1 seed', '1,200 runs')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def counted(entry: Entry, table: ResultTable) -> str:
    """Values of a row and how many were planned; the folds of a round of cross-validation make one value."""
    return f"{entry.summary.n}/{entry.cell.planned // (table.study.header.get('folds') or 1)}"


def listed(names: list[str], most: int = 4) -> str:
    """Names in a sentence, not too many of them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    shown = names[:most]
    rest = len(names) - len(shown)
    if rest:
        return ", ".join(shown) + f" and {rest} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def shortened(name: str, most: int = 24) -> str:
    """A name that fits beside a point.

    >>> shortened("feed_forward_dropout (feed-forward)")
    'feed_forward_dropout (f…'
    """
    return name if len(name) <= most else name[: most - 1] + "…"
