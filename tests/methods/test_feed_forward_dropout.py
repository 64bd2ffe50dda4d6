"""FeedForwardDropout: dropout on the inputs of both maps, found in the model without editing it."""

import pytest
import torch
from torch import nn

import dampen
from dampen import FeedForwardDropout
from dampen.masks import bernoulli
from tests.oracles import attention as reference


def test_equals_the_formula_in_a_real_block():
    """The block's feed-forward with the masks that were drawn, values and gradients."""
    torch.manual_seed(0)
    model = (
        dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=12)
        .double()
        .train()
    )
    mlp, x = model.blocks[0].mlp, torch.randn(2, 5, 8, dtype=torch.float64)
    for linear in (mlp.fc1, mlp.fc2):
        nn.init.zeros_(linear.bias)
    dampen.regularize(model, FeedForwardDropout(0.4))
    torch.manual_seed(1)
    got = mlp(x)
    torch.manual_seed(1)
    rate = torch.tensor(0.4)
    m1, m2 = ~bernoulli(x.shape, rate), ~bernoulli((2, 5, 12), rate)
    expected = reference.feed_forward_dropout(x, mlp.fc1.weight, mlp.fc2.weight, m1, m2, 0.4)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    for a, b in zip(
        *(
            torch.autograd.grad(o.square().sum(), list(mlp.parameters())[::2])
            for o in (got, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_only_the_feed_forward_is_touched():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=2, heads=2, mlp=12).train()
    reg = dampen.regularize(model, FeedForwardDropout(0.5))
    attn, x = model.blocks[0].attn, torch.randn(2, 5, 8)
    assert torch.equal(attn(x), attn(x))
    assert not torch.equal(model.blocks[0].mlp(x), model.blocks[0].mlp(x))
    assert "attention untouched" in repr(reg)


def test_a_model_without_feed_forward_is_an_error():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    with pytest.raises(ValueError, match="acts on the linear maps ffn_in, ffn_out"):
        dampen.regularize(nn.Sequential(Attention(), Attention()), FeedForwardDropout(0.1))
