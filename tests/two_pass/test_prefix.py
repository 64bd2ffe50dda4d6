"""The shared prefix: the same loss and gradients as two full passes, fewer computations, and an honest report where it
cannot be."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import Consistency, DropKey, HeadDiversity, RDrop, linear, regularize
from dampen.schedules import (
    always_zero,
    constant,
    cosine,
    curriculum,
    early,
    late,
    per_layer,
    vshape,
    warmup,
)

UPPER = ["blocks.[23]"]
X = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2])


class Count(nn.Module):
    """An activation that counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return F.gelu(x)


def vit(cls=dampen.models.ViT, **options):
    torch.manual_seed(0)
    model = cls(
        image_size=8, patch_size=4, classes=3, width=16, depth=4, heads=2, mlp=16, **options
    )
    for block in model.blocks:
        block.mlp.act = Count()
    return model


def step(model, reg, full=False, forward=None):
    """Loss, terms and gradients of one seeded step; `full` forbids sharing."""
    if full:
        reg.prefix.why = "the test wants two full passes"
    model.zero_grad()
    torch.manual_seed(5)
    loss, terms = reg.loss(forward or (lambda: model(X)), lambda out: F.cross_entropy(out, Y))
    loss.backward()
    return (
        loss.detach(),
        terms,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def assert_same(first, second, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[1].keys() == second[1].keys()
    assert first[2].keys() == second[2].keys()
    for name, gradient in first[2].items():
        rounding = atol * max(
            1.0, gradient.abs().max().item()
        )  # of sums in another order, by their largest term
        torch.testing.assert_close(gradient, second[2][name], msg=name, rtol=rtol, atol=rounding)


def compare(make, methods=None, sites=UPPER, forward=None):
    """The step with sharing (must happen) and with two full passes must be the same; the model that shared."""
    results = []
    for full in (False, True):
        model = make()
        reg = regularize(model, methods or [DropKey(0.4), Consistency(1.0)], sites)
        results.append(
            step(model, reg, full, None if forward is None else (lambda m=model: forward(m)))
        )
        if not full:
            shared = reg
            assert reg.prefix.shared, reg.prefix.why
    assert_same(*results)
    return shared


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("method", [Consistency(1.0), Consistency(1.0, symmetric=True), RDrop(0.5)])
def test_same_loss_and_gradients_as_two_full_passes(method, norm_first):
    reg = compare(lambda: vit(norm_first=norm_first), [DropKey(0.4), method])
    assert reg.prefix.shared == ["blocks.0", "blocks.1"]
    assert [b.mlp.act.calls for b in reg.model.blocks] == [1, 1, 2, 2]
    assert "2 blocks are computed once for both passes, blocks.0 to blocks.1" in repr(reg)


class UpperDropKey(DropKey):
    """Draws nothing where its rate is always 0, so that draws can be compared with two full passes."""

    def mask(self, q, k, call):
        return None if self.always_idle else super().mask(q, k, call)


def test_rates_that_are_always_zero_below_and_penalties_of_shared_blocks():
    """The penalties of shared blocks count for both passes, and their gradients are those of two full passes."""
    methods = [
        UpperDropKey([0.0, 0.0, 0.0, 0.5]),
        HeadDiversity(1.0),
        dampen.ExplicitDropout(value=1.0),
        RDrop(1.0),
    ]
    reg = compare(vit, methods, sites="*")
    assert reg.prefix.shared == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_rate_that_is_zero_only_now_is_no_prefix():
    model = vit()
    reg = regularize(model, [DropKey(linear(0.0, 0.4, along="progress")), RDrop(1.0)])
    step(model, reg)
    assert reg.prefix.shared == []
    assert "the first block, 'blocks.0', is perturbed already by DropKey" in repr(reg)


@pytest.mark.parametrize(
    ("schedule", "zero"),
    [
        (constant(0.0), True),
        (constant(0.1), False),
        (per_layer((0.0, 0.1)), True),
        (linear(0.0, 0.2), True),
        (linear(0.0, 0.2, along="progress"), False),
        (linear(0.0, 0.0, along="progress"), True),
        (cosine(0.0, 0.2, along="depth"), True),
        (cosine(0.0, 0.2), False),
        (early(0.0), True),
        (late(0.1), False),
        (warmup(linear(0.0, 0.3)), True),
        (curriculum(0.2), False),
        (vshape(0.0, 0.0), True),
        (vshape(0.0, 0.1), False),
        (lambda depth, progress: 0.0, False),
    ],
)
def test_zero_by_construction(schedule, zero):
    assert always_zero(schedule, 0.0) is zero


class UNet(dampen.models.ViT):
    """The last block also reads the first one's output."""

    def encode(self, tokens):
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        states = []
        for i, block in enumerate(self.blocks):
            x = block(x + states[0] if i == 3 else x)
            states.append(x)
        return self.norm(x)


def test_lower_states_read_above_are_the_same_states():
    compare(lambda: vit(UNet))


def test_blocks_that_are_checkpointed_without_reentry():
    def forward(model):
        for block in model.blocks:
            if not isinstance(vars(block).get("forward"), type(step)):
                inner = block.forward
                object.__setattr__(
                    block,
                    "forward",
                    (lambda f: lambda *a, **k: checkpoint(f, *a, use_reentrant=False, **k))(inner),
                )
        return model(X)

    compare(vit, forward=forward)


def hugging_face(kind, **options):
    torch.manual_seed(0)
    if kind == "t5":
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {
            "d_model": 16,
            "d_ff": 24,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
        }
        return T5ForConditionalGeneration(
            T5Config(vocab_size=19, **sizes, use_cache=False, decoder_start_token_id=0)
        ).train()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=19, **sizes, **options)).train()


