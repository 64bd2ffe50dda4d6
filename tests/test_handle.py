"""`regularize` and its handle: what it refuses, what it reports, and what it keeps."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropAttention, DropKey, FeedForwardDropout, Regularizer, linear
from dampen.regularizer import snake_case


def vit(depth=2, **kw):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, width=8, depth=depth, heads=2, mlp=12, **kw
    ).train()


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class ValueNorm(Regularizer):
    """A penalty, the mean square of v, for tests."""

    stochastic = False

    def __init__(self, weight=1.0):
        super().__init__()
        self.scheduled("weight", weight, high=math.inf)

    def qkv(self, q, k, v, call):
        self.penalize(self.weight * v.square().mean(), name="v")
        return q, k, v


class Learnt(ValueNorm):
    """A penalty with a learnable factor, for tests."""

    def __init__(self, weight=1.0):
        super().__init__(weight)
        self.factor = nn.Parameter(torch.ones(1))

    def qkv(self, q, k, v, call):
        self.penalize(self.factor.squeeze() * v.square().mean())
        return q, k, v


# --- what is refused


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        ([], ValueError, "at least one regularizer"),
        ([DropKey], TypeError, r"got the class DropKey. Write DropKey\(\)"),
        ([3], TypeError, "got 3 of type int"),
        ([Regularizer()], ValueError, "overrides no stage"),
        ([DropKey([0.1, 0.2, 0.3])], ValueError, "has 3 values, but 2 layers"),
        ([DropKey(lambda depth, progress: depth * 1.5)], ValueError, "got 1.5"),
        (
            [DropKey(lambda depth, progress: "high" if depth else 0.1)],
            TypeError,
            "got 'high' of type str",
        ),
    ],
)
def test_bad_methods(methods, error, message):
    model = vit()
    before = [type(m) for m in model.modules()]
    with pytest.raises(error, match=message):
        dampen.regularize(model, methods)
    assert [type(m) for m in model.modules()] == before  # nothing was changed


def test_no_matching_site_lists_the_candidates():
    found = r"(?s)target_modules='encoder.*'.*blocks.0.attn  \[self\].*blocks.1.attn  \[self\]"
    with pytest.raises(ValueError, match=found):
        dampen.regularize(vit(), DropKey(0.1), target_modules="encoder.*")
    with pytest.raises(ValueError, match="attention='cross'"):
        dampen.regularize(vit(), DropKey(0.1), attention="cross")
    with pytest.raises(ValueError, match="'self', 'cross' or 'all', got 'causal'"):
        dampen.regularize(vit(), DropKey(0.1), attention="causal")


def test_a_model_without_attention():
    with pytest.raises(
        ValueError, match=r"has no attention module.*F.scaled_dot_product_attention"
    ):
        dampen.regularize(nn.Sequential(nn.Linear(3, 3)), DropKey(0.1))
    with pytest.raises(TypeError, match="takes an nn.Module, got function"):
        dampen.regularize(lambda x: x, DropKey(0.1))


class HandAttention(nn.Module):
    """Attention without a softmax: it cannot be entered."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.normalize(q @ k.transpose(-2, -1), 1) @ v


class KeptAttention(HandAttention):
    """The same where its code does not tell: a function that is kept on the module might be a softmax."""

    def __init__(self):
        super().__init__()
        self.normalize = F.normalize

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.normalize(q @ k.transpose(-2, -1), dim=1) @ v


def test_a_model_without_softmax_is_refused_where_its_code_tells():
    with pytest.raises(ValueError, match=r"HandAttention at '0' has no softmax"):
        dampen.regularize(nn.Sequential(HandAttention()), DropKey(0.1))


def test_a_model_that_never_calls_sdpa_raises_on_its_first_step():
    model = nn.Sequential(KeptAttention())
    dampen.regularize(model, DropKey(0.1))
    with pytest.raises(
        RuntimeError,
        match=r"(?s)ran without calling F.scaled_dot_product_attention.*set_attn_implementation",
    ):
        model(torch.randn(2, 3, 4))
    model.eval()
    model(torch.randn(2, 3, 4))  # in eval nothing is claimed, so nothing is wrong


