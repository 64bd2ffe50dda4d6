"""A penalty reads clean operands: beside every method it is the formula of its own layer's input.

The oracle looks at the model's layers through hooks of its own, which see what the model gives to a
layer and what comes out, and knows nothing of dampen. Each penalty is computed again by its slow
formula from these tensors, in the same graph, so that gradients can be compared as well as values.
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import (
    AroraDropout,
    AttentionEntropy,
    BlurredAttention,
    DropAttention,
    DropConnect,
    DropHead,
    DropKey,
    DropPath,
    ExplicitDropout,
    ExplicitMixout,
    FeedForwardDropout,
    HardMasking,
    HeadDiversity,
    HiddenDropout,
    LayerDrop,
    Mixout,
    ProjectionDropout,
    regularize,
)
from dampen.functional.explicit import regularize_convolutions
from tests.full import FULL

WIDTH, HEADS, SIZE, BATCH, TOKENS, P = 6, 2, 3, 3, 5, 0.25
MAPS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


class Attention(nn.Module):
    """Separate projections; by torch's function or by hand, with the model's own attention dropout.

    A column of scores that belongs to no key (a sink), a mask of keys, and one after the softmax.
    """

    def __init__(self, eager: bool = False, dropout: float = 0.0, sink: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.out_proj = nn.Linear(HEADS * SIZE, WIDTH)
        self.eager, self.dropout = eager, dropout
        self.sink = nn.Parameter(torch.randn(HEADS)) if sink else None
        self.keep = self.after = None

    def forward(self, x):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (m(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for m in maps)
        rate = self.dropout if self.training else 0.0
        if not self.eager:
            o = F.scaled_dot_product_attention(q, k, v, attn_mask=self.keep, dropout_p=rate)
            return self.out_proj(o.transpose(1, 2).flatten(2))
        a = F.dropout(self.weights(q, k), rate, self.training)
        return self.out_proj((a @ v).transpose(1, 2).flatten(2))

    def weights(self, q, k):
        """A, as the model alone computes it."""
        s = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
        if self.keep is not None:
            s = s.masked_fill(~self.keep, -math.inf)
        if self.sink is not None:
            s = torch.cat([s, self.sink.view(1, -1, 1, 1).expand(*s.shape[:-1], 1)], dim=-1)
        a = s.softmax(-1)
        a = a if self.sink is None else a[..., :-1]
        return a if self.after is None else a.masked_fill(self.after, 0.0)


class Block(nn.Module):
    """One pre-norm block; nothing is upstream of its attention."""

    def __init__(self, **attention) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(**attention)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(self.drop(self.fc1(self.norm2(x)).tanh()))


class Net(nn.Module):
    def __init__(self, **attention) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block(**attention)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Seen:
    """What went into and came out of each linear layer in the last forward."""

    def __init__(self, model: nn.Module) -> None:
        self.x, self.y, self.w, self.b, self.u = {}, {}, {}, {}, {}
        self.attention = next(m for m in model.modules() if isinstance(m, Attention))
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if last in MAPS:
                self.w[last], self.b[last] = module.weight, module.bias
                self.u[last] = module.weight.detach().clone()
                module.register_forward_hook(self.look(last))

    def look(self, name):
        def hook(module, args, out):
            self.x[name], self.y[name] = args[0], out

        return hook

    def bare(self, name):
        """x W^T of one layer, by heads where it is a projection."""
        return torch.einsum("bni,oi->bno", self.x[name], self.w[name])

    def heads(self, y):
        return y.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)

    def a(self):
        """A of the queries and keys that arrive at the attention."""
        if self.attention.eager or self.attention.keep is None:
            return self.attention.weights(*(self.heads(self.y[n]) for n in ("q_proj", "k_proj")))
        return self.attention.weights(
            *(self.heads(self.y[n]) for n in ("q_proj", "k_proj"))
        ).nan_to_num(0.0)  # a query without keys gets nothing


def model_and_input(**attention):
    torch.manual_seed(0)
    model = Net(**attention).double().train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.7)
    x = torch.randn(BATCH, TOKENS, 4, dtype=torch.float64)
    return model, x


# --- the slow formulas --------------------------------------------------------------------------

N = BATCH * TOKENS


def parts(form, p=P):
    """Factors of bias and variance."""
    return {"paper": (p * p, 0.0), "exact": (p * p, p * (1 - p)), "inverted": (0.0, p / (1 - p))}[
        form
    ]


def variance(x, w):
    """sum_i sum_o sum_j x_ij^2 W_oj^2."""
    return torch.einsum("bni,oi->", x.square(), w.square())


def linear(name, form):
    def formula(seen):
        b, v = parts(form)
        total = b * seen.bare(name).square().sum() + v * variance(seen.x[name], seen.w[name])
        return 0.5 * total / N

    return formula


def query(form):
    def formula(seen):
        q, k = seen.heads(seen.bare("q_proj")), seen.heads(seen.bare("k_proj"))
        b, v = parts(form)
        total = b * torch.einsum("bhid,bhjd->bhij", q, k).square().sum()
        wq = seen.w["q_proj"].unflatten(0, (HEADS, SIZE))
        back = torch.einsum("hdl,bhjd->bhjl", wq, k)
        total = total + v * torch.einsum("bil,bhjl->", seen.x["q_proj"].square(), back.square())
        return 0.5 * total / (BATCH * TOKENS * TOKENS)

    return formula


def attended(form):
    def formula(seen):
        a, (b, v) = seen.a(), parts(form)
        total = b * (a @ seen.heads(seen.bare("v_proj"))).square().sum()
        wv = seen.w["v_proj"].unflatten(0, (HEADS, SIZE)).square().sum(1)
        total = total + v * torch.einsum("bhij,bjl,hl->", a.square(), seen.x["v_proj"].square(), wv)
        return 0.5 * total / N

    return formula


def residual(seen):
    total = 0.0
    for name in ("out_proj", "fc2"):
        total = total + (seen.bare(name) + seen.b[name]).square().sum()
    return 0.5 * P * P * total / N


def arora(seen):
    return 2 * sum(linear(name, "inverted")(seen) for name in ("q_proj", "fc1", "fc2"))


def mixout(seen):
    total = sum(variance(seen.x[n], seen.w[n] - seen.u[n]) for n in MAPS)
    return 0.5 * P / (1 - P) * total / N


def entropy(seen):
    a = seen.a()
    lacking = 0.9 * math.log(TOKENS) + (a * a.log()).sum(-1)
    return lacking.clamp(min=0).mean()


def diversity(seen):
    o = (seen.a() @ seen.heads(seen.y["v_proj"])).transpose(1, 2)  # (B, N, H, D)
    pairs = [(h, g) for h in range(HEADS) for g in range(h)]
    return sum(
        F.cosine_similarity(o[:, :, h], o[:, :, g], dim=-1).square() for h, g in pairs
    ).mean()


def explicit(form="paper", **terms):
    return lambda: ExplicitDropout(**terms, rate=P, form=form)


READERS = {
    **{
        f"{term}-{form}": (explicit(form, **{term: 1.0}), linear(name, form))
        for term, name in (
            ("value", "v_proj"),
            ("output", "out_proj"),
            ("ffn1", "fc1"),
            ("ffn2", "fc2"),
        )
        for form in ("paper", "exact", "inverted")
    },
    **{f"query-{f}": (explicit(f, query=1.0), query(f)) for f in ("paper", "exact")},
    **{
        f"attended-{f}": (explicit(f, attended_value=1.0), attended(f))
        for f in ("paper", "exact", "inverted")
    },
    "residual": (explicit(residual=1.0), residual),
    "arora": (lambda: AroraDropout(query=1.0, ffn=1.0, rate=P), arora),
    "mixout": (lambda: ExplicitMixout(1.0, rate=P), mixout),
    "entropy": (lambda: AttentionEntropy(1.0, floor=0.9), entropy),
    "diversity": (lambda: HeadDiversity(1.0), diversity),
}
OTHERS = {
    "nothing": (),
    "feed-forward dropout": (lambda: FeedForwardDropout(0.5),),
    "projection dropout": (lambda: ProjectionDropout(0.5, targets=["q", "k", "v", "out"]),),
    "drop connect": (lambda: DropConnect(0.5, targets="all"),),
    "mixout": (lambda: Mixout(0.7),),
    "drop key": (lambda: DropKey(0.4),),
    "drop attention": (lambda: DropAttention(0.4, normalized=False),),
    "drop attention, columns": (lambda: DropAttention(0.4, unit="column"),),
    "hard masking": (lambda: HardMasking(0.5, top=0.5, fill="zero"),),
    "blur": (lambda: BlurredAttention(3, 2.0),),
    "drop head": (lambda: DropHead(0.5),),
    "drop path": (lambda: DropPath(0.5),),
    "hidden dropout": (lambda: HiddenDropout(0.5),),
    "layer drop": (lambda: LayerDrop(0.5),),
    "own attention dropout": (),
    "several": (
        lambda: DropKey(0.3),
        lambda: DropConnect(0.5, targets="all"),
        lambda: DropHead(0.5),
    ),
}

OF_LINEAR_LAYERS = (
    "nothing",
    "feed-forward dropout",
    "projection dropout",
    "drop connect",
    "several",
)


def check(model, x, methods, formula, runs=1, single=False):
    """The penalty and its gradients against the formula, in the last of some forwards.

    `single` for methods that compute in float32.
    """
    seen = Seen(model)
    reg = regularize(model, methods)
    with torch.no_grad():  # away from the weights that Mixout keeps
        for name, weight in seen.w.items():
            weight.add_(torch.linspace(-0.3, 0.4, weight.numel()).view_as(weight).to(weight.dtype))
            assert name in MAPS
    for run in range(runs):
        torch.manual_seed(run)
        model(x)
        got = reg.penalty()
    wanted = formula(seen)
    rtol = 2e-5 if single else 1e-7
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=1e-10)
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    found, slow = (
        torch.autograd.grad(value, own.values(), retain_graph=True, allow_unused=True)
        for value in (got, wanted)
    )
    for name, p, a, b in zip(own, own.values(), found, slow, strict=True):
        a, b = (torch.zeros_like(p) if g is None else g for g in (a, b))
        torch.testing.assert_close(
            a, b, rtol=rtol, atol=1e-6 if single else 1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )
    return got.item()


def cases():
    """Those who read an attention beside every method, both ways of computing it; those who read a
    linear layer beside the methods that change one. `make full` runs all."""
    for reader in READERS:
        attends = reader.startswith(("attended", "entropy", "diversity"))
        for other in OTHERS:
            if FULL or attends or other in OF_LINEAR_LAYERS:
                yield pytest.param(reader, other, False, id=f"{reader}-{other}-sdpa")
            if FULL or attends or (other == "several" and reader.startswith(("value", "query"))):
                yield pytest.param(reader, other, True, id=f"{reader}-{other}-eager")


@pytest.mark.parametrize(("reader", "other", "eager"), list(cases()))
def test_a_penalty_is_the_formula_of_its_own_input(reader, other, eager):
    """Beside every method, in both orders; eager attention in its first forward and in later ones,
    which go a remembered way."""
    method, formula = READERS[reader]
    dropout = 0.4 if other == "own attention dropout" else 0.0
    values = []
    for first in (True, False):
        model, x = model_and_input(eager=eager, dropout=dropout)
        others = [make() for make in OTHERS[other]]
        methods = [method(), *others] if first else [*others, method()]
        single = reader in ("entropy", "diversity")
        values.append(check(model, x, methods, formula, 3 if eager else 1, single))
    assert values[0] == values[1]


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("other", ["drop connect", "projection dropout", "own attention dropout"])
def test_detached_inputs_read_the_same_and_give_gradients_to_weights_alone(other, detach):
    terms = {"value": 1.0, "attended_value": 1.0, "ffn": 1.0, "output": 1.0}
    method = ExplicitDropout(**terms, rate=P, form="exact", detach_inputs=detach)
    model, x = model_and_input(dropout=0.4 if other == "own attention dropout" else 0.0)
    seen = Seen(model)
    reg = regularize(model, [*(make() for make in OTHERS[other]), method])
    model(x)
    got = reg.penalty()
    names = ("v_proj", "out_proj", "fc1", "fc2")
    wanted = sum(linear(n, "exact")(seen) for n in names) + attended("exact")(seen)
    torch.testing.assert_close(got, wanted)
    upstream = torch.autograd.grad(got, model.embed.weight, allow_unused=True)[0]
    assert (upstream is None) == detach


def test_the_models_own_dropout_before_a_linear_layer_is_part_of_its_input():
    """What nn.Dropout gives to a layer is what the layer reads, with its zeros: no method of dampen
    has touched it. `reg.set_builtin_dropout(rate=0)` switches it off."""
    model, x = model_and_input()
    model.blocks[0].drop.p = 0.5
    assert check(model, x, [explicit(ffn2=1.0)()], linear("fc2", "paper")) > 0


# --- rows of A that do not sum to 1 -------------------------------------------------------------


def mask_with_empty_rows(per_head):
    keep = torch.ones(BATCH, HEADS if per_head else 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    keep[0, 0, 2] = False  # a query without keys
    keep[1, -1, :3] = False
    return keep


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("other", ["nothing", "drop key", "drop head", "drop connect"])
def test_a_query_without_keys_has_no_attended_value(per_head, other):
    model, x = model_and_input()
    model.blocks[0].attn.keep = mask_with_empty_rows(per_head)
    methods = [make() for make in OTHERS[other]]
    check(model, x, [*methods, explicit(attended_value=1.0)()], attended("paper"))


@pytest.mark.parametrize("form", ["paper", "exact"])
@pytest.mark.parametrize("kind", ["sink", "mask after the softmax"])
@pytest.mark.parametrize(
    "other", ["nothing", "own attention dropout", "drop attention", "drop head"]
)
def test_attended_value_where_the_model_itself_takes_weight_away(kind, form, other):
    dropout = 0.4 if other == "own attention dropout" else 0.0
    model, x = model_and_input(eager=True, dropout=dropout, sink=kind == "sink")
    if kind != "sink":
        model.blocks[0].attn.after = torch.eye(TOKENS, dtype=torch.bool)
    methods = [make() for make in OTHERS[other]]
    check(model, x, [*methods, explicit(form, attended_value=1.0)()], attended(form), runs=3)


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("other", OTHERS)
def test_without_value_weights_nothing_is_attended(other, form):
    """Wv = 0 and a large bias: A V is 0 whatever is done to A, in torch's own layer too."""
    torch.manual_seed(0)
    dropout = 0.3 if other == "own attention dropout" else 0.0
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True).double().train()
    with torch.no_grad():
        layer.self_attn.in_proj_weight[16:] = 0
        layer.self_attn.in_proj_bias[16:] = 3.0
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    for first in (True, False):
        methods = [make() for make in OTHERS[other]]
        methods.insert(0 if first else len(methods), explicit(form, attended_value=1.0)())
        reg = regularize(layer, methods)
        layer(x)
        assert reg.penalty().item() == pytest.approx(0.0, abs=1e-25)
        reg.remove()


