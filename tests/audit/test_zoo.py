"""The audit names the bug of every broken model, and none in its mended twin. Each bug is shown without dampen first."""

import pytest
import torch
from torch import nn

import dampen
from tests.audit.zoo import ZOO, X

CASES = [(name, broken) for name in ZOO for broken in (True, False)]


def built(name, broken):
    torch.manual_seed(0)
    return ZOO[name].build(broken)


def called(model, seed, training=True, x=X):
    torch.manual_seed(seed)
    out = model.train(training)(x)
    return out if isinstance(out, torch.Tensor) else out[0]


def same(a, b):
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def rate_counts_nothing(model, where):
    """Whether one seed gives one output, whatever the rate of a dropout module."""
    before = called(model, 1)
    model.get_submodule(where).p = 0.9
    return same(before, called(model, 1))


def gradients(model):
    called(model, 1).square().sum().backward()
    return [p.grad for p in model.parameters()]


def recompute_is_other(model, plain):
    plain.load_state_dict(model.state_dict())
    pairs = zip(gradients(model), gradients(plain), strict=True)
    return not all(torch.allclose(a, b, atol=1e-6) for a, b in pairs)


def parameter(model, where):
    return model.get_parameter(where)


ORACLES = {
    "dropout_not_called": lambda m, where: rate_counts_nothing(m, where),
    "dropout_without_effect": lambda m, where: rate_counts_nothing(m, where),
    "eval_dropout": lambda m, where: not same(called(m, 1, False), called(m, 2, False)),
    "eval_random": lambda m, where: not same(called(m, 1, False), called(m, 2, False)),
    "eval_changes": lambda m, where: not same(called(m, 1, False), called(m, 1, False)),
    "declared_rate": lambda m, where: same(called(m, 1), called(m, 2)),
    "checkpoint_redraws": lambda m, where: recompute_is_other(m, ZOO["detached"].build(False)),
    "repeated_draws": lambda m, where: same(called(m, 1), called(m, 2)),
    "no_gradient": lambda m, where: gradients(m) and parameter(m, where).grad is None,
    "frozen": lambda m, where: not parameter(m, where).requires_grad,
    "hidden_rows": lambda m, where: bool(called(m, 1).isnan().any()),
    "samples_mix": lambda m, where: (
        not torch.allclose(called(m, 1, False)[:1], called(m, 1, False, X[:1]), atol=1e-5)
    ),
    "dropped_weights": lambda m, where: bool((m.train()(X)[1].sum(-1) > 1.01).any()),
}


@pytest.mark.parametrize(("name", "broken"), CASES)
def test_the_bug_is_there_without_dampen(name, broken):
    bug = ZOO[name]
    assert bool(ORACLES[bug.kind](built(name, broken), bug.where)) == broken


ALSO = {"fully hidden rows": ("nan",)}
"""What else is wrong because of a bug."""


@pytest.mark.parametrize("name", ZOO)
def test_the_bug_is_named_and_the_mended_twin_is_clean(name):
    bug = ZOO[name]
    found = dampen.audit(built(name, True), bug.example)
    hits = [f for f in found.findings if f.kind == bug.kind and bug.where in f.where]
    assert [f.level for f in hits] == [bug.level]
    assert hits[0].meaning
    assert hits[0].change
    assert found.ok == (bug.level != "problem")
    assert set(found.kinds("problem")) <= {bug.kind, *ALSO.get(name, ())}

    mended = dampen.audit(built(name, False), bug.example)
    assert bug.kind not in mended.kinds()
    assert mended.ok, str(mended)


def test_there_are_a_dozen_classes_of_bugs():
    assert len({bug.kind for bug in ZOO.values()}) >= 12
    assert len(ZOO) >= 20


def test_every_dropout_of_a_clean_model_acts_in_training_alone():
    found = dampen.audit(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True), X)
    assert {(d.where, d.kind) for d in found.dropouts} == {
        ("self_attn.dropout", "attention dropout"),
        ("dropout", "dropout"),
        ("dropout1", "dropout"),
        ("dropout2", "dropout"),
    }
    assert all(d.in_training and not d.in_eval and d.rate == 0.1 for d in found.dropouts)
