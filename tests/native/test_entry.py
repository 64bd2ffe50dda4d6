"""What the native kernels are given: everything they cannot read runs on torch, with the reason in words."""

import ctypes

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import dampen
from dampen import DropKey, ExplicitDropout, HardMasking
from dampen.kernels.attend import Needs, attend
from dampen.native import entry, library, ops

pytestmark = pytest.mark.usefixtures("built")
NOTHING = [DropKey(1e-9)]  # a rate that hides nothing: must equal plain attention


def tiny(**options):
    sizes = {
        "image_size": 8,
        "patch_size": 2,
        "channels": 1,
        "width": 32,
        "depth": 2,
        "heads": 4,
        "mlp": 64,
    }
    return dampen.models.ViT(**(sizes | options)).train()


def run(q, k, v, methods=NOTHING):
    o, _, kernel = attend(q, k, v, None, 0.0, False, None, False, Needs(methods), None)
    return o, kernel


# --- layouts ----------------------------------------------------------------------------------------------------------


class OneByOne(nn.Module):
    """Queries, keys and values from 1 x 1 convolutions, channels before places, as in UNets and hybrids."""

    def __init__(self, channels, heads):
        super().__init__()
        self.q, self.kv = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, 2 * channels, 1)
        self.out, self.heads = nn.Conv2d(channels, channels, 1), heads

    def forward(self, x, context):
        b, c, h, w = x.shape
        q = self.q(x).reshape(b, self.heads, c // self.heads, h * w).transpose(2, 3)
        kv = self.kv(context).reshape(b, 2, self.heads, c // self.heads, -1)
        k, v = kv.transpose(3, 4).unbind(1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, h, w))


def test_one_token_out_of_a_convolution():
    """The axis of one token has whatever stride it has: a product of matrices once took it for the length of a row."""
    torch.manual_seed(0)
    model, x, context = OneByOne(128, 2), torch.randn(4, 128, 1, 1), torch.randn(4, 128, 4, 4)
    plain = model(x, context)
    reg = dampen.regularize(model, DropKey(1e-9), attention="all")
    torch.testing.assert_close(model(x, context), plain)
    assert "native" in repr(reg)


@pytest.mark.parametrize("size", [8, 33, 64])
@pytest.mark.parametrize("alone", ["query", "key", "both"])
def test_one_token_whose_stride_means_nothing(size, alone):
    torch.manual_seed(0)
    n, m = (1 if alone != "key" else 10), (1 if alone != "query" else 10)
    tensors = [torch.randn(2, 4, size, length).transpose(2, 3) for length in (n, m, m)]
    q, k, v = (t.requires_grad_() for t in tensors)
    o, kernel = run(q, k, v)
    expected = F.scaled_dot_product_attention(*(t.detach().clone() for t in (q, k, v)))
    assert kernel.name == "native"
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
    copies = [t.detach().contiguous().clone().requires_grad_() for t in (q, k, v)]
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*copies).sin().sum(), copies)
    for a, e in zip(torch.autograd.grad(o.sin().sum(), (q, k, v)), theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


# --- dtype and device -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_default_dtype(dtype):
    """What the kernels write into is float32 whatever the program's default is; in bfloat16 it overran the heap."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 16, requires_grad=True) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.set_default_dtype(dtype)
    try:
        o, kernel = run(q, k, v)
        dropped = dampen.masks.drop(torch.ones(64, 1000, dtype=torch.float32), 0.5)
        grads = torch.autograd.grad(o.sum(), (q, k, v))
    finally:
        torch.set_default_dtype(torch.float32)
    assert kernel.name == "native"
    assert {o.dtype, dropped.dtype, *(g.dtype for g in grads)} == {torch.float32}
    torch.testing.assert_close(o, expected, rtol=1e-5, atol=1e-5)
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.03)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}


def test_a_default_device_of_another_kind():
    """A model on the CPU trains under any default device, penalties and all; `meta` once ended the process."""
    torch.manual_seed(0)
    model, x, y = tiny(), torch.rand(8, 1, 8, 8), torch.arange(8) % 10
    reg = dampen.regularize(
        model, [ExplicitDropout(value=0.1, ffn=0.1, query_key=0.1), DropKey(0.3)]
    )
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(1)
        model.zero_grad()
        with torch.device(device):
            loss, _ = reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y))
            loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, e in zip(*found, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("causal", [False, True])
def test_long_sequences_on_torch_with_another_default_device(monkeypatch, causal):
    """The blocks of queries, which run where the kernels are switched off, write where their queries are."""
    monkeypatch.setattr(dampen.kernels.kernel, "LONG", 64)
    q, k, v = (torch.randn(1, 2, 70, 8, requires_grad=True) for _ in range(3))
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        with library.torch_only("a test"), torch.device(device):
            o, _, kernel = attend(
                q, k, v, None, 0.0, causal, None, False, Needs([DropKey(0.3)]), None
            )
            found.append((o, *torch.autograd.grad(o.sin().sum(), (q, k, v))))
        assert kernel.chunked
    for a, e in zip(*found, strict=True):
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_of_another_dtype(dtype):
    """They were once read as float32, past their end. Torch's kernels decide what may be mixed."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    o, kernel = run(q, k, v.to(dtype))
    with library.torch_only("a test"):
        expected, _ = run(q, k, v.to(dtype))
    assert kernel.name != "native"
    assert f"v is {dtype}".replace("torch.", "") in str(kernel)
    torch.testing.assert_close(o, expected)


def test_a_sign_that_is_changed_on_reading():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    part = torch.complex(k, v).conj().imag  # -v
    o, kernel = run(q, k, part)
    assert kernel.name != "native"
    assert "v is a view that changes signs" in str(kernel)
    torch.testing.assert_close(o, F.scaled_dot_product_attention(q, k, -v))
    dropped = dampen.masks.drop(torch._neg_view(torch.ones(1000)), 0.5)
    assert set(dropped.unique().tolist()) == {0.0, -2.0}
    y = torch._neg_view(torch.ones(3, 4))
    assert not ops.fits_tap(y, None)


def test_a_gradient_with_a_sign_to_change():
    q, k, v = (torch.randn(1, 2, 5, 4, requires_grad=True) for _ in range(3))
    grad = torch.randn(1, 2, 5, 4)
    o, _ = run(q, k, v)
    ours = torch.autograd.grad(o, (q, k, v), torch._neg_view(grad))
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), -grad)
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: torch.randn(3, 4).double(), "float64"),
        (lambda: torch.empty(3, 4, device="meta"), "on meta"),
        (lambda: torch.randn(3, 4).to_sparse(), "sparse"),
        (lambda: torch._neg_view(torch.randn(3, 4)), "signs"),
        (lambda: torch.frombuffer(bytearray(17), dtype=torch.float32, offset=1), "aligned"),
        (lambda: freed(torch.randn(3, 4)), "memory"),
        (lambda: torch.randn(3, 4).as_subclass(Strange), "Strange"),
    ],
    ids=["dtype", "device", "sparse", "sign", "unaligned", "freed", "subclass"],
)
def test_what_no_kernel_reads(make, says):
    t = make()
    assert says in entry.unreadable(t)
    with pytest.raises(entry.NativeError, match=says):
        entry.require((t,))


