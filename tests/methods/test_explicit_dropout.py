"""ExplicitDropout as a regularizer: switches, schedules, errors, precision, checkpointing, contracts. Formulas:
tests/functional/explicit."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import ExplicitDropout
from dampen.checking import check_contract
from dampen.checking.distributed import check_distributed
from dampen.methods.explicit_dropout import TERMS
from dampen.models.block import Block

ALL = dict.fromkeys(TERMS, 0.1)
LOOSE = {**ALL, "form": "exact", "rate": dampen.linear(0.3, 0.1, along="progress")}
SETTINGS = {
    "paper": ALL,
    "exact": LOOSE,
    "odd": {
        **ALL,
        "form": "inverted",
        "attended": "post",
        "visible_only": True,
        "reduction": "author",
    },
    "detached": {**LOOSE, "detach_inputs": True},
    "shared": {"query_key": 0.1, "shared_mask": True, "form": "exact", "visible_only": True},
}


def blocks(depth=2, width=16, heads=2, seed=0, **kw):
    torch.manual_seed(seed)
    return nn.Sequential(*[Block(width, heads, 24, **kw) for _ in range(depth)]).train()


def data(batch=3, tokens=5, width=16, seed=1):
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(seed))


# --- what is at work, and when


def test_a_term_with_the_plain_weight_zero_is_not_there():
    method = ExplicitDropout(value=0.05)
    assert method.stages == {"qkv"}
    assert method.roles == {"v", "qkv", "kv"}
    assert ExplicitDropout(ffn=0.1).roles == {"ffn_in", "ffn_out"}
    assert ExplicitDropout(ffn=0.1, ffn1=0).roles == {"ffn_out"}
    assert ExplicitDropout(query=0.1).roles == {"q", "k", "qkv", "kv"}
    assert ExplicitDropout(attended_value=0.1).stages == {"heads"}


def test_every_weight_zero_is_refused():
    """A method that would do nothing says so, and how it is written instead."""
    with pytest.raises(
        ValueError, match=r"would do nothing.*ExplicitDropout\(value=0.05, ffn=0.05\)"
    ):
        dampen.regularize(blocks(), ExplicitDropout())


def test_a_schedule_or_list_with_zeros_stays_on():
    model = blocks(3)
    reg = dampen.regularize(
        model, ExplicitDropout(value=[0.0, 0.5, 0.0], ffn=dampen.late(1.0, start=0.5))
    )
    model(data())
    early = reg.penalties()
    assert early["explicit_dropout.ffn1"] == 0
    values = []
    for k in range(3):
        alone = dampen.regularize(
            other := blocks(3), ExplicitDropout(value=1.0), target_modules=f"{k}*"
        )
        other(data())
        values.append(alone.penalty())
    torch.testing.assert_close(early["explicit_dropout.value"], 0.5 * values[1])
    reg.progress(0.7)
    model(data())
    assert reg.penalties()["explicit_dropout.ffn1"] > 0


def test_ffn_is_both_layers_unless_one_is_said():
    method = ExplicitDropout(ffn=0.3, ffn2=0.1)
    assert (method.ffn1.item(), method.ffn2.item()) == pytest.approx((0.3, 0.1))
    assert ExplicitDropout(ffn1=0.3).terms == {"ffn1"}


def test_nothing_happens_in_eval():
    model = blocks()
    plain = model.eval()(data())
    reg = dampen.regularize(model, ExplicitDropout(**ALL, form="exact"))
    assert torch.equal(model(data()), plain)
    assert reg.penalties() == {}


def test_the_model_computes_the_same_in_training():
    """A penalty is not a perturbation. With form="exact" the plain kernel runs, so equal up to rounding."""
    for options in ({}, {"form": "exact"}):
        model = blocks()
        plain = model(data())
        dampen.regularize(model, ExplicitDropout(**ALL, **options))
        torch.testing.assert_close(model(data()), plain)


def test_it_prints_what_it_does():
    assert str(ExplicitDropout(query=1, heads="concat", form="exact")) == (
        "ExplicitDropout(query=1, rate=0.2, form=exact, reduction=mean, heads=concat)"
    )
    text = str(
        ExplicitDropout(
            query_key=1, attended_value=2, shared_mask=True, visible_only=True, attended="post"
        )
    )
    assert text.endswith("attended=post, shared_mask, visible_only)")


# --- gradients


def test_detached_inputs_leave_the_weights_alone_with_the_gradient():
    """The value is the same; the gradient of a map's own weight is what it is with the input held constant."""
    for form, attended in (
        ("paper", "pre"),
        ("exact", "pre"),
        ("exact", "post"),
        ("inverted", "pre"),
    ):
        x = data().requires_grad_()
        values, grads = [], []
        for detach in (False, True):
            model = blocks(1)
            reg = dampen.regularize(
                model, ExplicitDropout(**ALL, form=form, attended=attended, detach_inputs=detach)
            )
            model(x)
            value = reg.penalty()
            values.append(value.detach())
            grads.append(torch.autograd.grad(value, [x, *model.parameters()], allow_unused=True))
        torch.testing.assert_close(*values, rtol=1e-5, atol=1e-7)
        names = ["x", *(n for n, _ in blocks(1).named_parameters())]
        free, held = (dict(zip(names, g, strict=True)) for g in grads)
        assert free["x"] is not None
        assert [n for n, g in held.items() if g is not None] == [
            "0.attn.qkv.weight",
            "0.mlp.fc1.weight",
            "0.mlp.fc2.weight",
        ]
        # the second feed-forward map feeds no other penalty, so its own gradient is the same in both
        torch.testing.assert_close(
            free["0.mlp.fc2.weight"], held["0.mlp.fc2.weight"], rtol=1e-4, atol=1e-6
        )


