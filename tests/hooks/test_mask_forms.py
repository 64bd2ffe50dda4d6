"""All forms of a mask mean the same, on every path: the rule of `dampen.masks` seen from models.

The contract `mask_forms` runs for every method alone. Here: pairs of methods by family, the border of the rule, biases,
rows that are masked everywhere, blocks of queries, native kernels and compiled graphs."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen import masks
from dampen.checking import masked
from dampen.checking.masked import check_forms
from dampen.checking.subjects import with_example
from dampen.hooks.tracing import scores
from dampen.kernels import kernel
from dampen.native import library
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel
from tests.full import FULL

FAMILIES = {
    "hides keys": "drop_key",
    "hides the largest": "hard_masking",
    "changes keys": "blurred_attention",
    "changes weights": "drop_attention",
    "changes heads": "drop_head",
    "changes branches": "drop_path",
    "changes maps": "feed_forward_dropout",
    "penalty of attention": "explicit_dropout",
    "penalty of weights": "attention_entropy",
    "penalty of heads": "head_diversity",
    "two passes": "r_drop",
}
PAIRS = list(itertools.combinations(methods() if FULL else FAMILIES.values(), 2))


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pairs_keep_the_contract(first, second):
    found = methods()
    try:
        check_forms([with_example(found[first]), with_example(found[second])], brief=not FULL)
    except UnsupportedModel:
        assert FULL, "no method of a family refuses text"


class Attention(nn.Module):
    """Attention without maps after it, so that an output names the keys that it saw."""

    def __init__(self, path):
        super().__init__()
        self.path, self.qkv = path, nn.Linear(4, 12)
        nn.init.zeros_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)

    def forward(self, v, mask):
        """v (B, H, M, D): what each key has to say. All scores are 0 before the mask."""
        q = k = v * self.qkv(v.new_zeros(4)).sum()
        if self.path == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        if self.path == "dampen.attention":
            return dampen.attention(q, k, v, attn_mask=mask, regularizers=self.own)
        return (q @ k.transpose(-2, -1) + mask).softmax(-1) @ v


def regularized(path, method):
    attn = Attention(path)
    model = nn.Sequential()
    model.attn = attn
    if path == "dampen.attention":
        attn.own = [method]
    else:
        dampen.regularize(model, method)
    return attn.train()


PATHS = ["sdpa", "eager", "dampen.attention"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("low", "returns"), [(-79.9, True), (-80.1, False)])
def test_an_emptied_row_gets_back_a_key_that_the_model_shows(path, low, returns):
    """The border, end to end: at a rate of 0.9 a row of two keys is emptied in 81 of 100, and gets back one of those
    that are seen, at random. So the second key is all that is seen 0.405 + 0.09 of the time where it counts."""
    attn = regularized(path, dampen.DropKey(0.9))
    keys = torch.eye(4)[:2].expand(400, 1, 2, 4)
    torch.manual_seed(0)
    seen = torch.cat([attn(keys, torch.tensor([[0.0, low], [0.0, low]])) for _ in range(10)])
    second = seen[..., 1] > 0.5
    if returns:
        assert abs(second.double().mean() - 0.495) < 5 * math.sqrt(0.25 / second.numel())
    else:
        assert not second.any()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_row_masked_everywhere_by_one_number_stays_as_it_is(path, low):
    """Uniform, as SDPA computes it, at a rate near 0; at a high one keys are hidden in it too."""
    keys = torch.eye(4).expand(300, 1, 4, 4)
    mask = torch.zeros(4, 4).masked_fill(~torch.ones(4, 4).tril().bool(), low)
    mask[1] = low
    expected = F.scaled_dot_product_attention(keys * 0, keys * 0, keys, attn_mask=mask)
    assert torch.equal(expected[0, 0, 1], torch.full((4,), 0.25))
    torch.testing.assert_close(regularized(path, dampen.DropKey(1e-9))(keys, mask), expected)
    out = regularized(path, dampen.DropKey(0.5))(keys, mask)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.sum(-1), torch.ones(300, 1, 4))
    assert not out[:, :, 0, 1:].any()  # the row beside it, of one visible key


PENALTIES = {
    "explicit": lambda: dampen.ExplicitDropout(
        query=1.0, key=1.0, value=1.0, attended_value=1.0, query_key=1.0, ffn=1
    ),
    "arora": lambda: dampen.AroraDropout(query=1.0, key=1.0, value=1.0, ffn=1.0),
    "entropy": lambda: dampen.AttentionEntropy(1.0, floor=0.99),
    "diversity": lambda: dampen.HeadDiversity(1.0),
}


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("path", masked.PATHS)
def test_a_padded_query_that_sees_nothing_makes_no_padding_count(penalty, path):
    """Left padding under a causal mask: the first rows are masked everywhere, and see the padding as SDPA computes it.
    The penalties are those of the sample without its padding, whatever the padding holds."""
    seen = torch.ones(7, 7).tril().bool()[None, None].repeat(3, 1, 1, 1)
    seen[..., :2] = False
    found = {}
    for form, mask in masked.forms_of(seen, torch.float64).items():
        if form in ("bool", "-inf"):
            continue  # NaN in the model's own softmax
        for other in (0, 5):
            model = masked.build(path, torch.float64)
            reg = dampen.regularize(model, PENALTIES[penalty]())
            ids = masked.ids()
            ids[:, :2] = (ids[:, :2] + other) % masked.VOCAB
            model(ids, mask)
            found[form, other] = reg.penalty().item()
    short = masked.build(path, torch.float64)
    reg = dampen.regularize(short, PENALTIES[penalty]())
    short(
        masked.ids()[:, 2:],
        torch.zeros(5, 5).double().masked_fill(~torch.ones(5, 5).tril().bool(), -1e9)[None, None],
    )
    expected = reg.penalty().item()
    assert expected > 0
    for name, value in found.items():
        assert value == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize("form", ["-1e9", "-100", "-inf", "the smallest number"])
@pytest.mark.parametrize("path", ["sdpa", "mha"])
def test_a_bias_stays_beside_a_mask_and_gets_its_gradient(form, path):
    """Swin adds relative positions and a window's -100: softmax(s + bias) over what is seen, by a loop."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(3))
    bias = (10 * torch.randn(1, 3, 5, 5, dtype=torch.float64)).requires_grad_()
    seen = torch.rand(2, 1, 5, 5) < 0.6
    seen[..., 0] = True
    expected = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    for b, h, i in itertools.product(range(2), range(3), range(5)):
        keys = [j for j in range(5) if seen[b, 0, i, j]]
        weights = torch.stack(
            [(q[b, h, i] @ k[b, h, j]) / 2 + bias[0, h, i, j] for j in keys]
        ).softmax(0)
        expected[b, h, i] = sum(w * v[b, h, j] for w, j in zip(weights, keys, strict=True))
    expected_gradient = torch.autograd.grad(expected.square().sum(), bias)[0]
    mask = bias + masked.forms_of(seen, torch.float64)[form]
    # a probability of 1e-12 hides nothing and keeps every stage open
    out = dampen.attention(q, k, v, attn_mask=mask, regularizers=[dampen.DropKey(1e-12)])
    torch.testing.assert_close(out, expected.detach(), atol=1e-9, rtol=0)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), bias)[0], expected_gradient, atol=1e-8, rtol=0
    )


