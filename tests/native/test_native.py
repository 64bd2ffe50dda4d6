"""The native kernels: against the torch path and its oracles, on odd shapes, under every contract that they touch."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import (
    BlurredAttention,
    DropAttention,
    DropHead,
    DropKey,
    FeedForwardDropout,
    HardMasking,
)
from dampen.checking import check_contract
from dampen.kernels.attend import Needs, attend
from dampen.native import library


def operands(b=2, h=4, g=4, n=17, m=17, d=12, seed=0):
    torch.manual_seed(seed)
    sizes = ((n, h), (m, g), (m, g))
    return [
        torch.randn(b, length, heads, d).transpose(1, 2).requires_grad_() for length, heads in sizes
    ]


def drawn_seed(seed):
    torch.manual_seed(seed)
    return torch.randint(2**63 - 1, ()).item()


def test_philox_known_answer(built):
    """Random123's vector for counter 0 and key 0: 6627e8d5 e169c58d bc57ac4c 9b00dbd8, in halves, lane 0 of 16."""
    found = [built.draws(128, seed=0)[16 * i].item() & 0xFFFF for i in range(8)]
    assert found == [0xE8D5, 0x6627, 0xC58D, 0xE169, 0xAC4C, 0xBC57, 0xDBD8, 0x9B00]


