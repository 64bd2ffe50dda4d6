"""Penalties of several layers at once (arXiv 2604.20505): the attended value A V, and one mask for
several projections."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from dampen.calls import Call, LinearCall
from dampen.functional.explicit.layers import ATTENTION
from dampen.functional.explicit.projections import HeadMap, at
from dampen.functional.explicit.reductions import Number, Pairs, RowWeights, wide
from dampen.functional.explicit.squares import again, column_power, contract_squares, squared_norm

# --- the attended value
#
# The penalty of the attended value, A V (arXiv 2604.20505).
#
# b = sum_i ||(A V)_i||^2 the attention output without the value bias v = sum_j (sum_i A_ij^2)
# sum_l x_jl^2 ||Wv_:l||^2 mask on X before mixing ("pre", appendix) v = sum_i sum_l (A X)_il^2
# ||Wv_:l||^2 mask on A X after it ("post", main text)
#
# both v per head.
#
# b keeps the fused kernel. v needs the attention weights; in long sequences they come in chunks
# of queries.


def attended_bias(
    o: Tensor, bias: Tensor | None, rows: Tensor | None, row_sums: Tensor | None = None
) -> Tensor:
    """sum_i r_i ||o_i - s_i bias||^2 of the output (B, H, N, dv) with value bias (kv heads, 1, dv).

    Where the rows of A sum to 1, the bias passes through the attention unchanged (`row_sums` None);
    else s_i is what they sum to, (B, H, N, 1).

    Args:
        o: head outputs (B, H, N, dv).
        bias: in no penalty; None: there is none.
        rows: row weights of the tokens; None: all are 1.
        row_sums: what the rows of the attention weights sum to, (B, H, N, 1); None: 1.
    """
    bias = None if bias is None else _per_query_head(bias, o.shape[1], 0)
    if bias is not None and row_sums is not None:
        return squared_norm(
            o, bias * row_sums.to(bias.dtype), None if rows is None else rows.unsqueeze(1)
        )
    # the fused kernel's layout, in which tokens are long vectors
    if o.transpose(1, 2).is_contiguous():
        return squared_norm(
            o.transpose(1, 2).flatten(2), None if bias is None else bias.flatten(), rows
        )
    return squared_norm(o, bias, None if rows is None else rows.unsqueeze(1))


def attended_bias_from_weights(a: Tensor, v: HeadMap, rows: Tensor | None) -> Tensor:
    """The same from the attention weights, where the output is not that of the clean values, or has
    gradients that the penalty must not.

    Args:
        a: attention weights (B, H, N, M).
        v: the values and the projection behind them.
        rows: row weights of the tokens; None: all are 1.
    """
    y = _per_query_head(v.bare, a.shape[1], 1)
    return squared_norm(wide(a) @ y, None, None if rows is None else rows.unsqueeze(1))


def attended_variance(a: Tensor, v: HeadMap, rows: Tensor | None, attended: str) -> Tensor:
    """The variance part from attention weights (B, H, N, M), row weights (B, N).

    Args:
        a: attention weights (B, H, N, M).
        v: the values and the projection behind them.
        rows: row weights of the tokens; None: all are 1.
        attended: "pre": mask before mixing; "post": after it.
    """
    columns = _per_query_head(column_power(v.weight), a.shape[1], 0)  # (H, in)
    if attended == "pre":
        seen = contract_squares("bhnm,bn->bhm", a, rows)
        return (seen * contract_squares("bml,hl->bmh", v.x, columns).transpose(1, 2)).sum()
    x = wide(v.x)
    total = x.new_zeros(())
    for h in range(a.shape[1]):
        total = total + again(_post, wide(a[:, h]), x, columns[h], rows)
    return total


def _post(a: Tensor, x: Tensor, columns: Tensor, rows: Tensor | None) -> Tensor:
    """sum_i r_i sum_l (A X)_il^2 columns_l of one head."""
    per_query = (a @ x).square() @ columns
    if rows is None:
        return per_query.sum()
    return (per_query * rows).sum()


def _per_query_head(t: Tensor, heads: int, dim: int) -> Tensor:
    """Repeat what several query heads share in grouped-query attention."""
    if t.shape[dim] == heads:
        return t
    return t.repeat_interleave(heads // t.shape[dim], dim)


# --- one mask for several projections
#
# One mask on X for several projections.
#
# For queries, keys and values at once, to first order: one vector-Jacobian product with random
# signs.
#
# The paper (arXiv 2604.20505) found no expression for it. With inverted dropout the input
# deviates by dX of mean zero, E dx_ij^2 = r x_ij^2 with r = p/(1-p), independently per entry.
# To first order the attention output o(X) deviates by J dX, so that
#
# E ||o(X + dX) - o(X)||^2 ~ r sum_ij x_ij^2 ||d o / d x_ij||^2.
#
# For random signs s on the outputs, g = J^T s has E g_ij^2 = ||d o / d x_ij||^2 (the signs are
# uncorrelated), so that 1/2 r sum (x g)^2 is an unbiased estimate of half of it,
# differentiable, whatever lies between X and o: rotary, norms, biases, masks. It is no limit: a
# dropped entry moves by its full size however small p is (docs/joint_mask.md).
#
# One mask on X that feeds queries and keys changes the diagonal of the scores. A token's score
# with itself is a quadratic form in ONE mask, S = sum_ab m_a m_b D_ab with D_ab = x_a C_ab x_b.
# Write m = c + z: constant, linear and mixed parts in z are uncorrelated, so no sum over four
# indices is left (docs/exactness.md derives it). With s = q . k, t_a = x_a (Wq^T k)_a, u_a =
# x_a (Wk^T q)_a, d_a = D_aa and tau = sum_a d_a, twice the penalty of the pair (i, i) exceeds
# that of independent masks by
#
# exact c^2 p^2 tau^2 - 2 (1-c^2) c p s tau + c p [2 c^2 sum tu + 2 c (1-2c) sum (t+u) d +
# (1-2c)^2 sum d^2] + c^2 p^2 (sum_ab D_ab D_ba - 2 sum d^2) inverted r^2 tau^2 + p/c^3 [the
# same bracket] + r^2 (sum_ab D_ab D_ba - 2 sum d^2), r = p/c
#
# The paper form takes equal mask entries as independent, so the diagonal does not change there.


def check_joint(form: str, detach_inputs: bool, heads: str) -> None:
    """Refuse what has no such term, with the reason.

    Args:
        form: paper, exact or inverted.
        detach_inputs: as given to ExplicitDropout.
        heads: as given to ExplicitDropout.
    """
    if form != "inverted":
        raise ValueError(
            f"ExplicitDropout: joint is for form='inverted', got form={form!r}. Masks that are not "
            "rescaled shift the "
            "input by -p X on average, which is no small deviation to expand around. Use "
            "form='inverted'."
        )
    if detach_inputs:
        raise ValueError(
            "ExplicitDropout: joint has no form with detach_inputs=True: its Jacobian runs through "
            "the activations. "
            "Use a second ExplicitDropout(joint=...) beside this one."
        )
    if heads == "concat":
        raise ValueError(
            "ExplicitDropout: joint follows the model's own heads; heads='concat' is for query, "
            "key and query_key. "
            "Use a second ExplicitDropout(joint=...) beside this one."
        )


def with_gradient(x: Tensor, call: LinearCall) -> Tensor:
    """x, or a leaf of the same numbers where nothing below it is trained, so that a Jacobian can be
    taken.

    Args:
        x: input of the layer.
        call: the attention, or the linear layer, at work.
    """
    if call.role in ATTENTION:
        call.input = (
            x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()
        )
        return call.input
    return x


def joint_variance(
    o: Tensor, call: Call, rows: RowWeights, rate: Number, signs: Tensor | None = None
) -> Tensor:
    """1/2 r sum (x g)^2 in the reduction of `rows`, for the attention output o (B, H, N, D) of one
    call.

    `signs` are -1 and 1, shaped like o; by default they are drawn.

    Args:
        o: head outputs (B, H, N, dv).
        call: the attention, or the linear layer, at work.
        rows: row weights of the tokens; None: all are 1.
        rate: of the dropout.
        signs: -1 and 1, shaped like o; None: drawn.
    """
    return cast(Tensor, _outside_graphs()(o, call, rows, rate, signs))


@functools.cache
def _outside_graphs() -> Any:
    """A gradient inside the forward that is differentiated again: graphs have no double backward,
    so it stays out of them. Not as a decorator: that would import the compiler with `import
    dampen`."""
    return torch.compiler.disable(_joint_variance)


def _joint_variance(
    o: Tensor, call: Call, rows: RowWeights, rate: Number, signs: Tensor | None
) -> Tensor:
    inputs = _one_input(call)
    if signs is None:
        signs = torch.empty_like(o, dtype=wide(o).dtype).bernoulli_(0.5).mul_(2).sub_(1)
    # a sum of squares weighted by w is one of outputs weighted by sqrt(w)
    if rows.weights is not None:
        signs = signs * rows.weights.sqrt()[:, None, :, None]
    gradients = torch.autograd.grad(o, inputs, signs.to(o.dtype), create_graph=True)
    g = sum((wide(t) for t in gradients[1:]), start=wide(gradients[0]))
    return rate / (1 - rate) * (wide(inputs[0]) * g).square().sum() * rows.factor


def _one_input(call: Call) -> list[Tensor]:
    """The tensors that q, k and v read, which must hold one X: the very same one, or leaves made of
    one."""
    inputs = [call.projection(role).input for role in ("q", "k", "v")]
    first = inputs[0]
    same = all(t.data_ptr() == first.data_ptr() and t.shape == first.shape for t in inputs)
    if call.cross or not same:
        raise RuntimeError(
            "joint is one mask on the input of queries, keys and values, but in "
            f"{at(call)} they read different inputs. Use query_key, value and "
            "attended_value there, or regularize(..., "
            "attention='self')."
        )
    return list({id(t): t for t in inputs}.values())


def shared_mask_excess(
    q: HeadMap, k: HeadMap, form: str, p: Number, weights: Tensor | None
) -> Tensor:
    """What one shared mask adds to the joint penalty of independent ones, summed over tokens and
    heads, without the 1/2.

    `weights` are row weights of the tokens, (B, N), or (B, H, N) where heads see different pairs.

    Args:
        q: the queries and their projection.
        k: the keys and their projection.
        form: paper, exact or inverted.
        p: rate of the dropout.
        weights: row weights; None: all are 1.
    """
    x = wide(q.x)
    y_q, y_k = q.bare, k.bare
    w_q, w_k = wide(q.weight), wide(k.weight)
    heads, repeat = w_q.shape[0], w_q.shape[0] // w_k.shape[0]
    total = x.new_zeros(())
    for h in range(heads):
        g = h // repeat
        if weights is None or weights.ndim == 2:
            r = weights
        else:
            r = weights[:, h if weights.shape[1] > 1 else 0]
        total = total + again(_excess_of_head, x, y_q[:, h], y_k[:, g], w_q[h], w_k[g], form, p, r)
    return total


def diagonal_weights(rows: Pairs, visible: Tensor | None) -> Tensor | None:
    """Row weights of the pairs (i, i): (B, N), or (B, H or 1, N) where a mask restricts the
    pairs.

    Args:
        rows: row weights of the tokens; None: all are 1.
        visible: bool, whether a token sees itself; None: all do.
    """
    weights = rows.queries
    if rows.keys is not None:
        weights = rows.keys if weights is None else weights * rows.keys
    if visible is None:
        return weights
    if weights is None:
        return wide(visible.float())
    return weights.unsqueeze(1) * visible


def _excess_of_head(
    x: Tensor,
    q: Tensor,
    k: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    form: str,
    p: Number,
    weights: Tensor | None,
) -> Tensor:
    """One head: x (B, N, in), q and k (B, N, dh) without bias, weights (dh, in)."""
    c = 1 - p
    t, u = x * (k @ w_q), x * (q @ w_k)
    power = x.square()
    own = power * (w_q * w_k).sum(0)  # d_a = x_a^2 C_aa
    tau, own_squared = own.sum(-1), own.square().sum(-1)
    linear = 2 * c * c * (t * u).sum(-1) + 2 * c * (1 - 2 * c) * ((t + u) * own).sum(-1)
    linear = linear + (1 - 2 * c) ** 2 * own_squared
    product = w_q.t() @ w_k
    mixed = ((power @ (product * product.t())) * power).sum(-1) - 2 * own_squared
    if form == "exact":
        s = (q * k).sum(-1)
        bias = (c * p * tau) ** 2 - 2 * (1 - c * c) * c * p * s * tau
        per_token = bias + c * p * linear + (c * p) ** 2 * mixed
    else:
        r = p / c
        per_token = (r * tau) ** 2 + p / c**3 * linear + r * r * mixed
    if weights is None:
        return per_token.sum()
    return (per_token * weights).sum()