@pytest.mark.parametrize("form", ["-1e9", "-1e4", "-100", "-inf", "the smallest number"])
def test_blocks_of_queries_take_every_form(form, monkeypatch):
    """Both ways of taking queries in blocks: the Function around torch's kernel, and checkpoints (here by autocast)."""
    monkeypatch.setattr(kernel, "LONG", 4)
    monkeypatch.setattr(kernel, "PLAIN_BELOW", {})
    monkeypatch.setattr(kernel, "CHUNK", 2 * 3 * 2 * 9)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    seen = torch.ones(9, 9).tril().bool()
    for matrix in ([], [dampen.DropAttention(0.2)]):
        out = []
        for mask in (seen, masked.forms_of(seen, torch.float64)[form]):
            torch.manual_seed(1)
            got = dampen.attention(
                q, k, v, attn_mask=mask, regularizers=[dampen.DropKey(0.4), *matrix]
            )
            out.append((got, *torch.autograd.grad(got.square().sum(), (q, k, v))))
        for a, b in zip(*out, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAMPEN_CACHE", str(tmp_path_factory.mktemp("native")))
        try:
            library.build()
        except library.BuildError as error:
            pytest.skip(f"no native kernels: {error}")
        yield
    library.reset()


@pytest.mark.parametrize(
    "method", [lambda: dampen.DropKey(0.5), lambda: dampen.HardMasking(0.5, top=0.9)]
)
def test_native_kernels_and_float_masks_hide_alike(native, method):
    """A bool mask goes to the native kernel and a float mask to torch, which draws otherwise: the share of each weight
    that is hidden agrees, and no key of the future is ever seen."""
    assert library.available()
    keys, samples, seen = torch.eye(8).expand(4000, 1, 8, 8), 4000, torch.ones(8, 8).tril().bool()
    shares = []
    for mask in masked.forms_of(seen, torch.float32).values():
        torch.manual_seed(len(shares))
        out = dampen.attention(keys * 0, keys * 0, keys, attn_mask=mask, regularizers=[method()])
        assert not out[:, :, ~seen].any()
        shares.append((out > 0).double().mean((0, 1)))
    for share in shares[1:]:
        assert (share - shares[0]).abs().max() < 5 * math.sqrt(0.5 / samples)


@pytest.mark.parametrize("path", masked.PATHS)
def test_compiled_graphs_read_masks_without_a_break(path):
    mask = masked.forms_of(torch.ones(7, 7).tril().bool()[None, None], torch.float32)["-100"]
    methods = [dampen.DropKey(0.4), dampen.ExplicitDropout(value=1.0, ffn=1.0)]
    torch.compiler.reset()
    found = []
    for compiled in (False, True):
        model = masked.build(path, torch.float32)
        reg = dampen.regularize(model, methods)
        run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
        torch.manual_seed(2)
        out = run(masked.ids(), mask)
        found.append((out.detach(), reg.penalty().detach()))
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("path", masked.PATHS)
def test_masks_made_under_inference_mode(path):
    """Torch does not count how often they are written to, so nothing is remembered of them; nor is anything there."""
    with torch.inference_mode():
        mask = masked.forms_of(torch.ones(7, 7).tril().bool()[None, None], torch.float32)["-1e9"]
    model = masked.build(path, torch.float32)
    dampen.regularize(model, dampen.DropKey(0.4))
    with torch.no_grad():
        torch.manual_seed(0)
        first = model(masked.ids(), mask)
    with torch.inference_mode():
        torch.manual_seed(0)
        assert torch.equal(model(masked.ids(), mask), first)


@pytest.mark.parametrize("path", masked.PATHS)
def test_a_mask_is_read_once_for_all_layers(path, monkeypatch):
    """Both blocks get the same mask; a mask that was written to between two forwards is read again."""
    reads, real = [], masks.hides
    for module in (masks, scores):
        monkeypatch.setattr(module, "hides", lambda mask: reads.append(mask) or real(mask))
    model = masked.build(path, torch.float32)
    dampen.regularize(model, [dampen.DropKey(0.4), dampen.ExplicitDropout(value=1.0)], strict=False)
    mask = masked.forms_of(torch.ones(7, 7).tril().bool()[None, None], torch.float32)["-1e9"]
    mask = mask.expand(3, masked.HEADS, 7, 7).contiguous()  # as nn.MultiheadAttention takes it
    for forward in range(3):
        model(masked.ids(), mask)
        # nn.MultiheadAttention's mask is folded anew by each block of this model, without a copy;
        # eager attention compares a small mask with that of the forward before
        assert len(reads) == (min(forward, 1) if path == "eager" else forward) + 1
    before = len(reads)
    mask[..., 0] += 0.5
    model(masked.ids(), mask)
    assert len(reads) == before + 1
