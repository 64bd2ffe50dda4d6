"""Rates above 1 - 2^-16: a 16-bit draw alone cannot tell them from 1, so the threshold is dithered.

At 0.99999 one entry in 100,000 stays. Each path is drawn until about a hundred stay, and the
count is held against the binomial."""

import inspect
import math

import pytest
import torch

import dampen
from dampen.calls import BranchCall, Call, LinearCall
from dampen.checking.subjects import adapted
from dampen.masks import bernoulli, few_kept, keep_factor
from dampen.native import library
from dampen.registry import methods

RATE = 0.99999
ENTRIES, CALLS = 20_000, 500


def is_binomial(kept, total, share=1 - RATE):
    mean = total * share
    # the dither is one number per call, shared by its entries: the count is more spread than a binomial's
    spread = math.sqrt(mean * (1 + ENTRIES * 2**-16))
    return abs(kept - mean) <= 5 * spread


@pytest.mark.parametrize(
    "rate", [RATE, torch.tensor(RATE), torch.full((ENTRIES, 1), RATE)], ids=["int", "0-d", "rows"]
)
def test_masks(rate):
    torch.manual_seed(0)
    shape = (ENTRIES, 1)
    share = (
        1 - float(torch.as_tensor(rate).flatten()[0])
        if isinstance(rate, torch.Tensor)
        else 1 - rate
    )
    kept = sum(int((~bernoulli(shape, rate)).sum()) for _ in range(CALLS))
    assert is_binomial(kept, ENTRIES * CALLS, share)
    factors = sum(int((keep_factor(shape, rate, torch.float32) > 0).sum()) for _ in range(CALLS))
    assert is_binomial(factors, ENTRIES * CALLS, share)
    few = sum(int((few_kept(shape, rate) > 0).sum()) for _ in range(CALLS))
    assert is_binomial(few, ENTRIES * CALLS, share)


def test_masks_in_graphs():
    torch.compiler.reset()
    run = torch.compile(
        lambda rate: (~bernoulli((ENTRIES,), rate)).sum(), fullgraph=True, backend="eager"
    )
    torch.manual_seed(0)
    kept = sum(int(run(torch.tensor(RATE))) for _ in range(CALLS))
    assert is_binomial(kept, ENTRIES * CALLS, 1 - torch.tensor(RATE).item())
    torch.compiler.reset()


@pytest.fixture
def native(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAMPEN_CACHE", str(tmp_path_factory.mktemp("native")))
        try:
            library.build()
        except library.BuildError as error:
            pytest.skip(f"no native kernels: {error}")
        yield
    library.reset()


def test_native_draws(native):
    from dampen.native import ops

    torch.manual_seed(0)
    x = torch.ones(ENTRIES)
    assert is_binomial(
        sum(int((ops.dropout(x, RATE) > 0).sum()) for _ in range(CALLS)), ENTRIES * CALLS
    )
    shown = sum(
        int((~ops.hidden_keys(1, 2, ENTRIES, RATE, seed)).sum()) for seed in range(CALLS // 2)
    )
    emptied = (CALLS - 0) * (RATE**ENTRIES)  # rows that get one key back
    assert abs(shown - ENTRIES * CALLS * (1 - RATE)) <= emptied + 5 * math.sqrt(
        ENTRIES * CALLS * (1 - RATE) * 2
    )


def stage(method):
    """What a method makes of ones, or which entries it leaves alone, as numbers of which those above 0 stayed."""
    x = torch.ones(1, 2, 100, 100)
    call = Call(shape=(1, 2, 100, 100), device=x.device, kv_heads=2, head_size=100)
    linear = LinearCall("ffn_in", x, torch.ones(100, 100), None)
    if isinstance(method, dampen.DropConnect):
        return method.operands(x, torch.ones(200, 100), linear)[1]
    if "operands" in method.stages:
        return method.operands(x, torch.ones(100, 100), linear)[0]
    if "embeddings" in method.stages:
        return method.embeddings(x[0])
    if "branch" in method.stages:
        samples = torch.ones(ENTRIES, 1, 1) if isinstance(method, dampen.DropPath) else x[0]
        return method.branch(samples, BranchCall("ffn", samples))
    if "mask" in method.stages:
        return (~method.mask(x, x, call)).float()
    return method.probs(x, call)


METHODS = {
    "drop_key": lambda: dampen.DropKey(RATE),
    "hard_masking": lambda: dampen.HardMasking(RATE, top=1.0),
    "drop_attention": lambda: dampen.DropAttention(RATE, normalized=False),
    "feed_forward_dropout": lambda: dampen.FeedForwardDropout(RATE),
    "projection_dropout": lambda: dampen.ProjectionDropout(RATE),
    "drop_connect": lambda: dampen.DropConnect(RATE),
    "embedding_dropout": lambda: dampen.EmbeddingDropout(RATE),
    "hidden_dropout": lambda: dampen.HiddenDropout(RATE),
    "drop_path": lambda: dampen.DropPath(RATE),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:HardMasking. a rate above 0.5")
def test_methods_keep_what_they_should(name):
    torch.manual_seed(0)
    method = METHODS[name]()
    made = [stage(method) for _ in range(CALLS)]
    assert made[0].numel() == ENTRIES
    assert is_binomial(sum(int((m > 0).sum()) for m in made), ENTRIES * CALLS)


RATED = [
    n for n, c in methods().items() if c.stochastic and "rate" in inspect.signature(c).parameters
]


@pytest.mark.parametrize("name", RATED)
@pytest.mark.parametrize("rate", [RATE, 1 - 1e-9])
@pytest.mark.filterwarnings("ignore:HardMasking. a rate above 0.5", "ignore::UserWarning")
def test_every_method_stays_finite(name, rate):
    """1 - 1e-9 is 1 in float32: a tensor of it would scale by 1 / 0, and 0 times that is no number."""
    torch.manual_seed(0)
    model = dampen.models.ViT(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    model = adapted(model, methods()[name]).train()
    reg = dampen.regularize(model, methods()[name](rate=rate))
    loss, _ = reg.loss(lambda: model(torch.randn(4, 3, 16, 16)), lambda out: out.square().mean())
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
