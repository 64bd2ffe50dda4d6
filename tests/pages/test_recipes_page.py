"""The recipe in docs/recipes.md is a recipe."""

import re
from pathlib import Path

from dampen.studies.config.plan import make_plan
from dampen.studies.config.recipe import load_recipe

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_the_example_is_planned_as_it_says(tmp_path):
    text = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "my.toml").write_text(text)
    plan = make_plan(load_recipe(str(tmp_path / "my.toml")))
    assert len(plan.trials) == 8  # (plain + DropKey x 2 rates + not pretrained) x 2 seeds
    assert sorted(t.pretrain is None for t in plan.trials.values()) == [False] * 6 + [True] * 2
    first = next(t for t in plan.trials.values() if t.methods).pretraining()
    assert first.model["name"] == "mae"
    assert first.methods[0]["name"] == "drop_key"
    assert first.train.epochs == 5
