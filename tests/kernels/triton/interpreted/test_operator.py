"""The kernels as operators of torch, and as `dampen.attention` chooses them."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropAttention, DropHead, DropKey, HardMasking
from dampen.kernels.attend import Needs, attend
from dampen.kernels.triton import ops, trial
from dampen.kernels.triton.tiles import HIDE_KEYS, NOTHING, Form


@pytest.fixture
def tried(monkeypatch, as_gpu):
    """The trial was made before: it has tests of its own, and the interpreter takes seconds."""
    monkeypatch.setattr(trial, "verdict", lambda *a: "")
    monkeypatch.setattr(trial, "_verdicts", {})


def operands(n=24, d=16, dtype=torch.float32):
    return [torch.randn(1, 2, n, d, dtype=dtype, requires_grad=True) for _ in range(3)]


def run(q, k, v, method, mask=None, causal=False):
    o, _, kernel = attend(q, k, v, mask, 0.0, causal, None, False, Needs([method]), None)
    return o, kernel


@pytest.mark.parametrize("bits", [False, True])
def test_opcheck(bits):
    """Schema, autograd, fake tensors, and a graph with dynamic sizes."""
    q, k, v = operands()
    seed, rate = torch.tensor(3), torch.tensor(0.3)
    keep = torch.full((1, 2, 24, 1), 2**23 + 5, dtype=torch.int32) if bits else None
    draws, guard = (NOTHING, False) if bits else (HIDE_KEYS, True)
    arguments = (q, k, v, keep, None, None, seed, rate, True, 0.25, draws, guard)
    torch.library.opcheck(ops._attention, arguments)


@pytest.mark.parametrize(
    "method",
    [
        DropKey(0.3),
        DropAttention(0.3),
        HardMasking(0.5, top=0.2),
        DropAttention(0.3, normalized=False),
    ],
    ids=repr,
)
def test_chosen_where_one_method_draws(tried, method):
    q, k, v = operands()
    _, kernel = run(q, k, v, method, causal=True)
    if method.weight_dropout() is not None:
        assert (kernel.name, kernel.way) == ("fused", "dropout")
        return
    assert kernel.name == "triton"
    # values that are the unit vectors: the output is the weights
    eye = torch.eye(24).expand(1, 2, 24, 24)
    q, k = (F.pad(t, (0, 8)) for t in (q, k))
    a, kernel = run(q, k, eye, method, causal=True)
    assert kernel.name == "triton"
    assert (a[~torch.ones(24, 24).tril().bool().expand_as(a)] == 0).all()
    torch.testing.assert_close(a.sum(-1), torch.ones(1, 2, 24))
    top = (q @ k.mT).tril() if method.name == "hard_masking" else None
    hidden = (a == 0) & torch.ones(24, 24).tril().bool()
    assert hidden.any()
    if top is not None:  # a fifth of the visible keys of each query, rounded up
        s = (q @ k.mT).masked_fill(~torch.ones(24, 24).tril().bool(), float("-inf"))
        for row in range(24):
            count = -(-(row + 1) // 5)
            best = s[..., row, :].topk(count).values[..., -1:]
            assert not (hidden[..., row, :] & (s[..., row, :] < best)).any()


def test_checkpoint_replays_the_draws(tried):
    q, k, v = operands()
    weight = torch.randn_like(q)
    grads = []
    for again in (False, True):
        torch.manual_seed(5)
        method = DropKey(0.4)
        o = (
            checkpoint(lambda *t: run(*t, method)[0], q, k, v, use_reentrant=False)  # noqa: B023
            if again
            else run(q, k, v, method)[0]
        )
        grads.append(torch.autograd.grad(o, (q, k, v), weight))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_without_a_break(tried):
    """One graph over a schedule, by aot_eager; the rate is a tensor of it."""
    method = DropKey(dampen.linear(0.6, 0.0, along="progress"))
    q, k, v = operands()
    graphs = []

    def count(graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(
        lambda q, k, v: dampen.attention(q, k, v, regularizers=[method]),
        backend=count,
        fullgraph=True,
    )
    for progress in (0.0, 0.5, 1.0):
        method.at(progress)
        torch.manual_seed(1)
        o = compiled(q, k, v)
        torch.manual_seed(1)
        torch.testing.assert_close(o, dampen.attention(q, k, v, regularizers=[method]))
        torch.autograd.grad(o.sum(), (q, k, v))
    assert len(graphs) == 1


REFUSED = {
    "no Triton": ("Triton is not installed", {"importlib.util.find_spec": lambda name: None}),
    "an old one": (
        "Triton 3.1.0 is older than 3.2",
        {f"{trial.__name__}.metadata.version": lambda name: "3.1.0"},
    ),
    "an unknown card": (
        "compute capability 7.5",
        {f"{trial.__name__}.verdict": lambda *a: "compute capability 7.5, older than 8.0"},
    ),
    "a card that Triton does not know": (
        "CompilationError: ptxas fatal: Value 'sm_140' is not defined",
        {f"{trial.__name__}.errors": None, f"{trial.__name__}.verdict": trial.verdict},
    ),
    "a kernel that computes something else": (
        "dk of float32 D16 hide keys is off by 0.5, torch's attention by 1e-06",
        {
            f"{trial.__name__}.errors": lambda *a: (
                [0.0, 0.0, 0.5, 0.0],
                [1e-6] * 4,
                torch.tensor([0.25]),
            ),
            f"{trial.__name__}.verdict": trial.verdict,
        },
    ),
    "heads that do not fit": ("heads of 8 channels, not 16 to 128", {}),
    "switched off": ("switched off by DAMPEN_TRITON=0", {}),
}


TRIED = {
    "an unknown card", "a card that Triton does not know", "a kernel that computes something else"
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_torch_path_says_why(tried, monkeypatch, why, tmp_path):
    """Nothing wrong is ever returned: what failed is not used, with a warning and a reason."""
    expected, patches = REFUSED[why]
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    monkeypatch.setenv("DAMPEN_TRITON", "0" if why == "switched off" else "1")
    for name, value in patches.items():
        monkeypatch.setattr(name, value or _fails)
    heads = 4 if why == "heads that do not fit" else 2
    net = dampen.models.ViT(image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=heads)
    reg = dampen.regularize(net, DropKey(0.3))
    images = torch.randn(2, 1, 8, 8)
    if why in TRIED:
        with pytest.warns(UserWarning, match=r"not used on cpu for float32 D16 hide keys"):
            out = net(images)
    else:
        out = net(images)
    out.sum().backward()
    assert f"not Triton: {expected}" in str(reg)
    assert not {"triton"} & {k.split()[0] for layer in reg.layers for k in layer.kernels.values()}


def _fails(*args):
    class CompilationError(Exception):
        pass

    raise CompilationError("ptxas fatal: Value 'sm_140' is not defined")


@pytest.mark.parametrize("size", [8, 160])
def test_heads_that_do_not_fit(tried, size):
    q, k, v = operands(d=size)
    assert f"heads of {size} channels" in str(run(q, k, v, DropKey(0.3))[1])


def test_other_methods_may_act_besides(tried):
    q, k, v = operands()
    needs = Needs([DropHead(0.1), DropKey(0.1)])
    kernel = attend(q, k, v, None, 0.0, False, None, False, needs, None)[2]
    assert (kernel.name, kernel.way) == ("triton", "")
    needs = Needs([DropKey(0.1), DropAttention(0.1, window=2, normalized=False)])
    kernel = attend(q, k, v, None, 0.0, False, None, False, needs, None)[2]
    assert "not Triton: drop_key and drop_attention need more" in str(kernel)


BITS = {
    "block": [DropKey(0.4, unit="block", window=3)],
    "cross": [DropKey(0.4, unit="cross", window=2)],
    "windows": [DropAttention(0.4, window=3)],
    "two": [DropKey(0.3), HardMasking(0.5)],
    "columns and elements": [DropKey(0.3, unit="column"), DropKey(0.2)],
}


@pytest.mark.parametrize("methods", BITS.values(), ids=BITS)
@pytest.mark.parametrize("causal", [False, True])
def test_what_hides_keys_together_keeps_one_bit_a_score(tried, monkeypatch, methods, causal):
    """Beside the path of a mask, under the same seed; all queries in one chunk, and in several."""
    torch.manual_seed(0)
    q = torch.randn(2, 2, 40, 16, requires_grad=True)
    k, v = (torch.randn(2, 1, 40, 16, requires_grad=True) for _ in range(2))
    weight = torch.randn(2, 2, 40, 16)
    needs = Needs(methods)

    def run_once(why):
        monkeypatch.setattr(trial, "refused", lambda *a: why)
        needs.kernels.clear()
        torch.manual_seed(4)
        o, _, kernel = attend(q, k, v, None, 0.0, causal, None, True, needs, None)
        return kernel, o, *torch.autograd.grad(o, (q, k, v), weight)

    kernel, *ours = run_once("")
    assert (kernel.name, kernel.way) == ("triton", "bits")
    other, *theirs = run_once("switched off")
    assert other.name in ("fused", "plain")
    for a, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("dampen.kernels.triton.fit.rows_in_memory", lambda *a, **_: 16)
    chunked = run_once("")[1]
    assert chunked.isfinite().all()
    assert not torch.equal(chunked, ours[0])  # the draws of three chunks are not those of one


def test_bits_keep_the_models_mask(tried):
    """Padding, and a query that the model shows nothing."""
    q, k = (torch.randn(2, 2, 36, 16) for _ in range(2))
    eye = torch.eye(36).expand(2, 2, 36, 36)
    mask = torch.ones(2, 1, 36, 36, dtype=torch.bool)
    mask[1, :, :, 30:] = False
    mask[0, :, 7] = False
    q, k = (F.pad(t, (0, 20)) for t in (q, k))
    method = DropKey(0.5, unit="block", window=2)
    a, kernel = run(q, k, eye, method, mask)
    assert kernel.way == "bits"
    assert (a[~mask.expand_as(a)] == 0).all()
    sums = torch.ones(2, 2, 36)
    sums[0, :, 7] = 0
    torch.testing.assert_close(a.sum(-1), sums)
    assert ((a == 0) & mask).any()


def test_bits_are_compiled_without_a_break(tried):
    method = DropKey(0.3, unit="cross")
    q, k, v = operands(n=25)
    compiled = torch.compile(
        lambda q, k, v: dampen.attention(q, k, v, regularizers=[method]),
        backend="aot_eager",
        fullgraph=True,
    )
    o = compiled(q, k, v)
    assert o.isfinite().all()
    torch.autograd.grad(o.sum(), (q, k, v))


def test_verdict_is_kept(tried, monkeypatch, tmp_path):
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(trial, "verdict", lambda *a: asked.append(a) or "")
    form = Form(torch.float32, 16, HIDE_KEYS)
    for _ in range(2):
        trial._verdicts.clear()  # another process
        assert trial.refused(torch.device("cpu"), form) == ""
    assert len(asked) == 1
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("gpu-")
    for other in (form._replace(size=24), form._replace(causal=True), form._replace(masked=1)):
        assert trial.refused(torch.device("cpu"), other) == ""
    assert len(asked) == 4
    path.write_text("cut off")
    trial._verdicts.clear()
    assert trial.refused(torch.device("cpu"), form) == ""
    assert len(asked) == 5
