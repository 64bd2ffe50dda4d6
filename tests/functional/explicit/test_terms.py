"""Every term, form and reduction against the enumeration of all masks and the paper's traces: values and gradients."""

import itertools

import pytest
import torch

import dampen
from dampen import ExplicitDropout
from dampen.functional.explicit.reductions import FORMS, REDUCTIONS
from dampen.methods.explicit_dropout import TERMS
from tests.oracles.explicit_layer import RATE, Case, expected, pair_value, split_heads

CASES = {
    "self": Case(),
    "padded": Case(lengths=(3, 2), padded=True),
    "causal": Case(causal=True),
    "causal_padded": Case(lengths=(3, 2), causal=True, padded=True),
    "cross": Case(cross=True),
    "cross_padded": Case(lengths=(3, 2), cross=True, padded=True),
    "grouped": Case(layer={"heads": 4, "kv_heads": 2, "size": 1}),
    "one_token": Case(lengths=(1,)),
}


def check(case, term, form, reduction, **options):
    layer, inputs = case.build()
    reg = dampen.regularize(
        layer, ExplicitDropout(**{term: 1.0}, rate=RATE, form=form, reduction=reduction, **options)
    )
    layer(**inputs)
    penalties = reg.penalties()
    assert list(penalties) == [f"explicit_dropout.{term}"]
    value = penalties[f"explicit_dropout.{term}"]
    oracle = expected(layer, case, term, form, reduction, **options)
    torch.testing.assert_close(value, oracle, rtol=1e-12, atol=1e-12)
    parameters = dict(layer.named_parameters())
    grads = torch.autograd.grad(value, parameters.values(), retain_graph=True, allow_unused=True)
    slow_grads = torch.autograd.grad(
        oracle, parameters.values(), retain_graph=True, allow_unused=True
    )
    for name, grad, slow in zip(parameters, grads, slow_grads, strict=True):
        zero = torch.zeros_like(parameters[name])
        torch.testing.assert_close(
            zero if grad is None else grad,
            zero if slow is None else slow,
            rtol=1e-9,
            atol=1e-10,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("term", TERMS)
def test_every_reduction(term, form):
    for case, reduction in itertools.product(("self", "padded"), REDUCTIONS):
        check(CASES[case], term, form, reduction)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_attention(case, form):
    terms = TERMS if "cross" not in case else TERMS[:5]
    for term in terms:
        check(CASES[case], term, form, "mean")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_attended_post(case, form):
    check(CASES[case], "attended_value", form, "mean", attended="post")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["self", "padded", "causal", "grouped", "one_token"])
