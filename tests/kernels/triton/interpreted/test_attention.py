"""The interpreted kernels beside dense attention in float64: values and gradients."""

import pytest
import torch

from dampen.kernels.triton.fit import packed
from dampen.kernels.triton.ops import attention, draws_of
from dampen.kernels.triton.tiles import (
    BY_BITS,
    BY_KEY,
    BY_NONE,
    BY_QUERY,
    DROP_WEIGHTS,
    HIDE_KEYS,
    HIDE_TOP,
    NOTHING,
    Form,
    Tile,
    tile_of,
)
from dampen.kernels.triton.trial import errors, verdict
from tests.full import FULL

RATE = 0.4


def dense(q, k, v, keep, bias, scale, factor):
    """softmax over the keys in `keep`, zeros for a query without any, times `factor`."""
    s = (q @ k.mT * scale + bias).masked_fill(~keep, float("-inf"))
    some = keep.any(-1, keepdim=True)
    return (s.masked_fill(~some, 0).softmax(-1) * some * factor) @ v


def given_back(kept, allowed, back):
    """The guard: a query that lost all that it may see gets one of these keys back, no other any."""
    lost = allowed.any(-1) & ~kept.any(-1)
    assert torch.equal(back >= 0, lost)
    one = (torch.arange(kept.shape[-1]) == back.unsqueeze(-1)) & lost.unsqueeze(-1)
    assert (allowed | ~one).all()
    return kept | one