IDS = torch.randint(1, 19, (2, 7), generator=torch.Generator().manual_seed(2))


def language_step(model, reg, full=False, **options):
    if full:
        reg.prefix.why = "the test wants two full passes"
    torch.manual_seed(5)
    outputs = []

    def forward():
        outputs.append(model(input_ids=IDS, labels=IDS, **options))
        return outputs[-1]

    loss, terms = reg.loss(forward, lambda out: out.loss)
    loss.backward()
    return (
        loss.detach(),
        terms,
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    ), outputs


@pytest.mark.parametrize("hidden", [False, True])
def test_hugging_face_causal_model(hidden):
    """With hidden states asked for, transformers hooks the attentions too: two full passes, and the same results."""
    results = []
    for full in (False, True):
        model = hugging_face("llama", use_cache=False)
        reg = regularize(model, [DropKey(0.4), RDrop(1.0)], "model.layers.[23]")
        results.append(language_step(model, reg, full, output_hidden_states=hidden))
        assert bool(reg.prefix.shared) is (not full and not hidden), reg.prefix.why
    (first, outputs), (second, expected) = results
    assert_same(first, second)
    for one, other in zip(outputs, expected, strict=True) if hidden else ():
        for a, b in zip(one.hidden_states, other.hidden_states, strict=True):
            torch.testing.assert_close(a, b)


def test_an_encoder_is_shared_when_only_the_decoder_is_perturbed():
    results = []
    for full in (False, True):
        model = hugging_face("t5")
        reg = regularize(model, [DropKey(0.4), RDrop(1.0)], "decoder.block.1")
        results.append(language_step(model, reg, full)[0])
        if not full:
            assert reg.prefix.shared == ["encoder.block.0", "encoder.block.1", "decoder.block.0"], (
                reg.prefix.why
            )
    assert_same(*results)


class Between(dampen.models.ViT):
    """Something stands between the embedding and the blocks, or between blocks and the next."""

    between = staticmethod(lambda i, x: x)

    def encode(self, tokens):
        x = torch.cat([self.cls_token.expand(len(tokens), -1, -1), tokens], 1)
        for i, block in enumerate(self.blocks):
            x = block(self.between(i, x))
        return self.norm(x)


def with_between(function):
    model = vit(Between)
    model.between = function
    return model


def in_place(i, x):
    return x.add_(1.0) if i == 2 else x


class Normed(nn.Module):
    """A feed-forward with a batch norm in it."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.norm = mlp, nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.mlp(x).transpose(1, 2)).transpose(1, 2)


class Hidden(nn.Module):
    """Dropout that no attribute gives away."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return F.dropout(self.mlp(x), 0.1)


def wrapped(wrapper):
    model = vit()
    for block in model.blocks:
        block.mlp = wrapper(block.mlp)
    return model


def with_hook():
    model = vit()
    model.seen = []
    model.blocks[0].attn.register_forward_hook(lambda m, a, o: model.seen.append(o))
    return model


def with_own_dropout():
    model = vit()
    model.blocks[0].mlp.fc2 = nn.Sequential(model.blocks[0].mlp.fc2, nn.Dropout(0.1))
    return model


def repeated():
    model = vit()
    model.blocks.insert(1, model.blocks[0])
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: with_between(lambda i, x: F.dropout(x, 0.1) if i == 0 else x),
            "'blocks.0' differs between the passes",
        ),
        (
            lambda: with_between(lambda i, x: F.dropout(x, 0.1) if i == 1 else x),
            "'blocks.1' differs between the passes",
        ),
        (lambda: with_between(in_place), "'blocks.1' is changed in place"),
        (lambda: wrapped(Normed), "'blocks.0' updates a state of its own"),
        (lambda: wrapped(Hidden), "'blocks.0' draws at random"),
        (with_hook, "a hook inside 'blocks.0'"),
        (repeated, "'blocks.0' runs several times"),
    ],
    ids=["stem", "between", "in place", "batch norm", "hidden dropout", "hook", "repeated"],
)
def test_falls_back_with_a_reason_and_is_still_right(make, says):
    results = []
    for full in (False, True):
        model = make()
        reg = regularize(model, [DropKey(0.4), RDrop(1.0)], ["blocks.[34]"])
        results.append(step(model, reg, full))
        if not full:
            assert says in reg.prefix.why
            assert f"two full passes: {reg.prefix.why}" in repr(reg)
            step(model, reg)  # and stays there
            assert reg.prefix.shared == []
    assert_same(*results)


