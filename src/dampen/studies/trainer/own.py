"""A trial that is a user's own training: the function gets a `Trial`, does what it likes, and returns test metrics.

What the lab does around it: seeds, the row's methods, curves, checkpoints, the times of steps, and a record like that
of any other trial. Errors inside the function name its file and line and end this trial only.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dampen.studies import environment
from dampen.studies.errors import LabError, OwnCodeError
from dampen.studies.loggers import open_loggers
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.bookkeeping import Event, set_threads
from dampen.studies.trainer.build import seed_all
from dampen.studies.trainer.function import Function
from dampen.studies.trainer.kernel_path import on_its_path
from dampen.studies.trainer.losses import NotFinite
from dampen.studies.trainer.own_trial import Trial
from dampen.studies.trainer.state import Execution

OUTPUT = "output.txt"
"""What the function prints goes into this file of the trial's folder: several trials share one terminal."""


@on_its_path
def run_own(
    spec: Run, folder: Path, execution: Execution, report: Callable[[Event], None], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Run a user's function as a trial, and record it; the folder's lock is held by the caller."""
    if execution.function is None:
        named = spec.function["name"] if spec.function else ""
        raise LabError(
            f"The trial is a run of {named}, which is not at hand. Start it with dampen compare or dampen.compare."
        )
    record = RunStore(folder)
    set_threads(execution, record)
    function = execution.function.load()
    trial = Trial(spec, folder, execution, report, stop)
    record.start(spec, environment.describe(torch.get_num_threads(), "cpu"))
    report({"kind": "start", "step": 0, "steps": 100, "resumed": 0})
    trial._log.loggers = open_loggers(execution.log_to, folder, spec, trial._resume_step())
    seed_all(spec.seed)
    before = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with (folder / OUTPUT).open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            returned = function(trial)
        return trial._finish(returned)
    except NotFinite as bad:
        return trial._diverged(bad)
    except LabError:
        raise
    except (Exception, SystemExit) as error:
        raise _in_their_words(error, execution.function, trial) from error
    finally:
        for logger in trial._log.loggers:
            logger.close()
        # The worker's next trial starts from the same state.
        torch.set_default_dtype(before[0])
        torch.set_grad_enabled(before[1])


def _in_their_words(error: BaseException, function: Function, trial: Trial) -> OwnCodeError:
    """The error with the place in the user's code where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    root = str(function.code.root) if function.code.root else None
    own = [f for f in frames if _theirs(f.filename, root, function)]
    place = own[-1] if own else frames[-1]
    name = Path(place.filename).name if not place.filename.startswith("<") else place.filename
    message = "".join(traceback.format_exception_only(error)).strip()
    told = OwnCodeError(
        f"{name}, line {place.lineno}, in {place.name}: {message} (row {trial.row!r}, seed {trial.seed})"
    )
    told.add_note("".join(traceback.format_exception(error)))
    return told


def _theirs(file: str, root: str | None, function: Function) -> bool:
    if root is None:
        return file.startswith("<") or "ipykernel" in file
    return any(file == str(Path(root) / name) for name in function.code.files) or Path(file).name in {
        Path(name).name for name in function.code.files
    }