class Strange(torch.Tensor):
    """A subclass may compute anything."""


def freed(t):
    """As sharded parameters are between two uses."""
    t.untyped_storage().resize_(0)
    return t


def test_the_reason_is_printed():
    model = tiny()
    reg = dampen.regularize(model, DropKey(0.3))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.rand(2, 1, 8, 8))
    assert "not native: autocast" in repr(reg)
    model.double()(torch.rand(2, 1, 8, 8).double())
    assert "not native: q is float64" in repr(reg)


# --- the checks in C --------------------------------------------------------------------------------------------------


def test_the_rate_must_be_one():
    for rate in (float("nan"), -0.1, 1.5, float("inf")):
        with pytest.raises(entry.NativeError, match="a rate outside 0 to 1"):
            entry.factors((3,), 0, rate)
        with pytest.raises(entry.NativeError, match="a rate outside 0 to 1"):
            entry.hidden_keys(1, 2, 3, rate, 0)


def refused(**changes):
    """What the kernel says to a problem of 2 x 3 heads, 5 queries and 7 keys of size 4, with fields changed."""
    settings = entry.AttentionSettings(0, 0.3, False, 0.5, 1, 0, 0)._replace(
        **changes.pop("settings", {})
    )
    given = {
        "q": torch.randn(2, 3, 5, 4),
        "k": torch.randn(2, 3, 7, 4),
        "v": torch.randn(2, 3, 7, 4),
        "keep": None,
        "top": torch.empty(0),
        "o": torch.empty(2, 3, 5, 4),
        "lse": torch.empty(2, 3, 5),
    } | changes
    said = library.library().dampen_attention(entry._problem(settings, **given))
    return None if said is None else said.decode()