# --- order, and what reading costs others -------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: DropConnect(0.5, targets="all"), lambda: Mixout(0.7)),
        (lambda: DropAttention(0.4, normalized=False), lambda: HardMasking(0.5, fill="zero")),
        (lambda: DropKey(0.2), lambda: DropKey(0.4, unit="column")),
        (lambda: BlurredAttention(3, 2.0), lambda: BlurredAttention(3, 2.0, edge="zero")),
        (lambda: DropPath(0.5), lambda: HiddenDropout(0.5)),
    ],
)
def test_the_order_of_methods_does_not_matter(first, second):
    outputs = []
    for makes in ((first, second), (second, first)):
        model, x = model_and_input()
        regularize(model, [make() for make in makes])
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.5)
        torch.manual_seed(3)
        outputs.append(model(x))
    assert torch.equal(*outputs)


def test_a_dropped_weight_is_zero_where_another_method_replaces_weights():
    """Mixout replaces weights, DropConnect drops some, in either order: of an input with one feature
    an output is then a single weight, and a share of them is exactly 0."""
    for methods in (
        [DropConnect(0.5, targets="ffn"), Mixout(0.7)],
        [Mixout(0.7), DropConnect(0.5, targets="ffn")],
    ):
        model, x = model_and_input()
        seen = Seen(model)
        model.blocks[0].fc1.register_forward_pre_hook(
            lambda m, args: (F.one_hot(torch.zeros(3, 5).long(), WIDTH).double(),)
        )
        regularize(model, methods)
        with torch.no_grad():
            seen.w["fc1"].add_(1.0)
        zeros = 0
        for seed in range(20):
            torch.manual_seed(seed)
            model(x)
            zeros += (seen.y["fc1"][0, 0] - seen.b["fc1"]).abs().lt(1e-12).sum().item()
        assert 40 < zeros < 100  # of 140, at a rate of 0.5