def test_applying_twice():
    model = vit()
    dampen.regularize(model, DropKey(0.1))
    with pytest.raises(ValueError, match=r"regularized already. Give all methods in one call"):
        dampen.regularize(model, FeedForwardDropout(0.1))


def test_wrong_order_of_wrapping(tmp_path):
    with pytest.raises(ValueError, match="compiled already. Regularize first"):
        dampen.regularize(torch.compile(vit(), backend="eager"), DropKey(0.1))
    inplace = vit()
    inplace.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled already"):
        dampen.regularize(inplace, DropKey(0.1))
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(vit())
        with pytest.raises(
            ValueError,
            match=r"wrapped in DistributedDataParallel already. Regularize first, then wrap",
        ):
            dampen.regularize(wrapped, DropKey(0.1))
    finally:
        torch.distributed.destroy_process_group()


def test_block_stages_need_a_block():
    class Halves(Regularizer):
        """For tests."""

        def block(self, x, y):
            return y / 2

    class Loop(nn.Module):  # attention and feed-forward side by side in the model's own loop
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.ModuleList([nn.MultiheadAttention(4, 2), nn.Linear(4, 4)])]
            )

        def forward(self, x):
            for attention, feed in self.layers:
                x = x + feed(attention(x, x, x)[0])
            return x

    with pytest.raises(ValueError, match="no module is the block"):
        dampen.regularize(Loop(), Halves())


def test_inlined_linear_maps_are_an_error():
    class Inlined(dampen.models.ViT):
        pass

    model = vit()

    def forward(x):
        mlp = model.blocks[0].mlp
        return F.linear(F.linear(x, mlp.fc1.weight), mlp.fc2.weight)

    for block in model.blocks:
        block.mlp.forward = forward
    dampen.regularize(model, FeedForwardDropout(0.1))
    with pytest.raises(RuntimeError, match="without calling any of its linear modules"):
        model(X)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (1.5, ValueError),
        (-0.1, ValueError),
        (float("nan"), ValueError),
        ("half", TypeError),
        (True, TypeError),
    ],
)
def test_bad_progress(value, error):
    reg = dampen.regularize(vit(), DropKey(0.1))
    with pytest.raises(error, match=r"in \[0, 1\]"):
        reg.progress(value)


# --- what it does


def test_sites_choose_layers_and_depth_runs_over_the_chosen():
    model = vit(depth=4)
    chosen = ["blocks.1", "blocks.2.*", "blocks.3.attn"]
    reg = dampen.regularize(model, DropKey(linear(0.4, 0.0)), target_modules=chosen)
    assert [layer.site.name for layer in reg.layers] == ["blocks.1", "blocks.2", "blocks.3"]
    assert [c.rate.item() for c in reg.clones] == pytest.approx([0.4, 0.2, 0.0])


def test_loss_adds_the_named_terms():
    model = vit()
    reg = dampen.regularize(model, [ValueNorm(0.5), DropKey(0.1)])
    loss, terms = reg.loss(lambda: model(X), lambda out: out.square().mean())
    assert set(terms) == {"task", "value_norm.v"}
    torch.testing.assert_close(loss, terms["task"] + terms["value_norm.v"])
    loss.backward()


def test_own_loop_and_accumulation():
    """Penalties accumulate over forwards until they are taken: both halves of a siamese step count."""
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    model(X)
    once = reg.penalty()
    model(X)
    model(X)
    torch.testing.assert_close(reg.penalty(), 2 * once)
    assert reg.penalties() == {}
    assert reg.penalty().item() == 0.0


def test_a_layer_shared_by_several_depths_counts_each_time():
    class Shared(nn.Module):
        def __init__(self, times):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                [nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)] * times
            )

        def forward(self, x):
            for _ in self.layers:
                x = self.layers[0](x) * 0 + x  # the same input at each depth
            return x

    x = torch.randn(2, 5, 8)
    penalties = []
    for times in (1, 3):
        model = Shared(times).train()
        reg = dampen.regularize(model, ValueNorm(1.0))
        assert len(reg.layers) == 1
        model(x)
        penalties.append(reg.penalty())
    torch.testing.assert_close(penalties[1], 3 * penalties[0])


