"""`dampen.attention` is a drop-in for F.scaled_dot_product_attention; with regularizers, masks and kernels behave as
declared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import dampen
from dampen import DropAttention, DropKey
from dampen.kernels.kernel import Kernel, choose_kernel, run_kernel
from dampen.regularizer import Call, Regularizer


class Halve(Regularizer):
    """Halves every stage of attention, to see that each one is open and in which order."""

    stochastic = False

    def __init__(self, *stages):
        super().__init__()
        self.stages = frozenset(stages)

    def qkv(self, q, k, v, call):
        return q, k, v / 2

    def mask(self, q, k, call):
        hidden = torch.zeros(1, 1, 1, k.shape[2], dtype=torch.bool)
        hidden[..., -1] = True
        return hidden

    def logits(self, s, call):
        return s / 2

    def probs(self, a, call):
        return a / 2

    def heads(self, o, call):
        return o / 2


@st.composite
def problems(draw):
    """Operands and masks in every form that F.scaled_dot_product_attention takes."""
    leading = draw(st.sampled_from([(), (3,), (2, 3), (2, 1, 3)]))
    n, m, d = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.sampled_from([1, 4, 8]))
    gqa = len(leading) == 2 and draw(st.booleans())
    heads = (2, 4) if gqa else leading
    mask = draw(
        st.sampled_from(["none", "causal", "bool", "float", "bool_row", "bool_full", "empty_row"])
    )
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    scale = draw(st.sampled_from([None, 0.3]))
    return heads, leading, n, m, d, gqa, mask, dtype, scale, draw(st.integers(0, 2**16))


@given(problems())
@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("kernel", ["chosen", "plain"])
def test_agrees_with_sdpa(kernel, problem):
    """Values and gradients, over shapes, dtypes, masks, scale, grouped queries; the plain kernel too."""
    heads, leading, n, m, d, gqa, mask_kind, dtype, scale, seed = problem
    torch.manual_seed(seed)
    kv = (2, 2) if gqa else leading
    q, k, v = (
        torch.randn(*lead, length, d, dtype=dtype).requires_grad_()
        for lead, length in ((heads, n), (kv, m), (kv, m))
    )
    mask = {
        "bool": torch.rand(n, m) < 0.7,
        "bool_row": (torch.rand(1, m) < 0.7).expand(n, m),
        "bool_full": torch.rand(*heads, n, m) < 0.7,
        "float": torch.randn(n, m, dtype=dtype),
        "empty_row": torch.zeros(n, m, dtype=torch.bool),
    }.get(mask_kind)
    options = {
        "attn_mask": mask,
        "is_causal": mask_kind == "causal",
        "scale": scale,
        "enable_gqa": gqa,
    }
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    weight = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    regularizers = [Halve()] if kernel == "chosen" else [Halve("logits")]
    if kernel == "plain":
        regularizers[0].logits = lambda s, call: s
    got = dampen.attention(q, k, v, **options, regularizers=regularizers)
    got_grads = torch.autograd.grad((got * weight).sum(), (q, k, v))
    tolerance = {
        torch.float64: 1e-9,
        torch.float32: 2e-5,
        torch.bfloat16: 0.06,
        torch.float16: 0.01,
    }[dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    for a, b in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=4 * tolerance, atol=4 * tolerance)


def test_without_regularizers_it_is_sdpa():
    q, k, v = torch.randn(3, 2, 4, 70, 8).unbind(0)
    assert torch.equal(dampen.attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


def test_broadcast_operands():
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(1, 3, 6, 8), torch.randn(2, 1, 6, 8)
    expected = F.scaled_dot_product_attention(q, k.expand(2, -1, -1, -1), v.expand(-1, 3, -1, -1))
    torch.testing.assert_close(dampen.attention(q, k, v, regularizers=[Halve()]), expected)


@pytest.mark.parametrize(
    ("stage", "factor"),
    [("qkv", 0.5), ("probs", 0.5), ("heads", 0.5), ("logits", None), ("mask", None)],
)
def test_stages_are_open(stage, factor):
    q, k, v = torch.randn(3, 2, 4, 5, 8).unbind(0)
    got = dampen.attention(q, k, v, regularizers=[Halve(stage)])
    if stage == "logits":
        expected = F.scaled_dot_product_attention(q / 2, k, v)
    elif stage == "mask":
        expected = F.scaled_dot_product_attention(q, k[..., :-1, :], v[..., :-1, :])
    else:
        expected = F.scaled_dot_product_attention(q, k, v) * factor
    torch.testing.assert_close(got, expected)


def test_logits_see_the_bias_but_no_infinities():
    """Raw scores with the model's bias; what the model hides holds no number that could spread."""
    seen = []

    class Look(Halve):
        def logits(self, s, call):
            seen.append(s)
            return s

    q, k, v = torch.randn(3, 1, 1, 3, 4).unbind(0)
    bias = torch.tensor([[0.5, float("-inf"), 2.0]]).expand(3, 3)
    dampen.attention(q, k, v, bias, regularizers=[Look("logits")])
    expected = q @ k.transpose(-2, -1) / 2 + torch.tensor([0.5, 0.0, 2.0])
    torch.testing.assert_close(seen[0], expected)


