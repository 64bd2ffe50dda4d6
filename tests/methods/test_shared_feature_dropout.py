"""Dropout with one mask for all tokens: every mask enumerated against the closed form of Arora's."""

import itertools

import pytest
import torch

import dampen
from dampen import AroraDropout, FeedForwardDropout, ProjectionDropout, regularize
from dampen.methods.dropouts import drop_features
from dampen.regularizer import LinearCall

P = 0.3


def expected_change(x, weight):
    """E ||y' - y||^2 over all masks, and its gradient in the weight, by enumeration."""
    total = 0.0
    for kept in itertools.product([0.0, 1.0], repeat=x.shape[-1]):
        chance = (1 - P) ** sum(kept) * P ** (len(kept) - sum(kept))
        masked = x * torch.tensor(kept, dtype=x.dtype) / (1 - P)
        total = total + chance * ((masked - x) @ weight.T).square().sum()
    return total / x.shape[:-1].numel()


def test_the_closed_form_is_the_expectation_over_every_mask():
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    method = AroraDropout(ffn=1.0, rate=P)
    method.product(x @ weight.T, LinearCall("ffn_in", x, weight, None))
    (closed,) = method.take_penalties().values()
    enumerated = expected_change(x, weight)
    torch.testing.assert_close(closed, enumerated, rtol=1e-6, atol=0)
    pair = [torch.autograd.grad(v, weight)[0] for v in (closed, enumerated)]
    torch.testing.assert_close(*pair, rtol=1e-6, atol=1e-9)


def test_sampling_comes_to_the_same():
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 6), torch.randn(4, 6)
    draws = [((drop_features(x, P) - x) @ weight.T).square().sum().item() / 6 for _ in range(4000)]
    mean, error = torch.tensor(draws).mean().item(), torch.tensor(draws).std().item() / 4000**0.5
    assert abs(mean - expected_change(x, weight).item()) < 4.5 * error


@pytest.mark.parametrize(
    ("method", "role"),
    [
        (FeedForwardDropout(0.5, shared=True), "ffn_in"),
        (ProjectionDropout(0.5, "out", True), "out"),
    ],
)
def test_all_tokens_of_a_batch_lose_the_same_features(method, role):
    x = torch.ones(2, 5, 16)
    torch.manual_seed(0)
    dropped, _ = method.operands(x, x, LinearCall(role, x, x, None))
    assert torch.equal(dropped, dropped[:1, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert not method.per_sample
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    assert "shared" in repr(regularize(model, method))