@pytest.mark.parametrize("reader", [r for r in READERS if r.endswith("paper") or "-" not in r])
def test_a_method_that_only_reads_changes_no_draw_of_others(reader):
    outputs = []
    for readers in ([], [READERS[reader][0]()]):
        model, x = model_and_input()
        regularize(model, [DropKey(0.3), DropConnect(0.3, targets="all"), DropHead(0.5), *readers])
        torch.manual_seed(5)
        outputs.append(model(x))
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)


def test_parts_add_up():
    """One method with two terms, two methods with one each, and twice the same."""
    totals = []
    for methods in (
        [ExplicitDropout(value=0.3, attended_value=0.2, ffn=0.7)],
        [ExplicitDropout(value=0.3), ExplicitDropout(attended_value=0.2), ExplicitDropout(ffn=0.7)],
        [ExplicitDropout(value=0.15, attended_value=0.1, ffn=0.35) for _ in range(2)],
    ):
        model, x = model_and_input()
        reg = regularize(model, [DropConnect(0.5, targets="all"), *methods])
        torch.manual_seed(1)
        model(x)
        totals.append(reg.penalty())
    torch.testing.assert_close(totals[0], totals[1])
    torch.testing.assert_close(totals[0], totals[2])


# --- methods of one's own -----------------------------------------------------------------------


