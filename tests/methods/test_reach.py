"""Where the stochastic family must reach: cross-attention, causal language models, more than 4096 tokens."""

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import (
    AttentionEntropy,
    BlurredAttention,
    DropConnect,
    DropHead,
    DropPath,
    HardMasking,
    HeadDiversity,
    LayerDrop,
)
from reproductions.models.seq2seq import Seq2Seq

EVERYWHERE = [
    HardMasking(0.4, 0.3),
    HardMasking(0.4, 0.3, fill="zero"),
    HardMasking(0.4, 0.3, learn=("rate", "top")),
    BlurredAttention(3, 2.0),
    BlurredAttention(3, 2.0, learn=True),
    DropHead(0.4),
    DropPath(0.4),
    LayerDrop(0.4),
    DropConnect(0.4),
    AttentionEntropy(1.0, 0.9),
    HeadDiversity(1.0),
]
IDS = [f"{m.name}{i}" for i, m in enumerate(EVERYWHERE)]
SOURCE = torch.randint(1, 11, (3, 7), generator=torch.Generator().manual_seed(0))
TARGET = torch.randint(1, 11, (3, 5), generator=torch.Generator().manual_seed(1))
SOURCE[1, 4:] = 0  # padding


def seq2seq():
    torch.manual_seed(0)
    model = Seq2Seq(source_vocab=11, target_vocab=11, width=16, depth=2, heads=2, mlp=16).train()
    with torch.no_grad():  # scores far enough apart that a change of them is seen
        for name, p in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                p *= 4
    return model


def loss_of(model, reg, source, seed=0):
    torch.manual_seed(seed)
    return reg.loss(
        lambda: model(source, TARGET),
        lambda out: F.cross_entropy(out.flatten(0, 1), TARGET.flatten()),
    )


@pytest.mark.parametrize("attention", ["cross", "all"])
@pytest.mark.parametrize("method", EVERYWHERE, ids=IDS)
def test_cross_attention(method, attention):
    model = seq2seq()
    reg = dampen.regularize(model, method, attention=attention)
    loss, terms = loss_of(model, reg, SOURCE)
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    plain = F.cross_entropy(seq2seq()(SOURCE, TARGET).flatten(0, 1), TARGET.flatten())
    drawn = [
        terms,
        *(loss_of(model, reg, SOURCE, seed)[1] for seed in range(1, 5)),
    ]  # one draw may drop nothing
    assert len(terms) > 1 or not all(torch.allclose(t["task"], plain) for t in drawn)  # it acts


@pytest.mark.parametrize("method", EVERYWHERE, ids=IDS)
def test_language_models_do_not_see_the_future(method):
    torch.manual_seed(0)
    model = dampen.models.LanguageModel(vocab=11, width=16, depth=2, heads=2, mlp=16).train()
    dampen.regularize(model, method)
    ids = torch.randint(11, (2, 8))
    other = ids.clone()
    other[:, 5:] = (other[:, 5:] + 3) % 11
    outs = []
    for x in (ids, other):
        torch.manual_seed(2)
        outs.append(model(x))
    torch.testing.assert_close(outs[0][:, :5], outs[1][:, :5])
    assert not torch.allclose(outs[0][:, 5:], outs[1][:, 5:])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        HardMasking(0.2, 0.01),
        HardMasking(0.2, 8, fill="zero"),
        BlurredAttention(),
        AttentionEntropy(1.0, 0.9),
    ],
    ids=["hard", "zero", "blur", "entropy"],
)
def test_more_than_4096_tokens(method, causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4200, 4, requires_grad=True) for _ in range(3))
    out = dampen.attention(q, k, v, is_causal=causal, regularizers=[method])
    (out.square().mean() + sum(method.take_penalties().values())).backward()
    assert out.shape == q.shape
    assert all(torch.isfinite(t.grad).all() for t in (q, k, v))
    if causal:  # the first query sees one key, which no method can take away
        torch.testing.assert_close(out[0, 0, 0], v[0, 0, 0])
