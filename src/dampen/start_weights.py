"""The weights that a model started from, kept beside it: in no list of its parameters or buffers.

They share the memory of the weights until those are written to. Where a weight is sharded (FSDP, DeepSpeed's ZeRO-3),
so is its start: each process keeps its share, and gathers the whole where the weight itself is whole, in a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import own_parameter, shared_until_written


class StartWeight:
    """The weight of one linear layer at one moment: whole, or this process's share of it."""

    def __init__(self, weight: Tensor, module: nn.Module, parameter: str) -> None:
        self.value = shared_until_written(weight).detach()
        self.shape = weight.shape
        self.module, self.parameter = module, parameter  # which parameter of which module it is, or is a part of
        self.group: Any = None  # the processes that share it

    def follow(self) -> None:
        """Keep a share where the parameter is sharded by now. Nothing is sent: each process has the whole."""
        if self.group is not None:
            return
        self.group = _sharded_over(own_parameter(self.module, self.parameter), self.shape)
        if self.group is not None:
            share = torch.distributed.get_rank(self.group)
            self.value = self.value.flatten()[share * self._size : (share + 1) * self._size].clone()

    def like(self, weight: Tensor) -> Tensor:
        """The whole start, where and as the weight is; every process of the group calls this together."""
        return self.whole().to(device=weight.device, dtype=weight.dtype)

    def whole(self) -> Tensor:
        """All of it."""
        if self.group is None:
            return self.value
        mine = F.pad(self.value, (0, self._size - self.value.numel()))
        parts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(self.group))]
        torch.distributed.all_gather(parts, mine, self.group)
        return torch.cat(parts)[: self.shape.numel()].view(self.shape)

    def set(self, whole: Tensor) -> None:
        """Take another start, as of a run that is resumed."""
        if whole.shape != self.shape:
            raise ValueError(
                f"a starting weight of the shape {tuple(whole.shape)} was saved, but this model's has "
                f"{tuple(self.shape)}. Load the state into the model that it is of."
            )
        flat = whole.to(self.value).flatten()
        if self.group is not None:
            share = torch.distributed.get_rank(self.group)
            flat = flat[share * self._size : (share + 1) * self._size]
        self.value = flat.clone().view(self.value.shape)

    @property
    def _size(self) -> int:
        return -(-self.shape.numel() // torch.distributed.get_world_size(self.group))

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles; a group of processes has neither."""
        if self.group is not None:
            raise RuntimeError(
                "the starting weights of Mixout are sharded over several processes, so the model cannot be copied or "
                "pickled here. Save model.state_dict() and reg.state_dict() instead, in every process."
            )
        return self.__dict__


def _sharded_over(parameter: nn.Parameter | None, whole: torch.Size) -> Any:
    """The processes that hold a parameter together between forwards; None where each holds all of it."""
    if parameter is None:
        return None
    held: Any = parameter
    if hasattr(held, "ds_id"):  # DeepSpeed's ZeRO-3
        return held.ds_process_group
    mesh = getattr(held, "device_mesh", None)
    if mesh is not None:  # FSDP2: the last axis of its mesh is the one that shards
        shards = [axis for axis, placed in enumerate(held.placements) if placed.is_shard()]
        return mesh.get_group(shards[-1]) if shards else None
    if parameter.ndim == 1 and len(whole) > 1:  # FSDP1: a piece of its flat parameter
        return torch.distributed.group.WORLD
    return None
