"""Every method of the registry keeps every contract."""

import importlib
import pkgutil

import pytest

import dampen.methods
from dampen.checking import CONTRACTS, SUBJECTS, check_contract
from dampen.checking.contracts import ONCE
from dampen.registry import methods
from dampen.regularizer import Regularizer
from tests.full import FULL

METHODS = methods()
COMPILED = ("vit", "llama")
"""Where contract 7 is checked; `make full` runs what takes long on every model, not on these or on the first alone."""


def _subjects(contract):
    if FULL:
        return SUBJECTS
    if contract == "compiled":
        return COMPILED
    return ["vit"] if contract in ONCE else SUBJECTS


def _cases():
    for name in METHODS:
        for contract in CONTRACTS:
            for subject in _subjects(contract):
                yield pytest.param(name, contract, subject, id=f"{name}-{contract}-{subject}")


@pytest.mark.parametrize(("name", "contract", "subject"), list(_cases()))
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch"
)
def test_contract(name, contract, subject):
    outcome = check_contract(METHODS[name], contract, subject)
    assert outcome.state in ("kept", "refused"), str(outcome)
    assert outcome.state == "kept" or subject != "vit", (
        f"no method may refuse the own ViT: {outcome}"
    )


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
