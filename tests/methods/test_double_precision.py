"""In a model in float64 every penalty is computed in float64, whatever the method.

The oracle is its own definition of a gradient: the difference of two penalties a step of 1e-6 apart.
Numbers that went through float32 would be off by a tenth of it."""

import pytest
import torch

import dampen
from dampen.checking import masked

TERMS = dict.fromkeys(("query", "key", "value", "attended_value", "query_key", "ffn"), 1.0)
PENALTIES = {
    "explicit, paper": lambda w: dampen.ExplicitDropout(**dict.fromkeys(TERMS, w)),
    "explicit, exact": lambda w: dampen.ExplicitDropout(**dict.fromkeys(TERMS, w), form="exact"),
    "explicit, inverted": lambda w: dampen.ExplicitDropout(
        **dict.fromkeys(TERMS, w), form="inverted"
    ),
    "arora": lambda w: dampen.AroraDropout(query=w, key=w, value=w, ffn=w),
    "mixout": lambda w: dampen.ExplicitMixout(w),
    "entropy": lambda w: dampen.AttentionEntropy(w, floor=0.999),
    "diversity": lambda w: dampen.HeadDiversity(w),
    "consistency": lambda w: [dampen.DropHead(0.3), dampen.Consistency(w)],
    "symmetric": lambda w: [dampen.DropHead(0.3), dampen.Consistency(w, symmetric=True)],
    "r_drop": lambda w: [dampen.DropHead(0.3), dampen.RDrop(w)],
    "r_drop, mse": lambda w: [dampen.DropHead(0.3), dampen.RDrop(w, distance="mse")],
    "learned rate": lambda w: dampen.HardMasking(0.2, learn=["rate", "top"], prior_weight=w),
    "learned width": lambda w: dampen.BlurredAttention(3, 2.0, learn=True, prior_weight=w),
}
SEEN = masked.scenes()["causal and padded"][0]


def penalty_of(model, reg):
    """The named terms' sum with the draws of one seed, in which only the weights may differ."""
    torch.manual_seed(3)
    _, terms = reg.loss(
        lambda: model(masked.ids(), SEEN), lambda out: out.sum() * 0, valid=SEEN[:, 0].any(1)
    )
    return sum(value for name, value in terms.items() if name != "task")


def attached(name, weight=1.0):
    model = masked.build("sdpa", torch.float64)
    reg = dampen.regularize(model, PENALTIES[name](weight))
    model.double()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.3 * torch.randn_like(p))
    return model, reg


@pytest.mark.parametrize("name", PENALTIES)
def test_the_gradient_is_the_difference(name):
    model, reg = attached(name)
    value = penalty_of(model, reg)
    assert value.dtype is torch.float64
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(value, trained, allow_unused=True)
    torch.manual_seed(2)
    way = [torch.randn_like(p) for p in trained]
    expected = sum((g * d).sum() for g, d in zip(gradients, way, strict=True) if g is not None)
    step, ends = 1e-6, []
    for side in (1, -1):
        with torch.no_grad():
            for p, d in zip(trained, way, strict=True):
                p.add_(d, alpha=side * step)
        ends.append(penalty_of(model, reg).detach())
        with torch.no_grad():
            for p, d in zip(trained, way, strict=True):
                p.add_(d, alpha=-side * step)
    difference = (ends[0] - ends[1]) / (2 * step)
    assert abs(difference - expected) <= 1e-6 * (abs(expected) + abs(value)) + 1e-12
    assert abs(expected) > 1e-6


@pytest.mark.parametrize("name", PENALTIES)
def test_a_coefficient_is_not_rounded(name):
    """0.1 is 1.5e-8 off in float32."""
    tenth, whole = (penalty_of(*attached(name, w)).item() for w in (0.1, 1.0))
    assert tenth == pytest.approx(0.1 * whole, rel=1e-13)
