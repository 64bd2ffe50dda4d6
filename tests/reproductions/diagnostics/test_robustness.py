"""Attacks against what can be computed by hand on a linear model."""

import pytest
import torch
from torch import nn

from dampen.models import ViT
from reproductions.diagnostics.robustness import Pixels, fgsm, pgd


def linear_case(n=60, seed=0):
    """A two-class linear model on 1 x 2 x 3 images, labels mostly right, and each example's margin."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():
        model[1].weight.copy_(torch.randn(2, 6, generator=generator))
        model[1].bias.copy_(torch.tensor([0.1, -0.2]))
    images = torch.rand(n, 1, 2, 3, generator=generator)
    labels = model(images).argmax(dim=1)
    labels[:5] = 1 - labels[:5]  # some wrong from the start
    return model, images, labels


def margins(model, images, labels):
    """(w_y - w_other) x + (b_y - b_other), and that difference of weights, per example."""
    weight, bias = model[1].weight.detach(), model[1].bias.detach()
    w = weight[labels] - weight[1 - labels]
    return (w * images.flatten(1)).sum(dim=1) + bias[labels] - bias[1 - labels], w


@pytest.mark.parametrize("eps", [0.0, 0.02, 0.05, 0.1])
def test_linear_model_without_touching_the_bounds(eps):
    """The worst point of the box costs eps * |w|_1: an example survives if its margin is larger."""
    model, images, labels = linear_case()
    margin, w = margins(model, images, labels)
    expected = (margin > eps * w.abs().sum(dim=1)).double().mean().item()
    wide, data = (
        Pixels(bounds=(-5.0, 5.0)),
        [(images[:40], labels[:40]), (images[40:], labels[40:])],
    )
    first = fgsm(model, data, eps, wide)
    assert first.accuracy == pytest.approx(expected)
    assert first.clean_accuracy == pytest.approx(55 / 60)
    assert (first.eps, first.step, first.steps, first.n) == (eps, eps, 1, 60)
    assert pgd(model, data, eps, step=eps / 2, steps=6, pixels=wide).accuracy == pytest.approx(
        expected
    )


def test_linear_model_at_the_bounds():
    """Within [0, 1] a pixel moves less where it is near a border: the worst point is the clipped corner."""
    model, images, labels = linear_case()
    eps = 0.25
    margin, w = margins(model, images, labels)
    corner = (images.flatten(1) - eps * w.sign()).clamp(0, 1)
    worst = margin + (w * (corner - images.flatten(1))).sum(dim=1)
    expected = ((worst > 0) & (margin > 0)).double().mean().item()
    free = (margin > eps * w.abs().sum(dim=1)).double().mean().item()
    assert expected > free  # the bounds matter here
    assert fgsm(model, [(images, labels)], eps).accuracy == pytest.approx(expected)
    assert pgd(model, [(images, labels)], eps, step=0.1, steps=10).accuracy == pytest.approx(
        expected
    )


def test_normalization_is_part_of_the_attacked_function():
    """A model on (x - mean) / std, attacked in pixels, is the linear model with weights w / std."""
    plain, images, labels = linear_case()
    mean, std = 0.4, 0.2
    shifted = nn.Sequential(nn.Flatten(), nn.Linear(6, 2))
    with torch.no_grad():  # shifted((x - mean) / std) == plain(x)
        shifted[1].weight.copy_(plain[1].weight * std)
        shifted[1].bias.copy_(plain[1].bias + mean * plain[1].weight.sum(dim=1))
    expected = fgsm(plain, [(images, labels)], 0.07)
    raw = fgsm(shifted, [(images, labels)], 0.07, Pixels(mean=[mean], std=[std]))
    normalized = Pixels(mean=[mean], std=[std], normalized=True)
    cooked = fgsm(shifted, [((images - mean) / std, labels)], 0.07, normalized)
    assert raw == expected == cooked
    assert 0 < expected.accuracy < expected.clean_accuracy


@pytest.fixture
def trained():
    """A tiny ViT fitted to synthetic images, and its data."""
    torch.manual_seed(0)
    model = ViT(
        image_size=8, patch_size=4, channels=1, classes=2, width=16, depth=1, heads=2, mlp=16
    )
    images, labels = torch.rand(64, 1, 8, 8), torch.arange(64) % 2
    images[labels == 1, :, :4] *= 0.6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model, [(images, labels)]


def test_model_and_random_state_are_left_alone(trained):
    model, data = trained
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    model.head.bias.requires_grad_(False)
    wanted = [p.requires_grad for p in model.parameters()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    with torch.no_grad():  # the caller's no_grad must not blind the attack
        result = pgd(model, data, eps=0.1, step=0.02, steps=8)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert [p.requires_grad for p in model.parameters()] == wanted
    for p, g, w in zip(model.parameters(), gradients, weights, strict=True):
        assert torch.equal(p, w)
        assert (p.grad is None) == (g is None)
        assert g is None or torch.equal(p.grad, g)
    assert result.clean_accuracy > 0.9
    assert result.accuracy < result.clean_accuracy - 0.2
    assert result.accuracy_low < result.accuracy < result.accuracy_high


def test_stronger_attacks_leave_less(trained):
    model, data = trained
    accuracy = [
        pgd(model, data, eps=e, step=e / 4, steps=8).accuracy for e in (0.0, 0.02, 0.05, 0.1)
    ]
    assert accuracy == sorted(accuracy, reverse=True)
    assert accuracy[0] == pgd(model, data, eps=0.0).clean_accuracy
    assert (
        pgd(model, data, eps=0.05, step=0.0125, steps=8).accuracy
        <= fgsm(model, data, eps=0.05).accuracy
    )


def test_same_seed_same_result(trained):
    model, data = trained
    assert pgd(model, data, seed=3) == pgd(model, data, seed=3)


@pytest.mark.parametrize(
    ("data", "arguments", "error", "message"),
    [
        (
            [(torch.full((2, 1, 8, 8), 2.0), torch.tensor([0, 1]))],
            {},
            ValueError,
            r"leave the bounds \[0, 1\]",
        ),
        (
            [(torch.zeros(2, 1, 8, 8).long(), torch.tensor([0, 1]))],
            {},
            TypeError,
            "floating-point images",
        ),
        (
            [(torch.zeros(2, 8, 8), torch.tensor([0, 1]))],
            {},
            TypeError,
            r"got torch.float32 \(2, 8, 8\)",
        ),
        (
            [(torch.zeros(2, 1, 8, 8), torch.tensor([0, -100]))],
            {},
            ValueError,
            "one labeled prediction per image",
        ),
        ([], {}, ValueError, "nothing to attack"),
        ([], {"eps": -0.1}, ValueError, "got eps=-0.1"),
        ([], {"steps": 0}, ValueError, "steps=0"),
    ],
)
def test_errors(trained, data, arguments, error, message):
    with pytest.raises(error, match=message):
        pgd(trained[0], data, **arguments)


def test_pixels_errors():
    with pytest.raises(ValueError, match="low < high"):
        Pixels(bounds=(1.0, 0.0))
    with pytest.raises(ValueError, match="std must be positive"):
        Pixels(std=[0.0])
    with pytest.raises(ValueError, match="needs the mean and std"):
        Pixels(normalized=True)
    with pytest.raises(ValueError, match=r"one per channel \(3\): got 2"):
        Pixels(mean=[0.1, 0.2]).to_model(torch.zeros(1, 3, 2, 2))
