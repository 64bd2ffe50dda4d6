"""What holds for every small model: it learns, compiles, exports, copies, and runs in bfloat16."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.models import MODELS, build_model
from reproductions.models.detr import Detections
from reproductions.models.mae import MaskedAutoencoder
from reproductions.models.set_loss import set_loss

torch.set_num_threads(1)

Loss = Callable[[Any], Tensor]


def case(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Loss]:
    """A tiny model, one synthetic batch, and the loss on it."""
    torch.manual_seed(0)
    labels = torch.arange(8) % 4

    def classify(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    if name == "vit":
        sizes = {
            "image_size": 8,
            "patch_size": 2,
            "channels": 1,
            "classes": 4,
            "width": 32,
            "depth": 2,
            "heads": 4,
        }
        return build_model(name, mlp=48, **sizes), (torch.randn(8, 1, 8, 8),), classify
    if name == "encoder":
        model = build_model(name, features=6, classes=4, width=32, heads=4, mlp=48, max_tokens=10)
        padding = torch.arange(9)[None] >= torch.arange(2, 10)[:, None]
        return model, (torch.randn(8, 9, 6), padding), classify
    if name == "seq2seq":
        model = build_model(
            name,
            source_vocab=11,
            target_vocab=13,
            width=32,
            depth=1,
            heads=4,
            mlp=48,
            max_tokens=20,
        )
        source, target = torch.randint(1, 11, (8, 7)), torch.randint(1, 13, (8, 6))
        source[::2, 5:] = 0
        return (
            model,
            (source, target[:, :-1]),
            lambda z: F.cross_entropy(z.flatten(0, 1), target[:, 1:].flatten()),
        )
    if name == "language":
        tokens = torch.randint(0, 13, (8, 7))
        model = build_model(name, vocab=13, width=32, depth=2, heads=4, mlp=48, context=8)
        return (
            model,
            (tokens[:, :-1],),
            lambda z: F.cross_entropy(z.flatten(0, 1), tokens[:, 1:].flatten()),
        )
    if name == "text":
        model = build_model(name, vocab=13, classes=4, width=32, heads=4, mlp=48, max_tokens=10)
        padding = torch.arange(9)[None] >= torch.arange(2, 10)[:, None]
        return model, (torch.randint(0, 13, (8, 9)), padding), classify
    if name == "convmixer":
        model = build_model(name, classes=4, width=16, depth=2, kernel=3, patch_size=2, channels=1)
        return model, (torch.randn(8, 1, 8, 8),), classify
    if name == "cnn":
        return (
            build_model(name, classes=4, width=16, depth=2, channels=1),
            (torch.randn(8, 1, 8, 8),),
            classify,
        )
    if name == "mae":
        sizes = {
            "image_size": 8,
            "patch_size": 2,
            "channels": 1,
            "width": 32,
            "depth": 1,
            "heads": 4,
            "mlp": 48,
        }
        light = {"decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2, "decoder_mlp": 32}
        return (
            build_model(name, **sizes, **light),
            (torch.randn(8, 1, 8, 8), torch.rand(8, 16)),
            lambda out: out.loss,
        )
    if name == "detr":
        sizes = {
            "image_size": 16,
            "classes": 4,
            "width": 32,
            "depth": 1,
            "heads": 4,
            "mlp": 48,
            "queries": 4,
        }
        model = build_model(name, **sizes)
        nn.init.normal_(
            model.shift[2].weight, std=0.02
        )  # at 0, where it starts, what is below it gets no gradient yet
        target = torch.cat([labels[:, None, None].float(), torch.rand(8, 1, 4) * 0.3 + 0.3], dim=-1)
        return model, (torch.randn(8, 3, 16, 16),), lambda found: set_loss(found, target)
    if name == "captions":
        model = build_model(name, vocab=13, classes=4, width=32, depth=1, heads=4, mlp=48)
        return model, (torch.randn(8, 1, 8, 8), torch.randint(1, 13, (8, 6))), classify
    raise KeyError(f"a new model {name!r} needs a tiny case here")


@pytest.fixture(params=sorted(MODELS))
def tiny(request):
    return case(request.param)


def main_output(out: Any) -> Tensor:
    if isinstance(out, tuple):
        return out.boxes if isinstance(out, Detections) else out.patches
    return out


def test_gradients_reach_every_parameter(tiny):
    model, batch, loss = tiny
    loss(model(*batch)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        if "k_proj.bias" not in name:  # a shift of all keys cancels in the softmax
            assert p.grad.abs().sum() > 0, name


def test_learns_one_batch(tiny):
    model, batch, loss = tiny
    start = loss(model(*batch)).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        value = loss(model(*batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    limit = 0.7 if isinstance(model, MaskedAutoencoder) else 0.25
    assert value.item() < limit * start


def test_compiles_into_one_graph(tiny):
    model, batch, loss = tiny
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(main_output(compiled(*batch)), main_output(model(*batch)))
    loss(compiled(*batch)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_exports_at_eval_with_any_batch_size(tiny):
    model, batch, _ = tiny
    model.eval()
    dynamic = tuple({0: torch.export.Dim("batch")} for _ in batch)
    program = torch.export.export(model, batch, dynamic_shapes=dynamic)
    smaller = tuple(x[:3] for x in batch)
    torch.testing.assert_close(
        main_output(program.module()(*smaller)), main_output(model(*smaller))
    )


def test_copy_is_equal_and_independent(tiny):
    model, batch, _ = tiny
    model.eval()
    twin = copy.deepcopy(model)
    before = main_output(model(*batch))
    assert torch.equal(main_output(twin(*batch)), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(0.1)
    assert torch.equal(main_output(model(*batch)), before)
    assert twin.load_state_dict(model.state_dict()) is not None
    assert torch.equal(main_output(twin(*batch)), before)


def test_bfloat16_autocast(tiny):
    model, batch, loss = tiny
    model.eval()
    exact = main_output(model(*batch))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(*batch)
        value = loss(out)
    torch.testing.assert_close(main_output(out).float(), exact, atol=0.1, rtol=0.1)
    value.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_whole_model_in_bfloat16(tiny):
    model, batch, _ = tiny
    batch = tuple(x.bfloat16() if x.is_floating_point() else x for x in batch)
    assert main_output(model.bfloat16()(*batch)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "name", sorted(set(MODELS) - {"captions", "cnn", "convmixer", "detr", "mae"})
)
def test_post_norm_learns_too(name):
    torch.manual_seed(0)
    _, batch, loss = case(name)
    needed = {
        "vit": {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 4},
        "encoder": {"features": 6, "classes": 4},
        "seq2seq": {"source_vocab": 11, "target_vocab": 13},
        "language": {"vocab": 13},
        "text": {"vocab": 13, "classes": 4},
    }[name]
    model = build_model(name, width=32, depth=1, heads=4, mlp=48, norm_first=False, **needed)
    assert not any(isinstance(m, nn.LayerNorm) for m in model.children())
    start = loss(model(*batch)).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(40):
        value = loss(model(*batch))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert value.item() < 0.6 * start


def test_unknown_model_names_the_nearest():
    with pytest.raises(ValueError, match=r"'covmixer'; did you mean 'convmixer'\?"):
        build_model("covmixer")
    with pytest.raises(ValueError, match="known: captions, cnn, convmixer, detr, encoder"):
        build_model("zzz")


def test_unknown_argument_names_the_nearest():
    with pytest.raises(
        TypeError, match=r"'vit' takes no argument 'patchsize'; did you mean 'patch_size'\?"
    ):
        build_model("vit", patchsize=4)


def test_missing_argument_is_named():
    with pytest.raises(TypeError, match="'encoder' needs a value for classes"):
        build_model("encoder", features=3)
