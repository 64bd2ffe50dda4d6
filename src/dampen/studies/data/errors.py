"""What can be wrong with a data set, each kind under its own name."""

from __future__ import annotations

from pathlib import Path


class MissingData(FileNotFoundError):
    """The set is nowhere it was looked for."""


class IncompleteData(ValueError):
    """The set is there but fewer files or rows than its authors published; `partial=True` accepts it."""


class DamagedData(ValueError):
    """A file is truncated, or does not hold what its format promises."""


def damaged(path: Path | str, what: str, got: object, expected: object) -> DamagedData:
    """The error for a file that breaks its format: which file, what was got, what was expected.

    >>> print(damaged("data_batch_1.bin", "bytes", 100, "a multiple of 3073"))
    data_batch_1.bin is damaged or truncated: got 100 bytes, expected a multiple of 3073. Fetch the file again.
    """
    return DamagedData(f"{path} is damaged or truncated: got {got} {what}, expected {expected}. Fetch the file again.")


def require_complete(problems: list[str], partial: bool, name: str) -> list[str]:
    """Raise for an incomplete copy unless it was accepted; return the problems as departures for the record."""
    if problems and not partial:
        raise IncompleteData(
            f"The copy of {name} is incomplete: {'; '.join(problems)}. Fetch the whole set, or accept the incomplete "
            "copy with partial=True (--partial on the command line); the record will then say so."
        )
    return [f"incomplete copy: {problem}" for problem in problems]
