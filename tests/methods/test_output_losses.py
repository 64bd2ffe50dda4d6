"""Penalties on logits and on the task loss against sums over single predictions."""

import math

import pytest
import torch

import dampen
from dampen import (
    ConfidencePenalty,
    Consistency,
    DropKey,
    Flooding,
    NEFTune,
    RDrop,
    ZLoss,
    regularize,
)

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def vit():
    torch.manual_seed(0)
    sizes = {"image_size": 8, "patch_size": 4, "classes": 3, "width": 16, "heads": 2, "mlp": 16}
    return dampen.models.ViT(depth=2, **sizes)


def z_loss(logits):
    return math.log(sum(math.exp(z) for z in logits)) ** 2


def confidence(logits):
    total = sum(math.exp(z) for z in logits)
    p = [math.exp(z) / total for z in logits]
    return math.log(len(p)) - sum(-q * math.log(q) for q in p)


@pytest.mark.parametrize(
    ("method", "oracle"), [(ZLoss(0.5), z_loss), (ConfidencePenalty(0.5), confidence)]
)
@pytest.mark.parametrize("padded", [False, True])
def test_one_prediction_at_a_time_with_gradients(method, oracle, padded):
    z = torch.randn(2, 3, 5, dtype=torch.float64).mul(2).requires_grad_()
    valid = torch.tensor([[True, True, False], [True, False, False]]) if padded else None
    method.outputs([z], valid)
    (found,) = method.take_penalties().values()
    chosen = z[valid] if padded else z.flatten(0, 1)
    expected = 0.5 * sum(oracle(row) for row in chosen.tolist()) / len(chosen)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(found, z)
    step, moved = 1e-6, z.detach().clone()
    moved[0, 1, 2] += step
    method.outputs([moved], valid)
    (after,) = method.take_penalties().values()
    assert gradient[0, 1, 2].item() == pytest.approx((after - found).item() / step, abs=1e-5)


def test_forbidden_classes_have_no_part_in_the_confidence():
    z = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    method = ConfidencePenalty(1.0)
    method.outputs([z])
    (value,) = method.take_penalties().values()
    assert value.item() == pytest.approx(math.log(3) - math.log(2))
    value.backward()
    assert torch.isfinite(z.grad[0, :2]).all()


@pytest.mark.parametrize("level", [0.5, 5.0])
def test_flooding_turns_the_gradient_below_its_level(level):
    model = vit()
    reg = regularize(model, Flooding(level))
    loss, terms = reg.loss(lambda: model(X), lambda out: out.square().mean() + 1)
    task = terms["task"]
    assert loss.item() == pytest.approx(abs(task.item() - level) + level, rel=1e-5)
    (ours,) = torch.autograd.grad(loss, model.head.weight, retain_graph=True)
    (plain,) = torch.autograd.grad(task, model.head.weight)
    torch.testing.assert_close(ours, plain if task > level else -plain)


def test_they_are_refused_where_only_a_loss_can_run_them():
    for method in (ZLoss(), Flooding(0.1)):
        model = vit()
        reg = regularize(model, method)
        model(X)
        with pytest.raises(RuntimeError, match="Let the handle run them"):
            reg.penalty()
        reg.remove()
        with pytest.raises(ValueError, match="reads the output or the loss"):
            regularize(model, method, attach_to_loss=True)


def divergence(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("passes", [2, 3, 4])
def test_consistency_over_several_passes(passes):
    outputs = [torch.randn(2, 5, dtype=torch.float64) for _ in range(passes)]
    method = Consistency(2.0, passes=passes)
    method.outputs(outputs)
    (found,) = method.take_penalties().values()
    ps = [o.softmax(-1).tolist() for o in outputs]
    pairs = [(i, j) for i in range(passes) for j in range(i + 1, passes)]
    each = [divergence(ps[i][b], ps[j][b]) for i, j in pairs for b in range(2)]
    assert found.item() == pytest.approx(2 * sum(each) / len(each), rel=1e-9)


def test_a_step_of_three_passes_runs_the_model_three_times_beside_two():
    model = vit()
    reg = regularize(model, [DropKey(0.3), Consistency(1.0, passes=3), RDrop(1.0)])
    calls = []
    loss, terms = reg.loss(lambda: calls.append(1) or model(X), lambda out: out.square().mean())
    loss.backward()
    assert len(calls) == reg.passes == 3
    assert terms["consistency"] > 0 < terms["r_drop"]
    with pytest.raises(ValueError, match="passes is a count from 2, got 1"):
        Consistency(passes=1)


def test_sym_noise_is_signs_in_opposite_pairs():
    x = torch.zeros(5, 4, 9)
    noise = NEFTune(6.0, symmetric=True).embeddings(x)
    torch.testing.assert_close(noise.abs(), torch.ones_like(x))  # 6 / sqrt(4 * 9)
    assert torch.equal(noise[3:], -noise[:2])
    assert noise[2].unique().numel() == 2
