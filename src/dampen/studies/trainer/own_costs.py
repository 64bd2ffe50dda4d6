"""What a user's own training cost, from the steps that its handles saw, and the mark of the weights it left."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen.native import library
from dampen.studies.processes import describe_malloc
from dampen.studies.trainer.checkpoint import fingerprint
from dampen.studies.trainer.watched import Clock


def costs(models: Sequence[nn.Module], clock: Clock, count: int, seconds: float, device: str) -> dict[str, Any]:
    """Times of steps and whole, and what they depend on: device, threads, malloc, kernels."""
    steps = clock.steps()
    unique = {id(m): m for m in models}.values()
    return {
        "steps": count,
        "parameters": sum(p.numel() for m in unique for p in m.parameters()),
        "seconds": {"train": round(seconds, 3), "evaluate": 0.0, "cpu": round(sum(cpu for _, cpu in steps), 3)},
        "step_seconds": statistics.median(wall for wall, _ in steps) if steps else None,
        "step_cpu_seconds": statistics.median(cpu for _, cpu in steps) if steps else None,
        "device": device,
        "threads": torch.get_num_threads(),
        "malloc": describe_malloc(),
        "kernels": library.path(),
    }


def weights_of(models: Sequence[nn.Module]) -> str:
    """A checksum of the regularized models as the function left them; '' where there is none."""
    states = {f"{i}.{k}": v for i, model in enumerate(models) for k, v in model.state_dict().items()}
    tensors = {k: v for k, v in states.items() if isinstance(v, Tensor) and not v.is_meta}
    return fingerprint(tensors) if tensors else ""
