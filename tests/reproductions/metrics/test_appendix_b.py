"""Appendix B of Explicit Dropout: the split of the paper's penalty, against sums over every pair of features."""

import pytest
import torch

from dampen.explicit import linear_penalty
from reproductions.metrics.appendix_b import alpha, appendix_b, r_arora, r_cross


def by_pairs(x, w, p):
    """R_arora and R_cross as Appendix B writes them: d x d matrices, summed entry by entry."""
    xx, ww = x.flatten(0, -2).t() @ x.flatten(0, -2), w.t() @ w
    same = other = 0.0
    for j in range(len(xx)):
        for i in range(len(xx)):
            if i == j:
                same += (xx[j, j] * ww[j, j]).item()
            else:
                other += (xx[i, j] * ww[i, j]).item()
    return p / (1 - p) * same, p**2 / 2 * other


@pytest.mark.parametrize("p", [0.05, 0.2, 0.7])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_the_split_to_ten_digits(p, shape):
    torch.manual_seed(0)
    x, w = torch.randn(shape, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    arora, cross = by_pairs(x, w, p)
    assert r_arora(x, w, p).item() == pytest.approx(arora, rel=1e-10)
    assert r_cross(x, w, p).item() == pytest.approx(cross, rel=1e-10)
    trace = (
        0.5 * torch.trace(p**2 * x.flatten(0, -2).t() @ x.flatten(0, -2) @ w.t() @ w).item()
    )  # 1/2 Tr(B W^T W)
    parts = appendix_b(x, w, p)
    assert alpha(p) * arora + cross == pytest.approx(trace, rel=1e-10)
    assert parts.paper.item() == pytest.approx(trace, rel=1e-10)
    own = linear_penalty(x if x.dim() == 3 else x[None], w, rate=p, form="paper", reduction="sum")
    assert parts.paper.item() == pytest.approx(own.item(), rel=1e-10)
    assert parts.arora.item() / alpha(p) == pytest.approx(arora, rel=1e-10)


def test_gradients_agree():
    torch.manual_seed(0)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    xx, ww, off = x.t() @ x, w.t() @ w, 1 - torch.eye(5, dtype=torch.float64)
    slow = 0.3**2 / 2 * (off * xx * ww).sum()
    for a, b in zip(
        *(torch.autograd.grad(v, (x, w)) for v in (slow, r_cross(x, w, 0.3))), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_the_cross_part_is_negative_where_features_cancel():
    x = torch.ones(3, 2, dtype=torch.float64)
    assert r_cross(x, torch.tensor([[1.0, -1.0]], dtype=torch.float64), 0.2) < 0
    assert r_cross(x, torch.tensor([[1.0, 1.0]], dtype=torch.float64), 0.2) > 0
    assert appendix_b(x, torch.tensor([[1.0, -1.0]], dtype=torch.float64), 0.2).paper == 0
