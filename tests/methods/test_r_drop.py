"""R-Drop is the symmetric consistency of arXiv 2106.14448."""

import torch

from dampen import Consistency, RDrop
from tests.oracles.stochastic import divergence as slow_divergence


def test_equals_the_papers_sum_of_both_directions():
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    method = RDrop(0.6)
    method.outputs([a, b])
    expected = 0.6 * (slow_divergence(a, b) + slow_divergence(b, a)) / 2
    torch.testing.assert_close(
        method.take_penalties()["r_drop"].item(), expected, rtol=1e-5, atol=1e-7
    )


def test_is_symmetric_and_equals_symmetric_consistency():
    a, b = torch.randn(6, 4), torch.randn(6, 4)
    values = []
    for method, outputs in (
        (RDrop(2.0), [a, b]),
        (RDrop(2.0), [b, a]),
        (Consistency(2.0, symmetric=True), [a, b]),
    ):
        method.outputs(outputs)
        values.append(next(iter(method.take_penalties().values())))
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(values[0], values[2])
