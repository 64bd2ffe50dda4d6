"""What passes between a layer and its methods: what a stage is told, here; the penalties that it leaves, `ledger.py`.

A stage is told the layer it sits in, and the linear map, the residual branch or the attention that is under way.
Letters as in `regularizer.py`: B batch, H heads, N queries, M keys, D channels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dampen.masks import any_in_row, causal_rows

if TYPE_CHECKING:
    from dampen.functional.explicit.layers import LowRank


@dataclass(frozen=True)
class Site:
    """Where a clone lives: the layer's name, and its place among the layers that were chosen."""

    name: str
    index: int = 0
    total: int = 1
    stack: tuple[int, int] | None = None  # its place in its own stack (encoder, decoder), and how many stand there

    @property
    def depth(self) -> float:
        """0 in the first layer, 1 in the last; of its own stack, where there are several."""
        index, total = (self.index, self.total) if self.stack is None else self.stack
        return index / max(1, total - 1)


@dataclass(eq=False)
class LinearCall:
    """One application of a linear map y = x W^T + b. It dies with the forward that made it."""

    role: str
    input: Tensor  # (..., in)
    weight: Tensor  # (out, in), whatever layout the module keeps
    bias: Tensor | None
    module: nn.Module | None = None
    site: Site | None = None
    valid: Tensor | None = None  # (B, N) bool, False on padded tokens; None when nothing is padded
    output: Tensor | None = None  # x W^T + b, known to `product` and in attention; None where x or W was changed
    counted: list[Any] = field(default_factory=list)  # the penalties that were made of it; see `Call.is_first`
    tokens: int | Tensor | None = None  # of an expert: the valid tokens of the whole batch, of which it gets some
    adapter: LowRank | None = None  # LoRA beside the map, which weight and output do not contain

    def clean_output(self) -> Tensor:
        """x W^T + b of the input and the weight above, which no method has changed; made where it was not. It is not
        kept: a checkpoint would not make it again, and miss it."""
        if self.output is not None:
            return self.output
        both = torch.promote_types(self.input.dtype, self.weight.dtype)  # they differ where autocast is left
        bias = None if self.bias is None else self.bias.to(both)
        return functional.linear(self.input.to(both), self.weight.to(both), bias)


@dataclass(eq=False)
class BranchCall:
    """One residual branch, about to be added to `residual`. `role` is "attention", "ffn", "parallel" for both, or
    "mixer" for what stands in the place of attention in a layer without one (Mamba)."""

    role: str
    residual: Tensor
    site: Site | None = None
    batch_axis: int | None = None  # 1 where the block was seen to work on (N, B, D); None: by convention
    skip: bool = True  # a method that sets it False takes the residual away: the branch goes on alone
    memory: dict[int, Any] = field(default_factory=dict)  # what a clone keeps for the later branches of this forward


