"""Whatever is typed or written into a recipe is read or refused as a usage error (exit 2) that says where."""

import tomllib

import pytest
from hypothesis import HealthCheck, given, settings

from dampen.studies.comparison import make_comparison
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.methods_text import build_methods, parse_rows
from dampen.studies.recipe import load_recipe, parse_recipe
from dampen.studies.request import comparison
from tests.studies import strategies

quietly = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
GOOD = tomllib.loads("""
title = "t"
paper = "p"
table = "1"
cost = "none"
command = "dampen run x"
departures = ["all"]
metric = "accuracy"
[base]
data = { name = "digits", limit = 300, augment = ["flip"] }
model = { name = "vit", depth = 2 }
train = { epochs = 1, betas = [0.9, 0.99] }
seeds = [0, 1]
[grid]
"train.lr" = [0.1, 0.2]
lambda = [0.5]
[scales.laptop]
departures = ["small"]
rows = ["plain", "key"]
[scales.paper]
unavailable = "no GPU"
[[rows]]
name = "plain"
baseline = true
methods = []
published = { accuracy = [86.4, 0.4] }
[[rows]]
name = "key"
methods = [{ name = "drop_key", rate = "$lambda" }]
published_grid = [{ grid = { lambda = 0.5 }, published = { accuracy = 87 } }]
scales.laptop = { train = { epochs = 2 } }
""")


def parsed(text):
    return {name: build_methods(specs) for name, specs in parse_rows(text).items()}


def planned(content):
    recipe, problems = parse_recipe("x", content)
    if recipe is None:
        raise ConfigError("x", problems)
    return make_comparison(recipe)


def planned_with(setting):
    return make_comparison(
        comparison("digits", None, "drop_key", 1), settings=[setting, "train.epochs=1"]
    )


def refused_or_read(read, given_):
    """A ConfigError with problems in words, or a result; any other error is a traceback for users."""
    problem: LabError | None = None
    try:
        read(given_)
    except LabError as error:
        problem = error
    if isinstance(problem, ConfigError):
        assert problem.exit_code == 2
        assert all(told.strip() for told in problem.problems)
    elif problem is not None:  # a scale that says it is unavailable
        assert "cannot run at scale" in str(problem)


@quietly
@given(strategies.METHOD_TEXT)
def test_methods(text):
    refused_or_read(parsed, text)


@quietly
@given(strategies.MODEL_TEXT)
def test_models(text):
    refused_or_read(lambda model: make_comparison(comparison("digits", model, "drop_key", 1)), text)


@quietly
@given(strategies.SETTING)
def test_settings(setting):
    refused_or_read(planned_with, setting)


@quietly
@given(strategies.mutated(GOOD))
def test_recipes(content):
    refused_or_read(planned, content)


def test_the_good_recipe_is_good():
    plan = planned(GOOD)
    assert [row.name for row in plan.configs] == ["plain", "key"]
    assert len(plan.runs) == 8


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("],[", "brackets"),
        (")+(", "brackets"),
        ("\0", "null"),
        ("+".join("a" * 5000), "recursion"),
        ("drop_key(rate=1e999)", "finite"),
        ("drop_key(rate=b'x')", "bytes"),
        ("drop_key(rate=1, rate=2)", "once"),
        ("drop_key(name='drop_path')", "once"),
        ("drop_key(**x)", "once"),
        ("drop_key(rate={1, 2})", "set"),
        ("", "nothing"),
    ],
)
def test_what_was_a_traceback_names_its_place(text, place):
    with pytest.raises(ConfigError, match=place) as caught:
        parse_rows(text)
    assert caught.value.what == "--methods"


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("train=3", "train is a table"),
        ("train.lr=inf", r"train\.lr"),
        ("train.lr=1979-05-27", r"train\.lr.*date"),
        ("data.augment=3", r"data\.augment"),
        ("train..lr=1", "names between dots"),
        ("model.depth=" + "[" * 2000, r"model\.depth"),
        ("train.lr=1\ny=2", "one value"),
    ],
)
def test_settings_that_were_tracebacks_name_their_place(setting, place):
    with pytest.raises(ConfigError, match=place):
        make_comparison(comparison("digits", None, "drop_key", 1), settings=[setting])


def test_settings_that_contradict_each_other():
    with pytest.raises(ConfigError, match="is a value"):
        make_comparison(
            comparison("digits", None, "drop_key", 1), settings=["train.lr=1", "train.lr.x=2"]
        )


def test_a_grid_that_explodes_is_refused_at_once():
    content = {**GOOD, "grid": {f"model.a{i}": list(range(100)) for i in range(8)}}
    with pytest.raises(ConfigError, match="at most 100000 can be planned"):
        planned(content)


def test_a_recipe_nested_too_deeply(tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 5000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        load_recipe(str(path))


def test_a_scale_cannot_name_a_folder_elsewhere():
    content = {**GOOD, "scales": {"../../x": {}}, "scale": "../../x"}
    with pytest.raises(ConfigError, match="letters, digits"):
        planned(content)
