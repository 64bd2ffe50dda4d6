"""Consistency and R-Drop: the divergence itself, the two passes, and what must raise."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import BlurredAttention, Consistency, DropKey, RDrop, regularize
from dampen.methods.consistency import divergence
from tests.oracles.stochastic import divergence as slow_divergence


def vit(**options):
    torch.manual_seed(0)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16, **options
    )


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0])


def criterion(out):
    return F.cross_entropy(out, Y)


def logits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 2


@pytest.mark.parametrize("masked", [False, True])
def test_divergence_equals_the_slow_sum(masked):
    a, b = logits(3, 5, 4), logits(3, 5, 4).flip(0)
    valid = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) < 0.6 if masked else None
    there, back = slow_divergence(a, b, valid), slow_divergence(b, a, valid)
    assert divergence(a, b, valid).item() == pytest.approx(there, rel=1e-5)
    assert divergence(a, b, valid, symmetric=True).item() == pytest.approx(
        (there + back) / 2, rel=1e-5
    )


def test_padded_predictions_do_not_count_even_if_not_finite():
    a, b = logits(2, 4, 3).requires_grad_(), logits(2, 4, 3).flip(0)
    valid = torch.tensor([[True, True, False, False], [True] * 4])
    with torch.no_grad():
        poisoned = a.masked_fill(~valid.unsqueeze(-1), 1e30)
    assert divergence(poisoned, b, valid).item() == pytest.approx(divergence(a, b, valid).item())
    divergence(a, b, valid).backward()
    assert (a.grad[~valid] == 0).all()
    assert torch.isfinite(a.grad).all()


def test_the_classes_may_stand_on_another_axis():
    """A segmentation's (B, C, H, W)."""
    a, b = logits(2, 3, 4, 4), logits(2, 3, 4, 4).flip(0)
    method = Consistency(1.0, axis=1)
    method.outputs([a, b])
    assert method.take_penalties()["consistency"].item() == pytest.approx(
        slow_divergence(a.movedim(1, -1), b.movedim(1, -1)), rel=1e-5
    )


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("method", "symmetric"), [(Consistency(0.7), False), (RDrop(0.7), True)])
def test_loss_is_the_mean_task_plus_the_divergence_of_two_independent_passes(
    method, symmetric, together
):
    model = vit()
    reg = regularize(model, [DropKey(0.4), method])
    if not together:
        reg.prefix.doubled.why = "the test wants two passes"
    torch.manual_seed(5)
    loss, terms = reg.loss(lambda: model(X), criterion)
    assert reg.prefix.doubled.used is together
    torch.manual_seed(5)
    first, second = model(torch.cat([X, X])).chunk(2) if together else (model(X), model(X))
    assert not torch.allclose(first, second)
    task = (criterion(first) + criterion(second)) / 2
    expected = task + 0.7 * divergence(first, second, symmetric=symmetric)
    torch.testing.assert_close(loss, expected)
    assert set(terms) == {"task", method.name}


def test_draws_that_are_one_per_forward_differ_between_the_passes():
    model = vit()
    reg = regularize(model, [BlurredAttention(5, 3.0), Consistency(1.0)])
    _, terms = reg.loss(lambda: model(X), criterion)
    assert terms["consistency"] > 0


def test_penalties_of_other_methods_are_averaged_over_the_passes():
    model = vit()
    reg = regularize(
        model, [DropKey(dampen.warmup(0.1)), dampen.HeadDiversity(1.0), Consistency(1.0)]
    )
    two = reg.loss(lambda: model(X), criterion)[1]["head_diversity"]
    reg.remove()
    one = regularize(model, dampen.HeadDiversity(1.0)).loss(lambda: model(X), criterion)[1][
        "head_diversity"
    ]
    torch.testing.assert_close(two, one)


def test_one_pass_in_eval_and_while_disabled():
    model = vit()
    reg = regularize(model, [DropKey(0.4), Consistency(1.0)])
    calls = []

    def forward():
        calls.append(1)
        return model(X)

    with reg.disable():
        assert set(reg.loss(forward, criterion)[1]) == {"task"}
    model.eval()
    assert set(reg.loss(forward, criterion)[1]) == {"task"}
    assert len(calls) == 2


def test_a_loop_of_ones_own_is_told_to_let_the_handle_run_the_passes():
    """One forward has no divergence: asking for its penalty must not give zero in silence."""
    model = vit()
    reg = regularize(model, [DropKey(0.4), Consistency(1.0)])
    model(X)
    for ask in (reg.penalty, reg.penalties):
        with pytest.raises(RuntimeError, match="reg.loss"):
            ask()
    model.eval()(X)
    assert reg.penalty().item() == 0


