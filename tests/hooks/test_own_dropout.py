"""The dropout that a model brings itself: listed, set, scheduled, sampled, silenced, and given back."""

import copy
import functools
import pickle

import pytest
import timm
import torch
import transformers as tr
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropKey, DropPath, linear
from dampen.hooks.builtin_dropout import find_own

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(10).view(2, 5)


def timm_vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=3, embed_dim=24, num_heads=2, num_classes=5,
        drop_rate=0.1, attn_drop_rate=0.2, drop_path_rate=0.3, proj_drop_rate=0.15,
    )  # fmt: skip


def bert():
    torch.manual_seed(0)
    return tr.BertModel(tr.BertConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                      intermediate_size=16, hidden_dropout_prob=0.2,
                                      attention_probs_dropout_prob=0.3, attn_implementation="sdpa"))  # fmt: skip


def llama():
    torch.manual_seed(0)
    return tr.LlamaModel(tr.LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                        intermediate_size=16, attention_dropout=0.3))  # fmt: skip


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, 0.2, batch_first=True), 2)


class Functional(nn.Module):
    """Dropout as constants in the code, where no attribute tells, for tests."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = SelfAttention()

    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        return F.dropout(input=self.attn(x), p=0.5, training=self.training)


class SelfAttention(nn.Module):
    """One more of the same."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, None, 0.5 if self.training else 0.0).squeeze(
            1
        )


FEATURES = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
MODELS = {
    "timm_vit": (timm_vit, IMAGES),
    "bert": (bert, IDS),
    "llama": (llama, IDS),
    "encoder": (encoder, FEATURES),
    "functional": (Functional, FEATURES),
}


def run(model, x):
    out = model(x)
    return out if isinstance(out, torch.Tensor) else out.last_hidden_state


def random_now(model, x):
    return not torch.equal(run(model, x), run(model, x))


# --- listed


def test_every_place_is_listed_with_its_rate():
    reg = dampen.regularize(timm_vit(), DropKey(0.1))
    text = repr(reg)
    assert "(built-in)  attention dropout 0.2: blocks.*.attn.attn_drop (x3)" in text
    assert "(built-in)  dropout 0.15: blocks.*.attn.proj_drop (x3)" in text
    assert "(built-in)  drop path 0.15: blocks.*.drop_path1" in text
    assert "(built-in)  drop path 0.3: blocks.*.drop_path2" in text
    assert "(built-in)  dropout 0.1: head_drop" in text


def test_rates_kept_as_numbers_are_listed():
    assert [str(r) for r in find_own(llama()) if r.rate] == [
        f"layers.{i}.self_attn.attention_dropout: attention dropout 0.3" for i in range(2)
    ]
    assert {r.kind for r in find_own(encoder())} == {"attention dropout", "dropout"}
    assert {(r.kind, r.rate) for r in find_own(bert()) if r.rate} == {
        ("dropout", 0.2),
        ("dropout", 0.3),
    }


def test_records_of_rates_that_nothing_reads_are_not_listed():
    assert not any(r.attribute == "drop_rate" for r in find_own(timm_vit()))


def test_drop_path_on_a_model_that_has_its_own_says_so():
    reg = dampen.regularize(timm_vit(), DropPath(0.1))
    assert "(note)  DropPath acts beside the model's own drop path" in repr(reg)
    reg.set_builtin_dropout(rate=0, target_modules="drop path")
    assert "beside the model" not in repr(reg)
    assert "beside the model" not in repr(dampen.regularize(timm_vit(), DropKey(0.1)))


# --- set


def rates_of(model):
    return {r.name: r.rate for r in find_own(model)}


def test_own_sets_schedules_and_gives_back():
    model = timm_vit()
    before = rates_of(model)
    reg = dampen.regularize(model, DropKey(0.1))
    chosen = reg.set_builtin_dropout(rate=linear(0.4, 0.0), target_modules="*.attn_drop")
    assert [r.rate for r in chosen] == pytest.approx([0.4, 0.2, 0.0])
    reg.set_builtin_dropout(
        rate=linear(0.0, 0.2, along="progress"), target_modules=["drop path", "head_drop"]
    )
    assert model.head_drop.p == 0.0
    reg.progress(0.5)
    assert model.head_drop.p == pytest.approx(0.1)
    assert model.blocks[2].drop_path1.drop_prob == pytest.approx(0.1)
    assert model.blocks[2].attn.proj_drop.p == 0.15  # not asked for
    reg.set_builtin_dropout(rate=[0.1, 0.2, 0.3], target_modules="*.proj_drop")
    assert model.blocks[1].attn.proj_drop.p == 0.2
    reg.remove()
    assert rates_of(model) == before


def test_own_of_a_copy_is_given_back_without_a_handle():
    model = timm_vit()
    before = rates_of(model)
    reg = dampen.regularize(model, DropKey(0.1))
    reg.set_builtin_dropout(rate=0)
    twin = pickle.loads(pickle.dumps(model))
    dampen.remove(twin)
    assert rates_of(twin) == before
    assert set(rates_of(model).values()) == {0.0}


def test_own_switched_off_is_the_plain_model():
    for make, x in (MODELS["timm_vit"], MODELS["bert"], MODELS["llama"], MODELS["encoder"]):
        model = make().train()
        reg = dampen.regularize(model, DropKey(0.0))
        reg.set_builtin_dropout(rate=0)
        assert not random_now(model, x)


