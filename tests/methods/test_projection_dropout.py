"""ProjectionDropout, and the explicit counterparts of output projection and residual branch."""

import itertools

import pytest
import torch

import dampen
from dampen import ExplicitDropout, HiddenDropout, ProjectionDropout, regularize
from dampen.masks import bernoulli
from dampen.regularizer import UnsupportedModel

FORMS = ("paper", "exact", "inverted")


def vit(**more):
    torch.manual_seed(0)
    size = {
        "image_size": 8,
        "patch_size": 4,
        "channels": 1,
        "width": 4,
        "depth": 1,
        "heads": 2,
        "mlp": 4,
    } | more
    return dampen.models.ViT(**size).double().train()


def expectation(x, w, p, form):
    """1/2 E ||W (f(x) - x)||^2 over every mask of each token, w None for the branch itself."""
    total = 0.0
    for token in x.reshape(-1, x.shape[-1]):
        for mask in itertools.product((0.0, 1.0), repeat=len(token)):
            kept = torch.tensor(mask, dtype=x.dtype)
            chance = (1 - p) ** sum(mask) * p ** (len(mask) - sum(mask))
            moved = token * kept / (1 - p if form == "inverted" else 1) - token
            total += 0.5 * chance * (moved if w is None else w @ moved).square().sum()
    return (total / x.shape[:-1].numel()).item()


def seen(model, images):
    """The input and output of the output projection and of the second feed-forward map."""
    kept, block = {}, model.blocks[0]
    hooks = [
        module.register_forward_hook(
            lambda m, i, o, name=name: kept.update({name: (i[0].detach(), o.detach())})
        )
        for name, module in (("out", block.attn.proj), ("ffn_out", block.mlp.fc2))
    ]
    model(images)
    for hook in hooks:
        hook.remove()
    return kept


def test_dropout_before_the_output_projection():
    """With the mask that was drawn, and nothing else changed."""
    model = vit()
    attn, x = model.blocks[0].attn, torch.randn(2, 5, 4, dtype=torch.float64)
    kept = {}
    hook = attn.proj.register_forward_pre_hook(lambda m, i: kept.update(x=i[0]))
    attn(x)
    hook.remove()
    regularize(model, ProjectionDropout(0.4))
    torch.manual_seed(1)
    got = attn(x)
    torch.manual_seed(1)
    keep = ~bernoulli(kept["x"].shape, 0.4)
    expected = torch.nn.functional.linear(kept["x"] * keep / 0.6, attn.proj.weight, attn.proj.bias)
    torch.testing.assert_close(got, expected)


def test_targets():
    model = vit()
    regularize(model, ProjectionDropout(0.5, targets="qkv"))
    attn, x = model.blocks[0].attn, torch.randn(2, 5, 4, dtype=torch.float64)
    assert not torch.equal(attn(x), attn(x))
    assert torch.equal(model.blocks[0].mlp(x), model.blocks[0].mlp(x))
    with pytest.raises(ValueError, match="the feed-forward has FeedForwardDropout"):
        ProjectionDropout(0.1, targets="all")


@pytest.mark.parametrize("form", ["exact", "inverted"])
def test_output_is_the_expectation_over_all_masks(form):
    model, images = vit(), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    x, _ = seen(model, images)["out"]
    reg = regularize(model, ExplicitDropout(output=1.0, rate=0.3, form=form))
    model(images)
    expected = expectation(x, model.blocks[0].attn.proj.weight.detach(), 0.3, form)
    assert reg.penalty().item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_residual_is_the_expectation_over_all_masks(form):
    """Both branches, bias and all; the paper's form keeps p^2 of the p that is true."""
    model, images = vit(), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].attn.proj.bias.fill_(0.5)
    branches = [y for _, y in seen(model, images).values()]
    reg = regularize(model, ExplicitDropout(residual=1.0, rate=0.3, form=form))
    model(images)
    value = reg.penalty()
    expected = sum(
        expectation(b, None, 0.3, "exact" if form == "paper" else form) for b in branches
    )
    assert value.item() == pytest.approx(expected * (0.3 if form == "paper" else 1), rel=1e-10)
    value.backward()
    assert model.blocks[0].mlp.fc2.bias.grad.abs().max() > 0  # the branch's bias is in it