class OutputPenalty(dampen.Regularizer):
    """Reads y in `product` and o in `heads`, as a user would write it."""

    stochastic = False

    def __init__(self):
        super().__init__()
        self.scheduled("weight", 1.0, high=math.inf)

    def product(self, y, call):
        if call.role == "ffn_in":
            self.penalize(self.weight * y.square().mean(), "product")
        return y

    def heads(self, o, call):
        self.penalize(self.weight * o.square().mean(), "heads")
        return o


@pytest.mark.parametrize("other", OTHERS)
def test_a_method_of_ones_own_reads_clean_operands(other):
    dropout = 0.4 if other == "own attention dropout" else 0.0
    model, x = model_and_input(dropout=dropout)

    def formula(seen):
        y = seen.bare("fc1") + seen.b["fc1"]
        o = seen.a() @ seen.heads(seen.y["v_proj"])
        return y.square().mean() + o.square().mean()

    check(model, x, [*(make() for make in OTHERS[other]), OutputPenalty()], formula)


class Doubles(OutputPenalty):
    """Says that it draws nothing and makes a penalty, and changes what it reads all the same."""

    def heads(self, o, call):
        return 2 * super().heads(o, call)


def test_a_method_that_says_it_only_reads_may_not_change_anything():
    model, x = model_and_input()
    reg = regularize(model, Doubles())
    with pytest.raises(
        RuntimeError, match="Doubles.heads returned another tensor.*only_reads = False"
    ):
        model(x)
    reg.remove()
    Doubles.only_reads = False
    try:
        regularize(model, Doubles())
        model(x)
    finally:
        Doubles.only_reads = True