def test_the_kernel_itself_checks_sizes_strides_and_room():
    assert refused() is None
    assert "ends before" in refused(v=torch.randn(2, 3, 6, 4))
    assert "ends before" in refused(o=torch.empty(2, 3, 4, 4))
    assert "ends before" in refused(lse=torch.empty(29))
    assert "rows overlap" in refused(k=torch.randn(2, 3, 1, 4).expand(2, 3, 7, 4))
    assert "null pointer" in refused(lse=None)
    assert "multiple" in refused(
        q=torch.randn(2, 4, 5, 4), o=torch.empty(2, 4, 5, 4), lse=torch.empty(40)
    )
    assert "mode" in refused(settings={"mode": 7})
    assert "rate" in refused(settings={"rate": float("nan")})
    assert "null pointer" in refused(settings={"mode": 2})  # no room for thresholds


def test_the_tap_itself_checks_too():
    y, total = torch.randn(3, 4), torch.zeros(())
    entry.sum_squares([entry.TapJob((1, 1, 3, 4), y, (0, 0, 4), 1.0, total=total)])
    torch.testing.assert_close(total, y.square().sum())
    with pytest.raises(entry.NativeError, match="ends before"):
        entry.sum_squares([entry.TapJob((1, 1, 4, 4), y, (0, 0, 4), 1.0, total=total)])
    with pytest.raises(entry.NativeError, match="ends before"):
        place = entry.Place(torch.zeros(6), 3)
        entry.sum_squares(
            [
                entry.TapJob(
                    (1, 1, 3, 4), y, (0, 0, 4), 1.0, place, total, entry.Place(torch.zeros(4))
                )
            ]
        )
    with pytest.raises(entry.NativeError, match="null pointer"):
        entry.sum_squares([entry.TapJob((1, 1, 3, 4), y, (0, 0, 4), 1.0)])


def test_no_address_leaves_python_elsewhere():
    """`entry` is the one module that gives an address of a tensor to C."""
    folder = library.SOURCE.parent
    users = {path.name for path in folder.glob("*.py") if "data_ptr()" in path.read_text()}
    assert users <= {"entry.py", "library.py"}
    assert not hasattr(ops, "library")
    assert ctypes.sizeof(ctypes.c_void_p) == 8


# --- what is differentiated again, counted or transformed -----------------------------------------------------------


@pytest.mark.parametrize(
    "method", [DropKey(0.4), HardMasking(0.3, top=3), HardMasking(0.3)], ids=str
)
@pytest.mark.parametrize("size", [(6, 9, 8), (40, 50, 48)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_differentiated_twice(built, method, size, causal):
    """By torch, with the mask that the kernel drew: recovered here from values that are the unit vectors."""
    torch.manual_seed(0)
    n, m, d = size
    n = m if causal else n
    q, k, v = (torch.randn(2, 2, length, d, requires_grad=True) for length in (n, m, m))

    def attention(values):
        torch.manual_seed(5)
        o, _, kernel = attend(q, k, values, None, 0.0, causal, None, False, Needs([method]), None)
        assert kernel.name == "native"
        return o

    kept = attention(torch.eye(m).expand(2, 2, m, m)).detach() != 0
    assert not kept.all()
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = (wide[0] @ wide[1].mT * d**-0.5).masked_fill(~kept, float("-inf"))
    outputs = (attention(v), (q, k, v)), (scores.softmax(-1) @ wide[2], wide)
    first, second = [], []
    for out, leaves in outputs:
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        first.append(grads)
        second.append(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))
    for found in (first, second):
        for a, e in zip(*found, strict=True):
            torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-4)


def test_one_tensor_as_queries_keys_and_values_twice():
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found = []
    for t in (x, wide):
        o = run(t, t, t)[0] if t is x else F.scaled_dot_product_attention(t * 1, t * 1, t * 1)
        if t is wide:
            o = (t @ t.mT / 2).softmax(-1) @ t
        (g,) = torch.autograd.grad(o.sin().sum(), t, create_graph=True)
        found.append((g, *torch.autograd.grad(g.square().sum(), t)))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [100, 2**18 + 7])