@dataclass(eq=False)
class Call:
    """One attention, as its stages see it. It dies with the forward that made it."""

    module: nn.Module | None = None
    site: Site | None = None
    cross: bool = False
    given: Sequence[int] | None = None  # the shape of the first tensor that the module got
    is_causal: bool = False  # the flag was given; no mask tensor stands for it
    mask: Tensor | None = None  # the model's own bool mask (B or 1, H or 1, N or 1, M), True may be seen
    bias: Tensor | None = None  # the model's own score bias (relative positions), hidden places 0
    blind: Tensor | None = None  # bool (..., N or 1, 1): queries from which a number hides every key; see `ModelMask`
    scores: Tensor | None = None  # the final scores (B, H, N, M), where they are there before keys are hidden
    scale: float = 1.0
    shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # B, H, N, M
    kv_heads: int = 0  # as seen at the socket; a library may have repeated grouped keys before it
    head_size: int = 0
    value_size: int = 0  # channels of a value head; mostly the same
    device: torch.device | None = None
    rows: slice | None = None  # which queries this call stands for, when the queries come in chunks
    valid: Tensor | None = None  # (B, N) bool, False on padded queries; None when nothing is padded
    seen: Tensor | None = None  # the valid keys of all queries, which a chunk's own mask does not tell
    maps: dict[str, LinearCall] = field(default_factory=dict)  # the linear maps run so far, by role
    cuts: dict[str, tuple[str, Any]] = field(default_factory=dict)  # q, k, v: which map, and its rows, where it is seen
    unknown: dict[str, str] = field(default_factory=dict)  # q, k, v: the fused map whose rows for it cannot be told
    followed: Any = None  # from which channels the operands come; see `hooks/channels.py`
    weights: Tensor | None = None  # A in `heads`, where the model computes it itself and its rows may not sum to 1
    memory: dict[int, Any] = field(default_factory=dict)  # what a clone (by its serial number) keeps for later stages

    @property
    def role(self) -> str:
        """self, cross or causal."""
        if self.cross:
            return "cross"
        return "causal" if self.is_causal or getattr(self.module, "is_causal", False) else "self"

    @property
    def keep(self) -> Tensor | None:
        """Bool, broadcastable to (B, H, N, M), True where the model lets a query see a key; None: everywhere."""
        if self.is_causal:
            return causal_rows(self.shape[2], self.shape[3], self.rows, self.device)
        return self.mask

    @property
    def row_sums(self) -> Tensor | None:
        """What the rows of A sum to, broadcastable to (B, H, N, 1), for `heads`: 0 for a query without keys, less than
        1 beside attention sinks. None: every row sums to 1."""
        if self.weights is not None:
            return self.weights.sum(-1, keepdim=True)
        return None if self.is_causal or self.mask is None else any_in_row(self.mask)

    @property
    def valid_keys(self) -> Tensor | None:
        """(B or 1, M) bool: the keys that some query of some head may see; None when the model gave no mask."""
        if self.seen is not None or self.mask is None:
            return self.seen
        mask = self.mask if self.blind is None else self.mask & ~self.blind
        return mask.flatten(1, 2).any(1)

    def projection(self, role: str) -> LinearCall:
        """The bare linear map behind "q", "k" or "v": its own input, weight (heads x d, in), bias and output, fused
        or not."""
        return _cut(*self.source(role), role)

    def is_first(self, roles: str, key: Any) -> bool:
        """Whether this is the first attention that penalizes the projections behind `roles` under `key`: a module may
        attend several times with what its projections made once (DiffLlama, images of several sizes in one row)."""
        sources = [self.source(role) for role in roles]
        first, rows = sources[0][0], [_rows_key(rows) for _, rows in sources]
        maps = [None if linear is first else linear for linear, _ in sources]  # a circle of references would stay
        counted = first.counted
        for other_key, other_maps, other_rows in counted:
            same = all(a is b for a, b in zip(maps, other_maps, strict=True)) if other_key == key else False
            if same and rows == other_rows:
                return False
        counted.append((key, maps, rows))
        return True

    def source(self, role: str) -> tuple[LinearCall, slice | Tensor]:
        """The linear map behind "q", "k" or "v" as it ran, fused or not, and which of its rows make the role."""
        return find_source(self, role)