# --- convolutions, low-rank adapters, long sequences, returned weights ----------------------------


class ConvolutionalAttention(nn.Module):
    """Projections by convolutions that are one position wide: linear layers of (B, C, N)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS * SIZE)
        self.v_proj = nn.Conv1d(WIDTH, HEADS * SIZE, 1)
        self.out_proj = nn.Conv1d(HEADS * SIZE, WIDTH, 1)

    def forward(self, x):
        q, k = (
            m(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for m in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(x.mT).unflatten(1, (HEADS, SIZE)).mT
        o = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(o.mT.flatten(1, 2)).mT


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("other", ["nothing", "projection dropout", "drop connect", "mixout"])
@pytest.mark.parametrize("hooks", [False, True], ids=["regularize", "regularize_convolutions"])
def test_a_convolution_of_one_position(hooks, other, form):
    """As a linear layer of `regularize`, and by the hooks of `regularize_convolutions` beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, WIDTH), ConvolutionalAttention()).double().train()
    attention, x = model[1], torch.randn(BATCH, TOKENS, 4, dtype=torch.float64)
    seen, names = {}, ("v_proj", "out_proj") if hooks else ("v_proj",)
    for name in names:
        conv = getattr(attention, name)
        conv.register_forward_hook(lambda m, args, out, name=name: seen.update({name: args[0]}))
    methods = [make() for make in OTHERS[other]]
    if hooks:
        regularize(model, [*methods, DropHead(0.3)])
        handle = regularize_convolutions(model, weight=1.0, rate=P, form=form)
    else:
        handle = regularize(model, [*methods, explicit(form, value=1.0)()])
    with torch.no_grad():
        attention.v_proj.weight.add_(0.2)
    model(x)
    b, v = parts(form)
    wanted = 0.0
    for name in names:
        w, inputs = getattr(attention, name).weight[..., 0], seen[name].mT
        y = torch.einsum("bni,oi->bno", inputs, w)
        wanted = wanted + 0.5 * (b * y.square().sum() + v * variance(inputs, w)) / N
    got = handle.penalty()
    torch.testing.assert_close(got, wanted)
    weights = [model[0].weight, *(getattr(attention, name).weight for name in names)]
    found, slow = (
        torch.autograd.grad(value, weights, retain_graph=True) for value in (got, wanted)
    )
    torch.testing.assert_close(found, slow)