class Normed(nn.Module):
    """A vision model with batch norm before and after its blocks."""

    def __init__(self):
        super().__init__()
        self.vit = vit()
        self.before, self.after = nn.BatchNorm2d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.after(self.vit(self.before(x)))


def test_batch_norm_sees_each_pass_by_itself():
    torch.manual_seed(0)
    model, twin = Normed(), Normed()
    twin.load_state_dict(model.state_dict())
    reg, plain = regularize(model, [DropKey(0.4), RDrop(1.0)]), regularize(twin, DropKey(0.4))
    torch.manual_seed(3)
    loss, _ = reg.loss(lambda: model(X), criterion)
    torch.manual_seed(3)
    first, second = twin(X), twin(X)
    expected = (criterion(first) + criterion(second)) / 2 + divergence(
        first, second, symmetric=True
    )
    torch.testing.assert_close(loss, expected)
    for (name, a), (_, b) in zip(
        model.state_dict().items(), twin.state_dict().items(), strict=True
    ):
        torch.testing.assert_close(a, b, msg=name)
    plain.remove()


def test_hugging_face_outputs_with_padding():
    from dampen.checking import SUBJECTS

    subject = SUBJECTS["bert"]
    model, inputs = subject.model(), subject.inputs()
    reg = regularize(model, [DropKey(0.3), RDrop(1.0)])
    valid = inputs["attention_mask"].bool()
    labels = torch.zeros_like(inputs["input_ids"])
    torch.manual_seed(0)
    loss, terms = reg.loss(
        lambda: model(**inputs, labels=labels), lambda out: out.loss, valid=valid
    )
    torch.manual_seed(0)
    first, second = model(**inputs).logits, model(**inputs).logits
    torch.testing.assert_close(terms["r_drop"], divergence(first, second, valid, symmetric=True))
    loss.backward()


def test_a_models_own_dropout_counts_as_random():
    model = nn.Sequential(vit(), nn.Dropout(0.5))
    reg = regularize(model, RDrop(1.0))
    assert reg.loss(lambda: model(X), criterion)[1]["r_drop"] > 0


@pytest.mark.parametrize("method", [Consistency(1.0), RDrop(1.0)])
@pytest.mark.parametrize(
    "beside",
    [
        [],
        [dampen.SkipAblation(attention=True)],
        [DropKey(0.0)],
        [dampen.DropPath(dampen.linear(0.0, 0.0))],
        [BlurredAttention(sigma=0.0)],
        [BlurredAttention(width=1)],
    ],
)
def test_without_anything_random_it_raises_and_leaves_the_model_alone(method, beside):
    model = vit()
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="nothing is random"):
        regularize(model, [method, *beside])
    assert [type(m) for m in model.modules()] == kinds


def test_outputs_that_hold_no_logits_say_how_to_name_them():
    model = vit()
    reg = regularize(model, [DropKey(0.1), Consistency(1.0)])
    with pytest.raises(TypeError, match="logits=lambda"):
        reg.loss(lambda: {"scores": model(X)}, lambda out: criterion(out["scores"]))
    loss, _ = reg.loss(
        lambda: {"scores": model(X)},
        lambda out: criterion(out["scores"]),
        logits=lambda out: out["scores"],
    )
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("shape", "valid", "says"),
    [((4, 1), None, "two classes"), ((4, 3), torch.ones(5, dtype=torch.bool), "valid has")],
)
def test_shapes_that_cannot_be_compared(shape, valid, says):
    with pytest.raises(ValueError, match=says):
        divergence(torch.zeros(shape), torch.zeros(shape), valid)


def test_bad_weights():
    with pytest.raises(ValueError, match=">= 0"):
        Consistency(-1.0)
    with pytest.raises(ValueError, match=">= 0"):
        RDrop(float("nan"))


@pytest.mark.parametrize("symmetric", [False, True])
def test_classes_that_a_mask_forbids(symmetric):
    first = torch.randn(3, 4, requires_grad=True)
    second, hidden = torch.randn(3, 4), torch.tensor([True, False, False, False])
    masked = [t.masked_fill(hidden, float("-inf")) for t in (first, second)]
    value = divergence(*masked, symmetric=symmetric)
    torch.testing.assert_close(value, divergence(first[:, 1:], second[:, 1:], symmetric=symmetric))
    value.backward()
    assert first.grad.isfinite().all()
