"""The kernels as operators of torch, and as `dampen.attention` chooses them."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dampen
from dampen import DropAttention, DropHead, DropKey, HardMasking
from dampen.kernels.attend import Needs, attend
from dampen.kernels.triton import trial
from dampen.kernels.triton.tiles import HIDE_KEYS


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


def test_opcheck():
    q, k, v = operands()
    seed, rate = torch.tensor(3), torch.tensor(0.3)
    arguments = (q, k, v, None, None, None, seed, rate, True, 0.25, HIDE_KEYS, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dampen.gpu_attention, arguments, test_utils=tests)


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
    "an old one": ("older than 3.2", {f"{trial.__name__}.metadata.version": lambda name: "3.1.0"}),
    "an unknown card": (
        "compute capability 7.5",
        {f"{trial.__name__}.verdict": lambda *a: "compute capability 7.5, older than 8.0"},
    ),
    "a compiler that fails": (
        "CompilationError",
        {f"{trial.__name__}.errors": None, f"{trial.__name__}.verdict": trial.verdict},
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_torch_path_says_why(tried, monkeypatch, why, tmp_path):
    """Nothing wrong is ever returned: what failed is not used, with a warning and a reason."""
    expected, patches = REFUSED[why]
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    for name, value in patches.items():
        monkeypatch.setattr(name, value or _fails)
    q, k, v = operands()
    if why in ("an unknown card", "a compiler that fails"):
        with pytest.warns(UserWarning, match="not used"):
            o, kernel = run(q, k, v, DropKey(0.3))
    else:
        o, kernel = run(q, k, v, DropKey(0.3))
    assert kernel.name in ("fused", "plain")
    assert expected in str(kernel)
    assert o.shape == q.shape


def _fails(*args):
    class CompilationError(Exception):
        pass

    raise CompilationError("ptxas")


@pytest.mark.parametrize("size", [8, 160])
def test_heads_that_do_not_fit(tried, size):
    q, k, v = operands(d=size)
    assert f"heads of {size} channels" in str(run(q, k, v, DropKey(0.3))[1])


def test_two_methods_that_draw_take_the_mask(tried):
    q, k, v = operands()
    needs = Needs([DropKey(0.1), HardMasking(0.1)])
    kernel = attend(q, k, v, None, 0.0, False, None, False, needs, None)[2]
    assert "both act on the weights" in str(kernel)
    needs = Needs([DropHead(0.1), DropKey(0.1)])
    assert attend(q, k, v, None, 0.0, False, None, False, needs, None)[2].name == "triton"


def test_verdict_is_kept(tried, monkeypatch, tmp_path):
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(trial, "verdict", lambda *a: asked.append(a) or "")
    q = operands()[0]
    for _ in range(2):
        trial._verdicts.clear()  # another process
        assert trial.refused(q, torch.float32, HIDE_KEYS) == ""
    assert len(asked) == 1
    assert [p.name[:4] for p in tmp_path.iterdir()] == ["gpu-"]
