"""Around the steps of a trial: progress, log, checkpoints, selection on validation, result."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dampen.native import library
from dampen.studies import environment
from dampen.studies.errors import DamagedRecord, Interrupted, LabError
from dampen.studies.files import finite
from dampen.studies.loggers import Logger, flat, open_loggers
from dampen.studies.metrics import TASKS, judged_by, selection
from dampen.studies.processes import describe_malloc
from dampen.studies.result import FORMAT
from dampen.studies.store import RunStore
from dampen.studies.trainer.checkpoint import (
    fingerprint,
    load_newest,
    save_state,
    save_weights,
    saved_states,
)
from dampen.studies.trainer.distributed import (
    all_ranks,
    is_sharded,
    load_model_state,
    whole_model_state,
)
from dampen.studies.trainer.optim import NotFinite, learning_rate
from dampen.studies.trainer.state import Execution, TrialState, over_training

Event = dict[str, Any]
"""As a worker sends it; listeners get it typed (`result.py`)."""


def set_threads(execution: Execution, record: RunStore) -> None:
    """As many threads as requested; a trial that resumes keeps its own number, because sums depend
    on it.
    """
    try:
        before = record.sessions()
    except DamagedRecord:  # the checkpoint knows it too
        state = load_newest(record.folder, "checkpoint")[0] or {}
        before = [state] if "threads" in state else []
    threads = before[-1].get("threads") if before else execution.threads
    if threads:
        torch.set_num_threads(threads)


class Bookkeeping:
    """What happens around the steps. Every rank has one, so that collective calls meet; only rank 0
    writes.
    """

    def __init__(
        self,
        s: TrialState,
        record: RunStore,
        report: Callable[[Event], None],
        stop: Callable[[], bool],
    ):
        self.s, self.record, self.report, self.stop = s, record, report, stop
        self.selection = selection(s.data.task)
        self.writes = s.fabric.is_global_zero
        self.log: list[dict[str, Any]] = []
        self.saved_at = self.reported_at = self.started = time.monotonic()
        self.loggers: list[Logger] = []

    def start(self) -> None:
        """Record the environment; resume from the newest intact checkpoint if there is one."""
        s = self.s
        state, damage = load_newest(self.record.folder, "checkpoint")
        if self.writes:
            self.record.start(s.trial, environment.describe(torch.get_num_threads(), str(s.device)))
        if state is not None:
            if state["trial"] != s.trial.id:
                raise LabError(
                    f"{self.record.folder} has a checkpoint of trial {state['trial']}, not of "
                    f"{s.trial.id}."
                )
            s.load_state(state)
            s.resumed = max(len(self.record.sessions()) - 1, state.get("resumed", 0) + 1)
        else:
            s.measure_conditions()
            s.measure_variance()
        if self.writes:
            for problem in [
                *(f"{problem} Going on from the one before." for problem in damage),
                *self._repair(state),
            ]:
                self.report({"kind": "warning", "message": problem})
            self.loggers = open_loggers(s.execution.log_to, self.record.folder, s.trial, s.step)
        self.report({"kind": "start", "step": s.step, "steps": s.total, "resumed": s.resumed})

    def _repair(self, state: dict[str, Any] | None) -> list[str]:
        """Make the log what it was when the checkpoint was taken: what came after will happen
        again, and what was lost or changed since is put back. Returns what was wrong, in words."""
        path, wrong = self.record.folder / "log.jsonl", ""
        count = state["lines"] if state is not None else 0
        try:
            found = self.record.lines()[:count]
        except DamagedRecord as error:
            found, wrong = [], str(error)
        # checkpoints of before know only how many lines there were
        kept = json.loads(state["log"]) if state is not None and "log" in state else found
        if not wrong and found != kept:
            wrong = f"{path} has lost or changed lines: {len(found)} of {count} are there."
        if not wrong and len(kept) < count:
            wrong = f"{path} has lost lines, {len(kept)} of {count} are there, "
            wrong += "and the checkpoint does not have them."
        self.log = kept
        if path.exists() or kept:
            self.record.write_lines(kept)
        return (
            [f"{wrong} It was repaired from the checkpoint."]
            if wrong and len(kept) == count
            else [wrong][: bool(wrong)]
        )

    def after_step(self) -> None:
        """Report progress; save and stop where due. `after_epoch` handles the end of an epoch."""
        s, now = self.s, time.monotonic()
        s.measure_conditions()
        s.measure_variance()
        if now - self.reported_at >= s.execution.progress_seconds:
            self.reported_at = now
            self._progress()
        if s.step % s.per_epoch == 0 or s.step >= s.total:
            return
        every = s.execution.checkpoint_steps
        due = every is not None and s.step % every == 0
        if (
            s.fabric.world_size == 1
        ):  # clocks differ between ranks, so several save by steps and at the end of an epoch
            due = due or now - self.saved_at >= s.execution.checkpoint_seconds
        stop = self._stop()
        if due or stop:
            self.save()
        if stop:
            raise self._interrupted()

    def after_epoch(self) -> None:
        """Validate, select, log, save."""
        s = self.s
        epoch = math.ceil(s.step / s.per_epoch)
        line: dict[str, Any] = {"epoch": epoch, "step": s.step}
        steps = s.step - (epoch - 1) * s.per_epoch
        line["train"] = _mean_of_ranks(all_ranks(s.fabric, s.meter.means(steps)))
        s.meter.reset()
        line["lr"] = learning_rate(max(0, s.step - 1), s.total, s.per_epoch, s.options)
        if s.conditions:
            line["conditioning"], s.conditions = s.conditions, []
        if s.variances:
            line["variance"], s.variances = s.variances, []
        last = s.step >= s.total
        if epoch % s.options.validate_every == 0 or last:
            began = time.perf_counter()
            line["valid"] = s.evaluate("valid")
            s.seconds["evaluate"] += time.perf_counter() - began
            self._select(line["valid"], epoch)
        line["seconds"] = round(s.seconds["train"], 4)
        self.log.append(finite(line))
        if self.writes:
            self.record.log(self.log[-1])
            for logger in self.loggers:
                logger.log(s.step, flat(self.log[-1]))
        self.report({"kind": "epoch", **self.log[-1], "epochs": s.options.epochs})
        stop = self._stop()
        due = all_ranks(
            s.fabric, time.monotonic() - self.saved_at >= s.execution.checkpoint_seconds
        )[0]
        if stop or due or s.execution.checkpoint_steps is not None:
            self.save()
        if stop and not s.done:
            raise self._interrupted()

    def _select(self, valid: dict[str, float], epoch: int) -> None:
        s, (name, mode) = self.s, self.selection
        value = valid[name]
        best = math.nan if s.best is None else s.best["value"]
        better = math.isnan(best) or (value > best if mode == "max" else value < best)
        s.stale = 0 if better else s.stale + 1
        if s.options.select == "last" or (better and not math.isnan(value)):
            s.best = {"epoch": epoch, "value": value, "valid": valid, "weights": s.weights()}

    def save(self) -> None:
        """Write a checkpoint; the one before stays until the next."""
        facts = {
            "threads": torch.get_num_threads(),
            "kernels": library.path(),
            "resumed": self.s.resumed,
        }
        state = {**self.s.state(), **facts, "lines": len(self.log), "log": json.dumps(self.log)}
        if self.writes:
            save_state(self.record.folder, "checkpoint", self.s.step, state)
        self.saved_at = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Test once, with the state that validation selected; write the result; drop the
        checkpoints.
        """
        s = self.s
        if s.best is None:
            raise LabError(
                f"{self.selection[0]} on validation was never a number, so no state could be "
                "selected."
            )
        last = whole_model_state(s.raw)
        load_model_state(s.raw, s.best["weights"])
        s.average = None
        test = s.evaluate("test", final=True)
        result = {
            "id": s.trial.id,
            "format": FORMAT,
            "status": "finished",
            **judged_by(s.data.task),
            "test": test,
            "valid": s.best["valid"],
            "train": self.log[-1]["train"] if self.log else {},
            "log_lines": len(self.log),
            "selected_epoch": s.best["epoch"],
            "epochs": math.ceil(s.step / s.per_epoch),
            **self._cost(),
            "last_weights": fingerprint(last),
            "selected_weights": fingerprint(s.best["weights"]),
            "data": s.data.info,
        }
        if variance := over_training(self.log):
            result["variance"] = variance
        if record := TASKS[s.data.task].record:
            result |= record(s.raw, s.data)
        if s.pretrained is not None:
            result["pretrain"] = s.pretrained.facts
        if self.writes:
            if s.execution.keep_weights:
                save_weights(self.record.folder, "weights", s.step, s.best["weights"])
            self.record.finish(finite(result))
            for logger in self.loggers:
                logger.finish(finite(result))
            self._drop_checkpoints()
        self.report(
            {"kind": "finish", "status": "finished", "test": test, "valid": s.best["valid"]}
        )
        out: dict[str, Any] = finite(result)
        return out

    def diverged(self, bad: NotFinite) -> dict[str, Any]:
        """Save the last finite weights, report which term failed first, and close the trial."""
        s = self.s
        terms = " and ".join(repr(n) if n != "the gradient" else n for n in bad.names)
        before = ", ".join(f"{k} {v:.4g}" for k, v in bad.before.items()) or "nothing yet"
        reason = f"Training stopped at step {bad.step} (epoch {bad.step // s.per_epoch + 1}): "
        reason += f"{terms} became NaN or infinite first (the step before: {before})."
        if not is_sharded(s.raw) and all(torch.isfinite(p).all() for p in s.raw.parameters()):
            path = save_weights(self.record.folder, "good", s.step, whole_model_state(s.raw))
            reason += f" The last good weights are in {path.name}."
        elif kept := saved_states(self.record.folder, "checkpoint"):
            reason += f" The weights are spoiled; the last good state is {kept[0].name}."
        reason += " Lower train.lr or that term's weight, set train.clip, or use precision fp32."
        result = {
            "id": s.trial.id,
            "status": "diverged",
            "reason": reason,
            "terms": bad.names,
            "step": bad.step,
        }
        result["format"] = FORMAT
        result |= {**judged_by(s.data.task), **self._cost(), "data": s.data.info}
        self.record.finish(result)
        self.report({"kind": "finish", "status": "diverged", "reason": reason})
        return result

    def close(self) -> None:
        """Let go of the model and the loggers."""
        for logger in self.loggers:
            logger.close()

    def _cost(self) -> dict[str, Any]:
        s = self.s
        return {
            "steps": s.step,
            "batch_size": s.options.batch_size,
            "parameters": sum(p.numel() for p in s.raw.parameters()),
            "seconds": {k: round(v, 3) for k, v in s.seconds.items()},
            "step_seconds": statistics.median(wall for wall, _ in s.step_times)
            if s.step_times
            else None,
            "step_cpu_seconds": statistics.median(cpu for _, cpu in s.step_times)
            if s.step_times
            else None,
            "device": s.device.type,
            "threads": torch.get_num_threads(),
            "malloc": describe_malloc(),
            "kernels": library.path(),
            "resumed": s.resumed,
        }

    def _drop_checkpoints(self) -> None:
        for path in saved_states(self.record.folder, "checkpoint"):
            path.unlink(missing_ok=True)

    def _progress(self) -> None:
        s = self.s
        pace = s.seconds["train"] / max(1, s.step)
        epoch = math.ceil(s.step / s.per_epoch)  # of the step that was just done
        event = {
            "kind": "progress",
            "epoch": epoch,
            "epochs": s.options.epochs,
            "step": s.step,
            "steps": s.total,
        }
        self.report(
            {**event, "terms": dict(s.meter.latest), "eta": round(pace * (s.total - s.step), 1)}
        )

    def _stop(self) -> bool:
        if (
            self.s.fabric.world_size > 1 and self.s.step % 10
        ):  # a collective over all ranks costs about a millisecond
            return False
        return any(all_ranks(self.s.fabric, bool(self.stop())))

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"Stopped at step {self.s.step} of {self.s.total}; the checkpoint in "
            f"{self.record.folder} resumes it."
        )


def _mean_of_ranks(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(p[name] for p in parts) / len(parts) for name in parts[0]}
