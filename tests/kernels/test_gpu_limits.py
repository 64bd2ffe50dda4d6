"""What runs on a GPU, as the code decides it: on meta tensors that are taken for a card."""

import json
from types import SimpleNamespace

import pytest
import torch

import dampen
from benchmarks.gpu_page import RECORD, before, card, layer, main, time_table
from dampen import DropAttention, DropHead, DropKey, FeedForwardDropout, HardMasking, linear
from dampen._torch import on_gpu
from dampen.kernels import kernel
from dampen.kernels.attend import Needs, attend
from dampen.kernels.columns import shifted_attention
from dampen.masks import keep_keys, rows_that_may_empty
from dampen.regularizer import Call

LINES = 8 * 32  # samples and heads


@pytest.mark.parametrize(("tokens", "chunks_before", "chunks"), [(2048, 512, 1), (8192, 8192, 7)])
@pytest.mark.parametrize("method", [DropKey(0.1), HardMasking(0.1)], ids=repr)
def test_chunks(method, tokens, chunks_before, chunks):
    """Of one layer: what the CPU's limits made of it, and what there is now."""
    assert before(method, tokens) == chunks_before
    with card("Triton is not installed"):
        found, count, kept = layer(method, tokens)
    assert (found.name, found.chunked, count, kept) == ("fused", True, chunks, 0)
    assert "not Triton: Triton is not installed" in str(found)
    with card(""):
        found, count, kept = layer(method, tokens)
    assert (found.name, found.chunked, count) == ("triton", False, 1)
    assert kept == LINES * tokens * (8 if method.name == "hard_masking" else 4)


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_a_mask_is_kept_as_bits(tokens):
    """Sixteen times less than the mask of SDPA."""
    with card(""):
        found, count, kept = layer(DropKey(0.1, unit="cross"), tokens)
    assert (found.name, found.way, count) == ("triton", "bits", 1)
    assert kept == 2 * LINES * tokens**2 / 16


@pytest.mark.parametrize("causal", [False, True])
def test_no_kernel_needed(causal):
    columns, dropping = DropKey(0.1, unit="column"), DropAttention(0.1, normalized=False)
    with card("Triton is not installed"):
        assert layer(columns, 8192, causal).kernel.way == "columns"
        assert layer(dropping, 8192, causal).kernel.way == "dropout"
        assert layer(DropHead(0.1), 8192, causal).kernel[:2] == ("fused", False)
    assert (before(columns, 8192), before(dropping, 8192)) == (1, 8192)


def test_the_page_is_current():
    assert main(["--check"]) == 0, "run python -m benchmarks.gpu_page"


def test_estimate_of_time():
    """By hand, of the H100: 2 x 7 products of 64 channels, 2,048^2 scores of 256 heads."""
    kernels = json.loads(RECORD.read_text())["kernels"]
    cells = next(line for line in time_table(kernels) if "H100" in line).strip("| ").split(" | ")
    clocks = 132 * 1.755e9
    scores = 256 * 2048**2
    assert cells[-3] == f"{1e3 * scores * 14 * 64 / 4096 / clocks:.1f}"
    assert cells[-2] == f"{1e3 * scores * 15.2 / 128 / clocks:.1f}"
    assert cells[-1] == f"{1e3 * scores * 14 / 3.35e12:.1f}"
    used = [kernels[f"sm_90 {name} plain D64 bf16"] for name in ("attend", "to_queries", "to_keys")]
    threads = [
        made["instructions"] * made["tile"][2] * 32 / (made["tile"][0] * made["tile"][1])
        for made in used
    ]
    assert cells[1] == f"{1e3 * scores * sum(threads) / 128 / clocks:.1f}"


def test_a_scheduled_dropout_is_no_number_in_a_graph(monkeypatch):
    """It would compile the graph anew with every value."""
    constant, falling = (
        DropAttention(rate, normalized=False) for rate in (0.2, linear(0.2, 0.0, along="progress"))
    )
    assert isinstance(falling.weight_dropout(), float)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert constant.weight_dropout() == pytest.approx(0.2)
    assert isinstance(falling.weight_dropout(), torch.Tensor)


