"""Reductions: what lambda depends on, the authors' scale, and which tokens count."""

import pytest
import torch

import dampen
from dampen import ExplicitDropout
from dampen.functional.explicit import author_weight
from dampen.functional.explicit.reductions import FORMS, REDUCTIONS, pair_rows, token_rows
from dampen.methods.explicit_dropout import TERMS
from tests.oracles.explicit_layer import Case, ToyLayer

WEIGHTS = dict.fromkeys(TERMS, 1.0)


def penalties(x, keep=None, **options):
    torch.manual_seed(0)
    layer = ToyLayer(width=8, heads=2, kv_heads=2, size=4, hidden=6).train()
    reg = dampen.regularize(layer, ExplicitDropout(**{**WEIGHTS, **options}))
    layer(x, keep=keep)
    return reg.penalties()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("attended", ["pre", "post"])
def test_mean_depends_on_neither_batch_size_nor_padding_nor_length(form, attended):
    torch.manual_seed(1)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    once = penalties(x, form=form, attended=attended)
    # the same samples four times: batch size
    four = penalties(x.repeat(4, 1, 1), form=form, attended=attended)
    # each token three times over: attention sees the same mixture, every mean over tokens or pairs stays
    longer = penalties(x.repeat(1, 3, 1), form=form, attended=attended)
    # three padded tokens that hold nonsense
    padded = torch.cat([x, 100 * torch.randn(2, 3, 8, dtype=torch.float64)], 1)
    keep = (torch.arange(8) < 5).expand(2, 1, 1, 8)
    masked = penalties(padded, keep=keep, form=form, attended=attended)
    for name, value in once.items():
        torch.testing.assert_close(four[name], value, rtol=1e-10, atol=0)
        torch.testing.assert_close(masked[name], value, rtol=1e-10, atol=0)
        # A^2 falls with the number of equal keys, so the variance part of the "pre" mask is truly smaller there
        if not (name.endswith("attended_value") and form != "paper" and attended == "pre"):
            torch.testing.assert_close(longer[name], value, rtol=1e-10, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "options", [{}, {"visible_only": True}, {"heads": "concat", "attended_value": 0.0}], ids=str
)
def test_padded_tokens_change_nothing(reduction, options):
    """Not the value, and not the gradient: it is zero on what is padded."""
    torch.manual_seed(1)
    x = torch.randn(2, 6, 8, dtype=torch.float64, requires_grad=True)
    valid = torch.arange(6) < torch.tensor([[6], [3]])
    keep = valid[:, None, None, :] & torch.ones(6, 6, dtype=torch.bool).tril()
    value = sum(penalties(x, keep=keep, form="exact", reduction=reduction, **options).values())
    (grad,) = torch.autograd.grad(value, x)
    assert grad[~valid].abs().max() == 0
    assert grad[valid].abs().min() > 0
    other = torch.where(valid.unsqueeze(-1), x, 7 * torch.randn_like(x))
    moved = sum(penalties(other, keep=keep, form="exact", reduction=reduction, **options).values())
    torch.testing.assert_close(moved.detach(), value.detach(), rtol=1e-12, atol=0)


def test_author_weight_is_what_the_authors_code_means():
    """The authors add up, over the batch, token means without the 1/2, at the published lambda."""
    batch, tokens, published = 4, 5, 5e-4
    torch.manual_seed(1)
    x = torch.randn(batch, tokens, 8, dtype=torch.float64)
    ours = penalties(x)
    theirs = penalties(x, reduction="author")
    for name in ours:
        pairs = name.rsplit(".", 1)[1] in ("query", "key", "query_key")
        weight = author_weight(published, batch, tokens if pairs else None)
        torch.testing.assert_close(
            weight * ours[name], published * theirs[name], rtol=1e-12, atol=0
        )


def test_author_weight_of_the_papers_window():
    """5e-4 to 1e-3 at batch 64 is about 0.06 to 0.13 for value and feed-forward."""
    assert author_weight(5e-4, 64) == pytest.approx(0.064)
    assert author_weight(1e-3, 64) == pytest.approx(0.128)


@pytest.mark.parametrize(("arguments", "text"), [
    ({"weight": -1.0, "batch": 2}, "finite number >= 0, got -1.0"),
    ({"weight": 1.0, "batch": 0}, "batch is a whole number of at least 1, got 0"),
    ({"weight": 1.0, "batch": 2, "tokens": 1.5}, "tokens is a whole number of at least 1, got 1.5"),
])  # fmt: skip
def test_author_weight_refuses(arguments, text):
    with pytest.raises(ValueError, match=text):
        author_weight(**arguments)


def test_a_sample_without_valid_tokens_counts_nothing():
    rows = token_rows(
        "token_mean", 2, 3, torch.tensor([[True, True, False], [False, False, False]])
    )
    assert rows.weights.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.isfinite(pair_rows("mean", 2, 3, 3, nothing, nothing).factor)
    torch.manual_seed(1)
    keep = torch.tensor([[True, True, True], [False, False, False]])[:, None, None, :]
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    both, first = penalties(x, keep=keep, form="exact"), penalties(x[:1], form="exact")
    for name, value in first.items():
        torch.testing.assert_close(both[name], value, rtol=1e-12, atol=0)


def test_an_empty_memory_gives_no_attended_value():
    """In cross-attention a sample whose memory is all padding attends to nothing: its output is zero, not minus the
    bias."""
    case = Case(cross=True)
    layer, inputs = case.build()
    reg = dampen.regularize(layer, ExplicitDropout(attended_value=1.0, reduction="sum"))
    keep = torch.tensor([[True, True, True], [False, False, False]])[:, None, None, :]
    layer(**inputs, keep=keep)
    both = reg.penalty()
    layer(inputs["x"][:1], memory=inputs["memory"][:1])
    torch.testing.assert_close(both, reg.penalty(), rtol=1e-12, atol=0)
