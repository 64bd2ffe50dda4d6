"""Code of others, installed by name: x-transformers and vit-pytorch compute their attention themselves, open_clip,
torchtune and torchvision call torch's."""

import warnings

import pytest
import torch

import dampen
from dampen import DropHead, DropKey, HardMasking

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # they still script their helpers
    import open_clip
    import torchvision
    from vit_pytorch import SimpleViT, ViT
    from x_transformers import Encoder

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, 20, (2, 6), generator=torch.Generator().manual_seed(0))
SIZES = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 32,
}
OPEN_CLIP = {
    "image_size": 32,
    "patch_size": 8,
    "width": 32,
    "layers": 2,
    "heads": 2,
    "mlp_ratio": 2,
    "output_dim": 8,
}


def torchtune_llama():
    """Built where torchtune can be imported: it wants torchao, which it does not require (the dev extra has both)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from torchtune.models.llama3 import llama3
        except ImportError as error:
            pytest.skip(f"torchtune cannot be imported here: {error}")
    return llama3(
        vocab_size=20, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=32, max_seq_len=8
    )


MODELS = {
    "vit_pytorch.ViT": (lambda: ViT(**SIZES), X),
    "vit_pytorch.SimpleViT": (lambda: SimpleViT(**SIZES), X),
    "x_transformers.Encoder": (lambda: Encoder(dim=32, depth=2, heads=2), TOKENS),
    "open_clip.VisionTransformer": (
        lambda: open_clip.transformer.VisionTransformer(**OPEN_CLIP),
        X,
    ),
    "open_clip.TextTransformer": (
        lambda: open_clip.transformer.TextTransformer(
            6, vocab_size=20, width=32, heads=2, layers=2, output_dim=8
        ),
        IDS,
    ),
    "torchvision.VisionTransformer": (
        lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 32, 32, num_classes=5),
        X,
    ),
    "torchvision.SwinTransformer": (
        lambda: torchvision.models.SwinTransformer(
            [2, 2], 16, [2], [2], [4, 4], stochastic_depth_prob=0.0, num_classes=5
        ),
        X,
    ),
    "torchtune.llama3": (torchtune_llama, IDS),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [DropKey(0.5), HardMasking(0.5, top=0.5), DropHead(0.5)])
def test_third_party_attention(name, method):
    build, x = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)  # torchvision's head begins with zeros
    plain, keys = model(x), list(model.state_dict())
    reg = dampen.regularize(model, method)
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == keys
    out = model.train()(x)
    out.square().mean().backward()
    assert not torch.allclose(out, plain)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    reg.remove()
    assert torch.equal(model.eval()(x), plain)


def test_every_attention_of_x_transformers_has_its_own_depth():
    reg = dampen.regularize(Encoder(dim=32, depth=6, heads=2), DropKey(dampen.linear(0.3, 0.0)))
    rates = [float(layer.clones[0].rate) for layer in reg.layers]
    assert rates == pytest.approx([0.3, 0.24, 0.18, 0.12, 0.06, 0.0])


def test_a_mask_of_scores_is_no_residual_branch():
    """torchvision's Swin makes the mask of its shifted windows by `x.new_zeros` and adds it to the scores: DropPath
    once dropped the scores of whole samples there."""
    model = torchvision.models.swin_transformer.SwinTransformer(
        [4, 4], 24, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0, num_classes=5
    )
    shapes = []

    class Watched(dampen.DropPath):
        def branch(self, b, call):
            shapes.append(b.shape)
            return super().branch(b, call)

    reg = dampen.regularize(model, Watched(0.5))
    for _ in range(2):  # followed, then compared with the first
        shapes.clear()
        reg.loss(lambda: model(torch.randn(2, 3, 64, 64)), lambda out: out.square().mean())
        assert [len(shape) for shape in shapes] == [4] * 8  # (B, h, w, C) twice in each of 4 blocks