def test_inputs_that_differ_between_the_passes_are_not_shared():
    """The closure augments: both passes are legitimately different from the first block on."""
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    step(model, reg, forward=lambda: model(X + torch.randn_like(X)))
    assert "differs between the passes" in reg.prefix.why


def test_a_cache_is_never_half_filled():
    model = hugging_face("llama", use_cache=True)
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], "model.layers.[23]")
    language_step(model, reg)
    assert "DynamicCache" in reg.prefix.why
    assert "use_cache=False" in reg.prefix.why


def test_reentrant_checkpointing_is_not_shared():
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    for block in model.blocks:
        object.__setattr__(
            block,
            "forward",
            (lambda f: lambda x: checkpoint(f, x, use_reentrant=True))(block.forward),
        )
    step(model, reg)
    assert "reentrant" in reg.prefix.why


def test_compiled_models_run_two_full_passes():
    torch._dynamo.reset()
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = [step(model, reg, forward=lambda: compiled(X))]
    assert "torch.compile" in reg.prefix.why
    results.append(step(model, reg))
    assert_same(*results)
    torch._dynamo.reset()


def test_nothing_is_kept_after_the_step_and_copies_are_clean():
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    step(model, reg)
    assert all(site.output is None and site.asked is None for site in reg.prefix.sites)
    twin = copy.deepcopy(reg)
    assert twin.prefix is not reg.prefix
    assert twin.model.blocks[0]._dampen_prefix.prefix is twin.prefix
    assert_same(step(model, reg), step(twin.model, twin))
    revived = pickle.loads(pickle.dumps(model))
    assert revived.eval()(X).shape == (3, 3)
    with pytest.raises(ZeroDivisionError):
        reg.loss(lambda: (model(X), 1 / 0), lambda out: out)
    assert reg.prefix.mode == ""
    assert all(site.output is None for site in reg.prefix.sites)


def test_one_pass_methods_swap_nothing_and_remove_restores():
    model = vit()
    kinds = [type(m) for m in model.modules()]
    reg = regularize(model, DropKey(0.1))
    assert reg.prefix.sites == []
    assert not any(hasattr(b, "_dampen_prefix") for b in model.blocks)
    reg.remove()
    reg = regularize(model, [DropKey(0.1), RDrop(1.0)], UPPER)
    assert all(hasattr(b, "_dampen_prefix") for b in model.blocks)
    reg.remove()
    assert [type(m) for m in model.modules()] == kinds


# --- what a careful reader tried


class OwnDropout(nn.Module):
    """Draws in a way that no attribute tells."""

    def __init__(self, block):
        super().__init__()
        self.norm1, self.attn, self.norm2, self.mlp = (
            block.norm1,
            block.attn,
            block.norm2,
            block.mlp,
        )

    def forward(self, x, keep=None):
        x = x + F.dropout(self.attn(self.norm1(x)), 0.5, self.training)
        return x + self.mlp(self.norm2(x))


def rebuilt(cls):
    model = vit()
    model.blocks = nn.ModuleList(cls(block) for block in model.blocks)
    return model


def test_a_blocks_own_draws_are_seen_beside_an_idle_method():
    model = rebuilt(OwnDropout)
    reg = regularize(model, [dampen.DropPath([0.0, 0.0, 0.0, 0.1]), RDrop(1.0)])
    terms = step(model, reg)[1]
    assert "draws at random" in reg.prefix.why
    assert terms["r_drop"] > 0


def test_two_passes_in_inference_mode_and_under_functional_transforms():
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    with torch.inference_mode():
        reg.loss(lambda: model(X), lambda out: F.cross_entropy(out, Y))
    weights = dict(model.named_parameters())

    def loss(w):
        return reg.loss(
            lambda: torch.func.functional_call(model, w, (X,)), lambda out: F.cross_entropy(out, Y)
        )[0]

    gradients = torch.func.grad(loss)(weights)
    assert all(g.isfinite().all() for g in gradients.values())
    assert step(model, reg)[0] > 0
    assert reg.prefix.shared == ["blocks.0", "blocks.1"]  # a plain step shares again


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_per_sample_gradients():
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)

    def loss(weights, x, y):
        forward = lambda: torch.func.functional_call(model, weights, (x.unsqueeze(0),))  # noqa: E731
        return reg.loss(forward, lambda out: F.cross_entropy(out, y.unsqueeze(0)))[0]

    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="different")(
        weights, X, Y
    )
    assert all(g.shape[0] == len(X) and g.isfinite().all() for g in found.values())
