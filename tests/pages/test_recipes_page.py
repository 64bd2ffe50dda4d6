"""The recipe in docs/recipes.md is a recipe."""

import re
from pathlib import Path

from dampen.studies.comparison import make_comparison
from dampen.studies.recipe import load_recipe
from dampen.studies.tuning import tuning_plan

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def examples() -> list[str]:
    return re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_example_is_planned_as_it_says(tmp_path):
    text, _ = examples()
    (tmp_path / "my.toml").write_text(text)
    plan = make_comparison(load_recipe(str(tmp_path / "my.toml")))
    assert len(plan.runs) == 8  # (plain + DropKey x 2 rates + not pretrained) x 2 seeds
    assert sorted(t.pretrain is None for t in plan.runs.values()) == [False] * 6 + [True] * 2
    first = next(t for t in plan.runs.values() if t.methods).pretraining()
    assert first.model["name"] == "mae"
    assert first.methods[0]["name"] == "drop_key"
    assert first.train.epochs == 5


def test_the_example_of_a_search_tunes_every_row_with_the_same_number_of_settings(tmp_path):
    _, text = examples()
    head = 'data = { name = "digits" }\nmodel = { name = "vit", patch_size = 2, width = 16, depth = 1, heads = 2 }'
    (tmp_path / "my.toml").write_text(text.replace("[base]", f"[base]\n{head}"))
    recipe = load_recipe(str(tmp_path / "my.toml"))
    tuning = tuning_plan(recipe, None, [], [])
    assert {len(row.settings) for row in tuning.configs} == {12}
    assert len(tuning.runs) == len(tuning.configs) * 12 * 3
