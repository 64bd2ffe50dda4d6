"""Every method of the registry keeps every contract, alone; every pair keeps the cheap ones."""

import importlib
import itertools
import pkgutil

import pytest

import dampen.methods
from dampen.checking import CONTRACTS, SUBJECTS, check_contract
from dampen.checking.contracts import ONCE, check_finite, check_leak, same
from dampen.checking.trial import Trial
from dampen.registry import methods
from dampen.regularizer import Regularizer, UnsupportedModel

METHODS = methods()


def _cases():
    for name in METHODS:
        for contract in CONTRACTS:
            for subject in ["vit"] if contract in ONCE else SUBJECTS:
                yield pytest.param(name, contract, subject, id=f"{name}-{contract}-{subject}")


@pytest.mark.parametrize(("name", "contract", "subject"), list(_cases()))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch")
def test_contract(name, contract, subject):
    outcome = check_contract(METHODS[name], contract, subject)
    assert outcome.state in ("kept", "refused"), str(outcome)
    assert outcome.state == "kept" or subject != "vit", f"no method may refuse the own ViT: {outcome}"


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(METHODS, 2)))
def test_pair(first, second):
    """Contracts 1, 3, 5, 9 and 10 for two methods together, eagerly, on a causal and a padded model."""
    for name in ("llama", "bert"):
        subject = SUBJECTS[name]
        makes = [METHODS[first], METHODS[second]]
        try:
            trial = Trial(makes, subject)
        except UnsupportedModel:
            continue
        if not any(m.in_eval for m in trial.reg.methods):
            plain, model = subject.model().eval(), trial.model.eval()
            same(subject.logits(model(**trial.inputs)), subject.logits(plain(**trial.inputs)), "eval")
            model.train()
        check_finite(trial)
        same(trial.step()[0], trial.step()[0], "two steps with one seed")
        check_leak(trial)
        neutral = Trial(makes, subject, neutral=True).step()[2]
        same(neutral, subject.logits(subject.model()(**trial.inputs)), "rate 0 and no regularizer", 1e-5)


def test_every_file_of_a_method_is_listed():
    """A method's file without its line in dampen/methods/__init__.py would be found by nobody."""
    listed = {cls.__module__ for cls in METHODS.values()}
    for module in pkgutil.walk_packages(dampen.methods.__path__, "dampen.methods."):
        defined = [
            v
            for v in vars(importlib.import_module(module.name)).values()
            if isinstance(v, type) and issubclass(v, Regularizer) and v.__module__ == module.name
        ]
        if defined:
            assert module.name in listed, (
                f"{module.name} defines {defined} but dampen/methods/__init__.py does not list it"
            )


def test_every_method_is_exported():
    for cls in METHODS.values():
        assert getattr(dampen, cls.__name__) is cls
