"""Errors of the studies, each with its exit code.

| code | meaning |
|---|---|
| 0 | everything requested is done |
| 1 | some trials failed, or an unexpected error |
| 2 | the command line, a recipe or a trial is not valid |
| 3 | a data set is missing, incomplete or damaged |
| 4 | another process works in this folder |
| 5 | a loss became NaN or infinite |
| 6 | the disk is full |
| 130 | interrupted; the run can be resumed |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path


class LabError(RuntimeError):
    """Something a user can act on; the message says what happened, what was got and what to do."""

    exit_code = 1


class ConfigError(LabError, ValueError):
    """A recipe or a trial is not valid. Carries every problem that was found, not only the first.

    >>> print(ConfigError("recipe.toml", ["train.lrr: unknown key", "seeds: empty"]))
    recipe.toml is not valid, 2 problems:
      - train.lrr: unknown key
      - seeds: empty
    """

    exit_code = 2

    def __init__(self, what: str, problems: Sequence[str]):
        self.what, self.problems = what, list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            f"{what} is not valid, {count}:\n" + "\n".join(f"  - {p}" for p in self.problems)
        )

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, list[str]]]:
        return type(self), (self.what, self.problems)


class Locked(LabError):
    """Another process works in the folder."""

    exit_code = 4


class Diverged(LabError):
    """The loss is no longer a finite number."""

    exit_code = 5


class DiskFull(LabError):
    """Nothing more can be written; what was recorded before is whole."""

    exit_code = 6


class DamagedRecord(LabError, ValueError):
    """A file of a record cannot be read, or is not what was written; the message names it."""


class Refused(LabError):
    """The function does not fit the comparison: every other run would end the same way."""

    exit_code = 2


class Interrupted(LabError):
    """Raised when the user stops the run; a checkpoint was written first."""

    exit_code = 130


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP to the command: like Ctrl-C, but whoever sent it may kill the command ten
    seconds later."""


class Stopped(Interrupted):
    """A trial of one's own training had to stop: interrupted, or pruned by a search."""


class OwnCodeError(LabError):
    """The user's function raised; the message names its file and line."""


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn 'no space left' into a message that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        raise DiskFull(
            f"No space left while writing {path}. Everything "
            "recorded before is whole, nothing was lost. "
            "Free some space and run the same command again: it resumes from the last checkpoint."
        ) from error


def portable(error: BaseException) -> Exception:
    """The error in a form that survives a pipe: our own kinds stay, others become LabError with
    their traceback.

    >>> print(portable(ZeroDivisionError("division by zero")))
    ZeroDivisionError: division by zero
    """
    import pickle
    import traceback

    if isinstance(error, LabError | OSError | ValueError):
        try:
            copy = pickle.loads(pickle.dumps(error))
            if type(copy) is type(error) and str(copy) == str(error):
                return copy
        except Exception as unpicklable:  # an exception whose constructor wants other arguments
            error.add_note(f"(could not be sent between processes: {unpicklable})")
    plain = LabError(f"{type(error).__name__}: {error}")
    plain.add_note("".join(traceback.format_exception(error)))
    return plain
