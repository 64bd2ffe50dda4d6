"""All the moving parts of one trial, put together from its plain data, with a state that can be
saved and put back.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from dampen.names import nearest
from dampen.studies.data.dataset import DamagedData
from dampen.studies.errors import ConfigError
from dampen.studies.loggers import check_loggers
from dampen.studies.methods_text import build_methods
from dampen.studies.metrics import TASKS
from dampen.studies.plugins import activate, active
from dampen.studies.run import Run
from dampen.studies.trainer.checkpoint import rng_state, set_rng_state
from dampen.studies.trainer.data import derive, load_data, make_augment, places, seed_all
from dampen.studies.trainer.distributed import (
    all_ranks,
    equal_buffers,
    gather_rows,
    load_model_state,
    load_optimizer_state,
    make_fabric,
    whole,
    whole_model_state,
    whole_optimizer_state,
)
from dampen.studies.trainer.models import Pretrained, make_model, prepared_by
from dampen.studies.trainer.optim import Meter, MovingAverage, NotFinite, loss_of, make_optimizer
from dampen.studies.trainer.user_function import Function, Parts

# --- the variance of the gradient
#
# The gradient's variance while a trial trains (`train.variance_every`): AttentionDrop claims
# that it falls by a tenth.
#
# Measured at the present weights over the same few batches each time, in training mode, with
# the methods and their penalties, not augmented. The global random state, buffers and gradients
# are put back, so training does not notice.

BATCHES = 8
"""Batches of the trial's own size, fixed by its seed; fewer where the training part is smaller."""
KINDS = ("trace", "normalized", "mean_squared_norm")