SHAPES = [
    (2, 4, 4, 17, 17, 12),
    (2, 4, 2, 65, 65, 32),
    (1, 2, 1, 5, 1, 8),
    (3, 2, 2, 1, 9, 3),
    (1, 1, 1, 130, 300, 7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_drop_key_equals_sdpa_with_its_mask(built, shape, rate):
    """Values and gradients; at rate 0.9 and few keys the guard gives most rows their only key."""
    q, k, v = operands(*shape)
    b, h, g, n, m, _ = shape
    hidden = built.hidden_keys(b * h, n, m, rate, drawn_seed(3)).view(b, h, n, m)
    assert not hidden.all(-1).any()
    torch.manual_seed(3)
    ours = built.attention(q, k, v, None, False, 0.3, built.Hiding(rate))
    expected = F.scaled_dot_product_attention(
        q, *(t.repeat_interleave(h // g, 1) for t in (k, v)), ~hidden, scale=0.3
    )
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    w = torch.randn_like(ours)
    for a, e in zip(*(torch.autograd.grad(o, (q, k, v), w) for o in (ours, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["causal", "padded", "per query"])
@pytest.mark.parametrize("method", [DropKey(0.5), HardMasking(0.4, top=0.5)], ids=lambda m: m.name)
def test_masks_of_the_model_hold(built, kind, method):
    """With values that are the unit vectors the output is the weights: nothing hidden is seen, every row sums to 1."""
    q, k, _ = operands(n=20, m=20)
    v = torch.eye(20).expand(2, 4, 20, 20)
    keep = {
        "causal": None,
        "padded": torch.rand(2, 1, 1, 20) < 0.6,
        "per query": torch.rand(2, 4, 20, 20) < 0.5,
    }[kind]
    a, _, kernel = attend(q, k, v, keep, 0.0, kind == "causal", None, False, Needs([method]), None)
    allowed = (
        torch.ones(20, 20).tril().bool().expand(2, 4, 20, 20)
        if keep is None
        else keep.expand(2, 4, 20, 20)
    )
    assert kernel.name == "native"
    assert (a[~allowed] == 0).all()
    sums, some = a.sum(-1), allowed.any(-1)
    torch.testing.assert_close(sums[some], torch.ones_like(sums[some]))
    assert (sums[~some] == 0).all()
    expected = ((q @ k.mT) * 12**-0.5).masked_fill(a == 0, float("-inf")).softmax(-1)
    torch.testing.assert_close(a[some], expected[some], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top", [0.1, 0.5, 3, 1.0])
def test_hard_masking_drops_top_keys_at_its_rate(built, top):
    torch.manual_seed(1)
    q, k = (torch.randn(8, 8, 60, 16) for _ in range(2))
    a = dampen.attention(
        q, k, torch.eye(60).expand(8, 8, 60, 60), regularizers=[HardMasking(0.3, top=top)]
    )
    s = q @ k.mT
    count = top if isinstance(top, int) and top > 1 else -(-60 * int(top * 10) // 10)
    least = s.topk(count).values[..., -1:]
    belongs = s >= least
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[..., None, None]
    ties = s >= least - 2 * 4 * (16 + 1) * 2**-24 * lengths  # by rounding; two in a row
    dropped = a < 1e-30
    assert not (dropped & ~ties & (s - s.amax(-1, keepdim=True) > -40)).any()
    assert dropped[belongs].float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_scores_that_all_tie_belong_to_the_top(built):
    q = k = torch.zeros(1, 2, 500, 4)
    a = dampen.attention(
        q, k, torch.eye(500).expand(1, 2, 500, 500), regularizers=[HardMasking(0.3)]
    )
    assert (a == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)


def test_every_layout_gives_the_same(built):
    """Contiguous, transposed, expanded heads and batches, and a stride that is no row."""
    torch.manual_seed(0)
    base = torch.randn(1, 1, 9, 8)
    results = []
    for make in (
        lambda t: t.expand(2, 3, 9, 8).contiguous(),
        lambda t: t.expand(2, 3, 9, 8),
        lambda t: t.expand(2, 3, 9, 8).transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda t: torch.cat([t, t], -1).expand(2, 3, 9, 16)[..., :8],
    ):
        q, k, v = (make(base).detach().requires_grad_() for _ in range(3))
        torch.manual_seed(7)
        o = dampen.attention(q, k, v, regularizers=[DropKey(0.4)])
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    for other in results[1:]:
        for a, e in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, e)


@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 5, 4), (2, 2, 2, 0, 5, 4)], ids=str)
def test_empty(built, shape):
    q, k, v = operands(*shape)
    o = dampen.attention(q, k, v, regularizers=[DropKey(0.3)])
    assert o.shape == q.shape
    o.sum().backward()
    assert k.grad.abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_run_on_torch(built, dtype):
    q, k, v = (t.detach().to(dtype) for t in operands())
    o, _, kernel = attend(q, k, v, None, 0.0, False, None, False, Needs([DropKey(0.3)]), None)
    assert kernel.name != "native"
    assert o.dtype == dtype
    assert o.isfinite().all()


def test_autocast_and_biases_run_on_torch(built):
    q, k, v = operands()
    bias = torch.randn(17, 17)
    assert (
        attend(q, k, v, bias, 0.0, False, None, False, Needs([DropKey(0.3)]), None)[2].name
        != "native"
    )
    with torch.autocast("cpu", torch.bfloat16):
        kernel = attend(q, k, v, None, 0.0, False, None, False, Needs([DropKey(0.3)]), None)[2]
    assert kernel.name != "native"


def test_threads_change_nothing(built):
    q, k, v = operands(n=100, m=100)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(2)
            o = dampen.attention(q, k, v, regularizers=[DropAttention(0.3)])
            results.append([o, *torch.autograd.grad(o.square().sum(), (q, k, v))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, e in zip(other, results[0], strict=True):
            torch.testing.assert_close(a, e, rtol=0, atol=0)


def test_checkpointing_draws_the_same_again(built):
    q, k, v = operands()
    run = lambda *t: dampen.attention(*t, regularizers=[DropKey(0.5)]).square().sum()  # noqa: E731
    torch.manual_seed(4)
    plain = torch.autograd.grad(run(q, k, v), (q, k, v))
    torch.manual_seed(4)
    again = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False), (q, k, v))
    for a, e in zip(again, plain, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    "method", [DropKey(0.3), HardMasking(0.3), FeedForwardDropout(0.3)], ids=lambda m: m.name
)
def test_a_graph_computes_the_same(built, method):
    torch.manual_seed(0)
    model = dampen.models.ViT(
        image_size=8, patch_size=2, channels=1, width=16, depth=1, heads=2, mlp=16
    ).train()
    dampen.regularize(model, method)
    x, results = torch.rand(3, 1, 8, 8), []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(6)
        model.zero_grad()
        forward(x).square().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("op", ["attention", "dropout"])
def test_operators_are_well_formed(built, op):
    q, k, v = operands(n=5, m=5)
    seed, rate = torch.tensor(5), torch.tensor(0.3)
    args = (
        (q, k, v, None, seed, rate, False, 0.3, 1, 0, 0)
        if op == "attention"
        else (q.detach(), seed, rate)
    )
    torch.library.opcheck(
        getattr(torch.ops.dampen, op), args, test_utils=("test_schema", "test_faketensor")
    )


def test_dropout_is_unbiased_and_its_gradient_has_the_same_mask(built):
    torch.manual_seed(0)
    x = torch.ones(400_001, requires_grad=True)
    y = dampen.masks.drop(x, 0.1)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
    assert y.mean().item() == pytest.approx(1.0, abs=0.003)
    assert y.unique().tolist() == [0.0, pytest.approx(1 / 0.9)]


def test_small_rates_are_exact_over_many_calls(built):
    """16 bits alone would turn 0.00001 into 0 or 0.0000153; the dither makes the mean right."""
    hits = sum(int(built.hidden_keys(1, 20, 1000, 1e-5, seed).sum()) for seed in range(600))
    assert abs(hits - 120) < 5 * 120**0.5


@pytest.mark.parametrize("keys", [1, 2, 3, 17])
def test_realized_rate(built, keys):
    """p - p^m / m for m keys, at every place."""
    rate, rows = 0.8, 40_000
    hidden = built.hidden_keys(4, rows // 4, keys, rate, seed=11).view(rows, keys)
    expected = rate - rate**keys / keys
    spread = 5 * (max(expected * (1 - expected), 1e-9) / rows) ** 0.5 + 2**-16
    assert (hidden.double().mean(0) - expected).abs().max() <= spread


CONTRACTS = [
    "eval_exact",
    "identity",
    "shapes_and_dtypes",
    "gradients_finite",
    "checkpointed",
    "seeded",
    "no_leak",
    "kernel",
]


@pytest.mark.parametrize("subject", ["vit", "llama", "bert"])
@pytest.mark.parametrize(
    "make", [DropKey, HardMasking, FeedForwardDropout, DropAttention], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("native", ["1", "0"])
def test_contracts_on_both_paths(built, native, make, subject, monkeypatch):
    monkeypatch.setenv("DAMPEN_NATIVE", native)
    library.reset()
    assert library.available() == (native == "1")
    try:
        for contract in CONTRACTS if subject != "vit" else [*CONTRACTS, "mask_forms"]:
            outcome = check_contract(make, contract, subject)
            assert outcome.state in ("kept", "refused"), str(outcome)
    finally:
        monkeypatch.undo()
        library.reset()


def test_switched_off_and_named(built, monkeypatch):
    model = dampen.models.ViT(
        image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16
    ).train()
    reg = dampen.regularize(model, DropKey(0.1))
    model(torch.randn(2, 3, 8, 8))
    assert "native" in repr(reg)
    monkeypatch.setenv("DAMPEN_NATIVE", "0")
    library.reset()
    model(torch.randn(2, 3, 8, 8))
    assert "native" not in repr(reg)
    assert "DAMPEN_NATIVE=0" in library.status()
    monkeypatch.undo()
    library.reset()


def test_short_rows_run_natively_and_longer_ones_where_keys_are_hidden(built):
    """Up to 32 keys the kernel's own products win, whatever the method; above, where it hides keys."""

    def kernel(length, method):
        q, k, v = operands(n=length, m=length)
        return attend(q, k, v, None, 0.0, False, None, False, Needs([method]), None)[2].name

    methods = DropKey(0.1), HardMasking(0.1), DropHead(0.1), BlurredAttention(3)
    assert [kernel(17, m) for m in methods] == ["native"] * 4
    assert [kernel(80, m) for m in methods] == ["native", "native", "fused", "fused"]


def test_a_changed_header_is_another_library(tmp_path, monkeypatch):
    for source in library.sources():
        (tmp_path / source.name).write_text(source.read_text())
    assert len(library.sources()) > 3
    monkeypatch.setattr(library, "SOURCE", tmp_path / library.SOURCE.name)
    before = library.library_path()
    for source in library.sources():
        text = source.read_text()
        source.write_text(text + "// changed\n")
        assert library.library_path() != before
        source.write_text(text)
    assert library.library_path() == before


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (k, s) for k in ("all", "causal", "padded") for s in SHAPES if k != "causal" or s[3] == s[4]
    ],  # causal: squares
    ids=str,
)
def test_without_hiding_it_is_sdpa(built, shape, kind):
    q, k, v = operands(*shape)
    b, h, g, _, m, _ = shape
    keep = torch.rand(b, 1, 1, m) < 0.7 if kind == "padded" else None
    if keep is not None:
        keep[..., 0] = True
    before = torch.get_rng_state()
    ours = built.attention(q, k, v, keep, kind == "causal", 0.3, None)
    assert torch.equal(before, torch.get_rng_state())
    many = [t.repeat_interleave(h // g, 1) for t in (k, v)]
    expected = F.scaled_dot_product_attention(q, *many, keep, is_causal=kind == "causal", scale=0.3)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    w = torch.randn_like(ours)
    for a, e in zip(*(torch.autograd.grad(o, (q, k, v), w) for o in (ours, expected)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("size", [1, 3, 1024, 5000])
def test_kept_factors_are_those_of_the_operator(built, size):
    """The mask of a small tensor is the one that a graph, and a large tensor, have under the same seed."""
    x = torch.randn(size)
    torch.manual_seed(5)
    ours = built.dropout(x, 0.3)
    expected = torch.ops.dampen.dropout(
        x, torch.tensor(drawn_seed(5)), torch.tensor(0.3, dtype=torch.float64)
    )
    torch.testing.assert_close(ours, expected)


def test_a_failed_build_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(library.BuildError) as error:
        library.build()
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.so"))
    monkeypatch.undo()
    library.reset()
