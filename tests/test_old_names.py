"""Names of 0.2 that changed keep working for one release, with a warning."""

import importlib

import pytest


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
    with pytest.warns(DeprecationWarning, match=f"dampen.studies.{old} is now dampen.studies.{new}"):
        assert getattr(studies, old) is getattr(studies, new)


def test_formulas_is_called_functional_now():
    new = importlib.import_module("dampen.functional.graying")
    old = importlib.import_module("dampen.formulas.graying")
    with pytest.warns(DeprecationWarning, match=r"is now dampen\.functional\.graying\.GrayImages"):
        assert old.GrayImages is new.GrayImages