def test_biases_of_the_same_map_get_no_gradient():
    """Biases are in no penalty: what they would get through the output is taken back."""
    model = blocks(1)
    reg = dampen.regularize(
        model, ExplicitDropout(query=1.0, key=1.0, value=1.0, query_key=1.0, form="exact")
    )
    nn.init.normal_(model[0].attn.qkv.bias, std=3.0)
    model(data())
    grad = torch.autograd.grad(reg.penalty(), [model[0].attn.qkv.bias, model[0].attn.qkv.weight])
    assert grad[0].abs().max() < 1e-4 * grad[1].abs().max()


def test_activations_that_work_in_place():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.fc1, self.fc2 = Block(16, 2, 8).attn, nn.Linear(16, 8), nn.Linear(8, 16)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x):
            x = x + self.attn(x)
            out = self.fc2(self.act(self.fc1(x)))
            out += x
            return out

    torch.manual_seed(0)
    layer = InPlace().train()
    reg = dampen.regularize(layer, ExplicitDropout(**ALL, form="exact"))
    out = layer(data())
    value = reg.penalty()
    (out.mean() + value).backward()
    x, weight = layer.attn.qkv.weight.grad, layer.fc1.weight.grad
    layer.zero_grad()
    layer.act.inplace = False
    out = layer(data())
    (out.mean() + reg.penalty()).backward()
    torch.testing.assert_close(layer.attn.qkv.weight.grad, x)
    torch.testing.assert_close(layer.fc1.weight.grad, weight)


# --- precision


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_under_autocast(form, dtype):
    """The quartic terms would overflow float16; computed in float32 they agree with the float32 model."""
    x = 30 * data()
    model = blocks(1, norm_first=False)
    reg = dampen.regularize(
        model, ExplicitDropout(**dict.fromkeys(TERMS, 1.0), form=form, reduction="sum")
    )
    model(x)
    wide = reg.penalties()
    with torch.autocast("cpu", dtype):
        model(x)
    narrow = reg.penalties()
    if form == "paper":
        assert narrow["explicit_dropout.query"] > torch.finfo(torch.float16).max
    for name, value in narrow.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wide[name], rtol=0.05, atol=0)
    scale = (
        1.0 if dtype is torch.bfloat16 else 1e-7
    )  # as GradScaler does: activations' gradients are float16
    (scale * sum(narrow.values())).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_model_in_half_precision():
    model = blocks(1).to(torch.bfloat16)
    reg = dampen.regularize(model, ExplicitDropout(**ALL, form="exact"))
    model(data().to(torch.bfloat16))
    for value in reg.penalties().values():
        assert value.dtype == torch.float32


# --- one forward, one penalty