@pytest.mark.parametrize(
    "regularizer", [DropKey(0.4), DropAttention(0.4, normalized=False)], ids=["fused", "plain"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_chunks_equal_the_whole(regularizer, causal):
    """Chunked over the queries: the same distribution, finite gradients, and the same draws in forward and backward."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 8, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def run(q, k, v):
        torch.manual_seed(1)
        call = Call(shape=(1, 2, 8, 8), scale=2**-0.5, is_causal=causal, kv_heads=2, head_size=2)
        name = "plain" if "probs" in regularizer.stages else "fused"
        import dampen.kernels.kernel as kernels

        rows = kernels.CHUNK
        kernels.CHUNK = 2 * 8 * 3  # 3 rows in a chunk, so the last one is shorter
        try:
            return run_kernel(Kernel(name, True, "test"), q, k, v, 0.0, [regularizer], call)
        finally:
            kernels.CHUNK = rows

    assert torch.equal(run(q, k, v), run(q, k, v))
    assert torch.autograd.gradcheck(run, (q, k, v), nondet_tol=0.0)


@pytest.mark.parametrize("causal", [False, True])
def test_chunks_without_a_draw_are_sdpa(causal):
    q, k, v = torch.randn(3, 1, 2, 2049, 4).unbind(0)
    got = dampen.attention(q, k, v, is_causal=causal, regularizers=[DropKey(0.0)])
    torch.testing.assert_close(
        got, F.scaled_dot_product_attention(q, k, v, is_causal=causal), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "method", [DropKey, lambda rate, unit: DropAttention(rate, unit, normalized=False)]
)
def test_columns_are_the_same_in_all_chunks(method):
    """What all queries share is drawn once, not once per chunk."""
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 2100, 2), torch.zeros(1, 1, 2100, 2)
    v = torch.randn(1, 1, 2100, 1)
    rows = [method(0.5, unit="column"), DropKey(0.0)]  # the second makes chunks necessary
    assert choose_kernel(q, k, rows).chunked
    out = dampen.attention(q, k, v, regularizers=rows)
    torch.testing.assert_close(out, out[..., :1, :].expand_as(out))
    assert not choose_kernel(q, k, [DropKey(0.5, unit="column")]).chunked


def test_kernel_choice():
    short, long = torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 256, 8)
    very_long = torch.zeros(1, 1, 4096, 8)
    assert choose_kernel(long, long, [DropKey(0.1)]).name == "fused"
    assert (
        choose_kernel(short, short, [DropKey(0.1)]).name == "plain"
    )  # measured: faster below 48 keys in float32
    plain = choose_kernel(long, long, [DropAttention(0.1, normalized=False)])
    assert plain.name == "plain"
    assert "drop_attention" in plain.why
    assert not choose_kernel(very_long, very_long, []).chunked
    assert choose_kernel(very_long, very_long, [DropKey(0.1)]).chunked
    assert choose_kernel(very_long, very_long, [DropAttention(0.1, normalized=False)]).chunked


def test_empty_sequences():
    """No queries give an empty result, no keys give zeros; neither raises nor gives NaN."""
    for regularizer in (
        DropKey(0.5),
        DropAttention(0.5, normalized=False),
        DropKey(0.5, unit="column"),
    ):
        none, some = torch.randn(2, 3, 0, 4), torch.randn(2, 3, 5, 4)
        assert dampen.attention(none, some, some, regularizers=[regularizer]).shape == (2, 3, 0, 4)
        assert torch.equal(
            dampen.attention(some, none, none, regularizers=[regularizer]), torch.zeros(2, 3, 5, 4)
        )
        assert (
            dampen.attention(
                *(torch.randn(0, 3, 5, 4) for _ in range(3)), regularizers=[regularizer]
            ).shape[0]
            == 0
        )


def test_fully_padded_rows_give_zeros_and_finite_gradients():
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1] = False
    for regularizer in (
        DropKey(0.5),
        DropAttention(0.5, normalized=False),
        DropAttention(0.5, unit="column"),
    ):
        out = dampen.attention(q, k, v, mask, regularizers=[regularizer])
        assert torch.equal(out[1], torch.zeros(3, 5, 4))
        for g in torch.autograd.grad(out.square().sum(), (q, k, v)):
            assert torch.isfinite(g).all()


def test_errors():
    q = torch.randn(2, 3, 5, 4)
    with pytest.raises(ValueError, match="not both"):
        dampen.attention(q, q, q, torch.ones(5, 5, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="at least two dimensions"):
        dampen.attention(q[0, 0, 0], q, q)


WRONG = {
    "tokens": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 6, 8)),
    "channels": ((2, 4, 5, 8), (2, 4, 7, 6), (2, 4, 7, 8)),
    "heads": ((2, 4, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)),
    "heads of values": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 3, 7, 8)),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize(
    "method", [dampen.DropKey(0.5), dampen.HardMasking(0.5), dampen.DropHead(0.5)], ids=str
)
def test_operands_that_do_not_fit_are_refused(what, method):
    """A native kernel would read past their ends."""
    q, k, v = (torch.randn(shape) for shape in WRONG[what])
    with pytest.raises(ValueError, match="do not fit together"):
        dampen.attention(q, k, v, enable_gqa="heads" in what, regularizers=[method.train()])


@pytest.mark.parametrize(
    "shapes", [(2, 4, 2), (2, 2, 4), (1, 2, 2)], ids=["values", "keys", "batch"]
)
@pytest.mark.parametrize(
    "method", [dampen.DropKey(1e-7), dampen.HardMasking(1e-7), dampen.DropAttention(1e-7)], ids=str
)
def test_grouped_keys_and_values_of_different_numbers(shapes, method):
    """SDPA repeats each for itself, and a batch of one: the kernels must not read past their ends (Nemotron's speech
    encoder repeats the values alone, which ended the process)."""
    torch.manual_seed(0)
    batch, keys, values = shapes
    q = torch.randn(2, 4, 13, 8, requires_grad=True)
    k, v = (torch.randn(batch, h, 13, 8, requires_grad=True) for h in (keys, values))
    repeated = (t.repeat_interleave(4 // t.shape[1], 1).expand(2, -1, -1, -1) for t in (k, v))
    weight = torch.randn(2, 4, 13, 8)
    wanted = torch.autograd.grad(
        (F.scaled_dot_product_attention(q, *repeated) * weight).sum(), (q, k, v)
    )
    found = dampen.attention(q, k, v, enable_gqa=True, regularizers=[method.train()])
    torch.testing.assert_close(
        torch.autograd.grad((found * weight).sum(), (q, k, v)), wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_shared_keys_and_values_with_any_number_of_leading_dimensions(leading):
    """Four heads of queries share two of keys and values; said by repeating those."""
    torch.manual_seed(0)
    q = torch.randn(*leading, 4, 5, 8)
    k, v = (torch.randn(*leading, 2, 7, 8) for _ in range(2))
    repeated = (t.repeat_interleave(2, dim=-3) for t in (k, v))
    expected = F.scaled_dot_product_attention(q, *repeated)
    found = dampen.attention(
        q, k, v, enable_gqa=True, regularizers=[dampen.DropKey(rate=0.0).train()]
    )
    torch.testing.assert_close(found, expected)
