"""Batches of size 0: a rank without data, an empty filter. The model runs, so every method does: no error, no NaN, a
penalty of 0, and gradients that are 0."""

import functools

import pytest
import torch

import dampen
from dampen.checking import masked
from dampen.checking.subjects import adapted, with_companion, with_example
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel


def images():
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    return model, (torch.zeros(0, 3, 16, 16),)


def text(path):
    mask = (
        torch.zeros(0, 1, 1, masked.TOKENS)
        if path == "eager"
        else torch.ones(0, 1, 1, masked.TOKENS).bool()
    )
    return masked.build(path, torch.float32), (masked.ids()[:0], mask)


def encoder():
    layer = torch.nn.TransformerEncoderLayer(
        16, 2, 16, batch_first=True, norm_first=True, dropout=0.0
    )
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (
        torch.zeros(0, 5, 16),
    )


def cross():
    """No memory to attend to: SDPA gives zeros."""
    layer = torch.nn.TransformerDecoderLayer(16, 2, 16, batch_first=True, dropout=0.0)
    return torch.nn.TransformerDecoder(layer, 2), (torch.zeros(0, 5, 16), torch.zeros(0, 3, 16))


SUBJECTS = {
    "images": images,
    "sdpa": lambda: text("sdpa"),
    "eager": lambda: text("eager"),
    "encoder": encoder,
    "cross": cross,
}


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("name", methods())
@pytest.mark.filterwarnings("error")
def test_a_batch_without_samples(name, subject):
    model, inputs = SUBJECTS[subject]()
    adapted(model, methods()[name]).train()
    try:
        reg = dampen.regularize(model, with_companion([with_example(methods()[name])()]))
    except UnsupportedModel:
        return  # patches in a model of text, an embedding where there is none
    for _ in range(5):  # also the ways that are remembered
        model.zero_grad()
        loss, terms = reg.loss(lambda: model(*inputs), lambda out: out.square().sum())
        loss.backward()
        for term, value in terms.items():
            # a loss of 0 lies below the level of Flooding, with no gradient to turn around
            assert value.item() == 0.0 or term == "flooding", term
        for parameter in model.parameters():
            assert parameter.grad is None or not parameter.grad.any()
    reg.remove()


@pytest.mark.parametrize("name", methods())
def test_full_batches_after_an_empty_one_are_what_they_were(name):
    found = []
    for empty in (False, True):
        model, inputs = images()
        adapted(model, methods()[name]).train()
        reg = dampen.regularize(
            model, with_companion([with_example(methods()[name])()]), strict=False
        )
        if empty:
            model(*inputs)
            reg._taken()
        for step in range(5):
            torch.manual_seed(step)
            x = torch.randn(3, 3, 16, 16)
            found.append(
                reg.loss(functools.partial(model, x), lambda out: out.square().mean())[0].detach()
            )
    half = len(found) // 2
    assert torch.equal(torch.stack(found[:half]), torch.stack(found[half:]))


def test_a_forward_outside_of_the_model_too():
    empty = torch.zeros(0, 4, 8)
    assert dampen.NEFTune(5.0).embeddings(empty).shape == (0, 4, 8)
    q = torch.zeros(0, 2, 4, 8)
    for method in (
        dampen.DropKey(0.3),
        dampen.HardMasking(0.3),
        dampen.DropAttention(0.3),
        dampen.DropHead(0.3),
    ):
        assert dampen.attention(q, q, q, regularizers=[method]).shape == (0, 2, 4, 8)
    none, some = torch.zeros(2, 2, 0, 8), torch.ones(2, 2, 4, 8)  # no tokens
    assert not dampen.attention(some, none, none, regularizers=[dampen.DropKey(0.3)]).any()
    for method in (
        dampen.DropKey(0.3),
        dampen.HardMasking(0.3),
        dampen.DropAttention(0.3),
        dampen.DropHead(0.3),
    ):
        assert dampen.attention(none, none, none, regularizers=[method]).shape == (2, 2, 0, 8)