def test_checkpointing_counts_each_penalty_once():
    x = data().requires_grad_()
    results = []
    for again in (False, True):
        model = blocks()
        reg = dampen.regularize(model, ExplicitDropout(**LOOSE))
        out = x
        for block in model:
            out = checkpoint(block, out, use_reentrant=False) if again else block(out)
        loss = out.square().mean() + reg.penalty()
        loss.backward()
        assert reg.penalties() == {}  # the recompute has left nothing
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_a_shared_layer_counts_each_time():
    """ALBERT-like: one block run twice adds both of its passes."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.block = Block(16, 2, 24)

        def forward(self, x, times=2):
            for _ in range(times):
                x = self.block(x)
            return x

    model = Twice().train()
    reg = dampen.regularize(model, ExplicitDropout(**ALL))
    first = model(data(), times=1)
    one = reg.penalty()
    model(first.detach(), times=1)
    two = reg.penalty()
    model(data())
    torch.testing.assert_close(reg.penalty(), one + two)


def test_copies_are_independent():
    model = blocks()
    reg = dampen.regularize(model, ExplicitDropout(**LOOSE))
    model(data())  # leaves a live graph, which a copy does not take along
    twin = copy.deepcopy(reg)
    reg.penalties()
    twin.model(data())
    model(data())
    torch.testing.assert_close(twin.penalty(), reg.penalty())


@pytest.mark.parametrize("setting", SETTINGS)
def test_contracts(setting):
    make = functools.partial(ExplicitDropout, **SETTINGS[setting])
    subjects = {
        "paper": ["vit", "bert"],
        "exact": ["timm_vit", "llama", "bert"],
        "odd": ["llama", "bert"],
    }
    names = [
        "identity",
        "shapes_and_dtypes",
        "gradients_finite",
        "copies",
        "checkpointed",
        "seeded",
        "no_leak",
        "kernel",
    ]
    for subject in subjects.get(setting, ["bert"]):
        for contract in names:
            outcome = check_contract(make, contract, subject)
            assert outcome.state == "kept", str(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "subject"),
    [("paper", "vit"), ("exact", "llama"), ("odd", "bert"), ("shared", "llama")],
)
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_compiled_in_one_graph(setting, subject):
    outcome = check_contract(
        functools.partial(ExplicitDropout, **SETTINGS[setting]), "compiled", subject
    )
    assert outcome.state == "kept", str(outcome)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_compiled_by_inductor():
    outcome = check_contract(
        functools.partial(ExplicitDropout, **SETTINGS["exact"]), "compiled_inductor", "vit"
    )
    assert outcome.state == "kept", str(outcome)


@pytest.mark.slow
def test_two_processes_equal_one():
    check_distributed(
        [
            functools.partial(ExplicitDropout, **ALL),
            functools.partial(ExplicitDropout, **ALL, form="exact"),
        ]
    )


# --- bad input


@pytest.mark.parametrize(("arguments", "error", "text"), [
    ({"value": -0.1}, ValueError, r"ExplicitDropout\(value=...\) must be a finite number >= 0, got -0.1"),
    ({"value": float("inf")}, ValueError, "finite number >= 0, got inf"),
    ({"value": "much"}, TypeError, "must be a number, a schedule"),
    ({"value": [0.1, -1.0]}, ValueError, "layer 1 must be a finite number >= 0, got -1.0"),
    ({"rate": 1.0}, ValueError, r"probability in \[0, 1\), got 1.0"),
    ({"form": "exakt"}, ValueError, "form must be one of paper, exact, inverted, got 'exakt'"),
    ({"reduction": "max"}, ValueError, "reduction must be one of mean, sum, token_mean, author, got 'max'"),
    ({"heads": "all"}, ValueError, "heads must be 'per_head' or 'concat', got 'all'"),
    ({"attended": "mid"}, ValueError, "attended must be 'pre' or 'post', got 'mid'"),
    ({"attended_value": 0.1, "heads": "concat"}, ValueError, "attended_value has no form with heads='concat'"),
    ({"vlaue": 0.1}, TypeError, "no argument 'vlaue'; did you mean 'value'"),
])  # fmt: skip
def test_bad_arguments(arguments, error, text):
    with pytest.raises(error, match=text):
        ExplicitDropout(**arguments)


class NoFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(16, 2, 24).attn for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_feed_forward_asked_for_where_there_is_none():
    with pytest.raises(
        ValueError,
        match=r"ffn1=...\) penalizes layer 1 of the feed-forward, but 'layers.0' has none .*Set ffn1=0",
    ):
        dampen.regularize(NoFeedForward(), ExplicitDropout(ffn=0.1))
    model = NoFeedForward().train()
    reg = dampen.regularize(model, ExplicitDropout(value=0.1))
    model(data())
    assert reg.penalty() > 0


class Riddle(nn.Module):
    """An attention whose maps have names that say nothing."""

    def __init__(self):
        super().__init__()
        self.alpha, self.beta, self.gamma, self.delta = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            m(x).unflatten(-1, (2, -1)).transpose(1, 2) for m in (self.alpha, self.beta, self.gamma)
        )
        return x + self.delta(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_projections_that_cannot_be_found_can_be_said():
    torch.manual_seed(0)
    model = nn.Sequential(Riddle()).train()
    with pytest.raises(
        ValueError, match=r"unknown which linear layer makes q at '0'.*projections=\{'q': 'name'"
    ):
        dampen.regularize(model, ExplicitDropout(query=0.1))
    reg = dampen.regularize(
        model,
        ExplicitDropout(value=1.0, rate=0.5),
        projections={"q": "alpha", "k": "beta", "v": "gamma"},
    )
    model(data())
    expected = 0.5 * 0.25 * (data() @ model[0].gamma.weight.T).square().sum() / 15
    torch.testing.assert_close(reg.penalty(), expected)


class Interleaved(nn.Module):
    """A fused map whose rows go head by head, each q, k and v (GPT-NeoX), under a name that promises otherwise."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (2, 3, 8)).permute(3, 0, 2, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_an_interleaved_fused_projection_is_followed():
    """Which rows make q, k and v is told by the channels, not by a convention."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Interleaved()).train(), data()
    reg = dampen.regularize(model, ExplicitDropout(value=1.0, key=1.0, rate=0.5))
    model(x)
    got = reg.penalties()
    q, k, v = (x @ model[0].qkv.weight.T).unflatten(-1, (2, 3, 8)).permute(3, 0, 2, 1, 4)
    pairs = (q @ k.transpose(-1, -2)).square().sum()
    torch.testing.assert_close(got["explicit_dropout.value"], 0.5 * 0.25 * v.square().sum() / 15)
    torch.testing.assert_close(got["explicit_dropout.key"], 0.5 * 0.25 * pairs / 75)


def test_concat_with_grouped_keys_raises():
    from tests.oracles.explicit_layer import Case

    layer, inputs = Case(layer={"heads": 4, "kv_heads": 2, "size": 1}).build()
    dampen.regularize(layer, ExplicitDropout(query=0.1, heads="concat"))
    with pytest.raises(RuntimeError, match="4 query heads and 2 key heads. Use heads='per_head'"):
        layer(**inputs)


def test_a_shared_mask_needs_one_input():
    from tests.oracles.explicit_layer import Case

    layer, inputs = Case(cross=True).build()
    dampen.regularize(layer, ExplicitDropout(query_key=0.1, shared_mask=True))
    with pytest.raises(RuntimeError, match=r"they read different inputs.*attention='self'"):
        layer(**inputs)


def test_keys_that_no_projection_made():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.0, batch_first=True).train()
    layer.self_attn = nn.MultiheadAttention(16, 2, add_zero_attn=True, batch_first=True)
    x, padding = data(), torch.arange(5) >= torch.tensor([[5], [4], [3]])
    reg = dampen.regularize(layer, ExplicitDropout(value=1.0, query=1.0, rate=0.5))
    layer(x, src_key_padding_mask=padding)
    w = layer.self_attn.in_proj_weight[32:]
    torch.testing.assert_close(
        reg.penalties()["explicit_dropout.value"], 0.125 * (x @ w.T)[~padding].square().sum() / 12
    )
    reg.remove()
    dampen.regularize(layer, ExplicitDropout(attended_value=1.0, form="exact"))
    with pytest.raises(RuntimeError, match="attends to 6 keys, but its projections read 5 tokens"):
        layer(x, src_key_padding_mask=padding)
