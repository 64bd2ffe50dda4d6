"""What a trial leaves behind, typed: its result (final.json) and the lines of its log.

`FORMAT` is written with every result; records from before it was have format 0 and load as they
are. Since format 2 `data.drawn` names the splits that the study drew itself. A field that an
older record does not have takes its default, a field that this version does not
know is left alone on disk.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dampen.studies.errors import LabError
from dampen.studies.files import finite

FORMAT = 2


class Detected(msgspec.Struct):
    """One test image as a detector saw it; places are fractions of the image:
    left, top, right, bottom."""

    image: str  # the data address of a small JPEG file
    truth: list[tuple[str, float, float, float, float]] = []
    found: list[tuple[str, float, float, float, float, float]] = []  # class, score, place


class Result(msgspec.Struct, kw_only=True):
    """The result of a trial. A finished one has `test` and `valid`; a diverged
    one says why it stopped."""

    id: str
    status: Literal["finished", "diverged"]
    format: int = 0
    task: str = ""
    primary: tuple[str, str] = (
        "",
        "max",
    )  # the metric that judges the test, and which way it improves
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
    variance: dict[str, float | None] | None = (
        None  # of the gradient, mean over training, where it was measured
    )
    detections: list[Detected] = []  # of a detector: a few test images with true and found boxes
    reason: str = ""
    terms: list[str] = []
    step: int | None = None
    same_as: str = ""  # the trial that was trained in its place, because it is the same training

    @property
    def step_time(self) -> float | None:
        """The time of a step that ratios are made of: processor time on the
        CPU, wall time elsewhere."""
        return (
            self.step_cpu_seconds
            if self.device == "cpu" and self.step_cpu_seconds
            else self.step_seconds
        )

    @property
    def validated(self) -> float | None:
        """The value on validation of the metric that chose the epoch."""
        return self.valid.get(self.selection[0])


class LogLine(msgspec.Struct, kw_only=True):
    """One line of log.jsonl: an epoch of our trainer, or whatever a user's own training function
    logged at a step."""

    step: int = 0
    epoch: float | None = None
    train: dict[str, float | None] = {}
    valid: dict[str, float | None] = {}
    lr: Any = None  # a number of our trainer, or whatever a user gave that name
    seconds: float | None = None
    conditioning: Any = (
        None  # these two are lists of our trainer's measurements, or whatever a user gave that name
    )
    variance: Any = None

    @property
    def at(self) -> float:
        """Where a curve has this line: its epoch, or its step where epochs are not known."""
        return self.step if self.epoch is None else self.epoch

    def measured(self, name: Literal["conditioning", "variance"]) -> list[dict[str, Any]]:
        """What our trainer measured at this line; empty where a user's own log has
        another thing of that name."""
        found = getattr(self, name)
        return found if isinstance(found, list) else []


def parse_result(content: Any, id: str | None = None) -> Result:
    """A result from plain data; raises LabError with what is wrong. `id` is the
    trial it must belong to."""
    final = _convert(finite(content), Result, "final.json")
    if id is not None and final.id != id:
        raise LabError(f"final.json belongs to trial {final.id}, config.json to {id}")
    if final.status == "finished":
        missing = [key for key in ("test", "valid", "selection", "primary") if key not in content]
        if missing:
            raise LabError(f"final.json has no {', '.join(missing)}")
    out: Result = final
    return out


def on_one_axis(lines: list[LogLine]) -> list[LogLine]:
    """The lines of a log that all have an epoch of their own, or all lie at their
    steps: a curve has one axis.

    Args:
        lines: of one log; changed in place.

    >>> [line.at for line in on_one_axis([LogLine(step=10, epoch=1), LogLine(step=15)])]
    [10, 15]
    """
    epochs = [line.epoch for line in lines]
    steps = {line.step for line in lines}
    if None in epochs or len(set(epochs)) < min(len(lines), len(steps)):
        for line in lines:
            line.epoch = None
    return lines


def parse_lines(content: list[Any]) -> list[LogLine]:
    """The lines of a log from plain data; raises ValueError where one is none."""
    return [msgspec.convert(finite(line), LogLine) for line in content]


def _convert(content: Any, kind: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise LabError(f"{where} is not what was expected: {error}") from error


# --------------------
# What `dampen diagnose` leaves in a trial's folder (diagnose.json), typed.
# A section holds the fields of the measurement of `dampen.diagnostics` that it is named after.
# Files from before the format was written have format 0; fields that they do not have take their
# defaults.


DIAGNOSIS_FORMAT = 1

Section = dict[str, Any]


class Diagnosis(msgspec.Struct, kw_only=True):
    """The measurements of one trained model; a section that was not measured is empty, and
    `skipped` may say why."""

    format: int = 0
    name: str = ""
    trial: str | None = None
    data: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    measured_with: dict[str, dict[str, Any] | None] = {}  # the settings of each section
    calibration: Section = {}
    robustness: list[Section] = []  # one per attack and eps
    corruptions: Section = {}
    gradient_variance: Section = {}
    attention: Section = {}
    conditioning: list[Section] = []  # one per layer and branch
    attention_maps: Section = {}
    generalization: Section = {}
    consistency: Section = {}
    other: dict[str, Any] = {}  # sections of plug-ins that this list does not have
    skipped: dict[str, str] = {}
    seconds: dict[str, float] = {}
    environment: dict[str, Any] = {}

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return any(self.section(name) for name in SECTIONS)

    def section(self, name: str) -> Any:
        """A section by its name; empty where it was not measured."""
        return getattr(self, name, None) or self.other.get(name, {})


SECTIONS = (
    "calibration", "robustness", "corruptions", "gradient_variance", "attention", "conditioning", "attention_maps",
    "generalization", "consistency",
)  # fmt: skip


def parse_diagnosis(content: Any) -> Diagnosis:
    """A diagnosis from plain data; raises LabError with what is wrong.

    >>> parse_diagnosis({"calibration": {"ece": 0.1}}).calibration["ece"], bool(parse_diagnosis({}))
    (0.1, False)
    """
    try:
        found: Diagnosis = msgspec.convert(content, Diagnosis)
    except msgspec.ValidationError as error:
        raise LabError(f"diagnose.json is not what was expected: {error}") from error
    known = {*Diagnosis.__struct_fields__}
    found.other |= {name: section for name, section in content.items() if name not in known}
    return found


def diagnosed(measured: Diagnosis) -> dict[str, float]:
    """The single numbers of a diagnosis: the strongest attacks, mean corruption, calibration,
    gradients, the gap, and how widely attention is spread, as a mean over the layers.
    """
    found: dict[str, Any] = {}
    for attack in ("pgd", "fgsm"):
        own = [a for a in measured.robustness if a["attack"] == attack]
        if own:
            found[f"{attack}_accuracy"] = max(own, key=lambda a: a["eps"])["accuracy"]
    found["corrupted_accuracy"] = measured.corruptions.get("mean_accuracy")
    found["adaptive_ece"] = measured.calibration.get("adaptive_ece")
    found["gradient_variance"] = measured.gradient_variance.get("normalized")
    found["averaged_brier_bound"] = measured.consistency.get("bound")
    found["accuracy_gap"] = measured.generalization.get("accuracy_gap")
    if spread := [
        a["entropy_share"] for a in measured.attention.get("layers", []) if "entropy_share" in a
    ]:
        found["attention_entropy"] = statistics.fmean(spread)
    return {k: v for k, v in found.items() if v is not None}


# --------------------
# What a worker reports while a run goes, typed: it starts, moves, ends an epoch, warns, finishes;
# and how a job ended.
# Workers send plain data through a pipe or a cluster, marked with `EVENT_FORMAT`; who listens
# gets an `Event`. A field that a kind of event does not have keeps its default, a field that this
# version does not know is passed over.


EVENT_FORMAT = 1

Kind = Literal["start", "progress", "epoch", "warning", "finish", "outcome"]


class Event(msgspec.Struct, kw_only=True, frozen=True):
    """One thing that happened in one trial."""

    kind: Kind
    format: int = 0
    step: int = 0
    steps: int | None = None  # in all
    resumed: int = 0  # start: how often the trial was taken up again
    epoch: float | None = None
    epochs: int | None = None
    count: int | None = None  # steps taken, where `step` counts percent (one's own training)
    fraction: float | None = None
    terms: dict[str, float | None] = {}  # of the loss, by name
    eta: float | None = None  # seconds
    phase: str = ""  # "pretraining", or empty
    train: dict[str, float | None] = {}
    valid: dict[str, float | None] = {}
    test: dict[str, float | None] = {}
    status: str = ""  # finish and outcome
    reason: str = ""
    message: str = ""


def marked(event: Mapping[str, Any]) -> dict[str, Any]:
    """An event as a worker sends it."""
    return {"format": EVENT_FORMAT, **event}


def parse_event(content: Any) -> Event:
    """An event from what a worker sent; raises LabError with what is wrong.

    >>> parse_event({"kind": "warning", "message": "no space"}).message
    'no space'
    """
    if isinstance(content, Event):
        return content
    try:
        return msgspec.convert(content, Event)
    except msgspec.ValidationError as error:
        raise LabError(
            f"an event of a worker is not what was expected: {error}; got {content!r}"
        ) from error
