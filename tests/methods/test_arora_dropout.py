"""AroraDropout: the closed form of Arora et al. on every projection, with padding, and its relation to
ExplicitDropout."""

import pytest
import torch
from torch import nn

import dampen
from dampen import AroraDropout, ExplicitDropout
from tests.oracles import explicit as slow
from tests.oracles.explicit_layer import Case

MAPS = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


def plain(x, w, p):
    """p/(1-p) sum_j (mean_i x_ij^2) ||W_:j||^2, letter by letter, for a list of samples without padding."""
    tokens = torch.cat(list(x))
    return (
        p
        / (1 - p)
        * sum((tokens[:, j] ** 2).mean() * (w[:, j] ** 2).sum() for j in range(w.shape[1]))
    )


GROUPED = Case(causal=True, layer={"heads": 4, "kv_heads": 2, "size": 1})


@pytest.mark.parametrize(
    "case", [Case(), Case(lengths=(3, 2), padded=True), GROUPED], ids=["self", "padded", "grouped"]
)
def test_every_term(case):
    layer, inputs = case.build()
    reg = dampen.regularize(layer, AroraDropout(query=1.0, key=1.0, value=1.0, ffn=1.0, rate=0.25))
    layer(**inputs)
    terms = reg.penalties()
    assert set(terms) == {f"arora_dropout.{t}" for t in ("query", "key", "value", "ffn")}

    def cut(t):
        return [t[b, :n] for b, n in enumerate(case.lengths)]

    for term, name in MAPS.items():
        expected = plain(cut(layer.attn.seen[0]), getattr(layer.attn, name).weight, 0.25)
        torch.testing.assert_close(terms[f"arora_dropout.{term}"], expected, rtol=1e-12, atol=0)
    both = plain(cut(layer.ffn_input), layer.fc1.weight, 0.25) + plain(
        cut(layer.hidden), layer.fc2.weight, 0.25
    )
    torch.testing.assert_close(terms["arora_dropout.ffn"], both, rtol=1e-12, atol=0)
    got = torch.autograd.grad(
        terms["arora_dropout.ffn"], [layer.fc1.weight, layer.attn.q_proj.weight], retain_graph=True
    )
    for a, b in zip(
        got, torch.autograd.grad(both, [layer.fc1.weight, layer.attn.q_proj.weight]), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_it_is_the_expectation_of_real_dropout():
    """For one token: E ||W dropout(x) - W x||^2, with nn.Dropout."""
    torch.manual_seed(0)
    x, w = torch.randn(1, 6), torch.randn(4, 6)
    mean, error = slow.sample_linear(x, w, 0.3, draws=100_000)
    assert abs(2 * mean - plain([x], w, 0.3).item()) < 4 * 2 * error


def test_twice_the_inverted_form():
    layer, inputs = Case().build()
    values = []
    for method in (
        AroraDropout(value=1.0, ffn=1.0),
        ExplicitDropout(value=1.0, ffn=1.0, form="inverted"),
    ):
        reg = dampen.regularize(layer, method)
        layer(**inputs)
        values.append(reg.penalty())
        reg.remove()
    torch.testing.assert_close(values[0], 2 * values[1])


def test_switches_and_printing():
    assert AroraDropout(query=0.1).roles == {"q", "qkv", "kv"}
    assert AroraDropout(query=0.1).stages == {"qkv"}
    assert AroraDropout(ffn=0.1).stages == {"product"}
    assert str(AroraDropout()) == "AroraDropout(every weight is 0, rate=0.2)"
    with pytest.raises(
        ValueError, match=r"AroraDropout\(key=...\) must be a finite number >= 0, got -1"
    ):
        AroraDropout(key=-1)


def test_errors_name_the_method():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = dampen.models.block.SelfAttention(8, 2)

        def forward(self, x):
            return x + self.attn(x)

    with pytest.raises(ValueError, match=r"AroraDropout\(ffn.* has none"):
        dampen.regularize(nn.Sequential(Bare()), AroraDropout(ffn=0.1))
