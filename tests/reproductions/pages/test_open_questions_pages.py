"""The pages of questions that the papers left open say what the committed records say."""

import json

import pytest

from reproductions.pages import (
    appendix_b,
    consistency_bound,
    drop_key_argument,
    joint_mask,
)


@pytest.mark.parametrize("page", [appendix_b, consistency_bound, drop_key_argument, joint_mask])
def test_up_to_date(page):
    assert page.main(["--check"]) == 0, f"run `python -m {page.__name__}`"


def test_the_bound_says_something():
    """Below what equal probabilities for ten classes score, above what was measured, and the identity holds."""
    for found in (
        f for row in json.loads(consistency_bound.RECORD.read_text())["rows"].values() for f in row
    ):
        assert found["average"] < found["bound"] < 0.9
        assert found["average"] == pytest.approx(found["one_draw"] - found["disagreement"])
        assert 0 < found["disagreement_bound"] < found["disagreement"] < found["kl"]


def test_the_first_order_is_near_real_dropout_at_usual_rates():
    for layer in json.loads(joint_mask.RECORD.read_text())["layers"]:
        assert 0.8 < layer["0.2"][0] < 1.25
