"""The default dtype is for tensors that the user makes: under another one every method draws the same masks, with the
same rates, and gives the same numbers in the dtype of the model.

The oracle is the same step under the usual default. A draw of 8 bits (bfloat16) would hide other keys."""

import pytest
import torch

import dampen
from dampen.checking.subjects import with_companion, with_example
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel

TOKENS = 9


def images():
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=12, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    return model, torch.randn(4, 3, 12, 12)


def causal():
    """Eager code with a float mask: what lies between the scores and the weights."""
    torch.manual_seed(0)
    layers = torch.nn.TransformerEncoderLayer(
        16, 2, 16, batch_first=True, norm_first=True, dropout=0.0
    )
    model = torch.nn.TransformerEncoder(layers, 2, enable_nested_tensor=False)
    mask = torch.zeros(TOKENS, TOKENS).masked_fill(~torch.ones(TOKENS, TOKENS).tril().bool(), -1e9)
    return WithMask(model, mask), torch.randn(4, TOKENS, 16)


class WithMask(torch.nn.Module):
    def __init__(self, model, mask):
        super().__init__()
        self.model = model
        self.register_buffer("mask", mask)

    def forward(self, x):
        return self.model(x, mask=self.mask)


def step(name, subject, default):
    """The terms of the loss, the output and the gradients of one step."""
    model, x = subject()
    torch.set_default_dtype(default)
    try:
        reg = dampen.regularize(model.train(), with_companion([with_example(methods()[name])()]))
        kept = []

        def task(out):
            kept.append(out.detach())
            return out.square().mean()

        torch.manual_seed(1)
        loss, terms = reg.loss(lambda: model(x), task)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {n: t.detach() for n, t in terms.items()}, kept[0], gradients
    finally:
        torch.set_default_dtype(torch.float32)


CASES = [(images, torch.float64), (images, torch.bfloat16), (causal, torch.float64)]
NAMES = {images: list(methods()), causal: [n for n in methods() if n != "patch_dropout"]}
"""The mask fits one number of tokens, and PatchDropout refuses it in words."""


@pytest.mark.parametrize(
    ("name", "subject", "default"),
    [
        pytest.param(name, subject, default, id=f"{name}-{subject.__name__}-{default}")
        for subject, default in CASES
        for name in NAMES[subject]
    ],
)
def test_a_step_is_the_same_under_another_default_dtype(name, subject, default):
    try:
        expected = step(name, subject, torch.float32)
    except UnsupportedModel:
        return  # patches in a model without any
    got = step(name, subject, default)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES[causal])
def test_a_model_in_float64_trains_under_that_default(name):
    model, x = causal()
    torch.set_default_dtype(torch.float64)
    try:
        model = model.double().train()
        reg = dampen.regularize(model, with_companion([with_example(methods()[name])()]))
        loss, _ = reg.loss(lambda: model(x.double()), lambda out: out.square().mean())
        loss.backward()
    except UnsupportedModel:
        return
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype is torch.float64
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