def test_disable_is_the_plain_model():
    model = vit()
    plain = model(X)
    reg = dampen.regularize(model, [DropKey(0.5), ValueNorm(1.0), FeedForwardDropout(0.5)])
    with reg.disable():
        assert torch.equal(model(X), plain)
        assert reg.penalties() == {}
    assert not torch.equal(model(X), plain)


def test_state_dict_keeps_the_position_and_what_was_learnt():
    model = vit()
    keys = list(model.state_dict())
    reg = dampen.regularize(model, [DropKey(linear(0.0, 0.4, along="progress")), Learnt(1.0)])
    assert list(model.state_dict()) == keys
    assert len(reg.parameters()) == 2
    assert {id(p) for p in reg.parameters()} <= {
        id(p) for p in model.parameters()
    }  # DDP and the optimizer see them
    with torch.no_grad():
        reg.parameters()[0].fill_(3.0)
    reg.progress(0.5)
    other = dampen.regularize(vit(), [DropKey(linear(0.0, 0.4, along="progress")), Learnt(1.0)])
    other.load_state_dict(reg.state_dict())
    assert other.clones[0].rate.item() == pytest.approx(0.2)
    assert other.parameters()[0].item() == 3.0
    with pytest.raises(ValueError, match="missing, got"):
        other.load_state_dict({"progress": 0.1})
    with pytest.raises(ValueError, match="Regularize with the same methods"):
        dampen.regularize(vit(), DropKey(0.1)).load_state_dict(reg.state_dict())


def test_report_says_what_sits_where():
    model = vit()
    reg = dampen.regularize(
        model, [DropKey(linear(0.3, 0.0)), DropAttention(0.1, normalized=False)]
    )
    text = repr(reg)
    assert "DropKey, DropAttention on ViT, 2 layers, progress 0, 1 pass per step" in text
    assert "no forward yet" in text
    model(X)
    text = repr(reg)
    assert "blocks.0  DropKey(rate=0.3, unit=element)" in text
    assert "blocks.1  DropKey(rate=0, unit=element)" in text
    assert "plain (drop_attention needs the matrix of scores)" in text
    assert "DropKey(rate=0.3" in repr(model)
    reg.remove()
    assert "removed" in repr(reg)
    with pytest.raises(RuntimeError, match="was removed"):
        reg.progress(0.5)


def test_rates_survive_a_change_of_dtype():
    model = vit()
    reg = dampen.regularize(model, DropKey(0.1))
    model.to(torch.bfloat16)
    assert reg.clones[0].rate.dtype == torch.float32
    assert reg.clones[0].rate.item() == pytest.approx(0.1, abs=1e-8)


def test_deepcopy_of_the_handle_takes_the_model_along():
    reg = dampen.regularize(vit(), DropKey(0.1))
    twin = copy.deepcopy(reg)
    assert twin.model is not reg.model
    twin.remove()
    reg.model(X)
    assert reg.layers


def test_frozen_backbone():
    """A frozen layer's penalty has no gradient, and that is fine; so is a frozen model with a head in training."""
    model = vit()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head"))
    reg = dampen.regularize(model, [ValueNorm(1.0), DropKey(0.1)])
    loss, terms = reg.loss(lambda: model(X), lambda out: out.square().mean())
    loss.backward()
    assert not terms["value_norm.v"].requires_grad
    assert model.head.weight.grad is not None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reentrant_checkpointing_is_detected():
    """It silently loses the gradient of penalties; non-reentrant checkpointing does not."""
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    x = torch.randn(2, 5, 8, requires_grad=True)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        reg.penalties()


