"""Grid points chosen on validation with seeds of their own, before the table is trained."""

import json

import pytest

from dampen.cli import main
from dampen.studies.comparison import Comparison

RECIPE = """
title = "tuned"
paper = ""
table = ""
cost = ""
command = ""
departures = []
metric = "accuracy"
report = "best"
[base]
seeds = [0, 1]
tuning_seeds = [7]
data = { name = "digits", limit = 80 }
model = { name = "vit", patch_size = 4, width = 8, depth = 1, heads = 2, mlp = 8 }
train = { epochs = 1, batch_size = 32 }
[grid]
rate = [0.1, 0.9]
[scales.laptop]
[[rows]]
name = "plain"
baseline = true
[[rows]]
name = "dropkey"
methods = [{ name = "drop_key", rate = "$rate" }]
"""


def test_rows_are_trained_at_the_point_that_validation_prefers_on_the_tuning_seed(tmp_path):
    recipe = tmp_path / "tuned.toml"
    recipe.write_text(RECIPE)
    with pytest.raises(SystemExit) as left:
        main(["run", str(recipe), "--out", str(tmp_path), "--workers", "1"])
    assert not left.value.code
    (folder,) = tmp_path.glob("tuned-*")
    tried = json.loads((folder / "search.json").read_text())
    assert list(tried["rows"]) == ["dropkey"]  # plain has nothing to choose
    trials = {t["values"]["rate"]: t["valid"] for t in tried["rows"]["dropkey"]["trials"]}
    plan = Comparison.load(folder)
    (point,) = next(r for r in plan.configs if r.name == "dropkey").settings
    assert trials[point.grid["rate"]] == max(trials.values())
    assert set(point.ids) == {"0", "1"}
    assert all((folder / i / "final.json").exists() for i in plan.runs)
    assert {p.name for p in (folder / "search").iterdir() if p.is_dir()} == {
        id for t in tried["rows"]["dropkey"]["trials"] for id in t["ids"].values()
    }
