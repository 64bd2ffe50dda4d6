"""The projections of an attention call: its valid tokens, its linear layers by head, and errors
that name the layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from dampen._torch import addresses_known, functorch_level
from dampen.calls import Penalty, find_source
from dampen.functional.explicit.layers import (
    Term,
    all_rows,
    map_penalty,
    merge,
    only_weight,
    tap_linear,
)
from dampen.functional.explicit.reductions import RowWeights, token_rows, wide, wide_dtype
from dampen.names import leave_out
from dampen.regularizer import Call, UnsupportedModel

# which term needs a linear layer, what that is, and what to do without it
_ASKED_FOR = {
    "out": (
        "output",
        "the attention's output projection",
        "Set output=0, say it with projections={'out': 'name'}",
    ),
    "ffn_in": ("ffn1", "layer 1 of the feed-forward", "Set ffn1=0 (or ffn=0)"),
    "ffn_out": ("ffn2", "layer 2 of the feed-forward", "Set ffn2=0 (or ffn=0)"),
}


@dataclass(frozen=True)
class HeadMap:
    """One projection: y = x W^T + bias, head by head. T tokens of its own input."""

    y: Tensor  # (B, H, T, dh), with the bias
    bias: Tensor | None  # (H, 1, dh)
    x: Tensor  # (B, T, in)
    weight: Tensor  # (H, dh, in)

    @property
    def bare(self) -> Tensor:
        """(B, H, T, dh) without the bias, in float32 or wider."""
        if self.bias is None:
            return wide(self.y)
        return wide(self.y) - wide(self.bias)

    @property
    def tokens(self) -> Tensor:
        """y as (B, T, H dh), a view where the heads are one."""
        return self.y.transpose(1, 2).flatten(2)

    def head(self, h: int) -> HeadMap:
        """One of the heads.

        Args:
            h: its index.
        """
        cut = slice(h, h + 1)
        return replace(
            self,
            y=self.y[:, cut],
            bias=None if self.bias is None else self.bias[cut],
            weight=self.weight[cut],
        )

    def as_one_head(self) -> HeadMap:
        """All heads as a single one: the authors' own code, with one full Wq^T Wk."""
        return replace(
            self,
            y=self.tokens.unsqueeze(1),
            bias=None if self.bias is None else self.bias.reshape(1, 1, -1),
            weight=self.weight.flatten(0, 1).unsqueeze(0),
        )


def read_map(
    call: Call, role: str, operand: Tensor | None, head_size: int, detach: bool
) -> HeadMap:
    """The projection behind "q", "k" or "v" of an attention call.

    `operand` is what arrived at the attention for this role. Where it is a mere view of the
    projection's output (no rotary, no norm, no scaling in between), the penalty's gradient enters
    there, which spares a fused projection the gradients of its slices.

    Args:
        call: the attention, or the linear layer, at work.
        role: q, k or v.
        operand: what arrived at the attention for this role.
        head_size: channels of a head.
        detach: no gradient to the activations.
    """
    linear = merge(call.projection(role))
    x, y = linear.input, linear.clean_output()
    if x.ndim == 2:
        x, y = x.unsqueeze(0), y.unsqueeze(0)
    x, y = x.flatten(1, -2), y.flatten(1, -2)
    if x.shape[0] != call.shape[0]:
        raise RuntimeError(
            f"{at(call)}: the {role} projection reads a batch of {x.shape[0]} "
            f"but the attention works on {call.shape[0]}, so tokens cannot be separated from "
            "samples. Leave the layer out with target_modules=."
        )
    if detach:
        x, y, bias = x.detach(), only_weight(x, linear.weight, y, linear.bias), None
    else:
        if linear.bias is None:
            bias = None
        else:
            bias = linear.bias.unflatten(0, (-1, 1, head_size))
    heads = y.unflatten(-1, (-1, head_size)).transpose(1, 2)
    if not detach and operand is not None and addresses_known():
        if _shows(operand, y, slice(0, y.shape[-1])):
            heads = operand
        elif _shows_otherwise(operand, y):
            raise RuntimeError(
                f"{at(call)}: the map '{linear.role}' was taken to give {role} as {heads.shape[1]} "
                "heads of size "
                f"{head_size} in order, but the attention reads it in another layout (heads of q, "
                "k and v "
                "interleaved). Use separate projections, or leave the layer out with "
                "target_modules=."
            )
    return HeadMap(heads, bias, x, linear.weight.unflatten(0, (-1, head_size)))


