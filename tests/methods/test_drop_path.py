"""DropPath: each branch by itself, per sample, whatever the block's library and layout."""

import pytest
import torch
from torch import nn

import dampen
from dampen import DropPath, linear, regularize
from dampen.regularizer import BranchCall


class Watch(DropPath):
    """Remembers what became of each branch."""

    def __init__(self, rate=0.5):
        super().__init__(rate)
        self.seen = []

    def branch(self, b, call):
        out = super().branch(b, call)
        self.seen.append((call.role, b.detach(), out.detach()))
        return out


def scales(before, after, axis=0):
    """The factor of each sample, after checking that it is one factor."""
    ratio = (after / before).movedim(axis, 0).flatten(1)
    torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    return ratio[:, 0]


def test_scale_is_zero_or_one_over_keep_and_unbiased():
    torch.manual_seed(0)
    b = torch.ones(20000, 2, 3)
    out = DropPath(0.3).branch(b, BranchCall("ffn", b))
    factor = scales(b, out)
    assert factor.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert abs(factor.mean().item() - 1) < 4 * (0.3 / 0.7 / 20000) ** 0.5


@pytest.mark.parametrize("norm_first", [True, False])
def test_each_branch_of_a_block_draws_for_itself(norm_first):
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16, norm_first=norm_first
    )
    reg = regularize(model, Watch(0.5))
    model(torch.randn(16, 3, 8, 8))
    drawn = [scales(before, after) for clone in reg.clones for _, before, after in clone.seen]
    assert [role for clone in reg.clones for role, _, _ in clone.seen] == ["attention", "ffn"] * 2
    assert len({tuple(d.tolist()) for d in drawn}) == 4


def test_linear_in_depth_by_default_and_constant_for_a_number():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=3, heads=2, mlp=16)
    reg = regularize(model, DropPath())
    assert [c.rate.item() for c in reg.clones] == pytest.approx([0.0, 0.05, 0.1])
    reg.remove()
    assert [c.rate.item() for c in regularize(model, DropPath(0.2)).clones] == pytest.approx(
        [0.2] * 3
    )


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_layers_draw_per_sample_in_either_layout(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    reg = regularize(model, Watch(0.5))
    model(torch.randn(12, 5, 8) if batch_first else torch.randn(5, 12, 8))
    axis = 0 if batch_first else 1
    for clone in reg.clones:
        for _, before, after in clone.seen:
            assert len(scales(before, after, axis)) == 12


def test_a_dropped_attention_branch_leaves_the_residual_alone():
    """With both branches dropped a pre-norm block is the identity for that sample."""
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    block = model.blocks[0]
    regularize(model, DropPath(0.9))
    x = torch.randn(32, 5, 16)
    y = block(x)
    assert any(torch.equal(a, b) for a, b in zip(x, y, strict=True))


def test_without_a_batch_axis_it_raises():
    with pytest.raises(ValueError, match="no batch axis"):
        DropPath(0.1).branch(torch.ones(4, 3), BranchCall("ffn", torch.ones(4, 3)))


def test_schedule_over_depth_can_be_said():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    assert [
        c.rate.item() for c in regularize(model, DropPath(linear(0.1, 0.3))).clones
    ] == pytest.approx([0.1, 0.3])
