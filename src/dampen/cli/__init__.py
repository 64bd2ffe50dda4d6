"""The `dampen` command. Each subcommand is imported only when it is called, so that
help answers at once."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

COMMANDS: dict[str, tuple[str, str]] = {
    "compare": ("dampen.cli.compare:compare", "Compare methods on your data and model, fairly."),
    "demo": (
        "dampen.cli.run:demo",
        "Compare every family of methods on embedded data; a few minutes, offline.",
    ),
    "list": ("dampen.cli.catalog:list_", "List the methods or the recipes."),
    "show": ("dampen.cli.catalog:show", "Show a method or a recipe in full."),
    "run": (
        "dampen.cli.run:run",
        "Run a recipe, your own or a paper's; an interrupted run resumes.",
    ),
    "noise": (
        "dampen.cli.noise:noise",
        "Measure how much your baseline varies between seeds.",
    ),
    "report": ("dampen.cli.report:report", "Write the report of finished runs."),
    "audit": (
        "dampen.cli.audit:audit",
        "Does my dropout do anything? Am I overfitting?",
    ),
    "bench": ("dampen.cli.measure:bench", "Measure what each method costs."),
    "diagnose": (
        "dampen.cli.measure:diagnose",
        "Measure a trained model: calibration, attention, conditioning.",
    ),
    "data": ("dampen.cli.catalog:app", "List, fetch or check data sets."),
    "doctor": ("dampen.cli.measure:doctor", "Show what is installed, found and missing."),
}
"""Name -> (module:function or module:Typer, one line of help). A line whose module does not exist
is not offered."""
PANELS = {
    "compare": "Compare",
    "demo": "Compare",
    "noise": "Compare",
    "run": "Compare",
    "report": "Read results",
    "audit": "Measure",
    "bench": "Measure",
    "diagnose": "Measure",
}
"""The panel of the help that lists a command; the others are in the last one."""
LOADS_TORCH = ("audit", "bench", "compare", "demo", "diagnose", "doctor", "noise", "run")
WIDEST = 100
"""Columns of the help, also on a wider terminal."""
NEEDED = ("typer", "rich", "msgspec", "numpy", "scipy")
"""Modules of the extra `studies` without which no command starts."""
WITHOUT_EXTRAS = """dampen: the command needs packages that are not installed: {missing}.
Install them with: pip install 'dampen[studies]'
Without them the library works (import dampen), and so does: dampen doctor --build"""

EPILOG = """Examples:

dampen demo

dampen list

dampen show drop_key

dampen compare --data digits --methods "drop_key(rate=0.3), drop_path" --seeds 5

dampen run my_recipe.toml --dry-run

Exit codes: 0 done, 1 some runs failed or an audit found a problem, 2 wrong usage or recipe, 3 data missing or damaged,
4 folder in use, 5 a loss became NaN, 6 disk full, 130 interrupted (run the same command again to resume)."""


def available() -> dict[str, tuple[str, str]]:
    """The commands whose modules exist."""
    root = Path(__file__).resolve().parents[2]
    return {
        name: entry for name, entry in COMMANDS.items() if _exists(root, entry[0].split(":")[0])
    }


def _exists(root: Path, module: str) -> bool:
    path = root / Path(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def build(called: str | None) -> typer.Typer:
    """The command line, in which only the subcommand `called` is the real one; the others have
    their line of help.

    Args:
        called: the subcommand that was typed; None without one.
    """
    import typer
    from typer import rich_utils

    rich_utils.MAX_WIDTH = _width()
    app = typer.Typer(
        name="dampen",
        help="Put Transformer regularizers into any model, "
        "train, compare, and see which one is worth it.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def options(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            from dampen import __version__

            print(__version__)
            raise typer.Exit

    for name, (place, line) in available().items():
        panel = PANELS.get(name, "Look up")
        if name != called:
            app.command(name, help=line, rich_help_panel=panel)(_placeholder)
            continue
        module, attribute = place.split(":")
        found: Any = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, help=line, rich_help_panel=panel)
        else:
            app.command(name, epilog=getattr(found, "examples", None), rich_help_panel=panel)(found)
    return app


def _width() -> int:
    """Columns of the terminal, at most `WIDEST`; `WIDEST` where there is no terminal."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)


RENAMED = {
    "--same-code": "--ignore-code-change",
    "--partial": "--allow-incomplete",
    "--weights": "--save-weights",
    "--no-weights": "--no-save-weights",
}
"""Options of 0.2 and what they are called now. The old names work until 0.4."""


def renamed(arguments: Sequence[str]) -> list[str]:
    """The command line with the options of 0.2 under their new names, and a line for each.

    Args:
        arguments: as typed, without the name of the program.
    """
    for old in dict.fromkeys(a for a in arguments if a in RENAMED):
        new = RENAMED[old]
        print(f"dampen: {old} is deprecated, use {new}. It stops working in 0.4.", file=sys.stderr)
    return [RENAMED.get(argument, argument) for argument in arguments]


def _load_plugins() -> None:
    """Load the plug-ins that DAMPEN_PLUGINS lists. A problem with one ends the command."""
    if not os.environ.get("DAMPEN_PLUGINS"):
        return
    from dampen.studies.errors import LabError
    from dampen.studies.plugins import load_from_environment

    try:
        load_from_environment()
    except LabError as error:
        print(f"dampen: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _say_loading() -> None:
    """Importing torch takes seconds: say so at once, on standard error."""
    if "torch" not in sys.modules:
        print("loading torch ...", file=sys.stderr, flush=True)


def without_extras(arguments: Sequence[str], missing: Sequence[str]) -> NoReturn:
    """What the command does after `pip install dampen`: build the kernels, or name
    the packages to install.

    Args:
        arguments: as typed, without the name of the program.
        missing: modules that are not installed.
    """
    if list(arguments) == ["--version"]:
        from dampen import __version__

        print(__version__)
        raise SystemExit(0)
    if list(arguments) != ["doctor", "--build"]:
        print(WITHOUT_EXTRAS.format(missing=", ".join(missing)), file=sys.stderr)
        raise SystemExit(2)
    from dampen.native.library import BuildError, build, status

    try:
        build()
    except BuildError as error:
        print(f"dampen: the native kernels were not built: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    print(f"dampen: {status()}")
    raise SystemExit(0)


def _placeholder() -> None:
    """Replaces a subcommand that was not called."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script.

    Args:
        arguments: the command line; None: as typed.
    """
    arguments = renamed(sys.argv[1:] if arguments is None else arguments)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        without_extras(arguments, missing)
    called = next((a for a in arguments if not a.startswith("-")), None)
    if called in LOADS_TORCH and not {"-h", "--help"} & set(arguments):
        _say_loading()
    _load_plugins()
    app: Callable[..., Any] = build(called)
    app(args=arguments, prog_name="dampen")