def tap_projection(role: str, operand: Tensor, call: Call, term: Term) -> tuple[Tensor, Penalty]:
    """The operand "q", "k" or "v" of an attention, and the penalty of the projection behind it.

    Args:
        role: q, k or v.
        operand: what arrived at the attention for this role.
        call: the attention, or the linear layer, at work.
        term: coefficient, rate, form and reduction.
    """
    linear, rows = find_source(call, role)
    x, y = linear.input, linear.output
    tokens = x.shape[0] if x.ndim == 2 else x.shape[1:-1].numel()
    valid = call.valid
    if role != "q":
        valid = call.seen if call.mask is None else call.valid_keys
    if valid is not None:
        valid = fit(valid, tokens, call)
    compiling = torch.compiler.is_compiling()
    followed = compiling or functorch_level() is not None  # memory addresses must not be read
    apart = term.detach or linear.adapter is not None or followed
    if (
        not apart and y is not None and isinstance(rows, slice) and _shows(operand, y, rows)
    ):  # mostly: nothing is cut
        if valid is None:
            weights = all_rows(term.reduction, operand.shape[0], tokens, None)
        else:
            weights = token_rows(term.reduction, operand.shape[0], tokens, valid, wide_dtype(x))
        return tap_linear(
            operand, linear.bias, linear, weights, term, (rows.start, rows.stop - rows.start)
        )
    linear = call.projection(role)
    windows = x.shape[0] != call.shape[0] and valid is None  # made after the projection
    if linear.adapter is None and not windows:
        m = read_map(call, role, operand, operand.shape[-1], detach=False)
        linear = replace(linear, input=m.x, output=m.tokens)
    return operand, map_penalty(replace(linear, valid=valid), term)


def _shows(operand: Tensor, y: Tensor, rows: slice) -> bool:
    """Whether an operand (B, H, N, dh) is a mere view of some channels of y (B, N, out), heads in
    order: then the gradient of a penalty may enter there, which spares a fused projection the
    gradients of its slices."""
    if y.ndim != 3 or operand.requires_grad != y.requires_grad:
        return False
    batch, heads, tokens, size = operand.shape
    sample, token, channel = y.stride()
    wanted = (sample, size * channel, token, channel)
    for n, a, b in zip(operand.shape, operand.stride(), wanted, strict=True):
        if n != 1 and a != b:
            return False
    return (
        (batch, tokens, heads * size) == (*y.shape[:2], rows.stop - rows.start)
        and operand.storage_offset() == y.storage_offset() + rows.start * channel
        and operand.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        and operand.dtype == y.dtype
    )


def _shows_otherwise(operand: Tensor, y: Tensor) -> bool:
    """Whether an operand is a view of other channels of y, or of the same in another order. One
    head of keys that all queries are shown (stride 0, multi-query attention) is none; nor is one
    that was cut from the graph."""
    same = operand.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
    some = same and _shows_some_tokens(operand, y)
    return same and not some and operand.stride(1) != 0 and operand.requires_grad == y.requires_grad


def _shows_some_tokens(operand: Tensor, y: Tensor) -> bool:
    """Whether an operand (B, H, n, dh) is a view of y (B, N, out) with its heads in order, but of
    some tokens alone: one of several images in a row."""
    sample, token, channel = y.stride()
    batch, heads, tokens, size = operand.shape
    wanted = (sample, size * channel, token, channel)
    start = operand.storage_offset() - y.storage_offset()
    fits = batch == y.shape[0] and heads * size == y.shape[2] and tokens < y.shape[1]
    return (
        fits
        and start >= 0
        and start % token == 0
        and all(
            n == 1 or a == b
            for n, a, b in zip(operand.shape, operand.stride(), wanted, strict=True)
        )
    )