def test_plain_dropouts_are_one_kernel(monkeypatch):
    monkeypatch.setattr("dampen.masks.on_gpu", lambda t: True)
    monkeypatch.setattr("dampen.methods.dropouts.on_gpu", lambda t: True)
    x = torch.ones(100, 100)
    torch.manual_seed(0)
    y, _ = FeedForwardDropout(0.25).operands(x, x, None)
    torch.manual_seed(0)
    assert torch.equal(y, torch.nn.functional.dropout(x, 0.25))


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_equal_a_mask(groups, causal, dtype):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 40, 16, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(2, groups, 40, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    keep = torch.rand(2, 4, 1, 40) > 0.4
    seen = torch.ones(40, 40, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    mask = keep & seen
    mask = mask | (seen & ~mask.any(-1, keepdim=True))  # sees what it saw
    ours = shifted_attention(q, k, v, keep, 0.0, causal, 0.25)
    many = [t.repeat_interleave(4 // groups, 1) for t in (k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(q, *many, mask, scale=0.25)
    tolerance = 1e-3 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    for a, e in zip(
        torch.autograd.grad(ours.float().square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.float().square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=0, atol=20 * tolerance)


def test_a_causal_cpu_hides_columns_without_a_mask(monkeypatch):
    monkeypatch.setattr(kernel, "COLUMNS_FROM", 16)
    method = DropKey(0.3, unit="column")
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    found = attend(q, k, v, None, 0.0, True, None, False, Needs([method]), None)[2]
    assert found.way == "columns"
    assert not attend(q, k, v, None, 0.0, False, None, False, Needs([method]), None)[2].way


def test_guard_of_a_causal_model_looks_at_its_first_rows():
    """The same keys come back whether all rows are looked at or only those that can be empty."""
    few = rows_that_may_empty([0.5], lines=4, start=0, keys=512)
    assert 20 < few < 40
    assert rows_that_may_empty([0.5], lines=4, start=1000, keys=2000) == 0
    assert rows_that_may_empty([None], lines=4, start=0, keys=512) is None
    assert rows_that_may_empty([0.5], lines=4, start=0, keys=2) is None

    allowed = torch.ones(64, 64, dtype=torch.bool).tril()
    for seed in range(20):
        torch.manual_seed(seed)
        hidden = torch.rand(2, 2, 64, 64) < 0.5
        kept = []
        for first in (None, few):
            torch.manual_seed(seed)
            kept.append(keep_keys(allowed, [hidden], 64, first=first))
        assert torch.equal(*kept)
        assert kept[0].any(-1).all()


@pytest.mark.parametrize("keys", [1, 2, 3])
def test_a_causal_query_keeps_a_key_where_there_are_fewer_keys_than_queries(keys):
    """Every query from the last key on sees all of them: none may be left without one."""
    q = torch.randn(64, 2, 64, 8, dtype=torch.float64)  # which no native kernel takes
    k = torch.randn(64, 2, keys, 8, dtype=torch.float64)
    out = dampen.attention(q, k, torch.ones_like(k), is_causal=True, regularizers=[DropKey(0.1)])
    torch.testing.assert_close(out, torch.ones_like(out))


def test_mps_takes_the_path_of_a_cpu(monkeypatch):
    """No Triton kernel, no chunks by free memory, and dampen's own way to drop."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)  # knows no meta
    tensor = SimpleNamespace(is_cuda=False, device=torch.device("mps", 0))
    assert not on_gpu(tensor)
    for method in (DropKey(0.1), DropAttention(0.1, normalized=False), HardMasking(0.1)):
        q = torch.empty(1, 2, 2048, 64, device="meta")
        found = kernel.choose_kernel(q, q, [method], native=True, v=q, call=Call(scale=0.125))
        assert found.name in ("fused", "plain")
        assert not found.way


def test_rocm_is_a_gpu():
    """torch calls its devices cuda, so the kernels and their self-check run there too."""
    assert on_gpu(SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0)))
