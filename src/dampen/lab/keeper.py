"""Keeps the books of a trial while it trains: progress, log, checkpoints, selection on validation, the final result."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dampen.lab import environment
from dampen.lab.allocator import describe_malloc
from dampen.lab.checkpoint import fingerprint, load_newest, save_state, saved_states
from dampen.lab.distributed import all_ranks, is_sharded, load_model_state, whole_model_state
from dampen.lab.errors import Interrupted, LabError
from dampen.lab.losses import NotFinite
from dampen.lab.metrics import SELECTION, judged_by
from dampen.lab.optim import learning_rate
from dampen.lab.record import Record
from dampen.lab.session import Execution, Session

Event = dict[str, Any]


def set_threads(execution: Execution, record: Record) -> None:
    """As many threads as asked for; a trial that resumes keeps its own number, because sums depend on it."""
    before = record.sessions()
    threads = before[-1]["threads"] if before else execution.threads
    if threads:
        torch.set_num_threads(threads)


class Keeper:
    """What happens around the steps. Every rank has one, so that collective calls meet; only rank 0 writes."""

    def __init__(self, s: Session, record: Record, report: Callable[[Event], None], stop: Callable[[], bool]):
        self.s, self.record, self.report, self.stop = s, record, report, stop
        self.selection = SELECTION[s.data.task]
        self.writes = s.fabric.is_global_zero
        self.lines = 0
        self.saved_at = self.told_at = self.started = time.monotonic()
        self.board: Any = None

    def start(self) -> None:
        """Note the environment; go on from the newest whole checkpoint if there is one."""
        s = self.s
        state, damage = load_newest(self.record.folder, "checkpoint")
        if self.writes:
            self.record.start(s.trial, environment.describe(torch.get_num_threads(), str(s.device)))
        if state is not None:
            if state["trial"] != s.trial.id:
                raise LabError(f"{self.record.folder} has a checkpoint of trial {state['trial']}, not of {s.trial.id}.")
            s.load_state(state)
            s.resumed, self.lines = len(self.record.sessions()) - 1, state["lines"]
        else:
            s.measure_conditions()
        if self.writes:
            self.record.keep_lines(self.lines)
            for problem in damage:
                self.report({"kind": "warning", "message": f"{problem} Going on from the one before."})
            if s.execution.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(str(self.record.folder / "tensorboard"), purge_step=s.step)
        self.report({"kind": "start", "step": s.step, "steps": s.total, "resumed": s.resumed})

    def after_step(self) -> None:
        """Tell how far we are; save and stop where asked. The end of an epoch is left to `after_epoch`."""
        s, now = self.s, time.monotonic()
        s.measure_conditions()
        if now - self.told_at >= s.execution.progress_seconds:
            self.told_at = now
            self._progress()
        if s.step % s.per_epoch == 0 or s.step >= s.total:
            return
        every = s.execution.checkpoint_steps
        due = every is not None and s.step % every == 0
        if s.fabric.world_size == 1:  # clocks differ between ranks, so several save by steps and at the end of an epoch
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
        last = s.step >= s.total
        if epoch % s.options.validate_every == 0 or last:
            began = time.perf_counter()
            line["valid"] = s.evaluate("valid")
            s.seconds["evaluate"] += time.perf_counter() - began
            self._select(line["valid"], epoch)
        line["seconds"] = round(s.seconds["train"], 4)
        self.lines += 1
        if self.writes:
            self.record.log(_finite(line))
            if self.board is not None:
                for group in ("train", "valid"):
                    for name, value in line.get(group, {}).items():
                        self.board.add_scalar(f"{group}/{name}", value, s.step)
                self.board.add_scalar("train/lr", line["lr"], s.step)
        self.report({"kind": "epoch", **_finite(line), "epochs": s.options.epochs})
        stop = self._stop()
        due = all_ranks(s.fabric, time.monotonic() - self.saved_at >= s.execution.checkpoint_seconds)[0]
        if stop or due or s.execution.checkpoint_steps is not None:
            self.save()
        if stop and not s.done:
            raise self._interrupted()

    def _select(self, valid: dict[str, float], epoch: int) -> None:
        s, (name, mode) = self.s, self.selection
        value = valid[name]
        better = s.best is None or (value > s.best["value"] if mode == "max" else value < s.best["value"])
        s.stale = 0 if better else s.stale + 1
        if s.options.select == "last" or (better and not math.isnan(value)):
            s.best = {"epoch": epoch, "value": value, "valid": valid, "weights": s.weights()}

    def save(self) -> None:
        """Write a checkpoint; the one before stays until the next."""
        state = {**self.s.state(), "lines": self.lines}
        if self.writes:
            save_state(self.record.folder, "checkpoint", self.s.step, state)
        self.saved_at = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Test once, with the state that validation selected; write the result; drop the checkpoints."""
        s = self.s
        if s.best is None:
            raise LabError(f"{self.selection[0]} on validation was never a number, so no state could be selected.")
        last = whole_model_state(s.raw)
        load_model_state(s.raw, s.best["weights"])
        s.average = None
        test = s.evaluate("test", final=True)
        lines = self.record.lines()
        result = {
            "id": s.trial.id,
            "status": "finished",
            **judged_by(s.data.task),
            "test": test,
            "valid": s.best["valid"],
            "train": lines[-1]["train"] if lines else {},
            "selected_epoch": s.best["epoch"],
            "epochs": math.ceil(s.step / s.per_epoch),
            **self._cost(),
            "last_weights": fingerprint(last),
            "selected_weights": fingerprint(s.best["weights"]),
            "data": s.data.info,
        }
        if s.pretrained is not None:
            result["pretrain"] = s.pretrained.facts
        if self.writes:
            if s.execution.keep_weights:
                save_state(self.record.folder, "weights", s.step, {"model": s.best["weights"]}, keep=1)
            self.record.finish(_finite(result))
            self._drop_checkpoints()
        self.report({"kind": "finish", "status": "finished", "test": test, "valid": s.best["valid"]})
        return _finite(result)

    def diverged(self, bad: NotFinite) -> dict[str, Any]:
        """Keep the last good weights, say which term went first, and close the trial."""
        s = self.s
        terms = " and ".join(repr(n) if n != "the gradient" else n for n in bad.names)
        before = ", ".join(f"{k} {v:.4g}" for k, v in bad.before.items()) or "nothing yet"
        reason = f"Training stopped at step {bad.step} (epoch {bad.step // s.per_epoch + 1}): "
        reason += f"{terms} became NaN or infinite first (the step before: {before})."
        if not is_sharded(s.raw) and all(torch.isfinite(p).all() for p in s.raw.parameters()):
            path = save_state(
                self.record.folder, "good", s.step, {"model": whole_model_state(s.raw), "step": s.step}, keep=1
            )
            reason += f" The last good weights are in {path.name}."
        elif kept := saved_states(self.record.folder, "checkpoint"):
            reason += f" The weights are spoiled; the last good state is {kept[0].name}."
        reason += " Lower train.lr or that term's weight, set train.clip, or use precision fp32."
        result = {"id": s.trial.id, "status": "diverged", "reason": reason, "terms": bad.names, "step": bad.step}
        result |= {**judged_by(s.data.task), **self._cost(), "data": s.data.info}
        self.record.finish(result)
        self.report({"kind": "finish", "status": "diverged", "reason": reason})
        return result

    def close(self) -> None:
        """Let go of the model and the board."""
        if self.board is not None:
            self.board.close()

    def _cost(self) -> dict[str, Any]:
        s = self.s
        return {
            "steps": s.step,
            "batch_size": s.options.batch_size,
            "parameters": sum(p.numel() for p in s.raw.parameters()),
            "seconds": {k: round(v, 3) for k, v in s.seconds.items()},
            "step_seconds": statistics.median(wall for wall, _ in s.step_times) if s.step_times else None,
            "step_cpu_seconds": statistics.median(cpu for _, cpu in s.step_times) if s.step_times else None,
            "device": s.device.type,
            "threads": torch.get_num_threads(),
            "malloc": describe_malloc(),
            "resumed": s.resumed,
        }

    def _drop_checkpoints(self) -> None:
        for path in saved_states(self.record.folder, "checkpoint"):
            path.unlink(missing_ok=True)

    def _progress(self) -> None:
        s = self.s
        pace = s.seconds["train"] / max(1, s.step)
        told = {"kind": "progress", "epoch": s.epoch + 1, "epochs": s.options.epochs, "step": s.step, "steps": s.total}
        self.report({**told, "terms": dict(s.meter.latest), "eta": round(pace * (s.total - s.step), 1)})

    def _stop(self) -> bool:
        if self.s.fabric.world_size > 1 and self.s.step % 10:  # asking all ranks costs about a millisecond
            return False
        return any(all_ranks(self.s.fabric, bool(self.stop())))

    def _interrupted(self) -> Interrupted:
        return Interrupted(
            f"Stopped at step {self.s.step} of {self.s.total}; the checkpoint in {self.record.folder} resumes it."
        )


def _mean_of_ranks(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(p[name] for p in parts) / len(parts) for name in parts[0]}


def _finite(value: Any) -> Any:
    """JSON has no NaN: what is not a finite number becomes null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
