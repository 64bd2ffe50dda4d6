"""One mask on X that feeds queries and keys: what changes on the diagonal of the scores.

Pairs of different tokens have independent masks and keep the joint form of `pairs.py`. A token's score with itself
is a quadratic form in ONE mask, S = sum_ab m_a m_b D_ab with D_ab = x_a C_ab x_b, C = Wq^T Wk. Write m = c + z:
constant, linear and mixed parts in z are uncorrelated, so no sum over four indices is left (docs/exactness.md
derives it). With s = q . k, t_a = x_a (Wq^T k)_a, u_a = x_a (Wk^T q)_a, d_a = D_aa and tau = sum_a d_a, twice the
penalty of the pair (i, i) exceeds that of independent masks by

    exact     c^2 p^2 tau^2 - 2 (1-c^2) c p s tau + c p [2 c^2 sum tu + 2 c (1-2c) sum (t+u) d + (1-2c)^2 sum d^2]
              + c^2 p^2 (sum_ab D_ab D_ba - 2 sum d^2)
    inverted  r^2 tau^2 + p/c^3 [the same bracket] + r^2 (sum_ab D_ab D_ba - 2 sum d^2),  r = p/c

The paper form takes equal mask entries as independent, so nothing changes there.
"""

from __future__ import annotations

from torch import Tensor

from dampen.functional.explicit.by_hand import again
from dampen.functional.explicit.forms import Number
from dampen.functional.explicit.layer import HeadMap
from dampen.functional.explicit.precision import wide
from dampen.functional.explicit.reductions import Pairs


def shared_mask_excess(q: HeadMap, k: HeadMap, form: str, p: Number, weights: Tensor | None) -> Tensor:
    """What one shared mask adds to the joint penalty of independent ones, summed over tokens and heads, without the
    1/2.

    `weights` are row weights of the tokens, (B, N), or (B, H, N) where heads see different pairs.
    """
    x = wide(q.x)
    y_q, y_k = q.bare, k.bare
    w_q, w_k = wide(q.weight), wide(k.weight)
    heads, repeat = w_q.shape[0], w_q.shape[0] // w_k.shape[0]
    total = x.new_zeros(())
    for h in range(heads):
        g = h // repeat
        r = weights if weights is None or weights.ndim == 2 else weights[:, h if weights.shape[1] > 1 else 0]
        total = total + again(_head, x, y_q[:, h], y_k[:, g], w_q[h], w_k[g], form, p, r)
    return total


def diagonal_weights(rows: Pairs, visible: Tensor | None) -> Tensor | None:
    """Row weights of the pairs (i, i): (B, N), or (B, H or 1, N) where a mask restricts the pairs."""
    weights = rows.queries
    if rows.keys is not None:
        weights = rows.keys if weights is None else weights * rows.keys
    if visible is None:
        return weights
    return wide(visible.float()) if weights is None else weights.unsqueeze(1) * visible


def _head(
    x: Tensor, q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, form: str, p: Number, weights: Tensor | None
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
    return per_token.sum() if weights is None else (per_token * weights).sum()
