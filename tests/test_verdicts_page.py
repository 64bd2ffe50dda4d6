"""The page about verdicts is what its records say."""

from __future__ import annotations

import json

import pytest

from benchmarks.verdicts_page import POWER, RACES, main, page, race_sentence


def test_the_page_is_current() -> None:
    assert main(["--check"]) == 0, "run python -m benchmarks.verdicts_page"


def test_every_kind_of_test_keeps_its_level_and_is_shown() -> None:
    power, text = json.loads(POWER.read_text()), page()
    for kind in ("false claims, fixed plan", "false claims, sequential, 100 looks"):
        for value in power[kind].values():
            assert value <= 0.055, "5 % and the noise of 10,000 tables"
            assert f"| {value:.1%} |" in text
    assert all(name in text for name in json.loads(RACES.read_text()))


@pytest.mark.parametrize(("fixed", "told"), [(40, "10 saved (25%)"), (25, "5 fewer than the race")])
def test_savings_and_losses_are_both_said(fixed: int, told: str) -> None:
    race = {
        "runs": 30,
        "rounds": 2,
        "why": "all decided",
        "fixed": fixed,
        "margin": 1.0,
        "fixed_for_margin": None,
    }
    assert told in race_sentence(race)
