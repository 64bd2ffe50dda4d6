"""What the subcommands share: errors as messages with exit codes, output for people and machines,
common options."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dampen.names import printable
from dampen.studies.errors import LabError

WHAT, DATA, JUDGING = "What to compare", "Data and model", "How to judge"
TUNING, RUNNING, OUTPUT = "Tuning", "Where and how runs execute", "Output"
"""Panels of the help."""

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON document to standard output, for machines.",
        rich_help_panel=OUTPUT,
    ),
]
DataDir = Annotated[
    str | None,
    typer.Option(
        "--data-dir",
        help="Where the data lies; default: $DAMPEN_DATA, then ~/.cache/dampen/data.",
        rich_help_panel=DATA,
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", envvar="DAMPEN_RUNS", help="Folder that holds the runs.", rich_help_panel=OUTPUT
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes at once; default: one per GPU, or per core.",
        rich_help_panel=RUNNING,
    ),
]
PerGpu = Annotated[
    int | None,
    typer.Option(
        "--per-gpu",
        min=1,
        help="Processes that share a GPU; default: 1.",
        rich_help_panel=RUNNING,
    ),
]
Tensorboard = Annotated[
    bool,
    typer.Option("--tensorboard", help="Write TensorBoard scalars too.", rich_help_panel=OUTPUT),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--logger",
        help="Also log to wandb or to a logger of a package. Repeatable.",
        rich_help_panel=OUTPUT,
    ),
]
Weights = Annotated[
    bool,
    typer.Option(
        "--save-weights/--no-save-weights",
        help="Save the selected weights of each run.",
        rich_help_panel=OUTPUT,
    ),
]
AllowIncomplete = Annotated[
    bool,
    typer.Option(
        "--allow-incomplete",
        help="Accept an incomplete copy of the data; the result file says so.",
        rich_help_panel=DATA,
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value, as in train.lr=0.001. Repeatable.",
        rich_help_panel=WHAT,
    ),
]


def command(examples: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a subcommand: help that ends in examples, and errors that end in a message
    and an exit code.

    Args:
        examples: one command per line, for the end of the help.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            as_json = bool(kwargs.get("as_json"))
            try:
                function(*args, **kwargs)
            except LabError as error:
                fail(str(error), error.exit_code, as_json)
            except KeyboardInterrupt:
                fail("Interrupted. Run the same command again to resume.", 130, as_json)
            except Exception as error:
                message, code = _known(error)
                if code is None:
                    raise
                fail(message, code, as_json)

        guarded.examples = "Examples:\n\n" + "\n\n".join(examples.strip().splitlines())  # type: ignore[attr-defined]
        return guarded

    return decorate


OF_STUDIES = (
    "altair filelock jinja2 lightning msgspec numpy PIL rich safetensors scipy sklearn "
    "tokenizers torchmetrics typer vl_convert"
).split()
"""Modules that the extra `studies` installs."""


def _known(error: Exception) -> tuple[str, int | None]:
    """Message and exit code of the errors of data sets (3), of paths that cannot be used and of
    packages that are not installed (2). An error that nobody expects has no code."""
    if isinstance(error, ModuleNotFoundError) and str(error.name).split(".")[0] in OF_STUDIES:
        return f"{error.name} is not installed. Install it with: pip install 'dampen[studies]'", 2
    kinds = {"MissingData", "IncompleteData", "DamagedData"}
    if any(c.__name__ in kinds and c.__module__.startswith("dampen.") for c in type(error).__mro__):
        return str(error), 3
    if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
        where = f" while writing {error.filename}" if error.filename else ""
        return f"No space left{where}. Free some space and run the same command again.", 6
    if isinstance(error, OSError) and error.filename is not None:
        reason = (error.strerror or type(error).__name__).lower()
        return f"{error.filename} cannot be used: {reason}. Give another path.", 2
    return str(error), None


SCHEMA = 1
"""Version of the documents that --json prints; see docs/json.md."""


def fail(message: str, code: int, as_json: bool = False) -> NoReturn:
    """Say what is wrong and leave.

    Args:
        message: what is wrong.
        code: the exit code.
        as_json: print JSON for machines.
    """
    if as_json:
        print(json.dumps({"schema": SCHEMA, "error": message, "exit_code": code}))
    else:
        print(f"dampen: {printable(message)}", file=sys.stderr)
    raise typer.Exit(code)


def print_json(value: Any) -> None:
    """One JSON document on standard output.

    Args:
        value: plain data.
    """
    print(json.dumps(value, indent=1, allow_nan=False, default=str))
