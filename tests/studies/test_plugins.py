"""A plug-in that lies beside a recipe: found, imported by workers, and no part of a run's identity."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dampen
from dampen.extensions import Registry, register
from dampen.studies import load_recipe, make_comparison
from dampen.studies.errors import ConfigError

PLUGIN = """
from dampen.studies import plugins

plugins.register(
    __name__,
    data={"stripes": "stripes_data:STRIPES"},
    models={"flat": "stripes_data:Flat"},
    tasks={"brightness": "stripes_data:BRIGHTNESS"},
    recipes={"stripes/table": plugins.Path(__file__).with_name("table.toml")},
)
"""
DATA = """
import torch
from torch import nn

from dampen.studies.plugins import Dataset, DataSource, DataSpec, Metrics, Split, Task


class Stripes(Split):
    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 4, generator=generator)

    def __len__(self):
        return len(self.x)

    def gather(self, indices):
        x = self.x[indices]
        return {"inputs": (x,), "target": x.sum(dim=1)}


def load(ask, *, noise: float = 0.0):
    parts = (Stripes(64, ask.seed), Stripes(16, 1), Stripes(16, 2))
    return Dataset(ask.spec.name, ask.spec.task, *parts, [], {"sha256": {}}, {"features": 4}, "task")


class Error(Metrics):
    def __init__(self):
        self.total = self.count = 0

    def update(self, logits, target, valid=None, index=None):
        self.total += (logits[:, 0] - target).square().sum().item()
        self.count += len(target)

    def compute(self):
        return {"squared_error": self.total / self.count}


class Flat(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.map = nn.Linear(features, 1)

    def forward(self, x):
        return self.map(x)


STRIPES = DataSource(DataSpec("stripes", "brightness", "synthetic stripes", "made here", "none"), load)
BRIGHTNESS = Task(
    lambda dataset, split: Error(),
    "squared_error",
    ("squared_error",),
    preset={"model": {"name": "flat"}, "train": {"epochs": 1, "batch_size": 16}},
    loss=lambda output, target: (output[:, 0] - target).square().mean(),
)
"""
RECIPE = """
plugins = ["stripes"]
[base]
seeds = [0, 1]
data = { name = "stripes" }
model = { name = "flat" }
train = { epochs = 1, batch_size = 16 }
[[rows]]
name = "plain"
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a plug-in, and a recipe that names it in a folder below."""
    (tmp_path / "stripes.py").write_text(PLUGIN)
    (tmp_path / "stripes_data.py").write_text(DATA)
    (tmp_path / "table.toml").write_text(RECIPE)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.toml").write_text(RECIPE)
    return tmp_path


def run(place, *arguments, code=0, **environment):
    """The command in a process of its own, in a folder that holds nothing."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    source = str(Path(dampen.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "dampen", *arguments],
        cwd=environment.pop("cwd", elsewhere),
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_recipe_finds_its_plugin_and_workers_import_it(place):
    told = run(place, "run", "../recipes/mine.toml", "--workers", "2", "--json")
    rows = json.loads(told[told.index("{") : told.rindex("}") + 1])["rows"]
    assert [(row["name"], row["n"]) for row in rows] == [("plain", 2)]
    assert "squared_error" in rows[0]["metrics"]
    plan = json.loads(next((place / "elsewhere").rglob("plan.json")).read_text())
    assert plan["header"]["plugins"] == ["stripes"]


@pytest.mark.slow
def test_the_environment_names_plugins_for_every_command(place):
    where = {"DAMPEN_PLUGINS": "stripes", "cwd": place}
    assert "stripes" in run(place, "data", "list", **where)
    assert (
        json.loads(run(place, "list", "recipes", "--json", **where))[0]["name"] == "stripes/table"
    )
    assert "stripes/table at scale laptop" in run(
        place, "run", "stripes/table", "--dry-run", **where
    )
    assert "1 seed" in run(
        place,
        "compare",
        "--data",
        "stripes",
        "--methods",
        "params(weight_decay=1.0)",
        "--seeds",
        "1",
        **where,
    )
    told = run(place, "list", code=2, DAMPEN_PLUGINS="strips")
    assert "there is no plug-in 'strips'" in told


def test_a_plugin_is_no_part_of_a_runs_identity(tmp_path):
    import reproductions  # noqa: F401 - so that its name resolves wherever this test runs

    text = RECIPE.replace('"stripes" }', '"digits" }').replace('"flat"', '"vit"')
    (tmp_path / "with.toml").write_text(text.replace('["stripes"]', '["reproductions"]'))
    (tmp_path / "without.toml").write_text(text.replace('plugins = ["stripes"]', ""))
    plans = [
        make_comparison(load_recipe(str(tmp_path / f"{name}.toml"))) for name in ("with", "without")
    ]
    assert plans[0].runs.keys() == plans[1].runs.keys()
    assert ["plugins" in plan.header for plan in plans] == [True, False]


@pytest.mark.parametrize(
    ("plugins", "told"),
    [
        ('"nowhere_at_all"', "expected a list of strings"),
        ('["nowhere_at_all"]', "there is no plug-in 'nowhere_at_all'"),
        ('["../stripes"]', "expected the name of a Python module"),
        ('["broken_plugin"]', "broken_plugin cannot be imported: ZeroDivisionError"),
        ('["odd_plugin"]', "odd_plugin registers 'datas'"),
    ],
)
def test_what_may_be_wrong_with_a_plugin(tmp_path, plugins, told):
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    odd = "from dampen.studies import plugins\nplugins.register(__name__, datas={})"
    (tmp_path / "odd_plugin.py").write_text(odd)
    (tmp_path / "x.toml").write_text(RECIPE.replace('["stripes"]', plugins))
    with pytest.raises(ConfigError, match=told):
        load_recipe(str(tmp_path / "x.toml"))


def test_a_recipe_of_the_repository_is_found_by_its_old_name(monkeypatch, tmp_path):
    monkeypatch.setattr("dampen.extensions._registered", {"dampen.recipes": {}})
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    with pytest.raises(
        ConfigError, match="did you mean reproductions/explicit_dropout/table_3.toml"
    ):
        load_recipe("explicit_dropout/table_3")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="in the folder reproductions of dampen's repository"):
        load_recipe("explicit_dropout/table_3")


def test_names_that_moved_say_so(monkeypatch):
    from dampen.extensions import hint

    assert "plug-in 'reproductions'" in hint("dampen.data", "cifar10", ["digits"])
    assert "plug-in 'reproductions'" in hint("dampen.models", "detr", ["vit"])
    assert hint("dampen.data", "digitz", ["digits"]) == "; did you mean 'digits'?"


def test_a_plugin_replaces_nothing_of_dampens_own(monkeypatch):
    monkeypatch.setattr("dampen.extensions._registered", {"dampen.models": {}})
    register("dampen.models", {"vit": object()})
    with pytest.raises(ValueError, match="adds 'vit' to dampen.models, which dampen has itself"):
        list(Registry("dampen.models", {"vit": object()}))
    with pytest.raises(ValueError, match="unknown group 'dampen.model'"):
        register("dampen.model", {})
