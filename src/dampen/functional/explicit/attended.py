"""The penalty of the attended value, A V (arXiv 2604.20505).

    b = sum_i ||(A V)_i||^2                              the attention output without the value bias
    v = sum_j (sum_i A_ij^2) sum_l x_jl^2 ||Wv_:l||^2    mask on X before mixing ("pre", appendix)
    v = sum_i sum_l (A X)_il^2 ||Wv_:l||^2               mask on A X after it ("post", main text)

both v per head.

b keeps the fused kernel. v needs the attention weights; in long sequences they come in chunks of
queries.
"""

from __future__ import annotations

from torch import Tensor

from dampen.functional.explicit.projections import HeadMap
from dampen.functional.explicit.reductions import wide
from dampen.functional.explicit.squares import again, column_power, contract_squares, squared_norm


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
