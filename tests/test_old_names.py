"""Names of 0.2 that changed keep working for one release, with a warning."""

import importlib
import warnings

import pytest
import torch
from torch import nn

import dampen
from dampen import deprecated


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(deprecated, "_warned", set())


def layer():
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)


@pytest.mark.parametrize(("old", "new"), deprecated.PUBLIC.items())
def test_an_old_public_name_is_the_new_one_and_warns_once(old, new):
    with pytest.warns(DeprecationWarning, match=f"dampen.{old} is now dampen.{new}"):
        assert getattr(dampen, old) is getattr(dampen, new)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(dampen, old) is getattr(dampen, new)


def test_regularize_takes_its_old_keywords():
    with pytest.warns(DeprecationWarning, match=r"regularize\(target_modules=...\)"):
        reg = dampen.regularize(layer(), dampen.DropKey(0.1), sites="*")
    assert len(reg.layers) == 1
    with pytest.warns(DeprecationWarning, match=r"regularize\(attach_to_loss=...\)"):
        reg = dampen.regularize(layer(), dampen.ExplicitDropout(ffn=0.1), carry=1.0)
    reg.model.train()(torch.randn(2, 3, 8))
    with pytest.warns(DeprecationWarning, match="Handle.carried is now Handle.attached"):
        assert reg.carried is reg.attached
    assert list(reg.attached) == ["explicit_dropout.ffn1", "explicit_dropout.ffn2"]
    with pytest.raises(TypeError, match="sites= and target_modules="):
        dampen.regularize(layer(), dampen.DropKey(0.1), sites="*", target_modules="*")


def test_the_old_methods_of_the_handle():
    reg = dampen.regularize(layer(), dampen.DropKey(0.1))
    with pytest.warns(DeprecationWarning, match="reg.builtin_dropout"):
        assert [r.name for r in reg.own()] == [r.name for r in reg.builtin_dropout()]
    with pytest.warns(DeprecationWarning, match="reg.set_builtin_dropout"):
        (rate,) = reg.own(rate=0.3, sites="attention dropout")
    assert rate.rate == 0.3
    assert [r.rate for r in reg.builtin_dropout("attention dropout")] == [0.3]
    with pytest.warns(DeprecationWarning, match="Handle.asked is now Handle.in_loss"):
        assert reg.asked is False
    with pytest.raises(AttributeError, match="no attribute 'unknown'"):
        reg.unknown  # noqa: B018


def test_the_lab_is_called_studies_now():
    studies = importlib.import_module("dampen.studies")
    lab = importlib.import_module("dampen.lab")
    for name in studies.__all__:
        with pytest.warns(DeprecationWarning, match=f"dampen.studies.{name}"):
            assert getattr(lab, name) is getattr(studies, name)


def test_an_unknown_name_of_the_lab_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("dampen.lab").nothing  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Plan", "Comparison"),
        ("Record", "RunStore"),
        ("RunResult", "ComparisonResult"),
        ("TrialSpec", "Run"),
        ("make_plan", "make_comparison"),
        ("run_plan", "run_comparison"),
    ],
)
def test_the_nouns_of_a_comparison_have_new_names(old: str, new: str):
    studies = importlib.import_module("dampen.studies")
    with pytest.warns(
        DeprecationWarning, match=f"dampen.studies.{old} is now dampen.studies.{new}"
    ):
        assert getattr(studies, old) is getattr(studies, new)


def test_formulas_is_called_functional_now():
    new = importlib.import_module("dampen.functional.graying")
    old = importlib.import_module("dampen.formulas.graying")
    with pytest.warns(DeprecationWarning, match=r"is now dampen\.functional\.graying\.GrayImages"):
        assert old.GrayImages is new.GrayImages