def find_source(call: Call, role: str) -> tuple[LinearCall, slice | Tensor]:
    """The linear map behind q, k or v of one attention call, and its rows, all of them where it is not fused."""
    if role in call.cuts:
        name, rows = call.cuts[role]
        return check_whole(call.maps[name]), rows
    if role in call.maps:
        return check_whole(call.maps[role]), slice(0, call.maps[role].weight.shape[0])
    fused = "qkv" if "qkv" in call.maps else "kv" if "kv" in call.maps and role != "q" else None
    if fused is None:
        found = ", ".join(sorted(call.maps)) or "none"
        where = call.site.name if call.site else "this attention"
        raise RuntimeError(
            f"{type(call.module).__name__} at '{where}': cannot tell which linear "
            f"map makes {role} (roles found: {found}). Say it when regularizing: "
            f"regularize(..., projections={{'q': 'name', 'k': 'name', 'v': 'name'}}) "
            f"or {{'qkv': 'name'}}, with names inside the attention module."
        )
    whole = check_whole(call.maps[fused])
    if isinstance(whole.module, nn.Conv1d | nn.Conv2d):
        raise RuntimeError(
            f"{type(call.module).__name__} at '{call.site.name if call.site else 'this attention'}': its convolution "
            f"'{fused}' makes q, k and v, and the way of its channels to {role} could not be followed. "
            "Inside torch.compile run one plain forward first (regularize(..., example=...) does), else leave the "
            "layer out with sites=."
        )
    if role in call.unknown:
        raise RuntimeError(
            f"{type(call.module).__name__} at '{call.site.name if call.site else 'this attention'}': its fused map "
            f"'{fused}' makes q, k and v, but what the attention gets as {role} is not in the columns where {role} "
            "would be with all of q first, then k, then v (they may be interleaved per head), so which columns make "
            f"{role} cannot be told. Use separate projections, or leave the layer out with sites=."
        )
    rows = _fused_rows(call, whole, fused)
    start = {"q": 0, "k": rows["q"], "v": rows["q"] + rows["k"]}[role]
    return whole, slice(start, start + rows[role])


def claimed_rows(call: Call, role: str) -> slice | None:
    """The rows of a fused map that make a role by convention: all of q, then k, then v. None where they do not fit."""
    try:
        rows = find_source(call, role)[1]
    except RuntimeError:  # said where a method asks for the map
        return None
    return rows if isinstance(rows, slice) else None


def _rows_key(rows: slice | Tensor) -> tuple[int, ...]:
    """The rows of a map as something that can be compared, also in a graph."""
    return (rows.start, rows.stop) if isinstance(rows, slice) else (len(rows),)


def _cut(whole: LinearCall, rows: slice | Tensor, role: str) -> LinearCall:
    """Some rows of a map."""
    if isinstance(rows, slice) and rows == slice(0, whole.weight.shape[0]):
        return whole
    return dataclasses.replace(
        whole,
        role=role,
        weight=whole.weight[rows],
        bias=None if whole.bias is None else whole.bias[rows],
        output=None if whole.output is None else whole.output[..., rows],
        adapter=None if whole.adapter is None else whole.adapter.rows(rows),
    )


def check_whole(linear: LinearCall) -> LinearCall:
    """The map itself; raise where DeepSpeed's ZeRO-3 has taken its weight apart again (it leaves an empty tensor)."""
    if linear.weight.shape[0] == 0 and hasattr(linear.weight, "ds_id"):
        raise RuntimeError(
            f"the weight of the map {linear.role} is read where its attention runs, but DeepSpeed's ZeRO-3 keeps it "
            "whole only while the map itself runs. Let it gather whole blocks, before deepspeed.initialize: "
            "deepspeed.utils.set_z3_leaf_modules(model, [type(block)])."
        )
    return linear


def _fused_rows(call: Call, whole: LinearCall, fused: str) -> dict[str, int]:
    """How many rows of a fused weight make q, k and v, from the number of query heads seen at the socket.

    The number of key heads follows from the weight, because some libraries repeat keys before they call the socket.
    """
    if call.value_size not in (0, call.head_size):
        raise RuntimeError(
            f"{type(call.module).__name__}: its fused projection makes values of {call.value_size} channels and keys "
            f"of {call.head_size}, so which of its rows make what cannot be told. "
            "Use separate projections, or leave the layer out with sites=."
        )
    total, queries = whole.weight.shape[0], call.shape[1] * call.head_size if fused == "qkv" else 0
    keys, rest = divmod(total - queries, 2)
    if rest or keys <= 0 or keys % call.head_size:
        raise RuntimeError(
            f"{type(call.module).__name__}: its fused projection has {total} rows, which {call.shape[1]} query heads "
            f"of size {call.head_size} and equal numbers of keys and values cannot make. Use separate projections, or "
            "say which maps make q, k and v (projections=)."
        )
    return {"q": queries, "k": keys, "v": keys}