def test_reentrant_checkpointing_of_a_frozen_layer_below_a_trained_one():
    """The layer is frozen, but its input is not: the penalty should have had a gradient."""
    model = vit()
    model.requires_grad_(False)
    reg = dampen.regularize(model, ValueNorm(1.0))
    x = torch.randn(2, 5, 8, requires_grad=True)
    checkpoint(model.blocks[0], x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        reg.penalties()


def test_forwards_without_gradient_count_nothing_unless_asked():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    with torch.no_grad():
        model(X)
    assert reg.penalties() == {}
    model(X)
    once = reg.penalty()
    with torch.no_grad():  # reg.loss asks for the terms of its own forward
        _, terms = reg.loss(lambda: model(X), lambda out: out.mean())
    assert torch.equal(terms["value_norm.v"], once)


def test_penalty_counts_once_under_checkpointing():
    model = vit()
    reg = dampen.regularize(model, ValueNorm(1.0))
    x = torch.randn(2, 5, 8)
    model.blocks[0](x)
    once = reg.penalty()
    y = checkpoint(model.blocks[0], x, use_reentrant=False)
    value = reg.penalty()
    torch.testing.assert_close(value, once)
    (y.sum() + value).backward()  # the recompute must not add a second time
    assert reg.penalties() == {}


def test_unknown_output_says_how_to_name_the_logits():
    class TwoPasses(Regularizer):
        """For tests."""

        passes = 2

        def outputs(self, outputs, valid=None):
            self.penalize((outputs[0] - outputs[1]).square().mean())

    model = vit()
    reg = dampen.regularize(model, [TwoPasses(), DropKey(0.3)])
    with pytest.raises(TypeError, match=r"output is a dict.*logits=lambda out"):
        reg.loss(lambda: {"scores": model(X)}, lambda out: out["scores"].mean())
    loss, terms = reg.loss(
        lambda: {"scores": model(X)}, lambda o: o["scores"].mean(), logits=lambda o: o["scores"]
    )
    assert terms["two_passes"] > 0
    assert "2 passes" in repr(reg)
    loss.backward()


def test_signature_and_names_survive():
    """Code that inspects the model (Trainer, save_pretrained, generate) sees what it knew."""
    import inspect

    plain, model = vit(), vit()
    dampen.regularize(model, DropKey(0.1))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert type(model).__name__ == "ViT"
    assert isinstance(model, dampen.models.ViT)


def test_sequential_roots_keep_their_length():
    layers = [nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(2)]
    model = nn.Sequential(*layers).train()
    dampen.regularize(model, [DropKey(0.1), FeedForwardDropout(0.1)])
    assert len(model) == 2
    assert model(torch.randn(2, 5, 8)).shape == (2, 5, 8)


def test_snake_case():
    assert [snake_case(n) for n in ("DropKey", "RDrop", "ExplicitDropout")] == [
        "drop_key",
        "r_drop",
        "explicit_dropout",
    ]


def test_registry_finds_the_nearest():
    from dampen.registry import find_method

    assert find_method("DropKey") is DropKey
    assert find_method("drop_key") is DropKey
    with pytest.raises(ValueError, match="did you mean 'drop_key'"):
        find_method("dropkeys")


@pytest.mark.parametrize("methods", [None, [DropKey(0.1), None]])
def test_methods_that_are_no_regularizers(methods):
    with pytest.raises(TypeError, match=r"takes regularizers such as DropKey\(0.1\)"):
        dampen.regularize(
            dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16),
            methods,
        )


def test_the_loss_takes_functions():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    reg = dampen.regularize(model, dampen.DropKey(0.1))
    with pytest.raises(TypeError, match=r"reg.loss\(forward=...\) is a function, got Tensor"):
        reg.loss(model(torch.randn(1, 3, 8, 8)), lambda out: out.sum())


def test_a_disabled_handle_stays_disabled_inside_another():
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16)
    reg = dampen.regularize(model, dampen.TokenGraying("dct", eps=0.5))
    x = torch.randn(2, 3, 8, 8)
    grayed = model(x)
    with reg.disable():
        plain = model(x)
        with reg.disable():
            pass
        assert torch.equal(model(x), plain)
    assert torch.equal(model(x), grayed)
    assert not torch.equal(plain, grayed)
