"""Every pair of methods keeps the cheap contracts: 1, 3, 5, 9 and 10, eagerly."""

import itertools

import pytest

from dampen.checking import SUBJECTS
from dampen.checking.attached import Attached, telling
from dampen.checking.contracts import check_finite, check_leak, same
from dampen.registry import methods
from dampen.regularizer import UnsupportedModel

METHODS = methods()


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(METHODS, 2)))
def test_pair(first, second):
    """Contracts 1, 3, 5, 9 and 10 for two methods together, eagerly, on an image, a causal and a padded model."""
    for name in ("vit", "llama", "bert"):
        subject = SUBJECTS[name]
        makes = [telling(METHODS[first]), telling(METHODS[second])]
        try:
            trial = Attached(makes, subject)
        except UnsupportedModel:
            continue
        if not any(m.in_eval for m in trial.reg.methods):
            plain, model = subject.model().eval(), trial.model.eval()
            same(subject.logits(model(**trial.inputs)), subject.logits(plain(**trial.inputs)), "eval")
            model.train()
        check_finite(trial)
        same(trial.step()[0], trial.step()[0], "two steps with one seed")
        check_leak(trial)
        neutral = Attached(makes, subject, neutral=True).step()[2]
        same(neutral, subject.logits(subject.model()(**trial.inputs)), "rate 0 and no regularizer", 1e-5)