CASES = {
    "plain": {"draws": NOTHING},
    "keys": {},
    "grouped, ragged, wide": {"g": 1, "n": 33, "m": 70, "d": 72},
    "causal": {"causal": True, "n": 40, "m": 40, "rate": 0.7},
    "padding": {"keep": (2, 1, 1), "d": 128},
    "mask by query": {"keep": (1, 2, 20), "rate": 0.9},
    "bias": {"bias": (1, 2, 20)},
    "weights": {"draws": DROP_WEIGHTS, "n": 40, "m": 40, "causal": True},
    "top": {"draws": HIDE_TOP},
    "top, causal": {"draws": HIDE_TOP, "causal": True, "n": 40, "m": 40},
    "bits": {"draws": NOTHING, "keep": (2, 2, 20), "bits": True},
    "bits, causal, grouped, bias": {
        "draws": NOTHING,
        "keep": (2, 2, 40),
        "bits": True,
        "causal": True,
        "n": 40,
        "m": 70,
        "g": 1,
        "bias": (1, 2, 1),
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_dense_attention(case):
    one = {"b": 2, "h": 2, "g": 2, "n": 20, "m": 50, "d": 32, "rate": RATE, "causal": False}
    one = {**one, "draws": HIDE_KEYS, "keep": None, "bias": None, **case}
    b, h, g, n, m, d = (one[name] for name in "bhgnmd")
    torch.manual_seed(0)
    q = torch.randn(b, n, h, d).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(b, g, m, d, requires_grad=True) for _ in range(2))
    mask = None if one["keep"] is None else torch.rand(*one["keep"], m) < 0.3
    bias = None if one["bias"] is None else torch.randn(*one["bias"], m)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    many = [exact[0], *(t.repeat_interleave(h // g, 1) for t in exact[1:])]
    allowed = torch.ones(b, h, n, m, dtype=torch.bool)
    if mask is not None:
        mask[0] = False if mask.shape[2] == 1 else mask[0]  # a sample without a key
        allowed = allowed & mask
    if one["causal"]:
        allowed = allowed.tril()
    top = None
    if one["draws"] == HIDE_TOP:
        s = (many[0] @ many[1].mT).masked_fill(~allowed, float("-inf")).detach() * 0.2
        top = s.topk(6, dim=-1).values[..., 4:].mean(-1).nan_to_num(neginf=-1e30).float()
    torch.manual_seed(3)
    seed = torch.randint(2**63 - 1, ())
    drawn = draws_of((b, h, n, m), seed, torch.tensor(one["rate"]), Tile(32, 32, 4, 1))
    guard = one["draws"] in (HIDE_KEYS, HIDE_TOP)
    arguments = (one["causal"], 0.2, one["draws"])
    factor = torch.ones(())
    keep = allowed
    if guard:
        hit = drawn if top is None else drawn & (s >= top.unsqueeze(-1))
        back = torch.ops.dampen.gpu_attention(
            q, k, v, mask, bias, top, seed, torch.tensor(one["rate"]), *arguments, True
        )[2]
        keep = given_back(allowed & ~hit, allowed, back)
    if one["draws"] == DROP_WEIGHTS:
        factor = ~drawn / (1 - RATE)
    torch.manual_seed(3)
    given = packed(mask.expand(b, h, n, m)) if "bits" in case else mask
    ours = attention(q, k, v, given, bias, top, *arguments, one["rate"], guard)
    added = torch.zeros(()) if bias is None else bias.double()
    theirs = dense(*many, keep, added, 0.2, factor)
    torch.testing.assert_close(ours, theirs.float(), rtol=1e-5, atol=1e-5)
    weight = torch.randn_like(ours)
    found = torch.autograd.grad(ours, (q, k, v), weight)
    expected = torch.autograd.grad(theirs, exact, weight.double())
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e.float(), rtol=1e-4, atol=2e-5)


def test_bits_of_a_mask():
    """Beside Python's integers, at lengths that fill no word, one, and more."""
    for keys in (1, 31, 32, 33, 100):
        keep = torch.rand(2, 3, 4, keys) < 0.5
        words = packed(keep)
        for line, found in zip(keep.flatten(0, 2).tolist(), words.flatten(0, 2), strict=True):
            whole = sum(bit << i for i, bit in enumerate(line))
            expected = [whole >> (32 * i) & 0xFFFFFFFF for i in range(-(-keys // 32))]
            assert [w & 0xFFFFFFFF for w in found.tolist()] == expected


HALVES = [Form(torch.float16, 64, HIDE_KEYS), Form(torch.bfloat16, 64, HIDE_KEYS, causal=True)]
HALVES += [Form(torch.bfloat16, 32, DROP_WEIGHTS), Form(torch.bfloat16, 64, HIDE_TOP, causal=True)]
HALVES += [Form(torch.float16, 72, NOTHING, masked=BY_BITS)]
HALVES += [Form(torch.bfloat16, 32, HIDE_KEYS, masked=BY_QUERY, biased=True)]
HALVES += [Form(torch.float16, 32, DROP_WEIGHTS, masked=BY_KEY)]


@pytest.mark.parametrize("form", HALVES, ids=str)
def test_errors_in_16_bits_are_those_of_torch(form, monkeypatch):
    """As the trial on a user's card has it, on fewer tokens."""
    monkeypatch.setattr("dampen.kernels.triton.trial.TOKENS", 200 if FULL else 40)
    assert verdict(torch.device("cpu"), form) == ""


@pytest.mark.parametrize(
    "form",
    [
        Form(torch.bfloat16, 64, HIDE_KEYS, masked=BY_QUERY, biased=True),
        Form(torch.float16, 64, DROP_WEIGHTS),
        Form(torch.bfloat16, 64, HIDE_TOP),
    ],
    ids=str,
)
def test_consumer_blackwell_has_tiles_of_its_own(form, monkeypatch):
    """Generation 12 computes and draws the same with tiles that no other card has."""
    rest = (form.draws, form.guards[0], form.masked, form.biased)
    assert any(
        tile_of(kernel, form.size, 2, 12, *rest) != tile_of(kernel, form.size, 2, 8, *rest)
        for kernel in ("attend", "to_keys")
    )
    monkeypatch.setattr("dampen.kernels.triton.ops._generation", lambda t: 12)
    monkeypatch.setattr("dampen.kernels.triton.trial.TOKENS", 200 if FULL else 70)
    assert verdict(torch.device("cpu"), form) == ""


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_trial_finds_a_wrong_kernel(monkeypatch, wrong):
    """Gradients that are 1 % off, or no numbers."""
    found = ([0.0, wrong, 0.0, 0.0], [1e-6] * 4, torch.tensor([0.25]))
    monkeypatch.setattr("dampen.kernels.triton.trial.errors", lambda *a: found)
    told = verdict(torch.device("cpu"), Form(torch.float32, 32, HIDE_TOP))
    assert told.startswith("dq of float32 D32 hide top is off")
    assert f"off by {wrong:.2g}" in told


def test_trial_runs_the_kernels_with_and_without_the_guard(monkeypatch):
    """Both are compiled for the same attention, with tiles of their own."""
    found = ([0.0] * 4, [1e-6] * 4, torch.tensor([0.25]))
    guards = []
    monkeypatch.setattr(
        "dampen.kernels.triton.trial.errors",
        lambda device, form, guard: guards.append(guard) or found,
    )
    for form in (Form(torch.float32, 32, HIDE_KEYS), Form(torch.float32, 32, DROP_WEIGHTS)):
        assert verdict(torch.device("cpu"), form) == ""
    assert guards == [False, True, False]
    assert Form(torch.float32, 32, HIDE_KEYS, causal=True).guards == (True,)
    assert Form(torch.float32, 32, HIDE_KEYS, masked=BY_KEY).guards == (True,)
    assert Form(torch.float32, 32, NOTHING, masked=BY_NONE).guards == (False,)


def test_an_older_card_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    told = verdict(torch.device("cuda", 0), Form(torch.float16, 64, HIDE_KEYS))
    assert told == "compute capability 7.5, older than 8.0"


def test_problem_of_the_trial(monkeypatch):
    monkeypatch.setattr("dampen.kernels.triton.trial.TOKENS", 50)
    form = Form(torch.float32, 16, DROP_WEIGHTS, causal=True)
    ours, theirs, drawn = errors(torch.device("cpu"), form, guard=False)
    assert max(ours) < 1e-4
    assert max(theirs) < 1e-4
    assert 0.2 < drawn.float().mean().item() < 0.3
