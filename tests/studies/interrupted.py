"""Trials that are stopped at a step, and what must be equal after they resumed."""

from dampen.studies.store import RunStore


def same(a, b):
    """Equal in everything but the times."""
    drop = ("seconds", "step_seconds", "step_cpu_seconds", "resumed")
    return {k: v for k, v in a.items() if k not in drop} == {
        k: v for k, v in b.items() if k not in drop
    }


def log_without_times(folder):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in RunStore(folder).lines()]


def interrupt_at(steps):
    """A `report` and a `stop` that end the trial when one of `steps` is reached."""
    seen = {"step": -1}

    def report(event):
        seen["step"] = event.get("step", seen["step"])

    return report, lambda: seen["step"] in steps
