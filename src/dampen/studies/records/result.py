"""What a trial leaves behind, typed: its result (final.json) and the lines of its log.

`FORMAT` is written with every result; records from before it was have format 0 and load as they are.
Since format 2 `data.drawn` names the splits that the study drew itself. A field that an
older record does not have takes its default, a field that this version does not know is left alone on disk.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from dampen.studies.errors import LabError

FORMAT = 2


class Detected(msgspec.Struct):
    """One test image as a detector saw it; places are fractions of the image: left, top, right, bottom."""

    image: str  # the data address of a small JPEG file
    truth: list[tuple[str, float, float, float, float]] = []
    found: list[tuple[str, float, float, float, float, float]] = []  # class, score, place


class Result(msgspec.Struct, kw_only=True):
    """The result of a trial. A finished one has `test` and `valid`; a diverged one says why it stopped."""

    id: str
    status: Literal["finished", "diverged"]
    format: int = 0
    task: str = ""
    primary: tuple[str, str] = ("", "max")  # the metric that judges the test, and which way it improves
    selection: tuple[str, str] = ("", "max")  # the metric that chose the epoch on validation
    test: dict[str, float | None] = {}
    valid: dict[str, float | None] = {}
    train: dict[str, float | None] = {}
    selected_epoch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None
    parameters: int | None = None
    seconds: dict[str, float] = {}
    step_seconds: float | None = None
    step_cpu_seconds: float | None = None
    device: str | None = None
    threads: int | None = None
    malloc: Any = None
    kernels: str = ""  # "torch" or "native": which path the trial was on; older records do not say
    resumed: int = 0
    last_weights: str = ""  # fingerprints: equal ones mean equal weights, bit by bit
    selected_weights: str = ""
    data: dict[str, Any] = {}
    pretrain: dict[str, Any] | None = None
    variance: dict[str, float | None] | None = None  # of the gradient, mean over training, where it was measured
    detections: list[Detected] = []  # of a detector: a few test images with true and found boxes
    reason: str = ""
    terms: list[str] = []
    step: int | None = None
    same_as: str = ""  # the trial that was trained in its place, because it is the same training

    @property
    def step_time(self) -> float | None:
        """The time of a step that ratios are made of: processor time on the CPU, wall time elsewhere."""
        return self.step_cpu_seconds if self.device == "cpu" and self.step_cpu_seconds else self.step_seconds

    @property
    def validated(self) -> float | None:
        """The value on validation of the metric that chose the epoch."""
        return self.valid.get(self.selection[0])


class LogLine(msgspec.Struct, kw_only=True):
    """One line of log.jsonl: an epoch of our trainer, or whatever a user's own training function logged at a step."""

    step: int = 0
    epoch: float | None = None
    train: dict[str, float | None] = {}
    valid: dict[str, float | None] = {}
    lr: float | None = None
    seconds: float | None = None
    conditioning: Any = None  # these two are lists of our trainer's measurements, or whatever a user gave that name
    variance: Any = None

    @property
    def at(self) -> float:
        """Where a curve has this line: its epoch, or its step where epochs are not known."""
        return self.step if self.epoch is None else self.epoch

    def measured(self, name: Literal["conditioning", "variance"]) -> list[dict[str, Any]]:
        """What our trainer measured at this line; empty where a user's own log has another thing of that name."""
        found = getattr(self, name)
        return found if isinstance(found, list) else []


def parse_result(content: Any, id: str | None = None) -> Result:
    """A result from plain data; raises LabError with what is wrong. `id` is the trial it must belong to."""
    final = _convert(content, Result, "final.json")
    if id is not None and final.id != id:
        raise LabError(f"final.json belongs to trial {final.id}, config.json to {id}")
    if final.status == "finished":
        missing = [key for key in ("test", "valid", "selection", "primary") if key not in content]
        if missing:
            raise LabError(f"final.json has no {', '.join(missing)}")
    out: Result = final
    return out


def parse_lines(content: list[Any]) -> list[LogLine]:
    """The lines of a log from plain data; raises ValueError where one is none."""
    return [msgspec.convert(line, LogLine) for line in content]


def _convert(content: Any, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise LabError(f"{where} is not what was expected: {error}") from error
