"""DropAttention: the paper's formula, and the identity with DropKey that decides how it may be compared."""

import pytest
import torch

import dampen
from dampen import DropAttention, DropKey
from dampen.masks import keep_keys
from tests.oracles import attention as reference


def operands(length):
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def drawn(method, q, k, seed=1):
    torch.manual_seed(seed)
    queries = q.shape[2] if method.per_query else 1
    return method.draw((*q.shape[:2], queries, k.shape[2]), q.device)


@pytest.mark.parametrize("unit", ["element", "column"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("length", [7, 65])
def test_equals_the_papers_formula(unit, window, normalized, length):
    """Dropped after the softmax and rescaled, exactly as written in the paper: values and gradients."""
    q, k, v = operands(length)
    method = DropAttention(0.3, unit=unit, window=window, normalized=normalized)
    dropped = drawn(method, q, k)
    if normalized:
        dropped = ~keep_keys(None, [dropped], length)
    torch.manual_seed(1)
    got = dampen.attention(q, k, v, regularizers=[method])
    expected = reference.drop_attention(q, k, v, dropped, None if normalized else 0.3)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    weight = torch.randn_like(got)
    for a, b in zip(
        *(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (got, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_element_and_normalized_is_drop_key():
    """Dividing by the kept sum is the softmax over the kept keys: forward and backward equal DropKey with the same
    mask."""
    q, k, v = operands(20)
    hidden = ~keep_keys(None, [torch.rand(2, 3, 20, 20) < 0.4], 20)
    literal, key = reference.drop_attention(q, k, v, hidden), reference.drop_key(q, k, v, hidden)
    torch.testing.assert_close(literal, key)
    weight = torch.randn_like(literal)
    for a, b in zip(
        *(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (literal, key)), strict=True
    ):
        torch.testing.assert_close(a, b)
    torch.manual_seed(2)
    ours = dampen.attention(q, k, v, regularizers=[DropAttention(0.4)])
    torch.manual_seed(2)
    assert torch.equal(ours, dampen.attention(q, k, v, regularizers=[DropKey(0.4)]))


def test_unnormalized_is_unbiased():
    """Ordinary attention dropout: the mean over masks is the plain attention."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 6, 4).unbind(0)
    many = [t.expand(4000, -1, -1, -1) for t in (q, k, v)]
    mean = dampen.attention(*many, regularizers=[DropAttention(0.3, normalized=False)]).mean(0)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v)[0]
    torch.testing.assert_close(mean, plain, atol=0.05, rtol=0)


def test_windows_drop_neighbors_together():
    torch.manual_seed(0)
    dropped = DropAttention(0.3, window=4).draw((200, 1, 1, 60), torch.device("cpu"))[:, 0, 0]
    assert abs(dropped[:, 10:50].double().mean() - 0.3) < 0.03
    inside = dropped[:, 1:-1]
    alone = inside & ~dropped[:, :-2] & ~dropped[:, 2:]
    assert not alone[:, 4:-4].any()  # away from the ends nothing is dropped alone


def test_stages_and_kernel():
    assert DropAttention(0.1).stages == {"mask"}
    assert DropAttention(0.1, normalized=False).stages == {"probs"}
    assert "normalized=False" in repr(DropAttention(0.1, normalized=False))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "block"}, "'element' or 'column'"),
        ({"window": 0}, "at least 1"),
        ({"rate": 2}, "probability"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        DropAttention(**arguments)