def test_dropout_differentiated_twice(size):
    x = torch.randn(size, requires_grad=True)
    torch.manual_seed(0)
    (g,) = torch.autograd.grad((dampen.masks.drop(x.square(), 0.5)).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(g, x * twice)
    assert set(twice.unique().tolist()) == {0.0, 4.0}


@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script:DeprecationWarning"
)  # torch's own forward-mode formulas
def test_forward_mode_runs_on_torch():
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    with forward_ad.dual_level():
        o, kernel = run(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        tangent = forward_ad.unpack_dual(o).tangent
    assert "not native: in forward-mode differentiation" in str(kernel)
    assert tangent is not None
    step = 1e-3
    ends = [run(q + sign * step, k, v)[0] for sign in (1, -1)]
    torch.testing.assert_close(tangent, (ends[0] - ends[1]) / (2 * step), rtol=1e-2, atol=1e-3)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore:`torch.jit.:DeprecationWarning"
)
def test_a_trace_holds_no_numbers_of_its_example():
    """What a kernel writes is a constant to `torch.jit.trace`: dropout would hide the same for ever, in silence. By
    torch's own operations the trace fails."""
    found = []

    def run_traced(x):
        found.append(entry.transformed())
        return dampen.masks.drop(x, 0.5)

    with pytest.raises(RuntimeError):
        torch.jit.trace(run_traced, (torch.ones(1000),), check_trace=False)
    assert found == ["inside torch.jit.trace"]


def test_flops_are_counted():
    """Forward 2 products and backward 5, as torch counts its own attention."""
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    torch.manual_seed(0)
    plain = run(q, k, v, [DropKey(0.5)])[0]
    with FlopCounterMode(display=False) as counter:
        torch.manual_seed(0)
        o, kernel = run(q, k, v, [DropKey(0.5)])
    assert kernel.name == "native"
    assert torch.equal(o, plain)  # watched or not, the same keys
    assert counter.get_total_flops() == 2 * 2 * (2 * 3 * 5 * 5 * 4)
    with FlopCounterMode(display=False) as counter:
        o.sum().backward()
    assert counter.get_total_flops() == 5 * 2 * (2 * 3 * 5 * 5 * 4)


def test_flops_of_a_model():
    model, x = tiny(), torch.rand(2, 1, 8, 8)
    with (
        FlopCounterMode(display=False) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch's fused one is not counted
        model.eval()(x)
    reg = dampen.regularize(model, DropKey(0.5))
    with FlopCounterMode(display=False) as regularized:
        model.train()(x)
    assert "native" in repr(reg)
    assert regularized.get_total_flops() == counter.get_total_flops()


@pytest.mark.parametrize("native", [True, False])
def test_explicit_dropout_without_a_version_counter_and_inside_torch_func(native):
    """In training mode under `inference_mode`, and under `torch.func.grad`, whose tensors have no address."""
    torch.manual_seed(0)
    model, x = tiny(), torch.rand(8, 1, 8, 8)
    method = ExplicitDropout(value=0.1, ffn=0.1)
    if not native:
        with library.torch_only("a test"):
            check_functional(model, method, x)
    else:
        check_functional(model, method, x)


def check_functional(model, method, x):
    reg = dampen.regularize(model, [method], strict=False)
    expected = model(x).detach()
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
    reg.penalty()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).square().mean() + reg.penalty()

    grads = torch.func.grad(loss)(parameters)
    (model(x).square().mean() + reg.penalty()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)


# --- numbers that are none --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [5, 8, 17, 40])
@pytest.mark.parametrize(
    "methods", [NOTHING, [DropKey(0.5)], [dampen.DropHead(1e-9)]], ids=["1e-9", "0.5", "none"]
)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_stays_nan(keys, methods, where):
    """A query whose scores are all NaN was once taken for one that is shown nothing: zeros, and finite gradients."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, keys, 8) for _ in range(3))
    {"q": q, "k": k, "v": v}[where][0, 0, 0] = float("nan")
    q.requires_grad_()
    o, _ = run(q, k, v, methods)
    assert o[0, 1].isfinite().all()
    if where == "q":
        assert o[0, 0, 0].isnan().all()
        assert o[0, 0, 1:].isfinite().all()
        (g,) = torch.autograd.grad(o.sum(), q)
        assert g[0, 0, 0].isnan().all()
    else:
        assert o[0, 0].isnan().any()
