"""`dampen audit`: what a model's dropout does and what is wrong around it, or whether a finished
run overfits."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dampen.cli.common import OUTPUT, Json, command, print_json
from dampen.names import printable

MODEL, CURVES = "For a model", "For curves"


@command(
    """dampen audit train.py:build
dampen audit train.py:build --loss train.py:loss --layers
dampen audit train.py:build --ranks 2 --json
dampen audit timm/vit_tiny_patch16_224
dampen audit runs/mine
dampen audit losses.csv --train train_loss --valid val_loss"""
)
def audit(
    what: Annotated[
        str,
        typer.Argument(
            help="FILE.py:FUNCTION that returns (model, "
            "inputs), timm/NAME or a saved hf/FOLDER. Or "
            "a folder of runs, a CSV of losses or trainer_state.json: am I overfitting?"
        ),
    ],
    loss: Annotated[
        str | None,
        typer.Option(
            help="FILE.py:FUNCTION of the output that returns the loss; default: the model's own, "
            "else the mean square.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="Also condition numbers and attention entropy by layer.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that build the model, to see whether they draw alike.",
            rich_help_panel=MODEL,
        ),
    ] = 1,
    batch: Annotated[
        int,
        typer.Option(
            min=2,
            help="Samples, where the function has an argument batch or dampen makes the inputs.",
            rich_help_panel=MODEL,
        ),
    ] = 4,
    batch_axis: Annotated[
        int | None,
        typer.Option(min=0, help="The axis of the samples; default: 0.", rich_help_panel=MODEL),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Leave a kind of finding out (docs/audit.md). Repeatable.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    train: Annotated[
        str | None,
        typer.Option(
            help="Column of the training loss; default: by its name.", rich_help_panel=CURVES
        ),
    ] = None,
    valid: Annotated[
        str | None,
        typer.Option(
            help="Column of the validation loss; default: by its name.", rich_help_panel=CURVES
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Also how each fact was tested.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure which dropouts act in training and in eval, and find common faults:
    exit code 1 for a problem.

    With a folder of runs or a file of losses: whether they overfit, where to
    stop and what to try."""
    from dampen.studies.advice import LOSSES, examine

    path = Path(what).expanduser()
    if path.is_dir() or path.suffix in LOSSES:
        overfitting = examine(path, train, valid)
        if as_json:
            print_json(overfitting.to_json())
        else:
            print("\n".join(map(printable, str(overfitting).splitlines())))
        return
    found = audited(
        what, loss, batch, ranks, layers=layers, batch_axis=batch_axis, ignore=ignore or ()
    )
    if as_json:
        from dampen.studies.files import finite

        print_json(finite(found.to_json()))
    else:
        lines = str(found).splitlines()
        if full:
            lines += ["", *(f"{name}: {how}" for name, how in found.tested.items())]
        print("\n".join(map(printable, lines)))
    raise typer.Exit(0 if found.ok else 1)


def audited(what: str, loss: str | None, batch: int, ranks: int = 1, **options: Any) -> Any:
    """The audit of a model, in this process or in several at once.

    Args:
        what: FILE.py:FUNCTION, timm/NAME, hf/FOLDER or a name of dampen's.
        loss: FILE.py:FUNCTION; None: what the first function returned, else the model's.
        batch: samples.
        ranks: processes; beyond one they form a group.
        options: of `dampen.audit`.
    """
    if ranks == 1:
        return _audit(what, loss, batch, options)
    from torch.multiprocessing.spawn import start_processes

    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            _in_rank, (ranks, folder, what, loss, batch, options), ranks, start_method="spawn"
        )
        return pickle.loads((Path(folder) / "audit").read_bytes())


def _in_rank(
    rank: int, ranks: int, folder: str, what: str, loss: str | None, batch: int, options: Any
) -> None:
    """One process of the group; the first writes what it found."""
    from torch import distributed

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    found = _audit(what, loss, batch, options)
    if rank == 0:
        (Path(folder) / "audit").write_bytes(pickle.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def _audit(what: str, loss: str | None, batch: int, options: Mapping[str, Any]) -> Any:
    import dampen
    from dampen.auditing import KINDS
    from dampen.extensions import hint
    from dampen.studies.bench.subject import built, make_subject, parse_model
    from dampen.studies.errors import ConfigError
    from dampen.studies.trainer.user_function import function_in_file

    unknown = [kind for kind in options["ignore"] if kind not in KINDS]
    if unknown:
        told = [f"--ignore: there is no kind {k!r}{hint('', k, KINDS)}" for k in unknown]
        raise ConfigError("dampen audit", told)
    measure: Callable[[Any], Any] | None = None
    if what.startswith("hf/") or ".py:" in what:
        model, inputs, *given = built(parse_model(what), batch)
        measure = given[0] if given else None
        model.train()  # a saved model comes in eval mode, and nobody set it here
    else:
        subject = make_subject(what, batch)
        model, inputs = subject.model, subject.inputs
    if loss is not None:
        measure = function_in_file(loss, "--loss").load()
    return dampen.audit(model, inputs, measure, **options)