def measure_variance(s: TrialState, seed: int) -> dict[str, float]:
    """tr Cov(g) over batches, and the same divided by the mean squared norm of the gradient, at
    this step.
    """
    from dampen.diagnostics import gradient_variance

    size = s.options.batch_size
    order = torch.randperm(len(s.data.train), generator=torch.Generator().manual_seed(seed))
    count = min(BATCHES, len(order) // size)
    if count < 2:
        problem = "train.variance_every: two batches are needed, "
        problem += f"{len(order)} examples make {count} of {size}"
        raise ConfigError("The trial", [problem])
    picked = [s.data.train.batch(order[i * size : (i + 1) * size]) for i in range(count)]
    batches = [{"batch": batch, "labels": batch["target"]} for batch in picked]

    def loss(model: nn.Module, given: Mapping[str, Any], labels: Tensor) -> Tensor:
        return s.losses({**given["batch"], "target": labels})[0]

    found = gradient_variance(s.raw, batches, loss=loss, seed=seed % 2**63)
    return {"step": s.step, **{kind: getattr(found, kind) for kind in KINDS}}


def over_training(lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """The mean over the measurements of a log, for the result; None where there are none.

    A log has null for what was not finite: such values are left out, and a mean of nothing is None.
    """
    found = [m for line in lines for m in line.get("variance", [])]
    if not found:
        return None
    known = {kind: [m[kind] for m in found if m[kind] is not None] for kind in KINDS}
    return {
        "n": len(found),
        **{kind: statistics.fmean(values) if values else None for kind, values in known.items()},
    }


# --- the moving parts

ACCELERATORS = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Execution:
    """How to run a trial, apart from what decides its result: folders, threads, intervals."""

    data_dir: str | None = None
    threads: int | None = None
    accelerator: str = "auto"
    checkpoint_seconds: float = 30.0
    checkpoint_steps: int | None = None
    tensorboard: bool = False
    loggers: tuple[str, ...] = ()
    keep_weights: bool = True
    progress_seconds: float = 0.25
    function: Function | None = None  # the user's own training, where trials are that
    parts: Parts | None = None  # where the user's own model and data are
    plugins: tuple[tuple[str, str], ...] = field(
        default_factory=active
    )  # loaded where the run was started

    def __post_init__(self) -> None:
        if self.accelerator not in ACCELERATORS:
            problem = (
                f"--accelerator: got {self.accelerator!r}{nearest(self.accelerator, ACCELERATORS)}"
            )
            raise ConfigError("How to run", [problem])
        check_loggers(self.loggers)

    @property
    def log_to(self) -> list[str]:
        """The loggers that receive each line of the log."""
        return [*(["tensorboard"] if self.tensorboard else []), *self.loggers]

    def check_here(self) -> None:
        """Raise for a device that this machine lacks (another machine of a cluster may have it)."""
        there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not there.get(self.accelerator, True):
            problem = (
                f"--accelerator: torch finds no {self.accelerator} device here; use cpu or auto"
            )
            raise ConfigError("How to run", [problem])


class TrialState:
    """A running trial: model, regularizers, optimizer, data, and the position in training."""

    def __init__(self, trial: Run, execution: Execution, pretrained: Pretrained | None = None):
        activate(execution.plugins)
        self.trial, self.options, self.execution = trial, trial.train, execution
        self.fabric = make_fabric(self.options, execution.accelerator)
        self.device = self.fabric.device
        self.data = load_data(trial.data, execution.data_dir, execution.parts, trial.seed)
        seed_all(
            derive(trial.seed, "init")
        )  # the same weights at the start whatever the methods: runs pair by seed
        self.raw = make_model(trial.model, self.data.model_args, execution.parts)
        self.pretrained = pretrained
        if pretrained is not None:
            pretrained.enter(self.raw)
        self.data = prepared_by(self.raw, trial.model["name"], self.data)
        self.task = TASKS[self.data.task]
        self.handle = None
        if trial.methods:
            from dampen import regularize

            self.handle = regularize(self.raw, build_methods(trial.methods), **places(trial.sites))
            if any(m.replaces_weight_decay for m in self.handle.methods):
                self.options = replace(self.options, weight_decay=0.0)
        self.compiled = self.raw
        if self.options.compile:
            self.compiled = cast(nn.Module, torch.compile(self.raw))
        self.model = self.fabric.setup_module(self.compiled)
        extra = list(self.handle.parameters()) if self.handle else []
        self.optimizer = cast(
            Any, self.fabric.setup_optimizers(make_optimizer(self.raw, extra, self.options))
        )
        if self.handle is not None:
            self.handle.attach_optimizer(self.optimizer)
        # One device without a gradient scaler needs nothing of Fabric's wrappers, and a tiny step
        # would feel them.
        self.alone = self.fabric.world_size == 1 and self.options.precision != "fp16"
        self.stepper: torch.optim.Optimizer = (
            self.optimizer.optimizer if self.alone else self.optimizer
        )
        self.average = MovingAverage(self.raw, self.options.ema) if self.options.ema else None
        self.augment = make_augment(trial.data.get("augment"), self.data)
        self.meter = Meter(self.device)
        self.probe = next(p for p in self.raw.parameters() if p.requires_grad)
        self.per_epoch = self.options.steps_per_epoch(len(self.data.train))
        self.total = min(self.options.epochs * self.per_epoch, self.options.max_steps or 10**18)
        self.step = 0  # optimizer steps done; the epoch and the place in it follow from it
        self.best: dict[str, Any] | None = None
        self.stale = 0  # validations without improvement
        self.seconds = {"train": 0.0, "evaluate": 0.0, "cpu": 0.0}
        self.conditions: list[dict[str, Any]] = []  # measured in this epoch
        self.variances: list[dict[str, Any]] = []  # likewise
        self.step_times: list[tuple[float, float]] = []  # (wall, cpu) of each step
        self.resumed = 0
        seed_all(derive(trial.seed, "train", self.fabric.global_rank))

    @property
    def epoch(self) -> int:
        return self.step // self.per_epoch

    @property
    def done(self) -> bool:
        patience = self.options.patience
        return self.step >= self.total or (patience is not None and self.stale >= patience)

    def batches(self) -> Iterator[list[tuple[dict[str, Any], Any]]]:
        """The rest of this epoch, one optimizer step at a time: this rank's parts, each with its
        share of the loss.
        """
        generator = torch.Generator().manual_seed(derive(self.trial.seed, "order", self.epoch))
        order = torch.randperm(len(self.data.train), generator=generator)
        size, rank, world = self.options.batch_size, self.fabric.global_rank, self.fabric.world_size
        for i in range(self.step % self.per_epoch, self.per_epoch):
            if self.step >= self.total:
                return
            mine = order[i * size : (i + 1) * size]
            if (
                world == 1 and self.options.accumulate == 1
            ):  # the usual case, on the way of every step of a tiny model
                yield [(self.batch(mine), 1.0)]
                continue
            mine = mine[rank::world]
            parts = [self.batch(part) for part in mine.chunk(self.options.accumulate)]
            yield list(zip(parts, self._shares(parts), strict=True))

    def batch(self, indices: Tensor) -> dict[str, Any]:
        """Training examples, augmented, on the device. The draws depend on seed and step alone, not
        on the methods.
        """
        batch = self.data.train.batch(indices)
        if self.augment is not None:
            seed = derive(self.trial.seed, "augment", self.step, int(indices[0]))
            batch = self.augment(batch, torch.Generator().manual_seed(seed))
        out: dict[str, Any] = batch if self.device.type == "cpu" else self.fabric.to_device(batch)
        return out

    def _shares(self, parts: list[dict[str, Any]]) -> list[Any]:
        """What each part counts: more with more valid positions, so that splitting a batch changes
        nothing.
        """
        counted = (
            self.task.counted
        )  # a loss may be a mean over objects, of which images have different numbers
        if not ("valid" in parts[0] or counted) or (
            len(parts) == 1 and self.fabric.world_size == 1
        ):
            return [1 / len(parts)] * len(parts)
        counts = torch.stack(
            [counted(p["target"]) if counted else p["valid"].sum() for p in parts]
        ).double()
        mean: Any = self.fabric.all_reduce(counts.sum(), reduce_op="mean")
        out: list[Any] = (counts / mean).tolist()
        return out

    def forward(self, inputs: tuple[Any, ...]) -> Any:
        """The model's output. One device needs nothing of Fabric's wrapper but the precision, and
        not its hooks.
        """
        if self.fabric.world_size > 1:
            return self.model(*inputs)
        precision = self.fabric.strategy.precision
        with precision.forward_context():
            output = self.compiled(*inputs)
        return precision.convert_output(output)

    def sampled(self, inputs: tuple[Any, ...]) -> Any:
        """Logarithms of class probabilities averaged over `train.test_samples` random forwards;
        plain models have no randomness to average over."""
        if self.handle is None:
            return self.forward(inputs)
        mean = self.handle.mc_average(
            lambda: self.forward(inputs), cast("int", self.options.test_samples)
        )
        return mean.clamp(
            min=torch.finfo(mean.dtype).tiny
        ).log()  # the metrics take a softmax, which undoes the log

    def losses(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its named terms. Without methods there is no handle."""
        target, valid = batch["target"], batch.get("valid")

        def criterion(output: Any) -> Tensor:
            return loss_of(self.data, output, target, valid, self.options.label_smoothing)

        if self.handle is None:
            loss = criterion(self.forward(batch["inputs"]))
            return loss, {"task": loss}
        return self.handle.loss(lambda: self.forward(batch["inputs"]), criterion, valid=valid)

    def clock(self, wall: float, cpu: float) -> None:
        """Note how long a step took."""
        self.step_times.append((wall, cpu))
        self.seconds["train"] += wall
        self.seconds["cpu"] += cpu

    def measure_conditions(self) -> None:
        """Condition numbers by layer, where `train.condition_every` is set. Training does
        not notice.
        """
        every = self.options.condition_every
        if every is None or self.step % every:
            return
        from dampen.diagnostics.conditioning import ConditionProbe

        batch = self.data.valid.batch(torch.arange(min(16, len(self.data.valid))))
        batch = batch if self.device.type == "cpu" else self.fabric.to_device(batch)
        self.conditions.append(ConditionProbe(every)(self.step, self.raw, batch))

    def measure_variance(self) -> None:
        """The variance of the gradient, where `train.variance_every` is set. Training does not
        notice.
        """
        every = self.options.variance_every
        if every is not None and self.step % every == 0:
            self.variances.append(measure_variance(self, derive(self.trial.seed, "variance")))

    def part_of_step(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one part: only the last part exchanges gradients."""
        return nullcontext() if last else self.fabric.no_backward_sync(self.model)

    def backward(self, loss: Tensor) -> None:
        """The gradients of a part of a step."""
        if self.alone:
            loss.backward()
        else:
            self.fabric.backward(loss)

    def check_gradient(self) -> None:
        """Stop before a gradient that is not finite reaches the weights, although the loss itself
        was finite.

        Gradients flow down to the first parameter, so one look there sees what went wrong above.
        With a gradient scaler such steps are normal and skipped by it; on other devices than the
        CPU the next look at the loss has to do."""
        grad = self.probe.grad
        if self.device.type != "cpu" or self.options.precision == "fp16" or grad is None:
            return
        if not math.isfinite((grad if self.alone else whole(grad)).sum().item()):
            raise NotFinite(self.step, ["the gradient"], self.meter.latest)

    def evaluate(self, split: str, final: bool = False) -> dict[str, float]:
        """Metrics of one split, with the moving average of the weights if there is one.

        `final` adds what needs the model itself and takes longer (decoding translations for BLEU).
        """
        from dampen.studies.metrics import make_metrics

        part = getattr(self.data, split)
        metrics = make_metrics(self.data, part)
        world, rank, size = (
            self.fabric.world_size,
            self.fabric.global_rank,
            self.options.eval_batch_size,
        )
        equal_buffers(self.fabric, self.raw)
        self.model.eval()
        with torch.no_grad(), self.averaged():
            for start in range(0, len(part), size):
                indices = torch.arange(start, min(start + size, len(part)))
                batch = part.batch(indices)
                rows = torch.arange(-(-len(indices) // world) * world)[rank::world].clamp(
                    max=len(indices) - 1
                )
                inputs = batch["inputs"] if world == 1 else tuple(x[rows] for x in batch["inputs"])
                inputs = inputs if self.device.type == "cpu" else self.fabric.to_device(inputs)
                output = (
                    self.sampled(inputs)
                    if final and self.options.test_samples
                    else self.forward(inputs)
                )
                if self.task.rows is not None:  # one tensor, as ranks exchange them
                    output = self.task.rows(output, len(inputs[0]))
                logits = gather_rows(self.fabric, output)[: len(indices)].cpu()
                metrics.update(logits, batch["target"], batch.get("valid"), indices)
            if final:
                metrics.finish(self.raw)
        self.model.train()
        return {k: float(v) for k, v in metrics.compute().items()}

    def data_identity(self) -> str:
        """The hashes of the files that the data was read from, in one line."""
        return json.dumps(self.data.info.get("sha256", {}), sort_keys=True)

    def weights(self) -> dict[str, Tensor]:
        """What would be evaluated now: the average of the weights where there is one."""
        with self.averaged():
            return whole_model_state(self.raw)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model carries the average that is evaluated: of the method WeightAverage, or
        of the training option `ema`.
        """
        handle = self.handle
        with ExitStack() as stack:
            if self.average:
                stack.enter_context(self.average.swapped_in(self.raw))
            if handle and any(c.averaged_weights() is not None for c in handle.clones):
                stack.enter_context(handle.averaged())
            yield

    def state(self) -> dict[str, Any]:
        """Everything that the rest of training depends on."""
        return {
            "trial": self.trial.id,
            "data": self.data_identity(),
            "step": self.step,
            "model": whole_model_state(self.raw),
            "optimizer": whole_optimizer_state(self.raw, self.optimizer.optimizer),
            "precision": self.fabric.strategy.precision.state_dict(),
            "handle": self.handle.state_dict() if self.handle else {},
            "average": self.average.state_dict() if self.average else {},
            "best": self.best,
            "stale": self.stale,
            "rng": all_ranks(self.fabric, rng_state(self.device)),
            "meter": self.meter.sums,
            "conditions": self.conditions,
            "variances": self.variances,
            "seconds": self.seconds,
            "step_times": torch.tensor(self.step_times, dtype=torch.float64),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume exactly where `state` was taken, on the same data; states from before 0.2 do not
        say which it was.
        """
        if state.get("data", self.data_identity()) != self.data_identity():
            raise DamagedData(
                f"The data of {self.data.name} has changed since the checkpoint was written: its "
                "hashes were "
                f"{state['data']}, they are {self.data_identity()}. Put the data back, or run the "
                "trial anew."
            )
        load_model_state(self.raw, state["model"])
        load_optimizer_state(self.raw, self.optimizer.optimizer, state["optimizer"])
        self.fabric.strategy.precision.load_state_dict(state["precision"])
        if self.handle:
            self.handle.load_state_dict(state["handle"])
        if self.average:
            self.average.load_state_dict(state["average"])
        self.step, self.best, self.stale = state["step"], state["best"], state["stale"]
        self.meter.sums = dict(state["meter"])
        self.conditions = list(state["conditions"])
        self.variances = list(
            state.get("variances", [])
        )  # states from before it was measured have none
        self.seconds, self.step_times = (
            dict(state["seconds"]),
            [tuple(t) for t in state["step_times"].tolist()],
        )
        set_rng_state(state["rng"][self.fabric.global_rank], self.device)
