"""Between a layer's calls and the formulas: which tokens are valid, which maps are there, and errors in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor, nn

from dampen.calls.later import Penalty
from dampen.formulas.explicit.linear import Term, map_penalty, tap_linear
from dampen.formulas.explicit.maps import HeadMap, read_map
from dampen.formulas.explicit.precision import wide_dtype
from dampen.formulas.explicit.reductions import Rows, token_rows
from dampen.regularizer import Call, LinearCall, UnsupportedModel


def tap_projection(role: str, operand: Tensor, call: Call, term: Term) -> tuple[Tensor, Penalty]:
    """The operand "q", "k" or "v" of an attention, and the penalty of the projection behind it."""
    linear, rows = call.source(role)
    valid, tokens = call.valid if role == "q" else call.valid_keys, linear.input.shape[-2]
    if not term.detach and _shows(operand, linear, rows):  # the usual case: no view is made, no map is cut
        weights = token_rows(
            term.reduction, operand.shape[0], tokens, fit(valid, tokens, call), wide_dtype(linear.input)
        )
        cut = (rows.start, rows.stop - rows.start)  # type: ignore[union-attr]
        return tap_linear(operand, linear.bias, linear.input, linear.weight, weights, term, cut)
    linear = call.projection(role)
    if linear.input.shape[0] != call.shape[0] and valid is None:  # windows made after the projection
        return operand, map_penalty(linear, term)
    if linear.adapter is not None:  # no view at the attention, and no merged matrix
        return operand, map_penalty(replace(linear, valid=fit(valid, tokens, call)), term)
    m = read_map(call, role, operand, operand.shape[-1], term.detach)
    batch, tokens = m.x.shape[:2]
    weights = token_rows(term.reduction, batch, tokens, fit(valid, tokens, call), wide_dtype(m.x))
    y, bias = (m.y, m.bias) if m.y is operand else m.tokens
    y, value = tap_linear(y, bias, m.x, m.weight.flatten(0, 1), weights, term)
    return y if m.y is operand else operand, value


def _shows(operand: Tensor, linear: LinearCall, rows: slice | Tensor) -> bool:
    """Whether an operand (B, H, N, dh) is a mere view of some rows of a map's output, heads in order: then the gradient
    of a penalty may enter there, which spares a fused projection the gradients of its slices."""
    y = linear.output
    if torch.compiler.is_compiling() or y is None or y.ndim != 3 or not isinstance(rows, slice) or linear.adapter:
        return False
    batch, heads, tokens, size = operand.shape
    sample, token, channel = y.stride()
    return (
        (batch, tokens, heads * size) == (*y.shape[:2], rows.stop - rows.start)
        and operand.stride() == (sample, size * channel, token, channel)
        and operand.data_ptr() == y.data_ptr() + rows.start * channel * y.element_size()
        and operand.dtype == y.dtype
        and operand.requires_grad == y.requires_grad
    )


def valid_pairs(call: Call, queries: int, keys: int) -> tuple[Tensor | None, Tensor | None]:
    """The valid queries (B or 1, N) and keys (B or 1, M) of an attention; None where all are."""
    return fit(call.valid, queries, call), fit(call.valid_keys, keys, call)


def query_rows(call: Call, reduction: str, dtype: torch.dtype) -> Rows:
    """The row weights of an attention's outputs, of all its queries: the valid ones of samples that have any key to
    see."""
    batch, _, queries, _ = call.shape
    valid, keys = fit(call.valid, queries, call), call.valid_keys
    if keys is not None:
        some = keys.any(1, keepdim=True).expand(-1, queries)
        valid = some if valid is None else valid & some
    return token_rows(reduction, batch, queries, valid, dtype)


def fit(valid: Tensor | None, tokens: int, call: Call) -> Tensor | None:
    """Validity for as many tokens as a projection read: extra keys are not tokens.

    nn.MultiheadAttention adds its own keys at the end, caches and prefixes stand at the beginning.
    """
    if valid is None or valid.shape[1] == tokens:
        return valid
    return valid[:, :tokens] if isinstance(call.module, nn.MultiheadAttention) else valid[:, -tokens:]


def as_one_head(q: HeadMap, k: HeadMap, call: Call) -> tuple[HeadMap, HeadMap]:
    """heads="concat"."""
    if q.weight.shape[0] != k.weight.shape[0]:
        raise RuntimeError(
            f"heads='concat' multiplies one full Wq^T Wk, but {type(call.module).__name__} at '{_where(call)}' has "
            f"{q.weight.shape[0]} query heads and {k.weight.shape[0]} key heads. Use heads='per_head'."
        )
    return q.as_one_head(), k.as_one_head()


def check_shared(call: Call) -> None:
    """One mask on X feeds queries and keys only where both read the same X."""
    if call.cross or call.projection("q").input is not call.projection("k").input:
        raise RuntimeError(
            "shared_mask=True is one mask on the input of queries and keys, but in "
            f"{type(call.module).__name__} at '{_where(call)}' they read different "
            "inputs. Use shared_mask=False there, or regularize(..., attention='self')."
        )


def check_visible(call: Call, q: HeadMap, k: HeadMap) -> None:
    """Visible pairs are those of the attention's mask: its queries and keys must be the projections' tokens."""
    if (q.x.shape[1], k.x.shape[1]) != call.shape[2:]:
        raise_extra_keys(call, k.x.shape[1], call.shape[3])


def raise_extra_keys(call: Call, tokens: int, keys: int) -> NoReturn:
    """Keys that no projection made (a cache, a prefix, bias_k) have no input that dropout could act on."""
    raise RuntimeError(
        f"{type(call.module).__name__} at '{_where(call)}' attends to {keys} keys, but its projections read {tokens} "
        "tokens: a cache, a prefix or added keys. attended_value and visible_only need every key to come from the "
        "projections; switch them off, or the extra keys."
    )


def sequence_first(modules: Iterable[nn.Module]) -> bool:
    """Whether the feed-forward beside these attentions sees (N, B, D): nn.MultiheadAttention with batch_first=False."""
    return any(isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in modules)


def check_roles(who: str, wanted: Iterable[str], found: set[str], where: str, branches: Iterable[str] = ()) -> None:
    """Raise where a layer lacks a linear map that a term reads, or has one that an adapter changes beside it.

    `branches` are the maps that only `residual` wants."""
    adapted = next((role for role in sorted(wanted) if f"lora_{role}" in found), None)
    if adapted is not None:
        raise UnsupportedModel(
            f"{who}: the map {adapted} at '{where}' is W + B A (LoRA), and the penalty would read W alone. Merge the "
            "adapters into the weights, penalize other terms, or leave the layer out with sites=."
        )
    names = ", ".join(sorted(found)) or "none"
    missing = next((role for role in branches if role not in found), None)
    if missing is not None:
        raise UnsupportedModel(
            f"{who}(residual=...) reads each branch at its last linear map ({missing} for one of them), but '{where}' "
            f"has none of that role (roles of its linear maps: {names}). Set residual=0, or leave the layer out with "
            "sites=."
        )
    if "out" in wanted and "out" not in found:
        raise UnsupportedModel(
            f"{who}(output=...) penalizes the attention's output projection, but '{where}' has none (roles of its "
            f"linear maps: {names}). Set output=0, say it with projections={{'out': 'name'}}, or leave the layer out "
            "with sites=."
        )
    for role, layer in (("ffn_in", 1), ("ffn_out", 2)):
        if role in wanted and role not in found:
            raise UnsupportedModel(
                f"{who}(ffn{layer}=...) penalizes layer {layer} of the feed-forward, but '{where}' has none (roles of "
                f"its linear maps: {names}). Set ffn{layer}=0 (or ffn=0), or leave the layer out with sites=."
            )
    for role in "qkv":
        fused = "qkv" in found or (role != "q" and "kv" in found)
        if role in wanted and role not in found and not fused:
            raise UnsupportedModel(
                f"{who}: cannot tell which linear map makes {role} at '{where}' (roles found: {names}). "
                "Say it: regularize(model, ..., projections={'q': 'name', 'k': 'name', 'v': 'name'}) or {'qkv': "
                "'name'}, with names inside the attention module; or leave the layer out with sites=."
            )


def _where(call: Call) -> str:
    return call.site.name if call.site else "this attention"
