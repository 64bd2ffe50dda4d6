"""Mixout: drop towards the pre-trained weights, its closed form, and the weights that a model
started from.

Starting weights are kept beside the model, in no list of its parameters or buffers. They share the
memory of the weights until those are written to. Where a weight is sharded (FSDP, DeepSpeed's
ZeRO-3), so is its start: each process keeps its share, and gathers the whole in a forward, where
the weight itself is whole."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import own_parameter, shared_until_written
from dampen.calls import check_whole
from dampen.functional.explicit.layers import Term, map_penalty
from dampen.functional.explicit.projections import fit, sequence_first
from dampen.functional.explicit.reductions import as_wide, no_autocast
from dampen.hooks.discover.roles import weight_of
from dampen.masks import drop
from dampen.methods.drop_connect import GROUPS, check_targets
from dampen.regularizer import Call, LinearCall, Regularizer, UnsupportedModel
from dampen.schedules import Value


class StartWeight:
    """The weight of one linear layer at one moment: whole, or this process's share of it.

    Args:
        weight: of one linear layer.
        module: that holds the parameter.
        parameter: name of the parameter in the module.
    """

    def __init__(self, weight: Tensor, module: nn.Module, parameter: str) -> None:
        self.value = shared_until_written(weight).detach()
        self.shape = weight.shape
        # which parameter of which module it is, or is a part of
        self.module, self.parameter = module, parameter
        self.group: Any = None  # the processes that share it

    def follow(self) -> None:
        """Keep a share where the parameter is sharded by now. Nothing is sent: each process has the
        whole."""
        if self.group is not None:
            return
        self.group = _sharded_over(own_parameter(self.module, self.parameter), self.shape)
        if self.group is not None:
            share = torch.distributed.get_rank(self.group)
            self.value = self.value.flatten()[share * self._size : (share + 1) * self._size].clone()

    def like(self, weight: Tensor) -> Tensor:
        """The whole start, where and as the weight is; every process of the group calls this
        together.

        Args:
            weight: of one linear layer.
        """
        return self.whole().to(device=weight.device, dtype=weight.dtype)

    def whole(self) -> Tensor:
        """All of it."""
        if self.group is None:
            return self.value
        mine = F.pad(self.value, (0, self._size - self.value.numel()))
        parts = [
            torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(self.group))
        ]
        torch.distributed.all_gather(parts, mine, self.group)
        return torch.cat(parts)[: self.shape.numel()].view(self.shape)

    def set(self, whole: Tensor) -> None:
        """Take another start, as of a run that is resumed."""
        if whole.shape != self.shape:
            raise ValueError(
                f"a starting weight of the shape {tuple(whole.shape)} was saved, but this "
                f"model's has {tuple(self.shape)}. Load the state into the model that it is of."
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
                "the starting weights of Mixout are sharded over several processes, so the model "
                "cannot be copied or "
                "pickled here. Save model.state_dict() and reg.state_dict() instead, in every "
                "process."
            )
        return self.__dict__


def _sharded_over(parameter: nn.Parameter | None, whole: torch.Size) -> Any:
    """The processes that hold a parameter together between forwards; None where each holds all of
    it."""
    if parameter is None:
        return None
    held: Any = parameter
    if hasattr(held, "ds_id"):  # DeepSpeed's ZeRO-3
        return held.ds_process_group
    mesh = getattr(held, "device_mesh", None)
    # FSDP2: the last axis of its mesh is the one that shards
    if mesh is not None:
        shards = [axis for axis, placed in enumerate(held.placements) if placed.is_shard()]
        if shards:
            return mesh.get_group(shards[-1])
        return None
    # FSDP1: a piece of its flat parameter
    if parameter.ndim == 1 and len(whole) > 1:
        return torch.distributed.group.WORLD
    return None


PROJECTIONS = frozenset({"q", "k", "v", "qkv", "kv"})


class FromStart(Regularizer):
    """What these methods and L2SP share: the weights U that the chosen maps had when
    the method was attached.

    U is in no list of the model: its parameters, buffers and state_dict stay what they were, and
    the handle's state has it. It goes along with `model.to()`, and where W is sharded it is too,
    from the next `reg.progress` on. It shares W's memory until W is written to: maps that are
    frozen, or not trained yet, cost nothing.

    Args:
        targets: roles of linear layers, or names of groups.
    """

    needs_module = True

    def __init__(self, targets: str | Sequence[str]) -> None:
        super().__init__()
        self.starts: dict[str, StartWeight] = {}
        self.roles = check_targets(targets, type(self).__name__)

    def check_layer(self, roles: set[str], where: str) -> None:
        super().check_layer(roles, where)
        adapted = sorted(r for r in self.roles if f"lora_{r}" in roles)
        if adapted:
            raise UnsupportedModel(
                f"{type(self).__name__}: the map {adapted[0]} at '{where}' is frozen under a LoRA "
                "adapter, so it never "
                "leaves its pre-trained weight and there is nothing to mix. Use it when all "
                "weights are trained, or "
                "leave these maps out with targets=."
            )

    def prepare(self, model: nn.Module) -> None:
        for i, (module, role) in enumerate(self.linears):
            if role in self.roles:
                self._keep(f"start_{i}", weight_of(module), role, module, "weight")
        for i, module in enumerate(self.neighbors):
            if isinstance(module, nn.MultiheadAttention):
                for role, weight in zip("qkv", _in_projections(module), strict=True):
                    if role in self.roles:
                        if module.in_proj_weight is not None:
                            whose = "in_proj_weight"
                        else:
                            whose = f"{role}_proj_weight"
                        self._keep(f"start_{role}_{i}", weight, role, module, whose)

    def _keep(
        self, name: str, weight: Tensor, role: str, module: nn.Module, parameter: str
    ) -> None:
        taken_apart = hasattr(weight, "ds_id")  # by deepspeed.zero.Init
        if weight.is_meta or taken_apart or not weight.is_floating_point():
            if weight.is_meta:
                state = "has no values yet (meta)"
            else:
                state = f"is stored as {weight.dtype}"
            if taken_apart:
                state = "is sharded already (DeepSpeed's zero.Init)"
            else:
                state = state
            raise UnsupportedModel(
                f"{type(self).__name__} keeps the weights that the model starts from, but the map "
                f"{role} at "
                f"'{self.site.name if self.site else ''}' {state}. Load the pre-trained weights "
                "first, in a floating "
                "dtype, and regularize then."
            )
        self.starts[name] = StartWeight(weight, module, parameter)

    def at(self, progress: float) -> None:
        super().at(progress)
        for start in self.starts.values():
            start.follow()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FromStart:
        super()._apply(fn, recurse)
        for start in self.starts.values():
            start.value = fn(start.value)
        return self

    def saved(self) -> dict[str, Tensor]:
        return {**super().saved(), **{name: start.whole() for name, start in self.starts.items()}}

    def restore(self, name: str, value: Tensor) -> None:
        if name in self.starts:
            self.starts[name].set(value)
        else:
            super().restore(name, value)

    def distance(self, call: LinearCall) -> Tensor:
        """W - U of the map that a call is about."""
        check_whole(call)
        for i, (module, _) in enumerate(self.linears):
            if module is call.module:
                return call.weight - self.starts[f"start_{i}"].like(call.weight)
        for i, module in enumerate(self.neighbors):
            if module is call.module:
                return call.weight - self.starts[f"start_{call.role}_{i}"].like(call.weight)
        raise RuntimeError(
            f"{type(self).__name__} has no starting weight of the map {call.role}: attach it with "
            "dampen.regularize."
        )

    def extra_repr(self) -> str:
        named = next(
            (name for name, roles in GROUPS.items() if set(roles) == self.roles),
            " ".join(sorted(self.roles)),
        )
        return f"{super().extra_repr()}, targets={named}"


class Mixout(FromStart):
    """Put random weights back to their pre-trained values, one mask per forward: Mixout (arXiv
    1909.11299).

    W_used = U + (1 - m) * (W - U) / (1 - p), m ~ Bernoulli(p) per weight, U the weights at the
    moment of `regularize`: DropConnect on the difference, so that E[W_used] = W and a model that
    has not moved yet is not disturbed. It is computed as W + ((1 - m) / (1 - p) - 1) (W - U), which
    rounds the difference and not W.

    Load the pre-trained weights before `regularize`. U costs the memory of the chosen weights once
    more as soon as they move; it is saved in `reg.state_dict()`, so that a resumed run knows where
    it started. Differences from the paper: biases and embeddings are not mixed.

    Args:
        rate: probability to put a weight back. The paper takes 0.7 to 0.9 for fine-tuning BERT.
        targets: which maps: "all" (default), "ffn", "attention", or roles among q, k, v, qkv, kv,
            out, ffn_in, ffn_out.

    >>> from dampen import Mixout
    >>> Mixout(0.7, targets="attention")
    Mixout(rate=0.7, targets=attention)
    """

    acts_first = True
    rate: Tensor

    def __init__(self, rate: Value = 0.7, targets: str | Sequence[str] = "all") -> None:
        super().__init__(targets)
        self.scheduled("rate", rate)

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        moved = self.distance(call)
        return x, weight + (drop(moved, self.rate) - moved)


class ExplicitMixout(FromStart):
    """The expectation of Mixout (arXiv 1909.11299) as a penalty: weight decay towards the
    pre-trained weights, each column weighted by the power of its feature.

    J = 1/2 p / (1 - p) sum_j (mean_i x_ij^2) (sum_o (W - U)_oj^2), the mean over valid tokens: half
    the expected squared change of a map's output under Mixout, which has no bias part because
    E[W_used] = W. Derived as Explicit Dropout (arXiv 2604.20505) is from dropout. Deterministic;
    nothing of the size of a weight is drawn.

    Args:
        weight: the penalty's factor; a number, a schedule or one value per layer.
        rate: p of the Mixout that it replaces.
        targets: as for `Mixout`.
        detach_inputs: gradients go to the weights alone, not to the activations.

    >>> from dampen import ExplicitMixout
    >>> ExplicitMixout(0.1)
    ExplicitMixout(rate=0.7, weight=0.1, targets=all)
    """

    stochastic = False
    needs_valid = True
    reads_product = False
    rate: Tensor
    weight: Tensor

    def __init__(
        self,
        weight: Value = 1.0,
        rate: Value = 0.7,
        targets: str | Sequence[str] = "all",
        detach_inputs: bool = False,
    ) -> None:
        super().__init__(targets)
        self.scheduled("rate", rate)
        self.scheduled("weight", weight, high=math.inf)
        self.detach_inputs = detach_inputs
        wanted = {"qkv": bool(self.roles & PROJECTIONS), "product": bool(self.roles - PROJECTIONS)}
        self.stages = frozenset(stage for stage, on in wanted.items() if on)

    def product(self, y: Tensor, call: LinearCall) -> Tensor:
        """The maps after attention, where padding is known: out and the feed-forward."""
        if call.role not in PROJECTIONS:
            self._penalize(call, sequence_first(self.neighbors) and call.role.startswith("ffn"))
        return y

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """The projections: the model's mask is known here."""
        for role, linear in call.maps.items():
            if role in self.roles & PROJECTIONS:
                valid = call.valid if role in ("q", "qkv") else call.valid_keys
                tokens = linear.input.shape[-2]
                self._penalize(dataclasses.replace(linear, valid=fit(valid, tokens, call)), False)
        return q, k, v

    def _penalize(self, call: LinearCall, swapped: bool) -> None:
        x = call.input.detach() if self.detach_inputs else call.input
        with no_autocast(x.device.type):
            moved = dataclasses.replace(
                call, input=x, weight=self.distance(call), output=None, bias=None
            )
            term = Term(
                as_wide(self.current("weight"), x),
                as_wide(self.current("rate"), x),
                "inverted",
                "mean",
            )
            self.penalize(map_penalty(moved, term, swapped))


def _in_projections(module: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    # None where q, k and v have maps of their own
    if module.in_proj_weight is not None:
        return module.in_proj_weight.chunk(3)
    return module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