def test_residual_agrees_with_hidden_dropout_itself():
    """Monte Carlo with the real method: the deviation of the block's output before the second branch reads it."""
    model = vit()
    block, x = model.blocks[0], torch.randn(1, 5, 4, dtype=torch.float64)
    plain = block.attn(block.norm1(x)).detach()
    draws = 4000
    torch.manual_seed(3)
    deviation = (
        (torch.nn.functional.dropout(plain.expand(draws, -1, -1), 0.3) - plain)
        .square()
        .sum((1, 2))
        .mean()
    )
    assert 0.5 * deviation.item() / 5 == pytest.approx(
        expectation(plain, None, 0.3, "inverted"), rel=0.05
    )
    reg = regularize(model, HiddenDropout(0.3))
    assert not torch.equal(block(x), block(x))
    reg.remove()


def test_padded_tokens_count_nowhere():
    torch.manual_seed(0)
    model = dampen.models.FeatureEncoder(
        features=4, width=8, depth=2, heads=2, mlp=8, classes=3
    ).train()
    reg = regularize(model, ExplicitDropout(output=1.0, residual=1.0))
    x = torch.randn(2, 6, 4)
    padding = torch.arange(6).expand(2, 6) >= torch.tensor([[6], [4]])
    other = x.clone()
    other[1, 4:] = 100.0
    values = []
    for given in (x, other):
        model(given, padding)
        values.append(reg.penalties())
    assert (
        values[0].keys()
        == values[1].keys()
        == {"explicit_dropout.output", "explicit_dropout.residual"}
    )
    for name, value in values[0].items():
        torch.testing.assert_close(value, values[1][name])


class NoProjection(torch.nn.Module):
    """A block whose attention gives out its heads as they are."""

    def __init__(self):
        super().__init__()
        self.attn = Heads()
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)
        )

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(4, 12)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        (
            {"output": 1.0},
            r"output=...\) penalizes the attention's output projection, but '0' has none",
        ),
        (
            {"output": 1.0, "residual": 1.0},
            r"output=...\) penalizes the attention's output projection",
        ),
        (
            {"residual": 1.0},
            r"residual=...\) reads each branch at its last linear map \(out for one",
        ),
        (
            {"residual": 1.0, "ffn": 1.0},
            r"residual=...\) reads each branch at its last linear map \(out for one",
        ),
    ],
)
def test_a_layer_without_an_output_projection_is_refused(terms, message):
    model = torch.nn.Sequential(NoProjection(), NoProjection()).train()
    with pytest.raises(UnsupportedModel, match=message):
        regularize(model, ExplicitDropout(**terms))
    regularize(model, ExplicitDropout(value=1.0, ffn=1.0))


def test_a_layer_without_a_feed_forward_does_not_blame_ffn2_for_residual():
    model = torch.nn.ModuleList([vit().blocks[0].attn, vit().blocks[0].attn])
    with pytest.raises(
        UnsupportedModel, match=r"residual=...\) reads each branch .*ffn_out for one"
    ) as caught:
        regularize(model, ExplicitDropout(residual=1.0))
    assert "ffn2" not in str(caught.value)


def test_detached_residual_is_refused():
    with pytest.raises(ValueError, match="no weight is between"):
        ExplicitDropout(residual=1.0, detach_inputs=True)
    with pytest.raises(RuntimeError, match="without samples"):
        from dampen.calls import LinearCall
        from dampen.functional.explicit.layers import Term, tap_branch

        y = torch.randn(3, 4)
        tap_branch(y, LinearCall("out", y, y, None), Term(1.0, 0.1, "paper", "author"))
