"""The hand-written backwards: against finite differences, twice, in half precision, and against the plain formulas."""

import pytest
import torch

from dampen.explicit.features import sum_of_squares
from dampen.explicit.grams import gram, spread
from dampen.explicit.maps import only_weight
from dampen.explicit.squares import column_sums, feature_power, mixed_power, squared_norm


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
    "squared_norm, heads": (lambda y, b: squared_norm(y, b, rows.unsqueeze(1)), [(2, 2, 3, 4), (2, 1, 4)]),
    "squared_norm, no bias": (lambda y: squared_norm(y, None, rows), [(2, 3, 4)]),
    "feature_power": (lambda x: feature_power(x, rows), [(2, 3, 4)]),
    "feature_power, per sample": (lambda x: feature_power(x, rows, per_sample=True), [(2, 3, 4)]),
    "feature_power, no rows": (lambda x: feature_power(x, None, per_sample=True), [(2, 3, 4)]),
    "mixed_power": (mixed_power, [(2, 3, 4), (2, 4)]),
    "column_sums": (lambda a: column_sums(a, rows), [(2, 2, 3, 4)]),
    "column_sums, no rows": (lambda a: column_sums(a, None), [(2, 2, 3, 4)]),
    "sum_of_squares": (sum_of_squares, [(2, 2, 3, 2), (2, 2, 4)]),
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
    bare = only_weight(y, b, x, w)
    torch.testing.assert_close(bare, y - b)
    grads = torch.autograd.grad(bare.pow(3).sum(), [x, w, b], allow_unused=True)
    expected = torch.autograd.grad(torch.nn.functional.linear(x.detach(), w).pow(3).sum(), [w])
    assert grads[0] is None
    assert grads[2] is None
    torch.testing.assert_close(grads[1], expected[0])
