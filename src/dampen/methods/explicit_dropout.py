"""Explicit Dropout: dropout as a deterministic penalty."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from dampen.functional.explicit.joint import (
    attended_bias,
    attended_bias_from_weights,
    attended_variance,
    check_joint,
    diagonal_weights,
    joint_variance,
    shared_mask_excess,
    with_gradient,
)
from dampen.functional.explicit.layers import BRANCHES, Term, map_penalty, multiply, tap_branch
from dampen.functional.explicit.pairs import (
    PAIR_TERMS,
    all_pairs,
    chunked_pairs,
    count_visible,
    needed,
    pair_penalty,
    restricts_pairs,
    seen_by_any_head,
    visible_diagonal,
    visible_pairs,
)
from dampen.functional.explicit.projections import (
    HeadMap,
    as_one_head,
    check_roles,
    check_shared,
    check_visible,
    query_rows,
    raise_extra_keys,
    read_map,
    sequence_first,
    tap_projection,
    valid_pairs,
)
from dampen.functional.explicit.reductions import (
    as_wide,
    check_form,
    check_reduction,
    combine,
    is_off,
    no_autocast,
    pair_rows,
    single,
    wide_dtype,
)
from dampen.names import leave_out
from dampen.regularizer import Call, LinearCall, Regularizer
from dampen.schedules import Value

TERMS = ("query", "key", "value", "attended_value", "query_key", "ffn1", "ffn2")
# ours: one mask for q, k and v, and the other places of figure 1
MORE_TERMS = ("joint", "output", "residual")
# the projections that each term reads
_READS = {
    "query": "qk",
    "key": "qk",
    "query_key": "qk",
    "value": "v",
    "attended_value": "v",
    "joint": "qkv",
}
NO_CONTEXT = contextlib.nullcontext()
_LAYER = {"ffn_in": "ffn1", "ffn_out": "ffn2", "out": "output"}


class ExplicitDropout(Regularizer):
    """Dropout as a deterministic penalty on queries, keys, values, attended values and the
    feed-forward.

    loss = task + sum over layers and terms of lambda * J. With `B = p^2 X^T X` (equations of arXiv
    2604.20505):

        J_q = 1/2 Tr(B Wq^T Wk X^T X Wk^T Wq)      J_v  = 1/2 Tr(B Wv^T Wv)
        J_k = 1/2 Tr(B Wk^T Wq X^T X Wq^T Wk)      J_av = 1/2 p^2 Tr(X^T A^T A X Wv^T Wv)
        J_ff = 1/2 Tr(B W^T W)

    The traces are squared norms of tensors that the forward pass already has, so no X^T X, no W^T W
    and no n x n matrix is built: J_q = J_k = p^2/2 ||Q K^T||^2, J_v = p^2/2 ||V||^2, J_av = p^2/2
    ||A V||^2.

    Differences from the paper: the paper's B keeps only the squared bias of dropout, `form="exact"`
    is the true expectation and `form="inverted"` that of `nn.Dropout` (docs/exactness.md);
    `query_key` masks queries and keys at once, for which the paper has no expression; a mean
    instead of the authors' sum (`author_weight` converts); biases, rotary, norm and scale are not
    in Q, K and V; padded tokens count nowhere. Beside other methods each term reads what none of
    them has changed in its layer, and A before the model's own dropout.

    Args:
        query, key, value, attended_value, query_key, ffn: the lambdas; a number, a schedule or one
            value per layer. The plain number 0 switches a term off at no cost.
        ffn1, ffn2: lambdas of the two feed-forward layers (gate and up of a gated one are layer 1),
            where they differ from `ffn`.
        rate: p of the dropout that the penalties replace.
        form: paper, exact or inverted.
        reduction: mean (per valid token, or pair of tokens), sum, token_mean (batch sum of token
            means) or author (that without the 1/2).
        heads: per_head, or concat for query, key and query_key with one full Wq^T Wk, as the
            authors' code has it.
        attended: where the mask of attended_value acts, on X before mixing ("pre") or on A X
            ("post").
        shared_mask: query_key with one mask on X for queries and keys, as dropout before the
            projections acts. Self-attention only.
        detach_inputs: gradients go to the weights alone, not to the activations.
        visible_only: query, key and query_key count the pairs that the model's mask lets see,
            instead of all; with heads="concat" those that any head may see.
        joint: lambda of one mask on X for queries, keys and values at once, to first order,
            `form="inverted"` only: a vector-Jacobian product with random signs
            (docs/joint_mask.md), about as dear as a second backward.
        output: lambda of dropout on the input of the attention's output projection
            (`ProjectionDropout`).
        residual: lambda of dropout on each residual branch (`HiddenDropout`), read at the branch's
            last linear map.

    >>> from dampen import ExplicitDropout
    >>> ExplicitDropout(value=0.05, ffn=0.05, rate=0.2)
    ExplicitDropout(value=0.05, ffn1=0.05, ffn2=0.05, rate=0.2, form=paper, reduction=mean)
    """

    stochastic = False
    needs_valid = True
    multiplies = True
    rate: Tensor
    swapped: bool | None = None  # whether the feed-forward sees (N, B, D); None: not known yet

    def __init__(
        self,
        query: Value = 0,
        key: Value = 0,
        value: Value = 0,
        attended_value: Value = 0,
        query_key: Value = 0,
        ffn: Value = 0,
        ffn1: Value | None = None,
        ffn2: Value | None = None,
        rate: Value = 0.2,
        form: Literal["paper", "exact", "inverted"] = "paper",
        reduction: Literal["mean", "sum", "token_mean", "author"] = "mean",
        heads: Literal["per_head", "concat"] = "per_head",
        attended: Literal["pre", "post"] = "pre",
        shared_mask: bool = False,
        detach_inputs: bool = False,
        visible_only: bool = False,
        joint: Value = 0,
        output: Value = 0,
        residual: Value = 0,
    ) -> None:
        super().__init__()
        check_form(form, "ExplicitDropout")
        check_reduction(reduction, "ExplicitDropout")
        if heads not in ("per_head", "concat"):
            raise ValueError(
                f"ExplicitDropout: heads must be 'per_head' or 'concat', got {heads!r}."
            )
        if attended not in ("pre", "post"):
            raise ValueError(
                f"ExplicitDropout: attended must be 'pre' or 'post', got {attended!r}."
            )
        layers = (ffn if ffn1 is None else ffn1, ffn if ffn2 is None else ffn2)
        given = (query, key, value, attended_value, query_key, *layers, joint, output, residual)
        weights = dict(zip((*TERMS, *MORE_TERMS), given, strict=True))
        for term, weight in weights.items():
            self.scheduled(term, weight, high=math.inf)
        self.scheduled("rate", rate)
        self.terms = frozenset(term for term, weight in weights.items() if not is_off(weight))
        if heads == "concat" and "attended_value" in self.terms:
            raise ValueError(
                "ExplicitDropout: attended_value has no form with heads='concat', because every "
                "head attends "
                "differently. Use heads='per_head', or a second "
                "ExplicitDropout(attended_value=...) beside this one."
            )
        if "joint" in self.terms:
            check_joint(form, detach_inputs, heads)
        if "residual" in self.terms and detach_inputs:
            raise ValueError(
                "ExplicitDropout: residual has no form with detach_inputs=True: no weight is "
                "between its mask and "
                "the branch. Use a second ExplicitDropout(residual=...) beside this one."
            )
        self.form, self.reduction, self.attended = form, reduction, attended
        self.concat, self.shared_mask = heads == "concat", shared_mask
        self.detach_inputs, self.visible_only = detach_inputs, visible_only
        self._switch()

    def _switch(self) -> None:
        """Open only the stages and read only the maps that the terms at work need."""
        self.pair_terms = self.terms & set(PAIR_TERMS)
        attends = "attended_value" in self.terms
        # A detached input leaves Wv alone, and values that another method changes are not X Wv: the
        # attention output does not separate A from these, so take A itself
        self.keeps_values = attends and not self.changed_maps.isdisjoint(("v", "qkv", "kv"))
        self.from_weights = self.detach_inputs or self.keeps_values
        self.reads_weights = attends and (self.form != "paper" or self.from_weights)
        self.reads_output = attends and self.form != "inverted" and not self.from_weights
        self.reads_product = "residual" in self.terms
        joint = "joint" in self.terms
        self.stochastic = joint  # type: ignore[misc]  # random signs
        self.takes_jacobian = joint
        stages = {
            # all off: present, sees nothing
            "product": bool(self.terms & {"ffn1", "ffn2", "output", "residual"}) or not self.terms,
            "qkv": "value" in self.terms or bool(self.pair_terms) or self.keeps_values,
            "operands": joint,
            # the plain kernel, which can be differentiated twice
            "probs": self.reads_weights or joint,
            "heads": self.reads_output or joint,
        }
        self.stages = frozenset(stage for stage, on in stages.items() if on)
        reads = {r for term in self.terms for r in _READS.get(term, "")}
        fused = {"qkv", "kv"} if reads else set()
        self.roles = frozenset(
            reads | fused | {role for role, term in _LAYER.items() if term in self.terms}
        )
        self.roles |= frozenset(BRANCHES if "residual" in self.terms else ())
        self.needs_valid = bool(self.terms)  # type: ignore[misc]
        # A V holds the noise of LoRA's own dropout
        self.reads_adapters = not joint and "attended_value" not in self.terms

    example: ClassVar[dict[str, Any]] = {"value": 0.05, "ffn": 0.05}

    @classmethod
    def canonical(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """J_k is J_q in the paper's form, and only there: the variances of queries and keys
        differ."""
        plain = dict(arguments)
        if (
            plain.get("form", "paper") == "paper"
            and is_off(plain.get("query", 0))
            and "key" in plain
        ):
            plain["query"] = plain.pop("key")
        return plain

    def _is_idle(self) -> bool:
        """Without weights nothing is left, whatever the rate."""
        return self.zero_is_identity and not any(
            self._numbers.get(term) for term in getattr(self, "terms", ("rate",))
        )

    @property
    def does_nothing(self) -> bool:
        return not self.terms

    def prepare(self, model: nn.Module) -> None:
        self.swapped = sequence_first(self.neighbors)
        if self.changed_maps & {"v", "qkv", "kv"}:
            self._switch()

    def check_layer(self, roles: set[str], where: str) -> None:
        alone = [r for r in BRANCHES if "residual" in self.terms and _LAYER[r] not in self.terms]
        check_roles(type(self).__name__, self.roles, roles, where, branches=alone)

    # --- the stages

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        """One mask for q, k and v: their input must have a gradient, also where nothing below it is
        trained."""
        return with_gradient(x, call), weight

    def multiply(self, call: LinearCall) -> Tensor | None:
        """Feed-forward, layers 1 and 2, and the output projection: map and penalty in one."""
        name = _LAYER.get(call.role)
        if name not in self.terms:
            return None
        # inside attention the batch is first
        swapped = (
            self._swapped(call) if self.swapped is None else self.swapped and call.role != "out"
        )
        found = multiply(call, self._term(name, call.input), swapped)
        if found is None:
            return None
        self.penalize(found[1], name)
        return self._branch(found[0], call) if "residual" in self.terms else found[0]

    def product(self, y: Tensor, call: LinearCall) -> Tensor:
        """The same beside the map, and the branches that these return."""
        name = _LAYER.get(call.role)
        if name in self.terms:
            with no_autocast(y.device.type):
                self.penalize(map_penalty(call, self._term(name, y), self._swapped(call)), name)
        return self._branch(y, call) if "residual" in self.terms else y

    def _branch(self, y: Tensor, call: LinearCall) -> Tensor:
        if call.role in BRANCHES:
            if call.tokens is not None:
                raise RuntimeError(
                    f"ExplicitDropout(residual=...) reads a branch at its last linear layer, "
                    f"but at '{call.site.name if call.site else call.role}' the branch is a sum of "
                    "experts, weighted after "
                    f"it. Set residual=0, or {leave_out(call.site.name if call.site else '')}."
                )
            with no_autocast(y.device.type):
                y, value = tap_branch(y, call, self._term("residual", y), self._swapped(call))
            self.penalize(value, "residual")
        return y

    def _swapped(self, call: LinearCall) -> bool:
        """Whether the map sees (N, B, D); inside attention the batch is first."""
        if self.swapped is None:
            swapped = sequence_first(self.neighbors)
        else:
            swapped = self.swapped
        return swapped and call.role != "out"

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Value, query, key, and the last two at once: the model's mask is known here."""
        device = q.device.type
        with no_autocast(device) if torch.is_autocast_enabled(device) else NO_CONTEXT:
            if "value" in self.terms and call.is_first("v", (self.serial, "value")):
                v, value = tap_projection("v", v, call, self._term("value", v))
                self.penalize(value, "value")
            if self.pair_terms and call.is_first("qk", (self.serial, "pairs")):
                self._pairs(q, k, call)
            # once for all chunks of queries
            if self.keeps_values:
                call.memory[self.serial] = self._values(call)
        return q, k, v

    def _values(self, call: Call) -> HeadMap:
        return read_map(call, "v", None, call.value_size, self.detach_inputs)

    def probs(self, a: Tensor, call: Call) -> Tensor:
        """Attended value: the parts that need the attention weights. `a` may hold some of the
        queries only."""
        if not self.reads_weights:
            return a
        with no_autocast(a.device.type):
            if self.keeps_values:
                v = call.memory[self.serial]
            else:
                v = self._values(call)
            if v.x.shape[1] != a.shape[-1]:
                raise_extra_keys(call, v.x.shape[1], a.shape[-1])
            rows, factors = (
                query_rows(call, self.reduction, wide_dtype(a)),
                single(self.form, as_wide(self.current("rate"), a)),
            )
            if rows.weights is None or call.rows is None:
                weights = rows.weights
            else:
                weights = rows.weights[:, call.rows]
            a_used = a.detach() if self.detach_inputs else a
            b = variance = None
            if factors.bias is not None and self.from_weights:
                b = attended_bias_from_weights(a_used, v, weights)
            if factors.variance is not None:
                variance = attended_variance(a_used, v, weights, self.attended)
            self._penalize("attended_value", combine(factors, b, variance) * rows.factor)
        return a

    def heads(self, o: Tensor, call: Call) -> Tensor:
        """Attended value: the part that the attention output shows; and one mask for q, k and v at
        once."""
        # nothing consumes it; the ledger is informed all the same
        if "joint" in self.terms and not torch.is_grad_enabled():
            if self.ledger is not None and self.ledger.counts(self):
                raise RuntimeError(
                    "joint is a derivative of the attention, which ran without gradients. Switch "
                    "them on."
                )
        elif "joint" in self.terms:
            rows = query_rows(call, self.reduction, wide_dtype(o))
            self._penalize("joint", joint_variance(o, call, rows, as_wide(self.current("rate"), o)))
        if not self.reads_output:
            return o
        with no_autocast(o.device.type):
            linear = call.projection("v")
            if linear.bias is None:
                bias = None
            else:
                bias = linear.bias.unflatten(0, (-1, 1, o.shape[-1]))
            rows = query_rows(call, self.reduction, wide_dtype(o))
            b = attended_bias(o, bias, rows.weights, None if bias is None else call.row_sums)
            self._penalize(
                "attended_value",
                combine(single(self.form, as_wide(self.current("rate"), o)), b, None) * rows.factor,
            )
        return o

    def _pairs(self, q: Tensor, k: Tensor, call: Call) -> None:
        """query, key and query_key, which share their sums over pairs."""
        queries, keys = (
            read_map(call, r, t, call.head_size, self.detach_inputs)
            for r, t in (("q", q), ("k", k))
        )
        n, m = queries.x.shape[1], keys.x.shape[1]
        valid, valid_keys = valid_pairs(call, n, m)
        dtype = wide_dtype(queries.x)
        rows = pair_rows(self.reduction, call.shape[0], n, m, valid, valid_keys, dtype)
        rate = as_wide(self.current("rate"), q)
        need, restricted = (
            needed(set(self.pair_terms), self.form),
            self.visible_only and restricts_pairs(call),
        )
        if self.concat:
            queries, keys = as_one_head(queries, keys, call)
        if restricted:
            call = seen_by_any_head(call) if self.concat else call
            check_visible(call, queries, keys)
            parts = visible_pairs(queries, keys, rows, need, call)
            if self.reduction == "mean":
                rows = rows._replace(
                    factor=0.5 / count_visible(call, rows, wide_dtype(queries.x)).clamp(min=1)
                )
        else:
            parts = (chunked_pairs if self.concat else all_pairs)(queries, keys, rows, need)
        for term in sorted(self.pair_terms):
            value = pair_penalty(term, self.form, rate, parts)
            if term == "query_key" and self.shared_mask:
                check_shared(call)
                if self.form != "paper":
                    weights = diagonal_weights(rows, visible_diagonal(call) if restricted else None)
                    value = value + shared_mask_excess(queries, keys, self.form, rate, weights)
            self._penalize(term, value * rows.factor)

    def _term(self, name: str, like: Tensor) -> Term:
        if torch.compiler.is_compiling():
            weight, rate = as_wide(self.current(name), like), as_wide(self.current("rate"), like)
        else:  # plain numbers, whatever the dtype
            weight, rate = self._numbers[name], self._numbers["rate"]
        return Term(weight, rate, self.form, self.reduction, self.detach_inputs)

    def _penalize(self, term: str, value: Tensor) -> None:
        self.penalize(self.current(term) * value, term)

    def extra_repr(self) -> str:
        values = [
            f"{term}={getattr(self, term).item():.3g}"
            for term in (*TERMS, *MORE_TERMS)
            if term in self.terms
        ]
        options = [f"form={self.form}", f"reduction={self.reduction}"]
        options += ["heads=concat"] if self.concat else []
        options += ["attended=post"] if self.attended == "post" else []
        options += [
            name for name in ("shared_mask", "detach_inputs", "visible_only") if getattr(self, name)
        ]
        return ", ".join(
            [*(values or ["every weight is 0"]), f"rate={self.rate.item():.3g}", *options]
        )