def valid_pairs(call: Call, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The valid queries (B or 1, N) and keys (B or 1, M) of an attention; None where all are.

    Args:
        call: the attention, or the linear layer, at work.
        queries: N.
        keys: M.
    """
    return fit(call.valid, queries, call), fit(call.valid_keys, keys, call)


def query_rows(call: Call, reduction: str, dtype: torch.dtype) -> RowWeights:
    """The row weights of an attention's outputs, of all its queries: the valid ones of samples that
    have any key to see.

    Args:
        call: the attention, or the linear layer, at work.
        reduction: mean, sum, token_mean or author.
        dtype: of the result.
    """
    batch, _, queries, _ = call.shape
    valid, keys = fit(call.valid, queries, call), call.valid_keys
    if keys is not None:
        some = keys.any(1, keepdim=True).expand(-1, queries)
        valid = some if valid is None else valid & some
    return token_rows(reduction, batch, queries, valid, dtype)


def fit(valid: Tensor | None, tokens: int, call: Call) -> Tensor | None:
    """Validity for as many tokens as a projection read: extra keys are not tokens.

    nn.MultiheadAttention adds its own keys at the end, caches and prefixes are at the beginning.

    Args:
        valid: bool, False on padding; None: all tokens count.
        tokens: how many a projection read.
        call: the attention, or the linear layer, at work.
    """
    if valid is None or valid.shape[1] == tokens:
        return valid
    if isinstance(call.module, nn.MultiheadAttention):
        return valid[:, :tokens]
    return valid[:, -tokens:]


def as_one_head(q: HeadMap, k: HeadMap, call: Call) -> tuple[HeadMap, HeadMap]:
    """heads="concat".

    Args:
        q: the queries and their projection.
        k: the keys and their projection.
        call: the attention, or the linear layer, at work.
    """
    if q.weight.shape[0] != k.weight.shape[0]:
        raise RuntimeError(
            f"heads='concat' multiplies one full Wq^T Wk, but {at(call)} has "
            f"{q.weight.shape[0]} query heads and {k.weight.shape[0]} key heads. Use "
            "heads='per_head'."
        )
    return q.as_one_head(), k.as_one_head()


def check_shared(call: Call) -> None:
    """One mask on X feeds queries and keys only where both read the same X.

    Args:
        call: the attention, or the linear layer, at work.
    """
    if call.cross or call.projection("q").input is not call.projection("k").input:
        raise RuntimeError(
            f"shared_mask=True is one mask on the input of queries and keys, but in {at(call)} "
            "they read different "
            "inputs. Use shared_mask=False there, or regularize(..., attention='self')."
        )


def check_visible(call: Call, q: HeadMap, k: HeadMap) -> None:
    """Visible pairs are those of the attention's mask: its queries and keys must be the
    projections' tokens.

    Args:
        call: the attention, or the linear layer, at work.
        q: the queries and their projection.
        k: the keys and their projection.
    """
    if (q.x.shape[1], k.x.shape[1]) != call.shape[2:]:
        raise_extra_keys(call, k.x.shape[1], call.shape[3])


def raise_extra_keys(call: Call, tokens: int, keys: int) -> NoReturn:
    """Keys that no projection made (a cache, a prefix, bias_k) have no input that dropout could act
    on.

    Args:
        call: the attention, or the linear layer, at work.
        tokens: how many a projection read.
        keys: M.
    """
    raise RuntimeError(
        f"{at(call)} attends to {keys} keys, but its projections read {tokens} "
        "tokens: a cache, a prefix or added keys. attended_value and visible_only need every key "
        "to come from the "
        "projections; switch them off, or the extra keys."
    )


def sequence_first(modules: Iterable[nn.Module]) -> bool:
    """Whether the feed-forward beside these attentions sees (N, B, D): nn.MultiheadAttention with
    batch_first=False.

    Args:
        modules: the attentions of a layer.
    """
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in modules)


def check_roles(
    who: str, wanted: Iterable[str], found: set[str], where: str, branches: Iterable[str] = ()
) -> None:
    """Raise where a layer lacks a linear map that a term reads, or has one that an adapter changes
    beside it.

    `branches` are the maps that only `residual` wants.

    Args:
        who: name of the method, for the error.
        wanted: roles that a term reads.
        found: roles that the layer has.
        where: name of the layer.
        branches: roles that only `residual` reads.
    """
    adapted = next((role for role in sorted(wanted) if f"lora_{role}" in found), None)
    if adapted is not None:
        raise UnsupportedModel(
            f"{who}: the map {adapted} at '{where}' is W + B A (LoRA), and the penalty would read "
            "W alone. Merge the "
            f"adapters into the weights, penalize other terms, or {leave_out(where)}."
        )
    names = ", ".join(sorted(found)) or "none"
    missing = next((role for role in branches if role not in found), None)
    if missing is not None:
        raise UnsupportedModel(
            f"{who}(residual=...) reads each branch at its last linear map ({missing} for one of "
            f"them), but '{where}' "
            f"has none of that role (roles of its linear maps: {names}). Set residual=0, or leave "
            "the layer out with "
            "target_modules=."
        )
    for role, (term, what, remedy) in _ASKED_FOR.items():
        if role in wanted and role not in found:
            raise UnsupportedModel(
                f"{who}({term}=...) penalizes {what}, but '{where}' has none (roles of its linear "
                f"maps: {names}). "
                f"{remedy}, or {leave_out(where)}."
            )
    for role in "qkv":
        fused = "qkv" in found or (role != "q" and "kv" in found)
        if role in wanted and role not in found and not fused:
            raise UnsupportedModel(
                f"{who}: unknown which linear layer makes {role} at '{where}' (roles found: "
                f"{names}). "
                "Say it: regularize(model, ..., projections={'q': 'name', 'k': 'name', 'v': "
                "'name'}) or {'qkv': "
                f"'name'}}, with names inside the attention module; or {leave_out(where)}."
            )


def at(call: Call) -> str:
    """Whose attention it is, for errors.

    Args:
        call: the attention, or the linear layer, at work.
    """
    return f"{type(call.module).__name__} at '{call.site.name if call.site else 'this attention'}'"
