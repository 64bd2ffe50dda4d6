"""FlexAttention with a counter-based score_mod, in its eager form on a CPU; no GPU has seen it."""

import pytest
import torch
import torch.nn.attention.flex_attention as flexes
from torch.nn import functional as F

from dampen import DropKey, HardMasking
from dampen.kernels import long_sequences


def grid(b, h, n, m):
    sizes = (b, h, n, m)
    return [
        torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
        for axis, size in enumerate(sizes)
    ]


def test_known_answer():
    """The mixer is lowbias32 (Wellons): some values of it in Python's integers."""

    def mixed(x):
        x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
        x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
        return x ^ x >> 16

    rows, columns = long_sequences.bits(1, 1, 50), long_sequences.bits(1, 1, 70)
    values = [
        [mixed((r ^ c) % 2**32) for c in columns.flatten().tolist()]
        for r in rows.flatten().tolist()
    ]
    places = grid(1, 1, 50, 70)
    for rate in (0.1, 0.5, 0.9):
        signed = torch.tensor(values) - 2**32 * (torch.tensor(values) >= 2**31)
        expected = signed < rate * 2**32 - 2**31
        for given in (rate, torch.tensor(rate)):
            assert torch.equal(long_sequences.hiding(rows, columns, given)(*places)[0, 0], expected)


def test_rate_and_independence():
    def drawn(seed):
        torch.manual_seed(seed)
        keys = long_sequences.bits(4, 8, 256), long_sequences.bits(4, 8, 256)
        return long_sequences.hiding(*keys, 0.2)(*grid(4, 8, 256, 256)).float()

    hidden = drawn(7)
    x, n = (hidden - 0.2) / 0.4, hidden.numel()
    other = (drawn(8) - 0.2) / 0.4
    pairs = {
        "rate": x,
        "keys": x[..., 1:] * x[..., :-1],
        "queries": x[..., 1:, :] * x[..., :-1, :],
        "heads": x[:, 1:] * x[:, :-1],
        "samples": x[1:] * x[:-1],
        "seeds": x * other,
        "corners": x[..., 1:, 1:] * x[..., 1:, :-1] * x[..., :-1, 1:] * x[..., :-1, :-1],
    }
    for name, values in pairs.items():
        assert abs(values.mean().item() * n**0.5) < 4.5, name
    assert 0.9 < hidden.sum(-1).var().item() / (256 * 0.16) < 1.1


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kv", [4, 2])
def test_equals_dense_attention(kv, monkeypatch):
    monkeypatch.setattr(
        flexes, "_validate_device", lambda *a: None
    )  # refuses gradients on a CPU, in the eager form too
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 32, 16, requires_grad=True) for heads in (4, kv, kv))
    torch.manual_seed(3)
    ours = long_sequences.flex_hiding(q, k, v, 0.2, 0.25, compiled=False)
    torch.manual_seed(3)
    hidden = long_sequences.hiding(
        long_sequences.bits(2, 4, 32), long_sequences.bits(2, 4, 32), 0.2
    )(*grid(2, 4, 32, 32))
    theirs = F.scaled_dot_product_attention(q, k, v, ~hidden, scale=0.25, enable_gqa=kv != 4)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), weight),
        torch.autograd.grad(theirs, (q, k, v), weight),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_only_where_asked_and_able(monkeypatch):
    q = torch.empty(1, 8, 4096, 64, device="meta")
    monkeypatch.setattr(long_sequences, "os", type("Fake", (), {"environ": {"DAMPEN_FLEX": "1"}}))
    assert not long_sequences.fits_flex(q, q, [DropKey(0.1)], enabled=True)  # no CUDA here

    class Cuda:
        shape, device = q.shape, torch.device("cuda")

    assert long_sequences.fits_flex(Cuda, Cuda, [DropKey(0.1)], enabled=True)
    assert not long_sequences.fits_flex(Cuda, Cuda, [DropKey(0.1)], enabled=False)
    assert not long_sequences.fits_flex(Cuda, Cuda, [HardMasking(0.1)], enabled=True)
    assert not long_sequences.fits_flex(Cuda, Cuda, [DropKey(0.1), DropKey(0.2)], enabled=True)