def test_shared_mask(case, form):
    check(CASES[case], "query_key", form, "mean", shared_mask=True)
    check(CASES[case], "query_key", form, "author", shared_mask=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("term", ["query", "key", "query_key"])
@pytest.mark.parametrize("case", ["self", "padded", "cross", "one_token"])
def test_concat(case, term, form):
    check(CASES[case], term, form, "mean", heads="concat")
    check(CASES[case], term, form, "token_mean", heads="concat")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("term", ["query", "key", "query_key"])
@pytest.mark.parametrize(
    "case", ["self", "padded", "causal", "causal_padded", "cross_padded", "grouped"]
)
def test_visible_only(case, term, form):
    for reduction in ("mean", "sum", "author"):
        check(CASES[case], term, form, reduction, visible_only=True)


@pytest.mark.parametrize("form", FORMS)
def test_visible_only_in_other_clothes(form):
    causal = Case(causal=True, layer={"heads": 4, "kv_heads": 2, "size": 1})
    check(causal, "query_key", form, "mean", visible_only=True)
    check(CASES["causal"], "query_key", form, "mean", visible_only=True, heads="concat")
    check(CASES["causal"], "query_key", form, "mean", visible_only=True, shared_mask=True)
    check(CASES["causal_padded"], "query_key", form, "mean", visible_only=True, shared_mask=True)


@pytest.mark.parametrize("form", FORMS)
def test_chunks_change_nothing(form, monkeypatch):
    """One query at a time, made again in the backward pass."""
    monkeypatch.setattr("dampen.functional.explicit.pairs.CHUNK", 1)
    for term in ("query", "query_key"):
        check(CASES["causal_padded"], term, form, "mean", visible_only=True)
        check(CASES["self"], term, form, "mean", heads="concat")
        check(CASES["self"], term, form, "mean")


@pytest.mark.parametrize("form", ["exact", "inverted"])
@pytest.mark.parametrize("attended", ["pre", "post"])
def test_attention_weights_in_chunks(form, attended, monkeypatch):
    """At long n the attention weights come in chunks of queries, and each chunk adds its part."""
    monkeypatch.setattr("dampen.kernels.kernel.LONG", 1)
    monkeypatch.setattr("dampen.kernels.kernel.CHUNK", 1)
    for case in ("self", "padded", "causal", "grouped"):
        check(CASES[case], "attended_value", form, "mean", attended=attended)


@pytest.mark.parametrize("form", FORMS)
def test_masks_that_differ_between_heads(form):
    """visible_only with another mask in each head: the average over heads is what the divisor counts."""
    case = Case()
    layer, inputs = case.build()
    keep = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(1)) > 0.4
    keep |= torch.eye(3, dtype=torch.bool)
    reg = dampen.regularize(
        layer,
        ExplicitDropout(query_key=1.0, rate=RATE, form=form, visible_only=True, shared_mask=True),
    )
    layer(**inputs, keep=keep)
    value = reg.penalty()
    x = layer.attn.seen[0]
    total = sum(
        pair_value("query_key", form, x[b], x[b], wq, wk, keep[b, h].double(), True)
        for b in range(2)
        for h, (wq, wk, _) in enumerate(split_heads(layer.attn))
    )
    torch.testing.assert_close(value, total / (keep.sum() / 2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_all_heads_as_one_see_what_any_of_them_sees(form, shared):
    layer, inputs = Case().build()
    keep = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(1)) > 0.6
    keep |= torch.eye(3, dtype=torch.bool)
    assert (keep[:, 0] != keep[:, 1]).any()
    method = ExplicitDropout(
        query_key=1.0, rate=RATE, form=form, visible_only=True, heads="concat", shared_mask=shared
    )
    reg = dampen.regularize(layer, method)
    layer(**inputs, keep=keep)
    value, x, seen = reg.penalty(), layer.attn.seen[0], keep.any(1)
    wq, wk = (torch.cat([head[i] for head in split_heads(layer.attn)]) for i in range(2))
    total = sum(
        pair_value("query_key", form, x[b], x[b], wq, wk, seen[b].double(), shared)
        for b in range(2)
    )
    torch.testing.assert_close(value, total / seen.sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("form", FORMS)
def test_all_terms_at_once_are_the_sum_of_each(form, rate):
    case = CASES["padded"]
    weights = dict(zip(TERMS, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), strict=True))
    layer, inputs = case.build()
    reg = dampen.regularize(layer, ExplicitDropout(**weights, rate=rate, form=form))
    layer(**inputs)
    together = reg.penalties()
    reg.remove()
    assert set(together) == {f"explicit_dropout.{term}" for term in TERMS}
    for term, weight in weights.items():
        reg = dampen.regularize(layer, ExplicitDropout(**{term: 1.0}, rate=rate, form=form))
        layer(**inputs)
        alone = reg.penalty()
        reg.remove()
        torch.testing.assert_close(
            together[f"explicit_dropout.{term}"], weight * alone, rtol=1e-6, atol=0
        )
        assert (alone == 0).item() == (rate == 0)


def test_query_and_key_are_one_function_in_the_paper_form():
    layer, inputs = CASES["self"].build()
    reg = dampen.regularize(layer, ExplicitDropout(query=1.0, key=1.0))
    layer(**inputs)
    terms = reg.penalties()
    assert torch.equal(terms["explicit_dropout.query"], terms["explicit_dropout.key"])
    both = [
        torch.autograd.grad(v, list(layer.attn.parameters()), retain_graph=True, allow_unused=True)
        for v in terms.values()
    ]
    for a, b in zip(*both, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
