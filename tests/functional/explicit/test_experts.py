"""Mixtures of experts: E equal experts cost what the dense layer they equal costs, padding counts nowhere, and experts
kept as parameters are reached or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import AroraDropout, DropConnect, ExplicitDropout, FeedForwardDropout
from dampen.regularizer import UnsupportedModel
from tests.hooks.odd_layers import AllAtOnce, D, Experts, ParameterMixture, Sparse

X = torch.randn(4, 6, D, generator=torch.Generator().manual_seed(0))
VALID = torch.ones(4, 6)
VALID[1, 3:] = VALID[2, 5:] = 0
KINDS = {
    "modules": lambda count: Experts(count),
    "parameters": lambda count: ParameterMixture(count),
    "transposed parameters": lambda count: ParameterMixture(count, transposed=True),
    "all at once": lambda count: AllAtOnce(count),
}
METHODS = {
    "paper": ExplicitDropout(ffn=1.0),
    "exact": ExplicitDropout(ffn=1.0, form="exact"),
    "inverted": ExplicitDropout(ffn=1.0, form="inverted"),
    "sum": ExplicitDropout(ffn=1.0, reduction="sum"),
    "detached": ExplicitDropout(ffn=1.0, detach_inputs=True),
    "arora": AroraDropout(ffn=1.0),
}


def build(kind, count):
    torch.manual_seed(0)
    model = Sparse(lambda: KINDS[kind](count)).train()
    with torch.no_grad():
        for layer in model.layers:
            biases = [
                m.bias
                for m in layer.mlp.modules()
                if isinstance(m, nn.Linear) and m.out_features != count
            ]
            for bias in biases:
                bias.zero_()
            for number in range(1, count):
                for weight, first in zip(
                    layer.mlp.weights(number), layer.mlp.weights(0), strict=True
                ):
                    weight.copy_(first)
    return model


def by_hand(model, method, valid=None):
    """The penalty from what enters the mixture, with the weights of expert 0 for all."""
    rate, total, inputs = 0.2, 0.0, []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
        for layer in model.layers
    ]
    model(X, valid)
    for hook in hooks:
        hook.remove()
    keep = torch.ones(X.shape[:2]) if valid is None else valid
    for layer, x in zip(model.layers, inputs, strict=True):
        up, down = layer.mlp.weights(0)
        hidden = F.gelu(x @ up.t())
        for t, w in ((x, up), (hidden, down)):
            square = ((t @ w.t()).square().sum(-1) * keep).sum()
            power = (((t.square() * keep[..., None]).sum((0, 1))) * w.square().sum(0)).sum()
            value = {
                "paper": 0.5 * rate**2 * square,
                "exact": 0.5 * (rate**2 * square + rate * (1 - rate) * power),
                "inverted": 0.5 * rate / (1 - rate) * power,
                "sum": 0.5 * rate**2 * square * keep.sum(),
                "detached": 0.5 * rate**2 * square,
                "arora": rate / (1 - rate) * power,
            }[method]
            total += value / keep.sum()
    return total.item()


@pytest.mark.parametrize(
    ("count", "padded"), [(1, False), (3, True)], ids=["one-whole", "three-padded"]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_experts_cost_what_the_dense_layer_costs(kind, method, count, padded):
    model = build(kind, count)
    valid = VALID if padded else None
    expected = by_hand(model, method, valid)
    reg = dampen.regularize(model, METHODS[method])
    model(X, valid)
    assert reg.penalty().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_padding_does_not_count(kind):
    model = build(kind, 3)
    reg = dampen.regularize(model, ExplicitDropout(ffn=1.0, form="exact"))
    values = []
    for fill in (0.0, 9.0):
        model(torch.where(VALID[..., None] > 0, X, torch.full_like(X, fill)), VALID)
        values.append(reg.penalty().item())
    assert values[0] == pytest.approx(values[1], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_formula(kind):
    model = build(kind, 3)
    reg = dampen.regularize(model, ExplicitDropout(ffn=1.0), target_modules="layers.0.*")
    model(X)
    reg.penalty().backward()
    got = [w.grad for w in model.layers[0].mlp.parameters() if w.grad is not None]
    names = [n for n, w in model.layers[0].mlp.named_parameters() if w.grad is not None]
    copied = build(kind, 3)
    mixture, given = copied.layers[0].mlp, []
    hook = mixture.register_forward_pre_hook(lambda m, args: given.append(args[0]))
    copied(X)
    hook.remove()
    flat, value = given[0].reshape(-1, D), 0.0
    for number in range(3):
        up, down = mixture.weights(number)
        x = flat[torch.arange(len(flat)) % 3 == number]
        hidden = F.gelu(x @ up.t())
        value = value + 0.02 * (
            (x @ up.t()).square().sum() + (hidden @ down.t()).square().sum()
        ) / len(flat)
    value.backward()
    expected = dict(mixture.named_parameters())
    assert got
    for name, grad in zip(names, got, strict=True):
        if "bias" not in name:
            torch.testing.assert_close(grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "method", [FeedForwardDropout(0.9), DropConnect(0.9)], ids=["dropout", "connect"]
)
def test_experts_are_reached_by_dropout(kind, method):
    """Every expert's output changes."""
    model = build(kind, 3)
    mixture, given = model.layers[0].mlp, []
    mixture.register_forward_hook(lambda m, args, out: given.append((args[0], out)))
    model(X)
    dampen.regularize(model, method, target_modules="layers.0.*")
    model(X)
    (before_in, before), (after_in, after) = given
    torch.testing.assert_close(before_in, after_in)
    moved = (before - after).reshape(-1, D).abs().sum(-1) > 1e-6
    assert moved.float().mean() > 0.8


