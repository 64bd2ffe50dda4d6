"""Code of others, installed by name: x-transformers and vit-pytorch compute their attention themselves."""

import warnings

import pytest
import torch

import dampen
from dampen import DropHead, DropKey, HardMasking

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # they still script their helpers
    from vit_pytorch import SimpleViT, ViT
    from x_transformers import Encoder

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 32}
MODELS = {
    "vit_pytorch.ViT": (lambda: ViT(**SIZES), X),
    "vit_pytorch.SimpleViT": (lambda: SimpleViT(**SIZES), X),
    "x_transformers.Encoder": (lambda: Encoder(dim=32, depth=2, heads=2), TOKENS),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", [DropKey(0.5), HardMasking(0.5, top=0.5), DropHead(0.5)])
def test_third_party_attention(name, method):
    build, x = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
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
