"""One mask for q, k and v at once: unbiased over all signs, in models, with padding, and what is refused."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import ExplicitDropout, regularize
from dampen.calls import Call, LinearCall
from dampen.checking import CONTRACTS, SUBJECTS, check_contract, check_regularizer
from dampen.functional.explicit.joint import joint_variance
from dampen.functional.explicit.reductions import token_rows
from reproductions.models.seq2seq import Seq2Seq


def attention_of(x, w, heads=1):
    """softmax(q k^T / sqrt d) v of a fused projection, written plainly."""
    q, k, v = (x @ w.t()).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v


def exact_sum(x, w, heads=1, valid=None):
    """sum_ij x_ij^2 ||d o / d x_ij||^2 from the whole Jacobian; outputs of padded queries do not count."""
    jacobian = torch.autograd.functional.jacobian(
        lambda t: attention_of(t, w, heads), x, create_graph=True
    )
    squares = jacobian.square()
    if valid is not None:
        squares = squares * valid[:, None, :, None, None, None, None]
    return (x.square() * squares.sum((0, 1, 2, 3))).sum()


def call_for(x, w, o):
    call = Call(shape=(*o.shape[:3], o.shape[2]), head_size=o.shape[3], value_size=o.shape[3])
    call.maps["qkv"] = LinearCall("qkv", x, w, None)
    return call


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_mean_over_all_signs_is_the_sum_over_the_jacobian(reduction):
    """Every one of the 256 sign vectors of 2 tokens x 2 heads x 2 channels; value and gradient, to ten digits."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    rows, p = token_rows(reduction, 1, 2, None), 0.3
    total = 0.0
    for signs in itertools.product((-1.0, 1.0), repeat=8):
        o = attention_of(x, w, heads=2)
        total = total + joint_variance(
            o, call_for(x, w, o), rows, p, torch.tensor(signs, dtype=torch.float64).view_as(o)
        )
    got = total / 256
    expected = 0.5 * p / (1 - p) * exact_sum(x, w, heads=2) / (1 if reduction == "sum" else 2)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)
    for a, b in zip(*(torch.autograd.grad(v, (x, w)) for v in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_first_order_is_the_leading_part_of_real_noise():
    """For noise that is small (not dropout, which is not) the expected deviation is what the Jacobian says."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 3, 4, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    noise = 1e-4 * torch.randn(4000, 3, 4, dtype=torch.float64) * x
    found = (attention_of(x + noise, w) - attention_of(x, w)).square().sum((1, 2, 3)).mean()
    assert found.item() == pytest.approx(1e-8 * exact_sum(x, w).item(), rel=0.1)


MODELS = {
    "own ViT, fused": lambda: dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8
    ),
    "torch's encoder layer": lambda: nn.TransformerEncoderLayer(
        8, 2, 8, dropout=0.0, batch_first=True
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_in_a_model_the_mean_over_draws_is_the_jacobians_sum(name):
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    x = torch.randn(2, 1, 8, 8).double() if "ViT" in name else torch.randn(2, 5, 8).double()
    kept = {}
    target = model.blocks[0].norm1 if "ViT" in name else None
    hook = (
        target.register_forward_hook(lambda m, i, o: kept.update(x=o.detach())) if target else None
    )
    plain = model(x)
    if hook:
        hook.remove()
    inputs = kept.get("x", x)
    weight = model.blocks[0].attn.qkv.weight if "ViT" in name else model.self_attn.in_proj_weight
    bias = model.blocks[0].attn.qkv.bias if "ViT" in name else model.self_attn.in_proj_bias
    assert (bias == 0).all()  # else the plain reference above would need it
    expected = (
        0.5
        * 0.2
        / 0.8
        * exact_sum(inputs, weight.detach(), heads=2).item()
        / inputs.shape[:2].numel()
    )
    reg = regularize(model, ExplicitDropout(joint=1.0, form="inverted", rate=0.2))
    draws = []
    for _ in range(300):
        out = model(x)
        torch.testing.assert_close(out, plain)  # the model computes what it did
        draws.append(reg.penalty().item())
    draws = torch.tensor(draws, dtype=torch.float64)
    assert abs(draws.mean().item() - expected) < 4 * draws.std().item() / 300**0.5
    model(x)
    reg.penalty().backward()
    gradient = weight.grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


def test_padded_tokens_change_nothing():
    torch.manual_seed(0)
    model = dampen.models.FeatureEncoder(
        features=4, width=8, depth=2, heads=2, mlp=8, classes=3
    ).train()
    reg = regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    x = torch.randn(2, 6, 4)
    padding = torch.arange(6).expand(2, 6) >= torch.tensor([[6], [4]])
    other = x.clone()
    other[1, 4:] = 100.0
    values = []
    for given in (x, other):
        torch.manual_seed(1)
        model(given, padding)
        values.append(reg.penalty())
    assert torch.equal(values[0], values[1])
    assert values[0] > 0


def test_where_nothing_below_is_trained():
    """Frozen embeddings and norms: the input of the first attention has no gradient of its own."""
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, width=8, depth=2, heads=2, mlp=8
    ).train()
    x = torch.randn(2, 1, 8, 8)
    free = regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    torch.manual_seed(1)
    model(x)
    expected = free.penalty()
    free.remove()
    for name, p in model.named_parameters():
        p.requires_grad = "attn" in name and "blocks.0" in name
    reg = regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    torch.manual_seed(1)
    model(x)
    value = reg.penalty()
    torch.testing.assert_close(value, expected)
    value.backward()
    assert model.blocks[0].attn.qkv.weight.grad.abs().max() > 0


def test_separate_projections_and_causal_models():
    torch.manual_seed(0)
    model = dampen.models.LanguageModel(
        vocab=11, width=8, depth=2, heads=2, mlp=8, context=6
    ).train()
    reg = regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    tokens = torch.randint(11, (2, 6))
    loss, terms = reg.loss(
        lambda: model(tokens), lambda out: F.cross_entropy(out.flatten(0, 1), tokens.flatten())
    )
    loss.backward()
    assert terms["explicit_dropout.joint"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "paper"}, "not rescaled shift the input"),
        ({"form": "exact"}, "not rescaled shift the input"),
        ({"form": "inverted", "detach_inputs": True}, "runs through the activations"),
        ({"form": "inverted", "heads": "concat"}, "own heads"),
    ],
)
def test_what_has_no_such_term_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExplicitDropout(joint=1.0, **arguments)


def test_cross_attention_and_compiled_graphs_are_refused():
    model = Seq2Seq(source_vocab=9, target_vocab=9, width=8, depth=1, heads=2, mlp=8).train()
    regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    with pytest.raises(RuntimeError, match="they read different inputs"):
        model(torch.randint(3, 9, (2, 5)), torch.randint(3, 9, (2, 5)))
    vit = dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8
    ).train()
    regularize(vit, ExplicitDropout(joint=1.0, form="inverted"))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="joint_variance"):
        torch.compile(vit, backend="eager", fullgraph=True)(torch.randn(1, 1, 8, 8))


def test_eval_is_untouched_and_no_grad_counts_nothing_that_nobody_takes():
    model = dampen.models.ViT(
        image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8
    ).eval()
    x = torch.randn(1, 1, 8, 8)
    plain = model(x)
    reg = regularize(model, ExplicitDropout(joint=1.0, form="inverted"))
    assert torch.equal(model(x), plain)
    model.train()
    with torch.no_grad():
        model(x)
    loss, terms = reg.loss(lambda: model(x), lambda out: out.sum())
    assert terms["explicit_dropout.joint"] > 0
    loss.backward()


@pytest.mark.parametrize("name", ["vit", "language", "torch"])
def test_a_loss_measured_without_gradients_has_it_too(name):
    """The same numbers as with gradients, and no graph in them."""
    torch.manual_seed(0)
    if name == "vit":
        model = dampen.models.ViT(
            image_size=8, patch_size=4, channels=1, width=8, depth=2, heads=2, mlp=8
        )
        x = torch.randn(2, 1, 8, 8)
    elif name == "language":
        model = dampen.models.LanguageModel(vocab=11, width=8, depth=2, heads=2, mlp=8, context=6)
        x = torch.randint(11, (2, 6))
    else:
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        model, x = torch.nn.TransformerEncoder(layer, 2), torch.randn(2, 5, 8)
    reg = regularize(model.train(), ExplicitDropout(joint=1.0, value=1.0, form="inverted"))
    results = []
    for grad in (True, False):
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad):
            results.append(reg.loss(lambda: model(x), lambda out: out.square().mean()))
    (loss, terms), (measured, found) = results
    assert found.keys() == terms.keys() >= {"explicit_dropout.joint", "explicit_dropout.value"}
    for key, value in found.items():
        torch.testing.assert_close(value, terms[key].detach())
        assert not value.requires_grad
    torch.testing.assert_close(measured, loss.detach())
    assert not measured.requires_grad
    loss.backward()
    with (
        torch.inference_mode(),
        pytest.raises(RuntimeError, match=r"under torch.no_grad\(\) instead"),
    ):
        reg.loss(lambda: model(x), lambda out: out.square().mean())


COMPILED = {"compiled", "compiled_dynamic", "compiled_inductor"}


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_the_contracts_with_it_on():
    """All but a compiled graph, which is refused by name."""

    def make():
        return ExplicitDropout(joint=0.05, form="inverted")

    outcomes = check_regularizer(make, contracts=[c for c in CONTRACTS if c not in COMPILED])
    assert {o.subject for o in outcomes if o.state == "kept"} == set(SUBJECTS)
    assert all(o.state == "kept" for o in outcomes), [str(o) for o in outcomes]
    refused = check_contract(make, "compiled", "vit")
    assert "joint" in refused.message
    assert refused.state == "broken"