def test_bad_rates_and_sites():
    reg = dampen.regularize(timm_vit(), DropKey(0.1))
    with pytest.raises(
        ValueError, match=r"(?s)no dropout .* target_modules='nowhere'.*blocks.0.attn.attn_drop"
    ):
        reg.set_builtin_dropout(rate=0.1, target_modules="nowhere")
    with pytest.raises(
        ValueError, match=r"reg.set_builtin_dropout\(rate=...\) must be a probability"
    ):
        reg.set_builtin_dropout(rate=1.5)
    with pytest.raises(ValueError, match="has 2 values, but the model has 3 layers"):
        reg.set_builtin_dropout(rate=[0.1, 0.2])
    with pytest.raises(ValueError, match=r"must be a probability in \[0, 1\), got 1.5"):
        reg.set_builtin_dropout(rate=lambda depth, progress: 1.5)


# --- sampled


@pytest.mark.parametrize("name", ["timm_vit", "bert", "llama", "encoder"])
def test_mc_mode_samples_it_and_nothing_else_changes(name):
    make, x = MODELS[name]
    model = make().eval()
    expected = run(model, x)
    reg = dampen.regularize(model, DropKey(0.0))
    classes, modes = [type(m) for m in model.modules()], [m.training for m in model.modules()]
    with torch.no_grad():
        assert (
            torch.equal(run(model, x), expected) or name == "encoder"
        )  # whose fused eval path our sites pass by
        still = run(model, x)
        with reg.mc_mode():
            with reg.mc_mode():
                assert random_now(model, x)
            twin = copy.deepcopy(model)
            assert random_now(model, x)
            assert not random_now(twin, x)
        assert torch.equal(run(model, x), still)
    assert [type(m) for m in model.modules()] == classes
    assert [m.training for m in model.modules()] == modes
    assert [m.training for m in twin.modules()] == modes


class Doubled(dampen.Regularizer):
    """Twice the output of each head in training, for tests."""

    stochastic = False

    def heads(self, o, call):
        return 2 * o


def test_mc_mode_of_own_dropout_leaves_deterministic_methods_alone():
    """A module that samples its own rate is not in training for the regularizers in it."""
    model = llama().eval()
    plain = run(model, IDS)
    reg = dampen.regularize(model, [Doubled(), dampen.HeadDiversity(1.0), DropKey(0.0)])
    reg.set_builtin_dropout(
        rate=1e-7, target_modules="attention dropout"
    )  # sampled, and drops nothing
    with reg.mc_mode():
        torch.testing.assert_close(run(model, IDS), plain)
    assert reg.penalties() == {}


# --- silenced


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("regularized", [False, True])
def test_deterministic(name, regularized):
    """Training without anything random is eval, and afterwards all is as it was."""
    make, x = MODELS[name]
    model = make().train()
    if regularized:
        dampen.regularize(model, [DropKey(0.5), dampen.DropAttention(0.5, normalized=False)])
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    torch.manual_seed(1)
    expected = run(model, x)
    with dampen.deterministic(model):
        first = run(model, x)
        assert torch.equal(run(model, x), first)
        first.square().mean().backward()
    torch.testing.assert_close(first, run(make().eval(), x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ZeroDivisionError), dampen.deterministic(model):
        raise ZeroDivisionError
    for place, module in model.named_modules():
        assert {k: v for k, v in vars(module).items() if isinstance(v, float)} == {
            k: v for k, v in before[place].items() if isinstance(v, float)
        }
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    torch.manual_seed(1)
    assert torch.equal(run(model, x), expected)


def test_deterministic_leaves_what_is_outside_of_the_model_alone():
    model = timm_vit().train()
    other = nn.Dropout(0.5)
    with dampen.deterministic(model):
        assert torch.rand(3).std() > 0
        assert other.p == 0.5


def test_deterministic_under_checkpointing():
    model = timm_vit().train()
    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with (
        pytest.raises(RuntimeError, match=r"Put loss.backward\(\) inside"),
        dampen.deterministic(model),
    ):
        model(IMAGES)
    with torch.no_grad(), dampen.deterministic(model):
        model(IMAGES)
    with dampen.deterministic(model):
        model(IMAGES).square().mean().backward()
    plain = timm_vit().eval()
    plain(IMAGES).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_what_is_not_dropout_is_named():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = Noisy()
    with (
        pytest.warns(UserWarning, match="Noisy drew random numbers .* by randn_like"),
        dampen.deterministic(model),
    ):
        model(FEATURES)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # dynamo looks at what a hook gets
def test_deterministic_and_compile():
    torch._dynamo.reset()
    model = Functional().train()
    compiled = torch.compile(model, backend="eager")
    assert random_now(compiled, FEATURES)
    with dampen.deterministic(model):
        assert not random_now(compiled, FEATURES)
    assert random_now(compiled, FEATURES)
    torch._dynamo.reset()


class Checkpointed(Functional):
    """Constants in a part that is computed again in the backward, for tests."""

    def forward(self, x):
        return checkpoint(self.attn, x, use_reentrant=False)


def test_functional_calls_are_silent_in_a_recompute_too():
    model, plain = Checkpointed().train(), Checkpointed().eval()
    with dampen.deterministic(model):
        model(FEATURES).square().mean().backward()
    plain(FEATURES).square().mean().backward()
    torch.testing.assert_close(model.attn.qkv.weight.grad, plain.attn.qkv.weight.grad)
