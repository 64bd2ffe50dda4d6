"""The hand-written backwards: against finite differences, twice, in half precision, and against the plain formulas."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dampen.calls import LinearCall
from dampen.functional.explicit.layers import Term, multiply, only_weight
from dampen.functional.explicit.pairs import gram, spread, squares_over_heads
from dampen.functional.explicit.reductions import FORMS
from dampen.functional.explicit.squares import (
    column_power,
    contract_squares,
    feature_power,
    squared_norm,
    tap,
)


def tensors(*shapes, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


rows = torch.tensor([[1.0, 0.5, 0.0], [0.25, 1.0, 1.0]], dtype=torch.float64)
CASES = {
    "gram": (lambda y, b: gram(y, b, None), [(2, 2, 3, 2), (2, 1, 2)]),
    "gram, rows": (lambda y, b: gram(y, b, rows), [(2, 2, 3, 2), (2, 1, 2)]),
    "gram, no bias": (lambda y: gram(y, None, rows), [(2, 2, 3, 2)]),
    "spread": (spread, [(2, 2, 4), (3, 4)]),
    "squared_norm": (lambda y, b: squared_norm(y, b, None), [(2, 3, 4), (4,)]),
    "squared_norm, rows": (lambda y, b: squared_norm(y, b, rows), [(2, 3, 4), (4,)]),
    "squared_norm, heads": (
        lambda y, b: squared_norm(y, b, rows.unsqueeze(1)),
        [(2, 2, 3, 4), (2, 1, 4)],
    ),
    "squared_norm, no bias": (lambda y: squared_norm(y, None, rows), [(2, 3, 4)]),
    "feature_power": (lambda x: feature_power(x, rows), [(2, 3, 4)]),
    "feature_power, no rows": (lambda x: feature_power(x, None), [(2, 3, 4)]),
    "squares, per sample": (lambda x: contract_squares("bni,bn->bi", x, rows), [(2, 3, 4)]),
    "squares, per sample, no rows": (
        lambda x: contract_squares("bni,bn->bi", x, None),
        [(2, 3, 4)],
    ),
    "squares, both": (lambda x, w: contract_squares("bnl,hl->bnh", x, w), [(2, 3, 4), (2, 4)]),
    "squares, columns": (lambda a: contract_squares("bhnm,bn->bhm", a, rows), [(2, 2, 3, 4)]),
    "squares, columns, no rows": (
        lambda a: contract_squares("bhnm,bn->bhm", a, None),
        [(2, 2, 3, 4)],
    ),
    "column_power": (column_power, [(3, 4)]),
    "column_power, heads": (column_power, [(2, 3, 4)]),
    "squares_over_heads": (squares_over_heads, [(2, 2, 3, 2), (2, 2, 4)]),
}


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    function, shapes = CASES[name]
    inputs = tensors(*shapes)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", CASES)
def test_the_plain_formula_of_compiled_graphs_is_the_same(name, monkeypatch):
    function, shapes = CASES[name]
    inputs = tensors(*shapes)
    fast = function(*inputs)
    weights = torch.randn_like(fast)
    fast_grads = torch.autograd.grad((fast * weights).sum(), inputs)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = function(*inputs)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    plain_grads = torch.autograd.grad((plain * weights).sum(), inputs)
    for a, b in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_half_precision_in_float32_out(name, dtype, monkeypatch):
    """Gradients come back in the dtype of the input, sums are float32, and autocast changes nothing."""
    function, shapes = CASES[name]
    inputs = [t.detach().to(dtype).requires_grad_() for t in tensors(*shapes)]
    monkeypatch.setitem(globals(), "rows", rows.float())
    with torch.autocast("cpu", torch.bfloat16):
        out = function(*inputs)
        out.sum().backward()
    wide = function(*[t.detach().float() for t in inputs])
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, wide, rtol=1e-5, atol=1e-5)
    assert all(t.grad.dtype == dtype for t in inputs)


def test_only_weight_is_the_map_with_a_constant_input():
    x, w, b = tensors((2, 3, 4), (5, 4), (5,))
    y = torch.nn.functional.linear(x, w, b)
    bare = only_weight(x, w, y, b)
    torch.testing.assert_close(bare, y - b)
    grads = torch.autograd.grad(bare.pow(3).sum(), [x, w, b], allow_unused=True)
    expected = torch.autograd.grad(torch.nn.functional.linear(x.detach(), w).pow(3).sum(), [w])
    assert grads[0] is None
    assert grads[2] is None
    torch.testing.assert_close(grads[1], expected[0])


TAPS = {
    "bias": (lambda y, b: tap(y, b, None, 0.3), [(2, 3, 4), (4,)]),
    "heads": (lambda y, b: tap(y, b, rows.unsqueeze(1), 0.3), [(2, 2, 3, 4), (2, 1, 4)]),
    "no bias": (lambda y: tap(y, None, None, 0.3), [(2, 3, 4)]),
    "rows of a map": (lambda y, b: tap(y, b, None, 0.3, (2, 4)), [(2, 2, 3, 2), (7,)]),
    "tensor factor": (
        lambda y, b: tap(y, b, None, torch.tensor(0.3, dtype=torch.float64)),
        [(2, 3, 4), (4,)],
    ),
}


@pytest.mark.parametrize("name", TAPS)
def test_a_tap_passes_its_gradient_on(name):
    function, shapes = TAPS[name]
    inputs = tensors(*shapes)
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def mapped(x, w, b=None, form="paper", valid=None):
    """A linear map with 0.7 sum ||x W^T||^2 beside it, in the paper's form."""
    return multiply(
        LinearCall("ffn_in", x, w, b, valid=valid), Term(5.6, 0.5, form, "sum"), swapped=False
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "shapes", [[(2, 3, 4), (5, 4), (5,)], [(2, 3, 4), (5, 4)], [(6, 4), (5, 4), (5,)]], ids=str
)
def test_a_map_with_its_penalty(form, padded, shapes):
    """Both outputs and their first and second derivatives, with and without a bias, padded tokens and samples."""
    inputs = tensors(*shapes)
    x, w = inputs[:2]
    valid = rows.reshape(x.shape[:-1]) > 0.3 if padded else None
    options = {"form": form, "valid": valid}
    for outputs in ((0, 1), (0,), (1,)):
        function = lambda *t: [mapped(*t, **options)[i] for i in outputs]  # noqa: B023, E731
        # a second backward makes x W^T again, which rounds otherwise
        assert torch.autograd.gradcheck(function, inputs, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(lambda *t: mapped(*t, **options), inputs, nondet_tol=1e-12)
    y, value = mapped(*inputs, **options)
    torch.testing.assert_close(y, torch.nn.functional.linear(*inputs))
    kept = x if valid is None else x * valid.unsqueeze(-1)
    b, v = (kept @ w.t()).square().sum(), kept.square().flatten(0, -2).sum(0) @ w.square().sum(0)
    wanted = {"paper": 0.25 * b, "exact": 0.25 * (b + v), "inverted": v}[form]
    torch.testing.assert_close(value, 2.8 * wanted)


@pytest.mark.parametrize("form", ["paper", "inverted"])
@pytest.mark.parametrize("after", ["nothing", "in place", "checkpoint", "checkpoint in place"])
def test_a_map_with_its_penalty_equals_the_penalty_beside_it(after, form):
    """y goes on through a nonlinearity that may change it in place; the bias gets nothing of the penalty."""
    x, w, b = tensors((2, 3, 4), (5, 4), (5,))
    act = torch.relu_ if "in place" in after else torch.relu

    def together(x):
        y, value = mapped(x, w, b, form)
        return act(y).pow(3).sum() + value

    def beside(x):
        squares = 0.7 * (x @ w.t()).square().sum()
        squares = squares if form == "paper" else 2.8 * (x.square().sum((0, 1)) @ w.square().sum(0))
        return torch.relu(torch.nn.functional.linear(x, w, b)).pow(3).sum() + squares

    ours = checkpoint(together, x, use_reentrant=False) if "checkpoint" in after else together(x)
    for a, e in zip(
        torch.autograd.grad(ours, [x, w, b]), torch.autograd.grad(beside(x), [x, w, b]), strict=True
    ):
        torch.testing.assert_close(a, e)


def test_it_survives_a_second_backward_and_a_retained_graph():
    x, w, b = tensors((2, 3, 4), (5, 4), (5,))
    y, value = mapped(x, w, b)
    first = torch.autograd.grad(y.sum() + value, [x, w], retain_graph=True)
    again = torch.autograd.grad(y.sum() + value, [x, w])
    for a, e in zip(first, again, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_map_with_its_penalty_under_autocast(dtype):
    x, w, b = (t.detach().float().requires_grad_() for t in tensors((2, 3, 4), (5, 4), (5,)))
    with torch.autocast("cpu", dtype):
        y, value = mapped(x, w, b, form="exact")
        expected = torch.nn.functional.linear(x, w, b)
    assert y.dtype == expected.dtype == dtype
    assert value.dtype == torch.float32
    wide_y, wide_value = mapped(x, w, b, form="exact")
    torch.testing.assert_close(value, wide_value, rtol=0.03, atol=0)
    ours = torch.autograd.grad(y.float().sin().sum() + value, [x, w, b])
    theirs = torch.autograd.grad(wide_y.sin().sum() + wide_value, [x, w, b])
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=0.05, atol=0.3)
