"""Nested tensors, jagged or strided, are refused at the first forward, in words, by every method; the plain model and
eval run as they did."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen.checking.subjects import with_companion, with_example
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(16, 16) for _ in range(4))
        self.num_heads = 2

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.fc1, self.fc2 = Attention(), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.fc2(F.gelu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Linear(4, 16), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def jagged():
    torch.manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(9, 4), torch.randn(6, 4)], layout=torch.jagged)


OUTSIDE = {
    "anchor_kl",
    "confidence_penalty",
    "flooding",
    "weight_average",
    "weight_decay",
    "z_loss",
}
"""Methods that act on a loss or a step, and never see a batch."""


@pytest.mark.parametrize("name", [n for n in methods() if n not in OUTSIDE])
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore::DeprecationWarning"
)
def test_jagged_batches_are_refused_in_words(name):
    model = Net().train()
    assert model(jagged()).is_nested
    try:
        reg = dampen.regularize(model, with_companion([with_example(methods()[name])()]))
    except UnsupportedModel:
        return  # patches
    with pytest.raises(RuntimeError, match="got a nested tensor .* padded batches with a mask"):
        model(jagged())
    if not any(m.in_eval for m in reg.methods):
        assert model.eval()(jagged()).is_nested
    reg.remove()
    assert model.train()(jagged()).is_nested


def test_an_attention_of_its_own():
    q = torch.nested.nested_tensor(
        [torch.randn(9, 2, 8), torch.randn(6, 2, 8)], layout=torch.jagged
    ).transpose(1, 2)
    assert dampen.attention(q, q, q).is_nested
    with pytest.raises(RuntimeError, match="attention got a nested tensor"):
        dampen.attention(q, q, q, regularizers=[dampen.DropKey(0.3)])
