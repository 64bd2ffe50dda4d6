"""The native penalty tap against plain autograd, in every layout that it reads."""

import pytest
import torch

from dampen.functional.explicit import squares as taps

pytestmark = pytest.mark.usefixtures("built")


def made(layout):
    torch.manual_seed(0)
    if layout == "rows":
        return torch.randn(7, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    if layout == "tokens":
        return torch.randn(3, 7, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    if layout == "one number":
        return torch.randn(1, 1, requires_grad=True), torch.randn(1, requires_grad=True)
    if layout == "no bias":
        return torch.randn(3, 7, 5, requires_grad=True), None
    whole = torch.randn(3, 7, 3, 2, 5, requires_grad=True)  # B, N, 3, H, D: a fused projection
    if layout == "no bias, heads":
        return whole.permute(2, 0, 3, 1, 4)[2], None
    return whole.permute(2, 0, 3, 1, 4)[2], torch.randn(2, 1, 5, requires_grad=True)


@pytest.mark.parametrize(
    "layout", ["rows", "tokens", "heads", "one number", "no bias", "no bias, heads"]
)
def test_equals_autograd(layout, monkeypatch):
    y, bias = made(layout)
    inputs = [t for t in (y, bias) if t is not None]
    from dampen.native import ops as native_taps

    calls, sums = [], native_taps.tap_sums
    monkeypatch.setattr(native_taps, "tap_sums", lambda *a: calls.append(1) or sums(*a))
    out, penalty = taps.tap(y, bias, None, 0.3)
    mine = torch.autograd.grad(out.sin().sum() + 2 * penalty, inputs)
    bare = y if bias is None else y - bias
    expected = 0.3 * bare.square().sum()
    theirs = torch.autograd.grad(y.sin().sum() + 2 * expected, inputs)
    assert calls
    torch.testing.assert_close(penalty, expected)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "y",
    [
        torch.randn(4, 3, dtype=torch.float64),
        torch.randn(4, 3).bfloat16(),
        torch.randn(0, 3),
        torch.randn(3, 4).t(),
    ],
)
def test_what_it_cannot_read_goes_by_torch(y):
    y, bias = y.requires_grad_(), torch.zeros(3, dtype=y.dtype, requires_grad=True)
    from dampen.native.ops import fits_tap

    assert not fits_tap(y, bias)
    out, penalty = taps.tap(y, bias, None, 0.5)
    torch.autograd.grad(out.sum() + penalty, (y, bias))
    torch.testing.assert_close(
        penalty.float(), 0.5 * y.float().square().sum(), rtol=1e-2, atol=1e-6
    )


def test_an_expanded_gradient():
    y, bias = made("tokens")
    out, penalty = taps.tap(y, bias, None, 0.3)
    (mine,) = torch.autograd.grad(
        (out, penalty), y, (torch.ones(()).expand_as(out), torch.ones(()))
    )
    torch.testing.assert_close(mine, 1 + 0.6 * (y - bias))