class LowRankLinear(nn.Module):
    """A LoRA layer as peft makes them, with the parts that dampen reads."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.active_adapters = base, {"a": 0.5}, ["a"]
        self.lora_A = nn.ModuleDict({"a": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(2, base.out_features, bias=False)})
        self.disable_adapters = self.merged = False

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B["a"](self.lora_A["a"](x))


@pytest.mark.parametrize("form", ["paper", "exact", "inverted"])
@pytest.mark.parametrize("other", ["nothing", "feed-forward dropout", "drop connect"])
def test_a_layer_with_a_low_rank_adapter(other, form):
    """W + s B A of the clean input, whatever is done to W and to its input in the forward."""
    model, x = model_and_input()
    block = model.blocks[0]
    block.fc1, block.fc2 = LowRankLinear(block.fc1).double(), LowRankLinear(block.fc2).double()
    seen = {}
    for name in ("fc1", "fc2"):
        layer = getattr(block, name)
        layer.register_forward_hook(lambda m, args, out, name=name: seen.update({name: args[0]}))
    reg = regularize(model, [*(make() for make in OTHERS[other]), explicit(form, ffn=1.0)()])
    model(x)
    b, v = parts(form)
    wanted = 0.0
    for name in ("fc1", "fc2"):
        layer = getattr(block, name)
        w = layer.base_layer.weight + 0.5 * layer.lora_B["a"].weight @ layer.lora_A["a"].weight
        y = torch.einsum("bni,oi->bno", seen[name], w)
        wanted = wanted + 0.5 * (b * y.square().sum() + v * variance(seen[name], w)) / N
    got = reg.penalty()
    torch.testing.assert_close(got, wanted)
    weights = [block.fc1.lora_A["a"].weight, block.fc2.lora_B["a"].weight]
    found, slow = (
        torch.autograd.grad(value, weights, retain_graph=True) for value in (got, wanted)
    )
    torch.testing.assert_close(found, slow)


@pytest.mark.parametrize("reader", ["attended-paper", "attended-exact", "entropy", "diversity"])
@pytest.mark.parametrize("other", ["drop key", "drop attention", "several"])
def test_chunks_of_queries_read_the_same(reader, other, monkeypatch):
    monkeypatch.setattr("dampen.kernels.kernel.CHUNK", 2 * BATCH * HEADS * TOKENS)
    monkeypatch.setattr("dampen.kernels.kernel.LONG", 1)
    method, formula = READERS[reader]
    model, x = model_and_input()
    methods = [*(make() for make in OTHERS[other]), method()]
    check(model, x, methods, formula, single=reader in ("entropy", "diversity"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_and_in_sixteen_bits(dtype):
    """Close to the penalty in float64: the sum is made in float32, and dtypes meet without an error."""
    values = []
    for cast in (torch.float64, dtype):
        for autocast in (False, True) if cast is not torch.float64 else (False,):
            model, x = model_and_input()
            inside = torch.float32 if autocast else cast
            model, x = model.to(inside), x.to(inside)
            terms = {
                "value": 1.0,
                "attended_value": 1.0,
                "ffn": 1.0,
                "output": 1.0,
                "residual": 1.0,
            }
            others = [DropConnect(0.5, targets="all"), ProjectionDropout(0.5, targets=["q", "v"])]
            reg = regularize(model, [*others, ExplicitDropout(**terms, form="exact")])
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model.blocks[0](model.embed(x))
            taken = reg.penalties()
            # what comes first in the block has the same input whatever is drawn
            values.append(taken["explicit_dropout.value"].item())
            assert all(math.isfinite(v.item()) for v in taken.values())
    assert values[1:] == pytest.approx([values[0]] * 2, rel=0.03)


def test_weights_that_a_module_returns_are_those_of_the_forward():
    """A reader beside DropAttention: the weights given out have the zeros of the forward."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True).train()
    x = torch.randn(2, 5, 8)
    regularize(layer, [HeadDiversity(1.0), DropAttention(0.5, normalized=False)])
    _, weights = layer(x, x, x, need_weights=True, average_attn_weights=False)
    assert weights.eq(0).float().mean() > 0.2
