"""A step of two passes is shared in the same way every time, or refused before it begins."""

import pytest
import torch

import dampen
from dampen import DropKey, RDrop, regularize
from tests.two_pass.test_prefix import UPPER, X, step, vit


def test_a_model_that_runs_twice_in_a_pass_never_shares_half_a_step():
    """Two inputs through one model, as in sentence-transformers: the first step sums its gradients in the order of all
    later ones, to the bit, so that a run resumed there goes on as one that never stopped."""
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)], UPPER)
    steps = [step(model, reg, forward=lambda: model(X) + model(X.flip(0))) for _ in range(3)]
    assert "'blocks.0' runs several times in one pass" in reg.prefix.why
    for _, _, gradients in steps[1:]:
        assert all(torch.equal(gradients[name], g) for name, g in steps[0][2].items())


def test_a_model_that_runs_twice_in_a_pass_is_not_doubled_again_nor_after_a_resume():
    """Its first step has doubled one of the two calls; what was found then is part of the handle's state."""
    model = vit()
    reg = regularize(model, [DropKey(0.4), RDrop(1.0)])
    steps = [step(model, reg, forward=lambda: model(X) + model(X.flip(0))) for _ in range(3)]
    assert "several times in one pass" in reg.prefix.doubled.why
    resumed = vit()
    again = regularize(resumed, [DropKey(0.4), RDrop(1.0)])
    again.load_state_dict(reg.state_dict())
    steps.append(step(resumed, again, forward=lambda: resumed(X) + resumed(X.flip(0))))
    for _, _, gradients in steps[2:]:
        assert all(torch.equal(gradients[name], g) for name, g in steps[1][2].items())


def test_blocks_that_zero_3_gathers_whole_are_refused_with_the_reason():
    """DeepSpeed's marks by hand: it is not installed here; tests/integrations/test_sharded.py has the real one."""
    model = vit()
    reg = regularize(model, [DropKey(0.4), dampen.ExplicitDropout(value=1.0), RDrop(1.0)])
    for i, p in enumerate(model.parameters()):
        p.ds_id = i
    step(model, reg)
    for block in model.blocks:
        block._z3_leaf = True
    with pytest.raises(
        RuntimeError, match=r"gathers 'blocks.0' as a whole.*or use ZeRO-2, which runs both"
    ):
        step(model, reg)