def test_reductions_per_sample_are_refused_with_their_reason():
    model = build("modules", 2)
    dampen.regularize(model, ExplicitDropout(ffn=1.0, reduction="token_mean"))
    with pytest.raises(RuntimeError, match="the experts at 'layers.0' get tokens without samples"):
        model(X)


class Strange(nn.Module):
    """Experts under names that tell nothing."""

    def __init__(self):
        super().__init__()
        self.experts = StrangeExperts()

    def forward(self, x):
        return self.experts(x)


class StrangeExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(2, D, D)) for _ in range(2))

    def forward(self, x):
        return torch.einsum("bnd,edh,ehk->bnk", x, self.first, self.second)


class OneProduct(ParameterMixture):
    """All experts in one product that is none of those which can be followed."""

    def forward(self, x):
        hidden = F.gelu(torch.einsum("bnd,ehd->ebnh", x, self.experts.gate_up_proj))
        return torch.einsum("ebnh,edh->bnd", hidden, self.experts.down_proj)


def test_experts_that_cannot_be_reached_are_refused_by_name():
    with pytest.raises(
        UnsupportedModel, match=r"layers.0.mlp.experts.first, layers.0.mlp.experts.second"
    ):
        dampen.regularize(Sparse(Strange), FeedForwardDropout(0.1))
    model = Sparse(lambda: OneProduct(2)).train()
    dampen.regularize(model, FeedForwardDropout(0.1))
    with pytest.raises(
        RuntimeError, match=r"'layers.0.mlp' ran without a product with a slice of .*gate_up_proj"
    ):
        model(X)


def test_a_branch_that_sums_experts_has_no_residual_term():
    model = build("modules", 2)
    dampen.regularize(model, ExplicitDropout(residual=1.0))
    with pytest.raises(RuntimeError, match="a sum of experts"):
        model(X)


def test_routing_that_cannot_be_followed_is_an_error_where_tokens_are_padded():
    class Sorting(Experts):
        def forward(self, x):
            order = torch.sort(x, dim=1).values
            return torch.stack([expert(order) for expert in self.experts]).sum(0)

    model = Sparse(lambda: Sorting(2)).train()
    reg = dampen.regularize(model, ExplicitDropout(ffn=1.0))
    model(X)
    reg.penalty()
    with pytest.raises(RuntimeError, match="which of them are padding is not known"):
        model(X, VALID)


@pytest.mark.parametrize("kind", KINDS)
def test_eval_and_removal_leave_the_model_as_it_was(kind):
    model = build(kind, 2).eval()
    plain = model(X)
    reg = dampen.regularize(model, [FeedForwardDropout(0.5), ExplicitDropout(ffn=1.0)])
    assert torch.equal(model(X), plain)
    reg.remove()
    assert torch.equal(model.train()(X), plain)
