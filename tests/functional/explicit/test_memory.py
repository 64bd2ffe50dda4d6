"""What is never built: no n x n and no d x d tensor in the paper form, no (B, H, n, d) in any."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dampen
from dampen import ExplicitDropout
from dampen.methods.explicit_dropout import TERMS

WIDTH, HEADS, TOKENS, BATCH = (
    64,
    4,
    50,
    3,
)  # n, d, dh = 50, 64, 16: every product of two of them is unmistakable
ALL = dict.fromkeys(TERMS, 0.1)


class Shapes(TorchDispatchMode):
    """Every tensor that any operation makes, forward and backward."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for t in tree_leaves(out):
            if (
                isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given
            ):  # views are not made
                self.made.add((func.name(), tuple(t.shape)))
        return out


def shapes(method):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[dampen.models.block.Block(WIDTH, HEADS, 96) for _ in range(2)]
    ).train()
    reg = dampen.regularize(model, method) if method else None
    watch = Shapes()
    with watch:
        out = model(torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True))
        (out.square().mean() + (reg.penalty() if reg else 0)).backward()
    return watch.made


def has(shape, *sizes):
    shape = list(shape)
    for size in sizes:
        if size not in shape:
            return False
        shape.remove(size)
    return True


@pytest.mark.parametrize("reduction", ["mean", "author"])
def test_paper_form_builds_no_square_matrix(reduction):
    own = shapes(ExplicitDropout(**ALL, reduction=reduction)) - shapes(None)
    assert any(
        shape == (BATCH, HEADS, 16, 16) for _, shape in own
    )  # the Gram matrices are seen, so seeing works
    assert not [s for s in own if has(s[1], TOKENS, TOKENS)]
    # the only d x d tensors are the weights' own gradients
    assert not [s for s in own if has(s[1], WIDTH, WIDTH) or has(s[1], BATCH, WIDTH, WIDTH)]


@pytest.mark.parametrize("form", ["exact", "inverted"])
def test_other_forms_build_nothing_per_head_and_feature(form):
    own = shapes(ExplicitDropout(**{**ALL, "attended_value": 0.0}, form=form)) - shapes(None)
    assert not [s for s in own if has(s[1], TOKENS, TOKENS)]
    assert not [
        s for s in own if has(s[1], BATCH, HEADS, TOKENS, WIDTH) or has(s[1], BATCH, WIDTH, WIDTH)
    ]
    assert not [s for s in own if has(s[1], BATCH, HEADS, 16, WIDTH)]


def test_attention_weights_are_needed_for_the_attended_variance_only():
    assert ExplicitDropout(**ALL).stages == {"product", "qkv", "heads"}
    assert ExplicitDropout(**ALL, form="exact").stages == {"product", "qkv", "heads", "probs"}
    assert ExplicitDropout(**ALL, form="inverted").stages == {"product", "qkv", "probs"}
    assert ExplicitDropout(**{**ALL, "attended_value": 0}, form="exact").stages == {
        "product",
        "qkv",
    }


def test_long_sequences_stay_linear(monkeypatch):
    """Above the length at which kernels go in chunks, the attended variance holds a chunk of A at a time."""
    monkeypatch.setattr("dampen.kernels.kernel.LONG", TOKENS)
    monkeypatch.setattr("dampen.kernels.kernel.CHUNK", BATCH * HEADS * TOKENS * 10)
    own = shapes(ExplicitDropout(attended_value=0.1, form="exact"))
    assert any(has(shape, BATCH, HEADS, 10, TOKENS) for _, shape in own)
    assert not [s for s in own if has(s[1], TOKENS, TOKENS)]
    monkeypatch.setattr("dampen.functional.explicit.pairs.CHUNK", BATCH * HEADS * TOKENS * 10)
    own = shapes(ExplicitDropout(query_key=0.1, form="exact", heads="concat"))
    assert any(has(shape, BATCH, 10, TOKENS) for _, shape in own) or any(
        has(s, BATCH, 40, TOKENS) for _, s in own
    )
    assert not [s for s in own if has(s[1], TOKENS, TOKENS)]


def test_nothing_is_kept_beyond_the_forward():
    """The slots are emptied when read, so no graph lives on and deepcopy never meets one."""
    torch.manual_seed(0)
    block = dampen.models.block.Block(WIDTH, HEADS, 96).train()
    reg = dampen.regularize(block, ExplicitDropout(**ALL, form="exact"))
    block(torch.randn(2, 5, WIDTH))
    reg.penalty()
    for clone in reg.clones:
        assert not clone._penalties
        assert not [
            v for v in vars(clone).values() if isinstance(v, torch.Tensor) and v.grad_fn is not None
        ]
