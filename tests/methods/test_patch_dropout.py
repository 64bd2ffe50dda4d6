"""PatchDropout: a random subset of patches, the prefix always, in order."""

import pytest
import torch
from torch import nn

import dampen
from dampen import PatchDropout, early, regularize
from dampen.regularizer import UnsupportedModel


def numbered(batch=3, tokens=10):
    """Tokens that say their own number."""
    return torch.arange(float(tokens)).view(1, -1, 1).expand(batch, -1, 2)


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 9), (0.3, 6), (0.5, 4), (0.99, 1)])
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_keeps_the_prefix_and_the_stated_number_in_order(rate, kept, prefix):
    torch.manual_seed(0)
    out = PatchDropout(rate, prefix).tokens(numbered(tokens=9 + prefix))[..., 0]
    assert out.shape[1] == prefix + max(1, round((1 - rate) * 9))
    assert out.shape[1] == prefix + kept
    assert (out[:, :prefix] == torch.arange(float(prefix))).all()
    assert (out.diff(dim=1) > 0).all()


def test_subsets_differ_between_samples_and_every_patch_has_the_same_chance():
    torch.manual_seed(0)
    out = PatchDropout(0.5, 1).tokens(numbered(20000, 9))[:, 1:, 0]
    counts = torch.bincount(out.flatten().long(), minlength=9)[1:] / 20000
    torch.testing.assert_close(
        counts, torch.full((8,), 0.5), atol=4 * (0.25 / 20000) ** 0.5, rtol=0
    )
    assert len({tuple(row.tolist()) for row in out[:50]}) > 10


def test_rate_zero_is_the_identity_to_the_bit():
    x = torch.randn(2, 7, 3)
    assert torch.equal(PatchDropout(0.0, 1).tokens(x), x)


def test_all_layers_see_fewer_tokens_and_gradients_reach_the_kept_patches():
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=16, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    )
    reg = regularize(model, PatchDropout(0.5))
    lengths = []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda m, args: lengths.append(args[0].shape[1]))
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    out = model(x)
    assert lengths == [9, 9]
    assert len(reg.clones) == 1  # in the first layer only
    out.sum().backward()
    patches = x.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((1, 4, 5)).flatten(1)
    assert ((patches > 0).sum(1) == 8).all()
    lengths.clear()
    model.eval()(x)
    assert lengths == [17, 17]


def test_the_prefix_is_what_the_model_says():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    model.num_prefix_tokens = 3
    assert regularize(model, PatchDropout(0.5)).clones[0].prefix == 3


def test_schedules_change_the_number_of_tokens():
    method = PatchDropout(early(0.5, until=0.5), prefix=0)
    assert method.tokens(numbered()).shape[1] == 5
    method.at(0.9)
    assert method.tokens(numbered()).shape[1] == 10


def test_torch_layers_in_sequence_first_layout():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    regularize(model, PatchDropout(0.5, prefix=0))
    assert model(torch.randn(10, 3, 8)).shape == (5, 3, 8)


def test_text_models_are_refused():
    model = dampen.models.LanguageModel(vocab=11, width=16, depth=1, heads=2, mlp=16)
    with pytest.raises(UnsupportedModel, match="vocabulary"):
        regularize(model, PatchDropout(0.5))


def test_a_block_that_gets_a_mask_over_tokens_raises():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    regularize(model, PatchDropout(0.5, prefix=0))
    with pytest.raises(RuntimeError, match="mask or positions"):
        model(torch.randn(3, 10, 8), src_key_padding_mask=torch.zeros(3, 10, dtype=torch.bool))


@pytest.mark.parametrize("prefix", [-1, 1.0, True])
def test_bad_prefix(prefix):
    with pytest.raises(ValueError, match="prefix is a number"):
        PatchDropout(0.5, prefix)


def test_bad_tokens():
    with pytest.raises(ValueError, match="only 2 tokens"):
        PatchDropout(0.5, 2).tokens(torch.ones(1, 2, 3))
    with pytest.raises(ValueError, match=r"\(B, N, D\)"):
        PatchDropout(0.5, 2).tokens(torch.ones(1, 2, 2, 3))
