"""The recipes of the papers: their figures are the published ones, their trials can be built."""

import math
import tomllib
from pathlib import Path

import pytest
import torch

from dampen import hidden_key, regularize
from dampen.studies.comparison import Comparison, make_comparison
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.methods_text import build_methods, parse_rows
from dampen.studies.recipe import list_recipes, load_recipe, parse_recipe
from dampen.studies.run import Run
from dampen.studies.trainer.data import places
from dampen.studies.trainer.models import make_model
from dampen.studies.tuning import as_large, count_runs, tuning_plan
from reproductions.campaign import EXPERIMENTS
from reproductions.pages import claims
from reproductions.pages.claimed import CLAIMS
from reproductions.pages.planned_statistics import over

PAPERS = Path(claims.__file__).parent / "published"
NAMES = [name for name in list_recipes() if name not in EXPERIMENTS]
"""The recipes of papers' tables; the experiments of PLAN.md have rules of their own."""


def papers(name):
    """The published figures, copied from the papers."""
    return tomllib.loads((PAPERS / f"{name}.toml").read_text())


BEYOND = pytest.mark.filterwarnings(
    r"ignore:.*(a rate above 0\.5|a width above 9) hurts:UserWarning"
)
"""`attentiondrop/sweeps_digits` goes where the paper says not to."""


def published(name):
    return {row["name"]: row.get("published", {}) for row in load_recipe(name).rows}


def test_every_paper_has_its_tables():
    papers_shown = {
        "explicit_dropout",
        "dropkey",
        "attentiondrop",
        "always_skip_attention",
        "language",
    }
    assert {n.split("/")[0] for n in NAMES} == papers_shown
    explicit = [n.removeprefix("explicit_dropout/") for n in NAMES if n.startswith("explicit")]
    beside = ["augmented_cifar10", "lambda_cifar10", "lambda_digits", "spoken_digits"]
    assert explicit == [*beside, *(f"table_{i}" for i in range(1, 6))]


@pytest.mark.parametrize(
    ("table", "column", "metric"),
    [
        (1, "cifar10", "accuracy"),
        (2, "cifar100", "accuracy"),
        (3, "thumos14_kinetics", "frame_map"),
        (4, "gtzan", "accuracy"),
    ],
)
def test_figures_of_explicit_dropout(table, column, metric):
    ours = published(f"explicit_dropout/table_{table}")
    for row in papers("explicit_dropout")["tables_1_to_4"]["rows"]:
        name = f"{row['attention'].replace('_', ' ')} + {row['ffn']} ffn"
        assert ours[name] == {metric: row[column]}


def test_figures_of_the_grid():
    table = papers("explicit_dropout")["table_5"]
    plan = make_comparison(load_recipe("explicit_dropout/table_5"))
    rows = {
        r.name: {
            (p.grid["lambda"], p.grid["train.lr"]): p.published["accuracy"] for p in r.settings
        }
        for r in plan.configs
    }
    for term in ("k", "q", "v", "av"):
        for weight, cells in table.get(term, {}).items():
            for lr, cell in zip(table["learning_rates"], cells, strict=True):
                assert rows[f"explicit {term} + explicit ffn"][float(weight), lr] == cell


def test_figures_of_dropkey():
    paper = papers("dropkey")
    for i, name in enumerate(("cifar10", "cifar100")):
        ours = published(f"dropkey/schedules_{name}")
        assert {k: v["accuracy"] for k, v in ours.items() if v} == {
            k: v[i] for k, v in paper["schedules"].items()
        }
    ours = published("dropkey/detr")
    rows = ("plain", "dropout", "DropKey")
    assert [ours[row]["ap"] for row in rows] == paper["coco_detr"]["ap"]
    ours = published("dropkey/imagenet")
    for model, (attention, dropkey, *_) in paper["imagenet"].items():
        assert ours[f"{model}, attention dropout"]["accuracy"] == attention
        assert ours[f"{model}, DropKey"]["accuracy"] == dropkey


def test_figures_of_attentiondrop_and_always_skip():
    results = papers("attentiondrop")["results"]
    for name, column in (
        ("cifar10", "accuracy"),
        ("cifar100", "accuracy"),
        ("translation", "bleu"),
    ):
        ours = published(f"attentiondrop/{name}")
        i = results["columns"].index("bleu" if name == "translation" else name)
        assert ours["dropout"][column] == results["dropout"][i]
        assert ours["blur + consistency"][column] == results["blur_consistency"][i]
    skips = papers("always_skip_attention")["skip_ablation"]
    ours = published("always_skip_attention/skip_ablation")
    assert ours["ViT, no attention skip"]["accuracy"] == skips["no_attention_skip"]
    assert ours["ViT, all skips"]["accuracy"] == skips["all_skips"]
    graying = published("always_skip_attention/token_graying_svd")
    for eps, accuracy, before, after in papers("always_skip_attention")["token_graying_svd"][
        "rows"
    ]:
        row = graying["plain (eps 1)" if eps == 1.0 else f"SVD, eps {eps}"]
        assert (row["accuracy"], row["ln_condition_in"], row["ln_condition_out"]) == (
            accuracy,
            before,
            after,
        )


@BEYOND
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_plans_at_every_scale(name, tmp_path):
    recipe = load_recipe(name)
    assert {"laptop"} < set(recipe.scales) <= {"paper", "laptop", "study"}
    assert recipe.departures
    assert recipe.command.startswith(f"dampen run reproductions/{name}.toml")
    for scale, own in recipe.scales.items():
        if "unavailable" in own:
            with pytest.raises(LabError, match="cannot run at scale"):
                make_comparison(recipe, scale)
            continue
        plan = make_comparison(recipe, scale)
        assert sum(r.baseline for r in plan.configs) == (0 if plan.header["report"] == "all" else 1)
        assert all(len(p.ids) == len(plan.seeds) for r in plan.configs for p in r.settings)
        plan.save(tmp_path)
        assert Comparison.load(tmp_path) == plan
    laptop = make_comparison(recipe, "laptop")
    assert len(laptop.runs) <= 68


@BEYOND
def test_every_study_has_rows_without_a_method_to_compare_with():
    for name in NAMES:
        recipe = load_recipe(name)
        if "study" in recipe.scales:
            plain = [
                row.name for row in make_comparison(recipe, "study").configs if not row.methods
            ]
            several_models = name.startswith("always_skip_attention/")
            assert plain[0] == "plain" or (several_models and len(plain) > 1), name


@BEYOND
@pytest.mark.parametrize("name", NAMES)
def test_the_cost_says_how_many_trials_run(name):
    recipe = load_recipe(name)
    for scale in (s for s, own in recipe.scales.items() if "unavailable" not in own):
        plan, tuning = make_comparison(recipe, scale), tuning_plan(recipe, scale, [], [])
        told = f"{count_runs(tuning)} + " if tuning else ""
        count = len((as_large(plan, tuning) if tuning else plan).chosen())
        assert plan.header["cost"].startswith(f"{told}{count} trials"), (name, scale)


@BEYOND
def test_every_claim_names_rows_of_its_recipe():
    checked = 0
    for record in {claim.record for claim in CLAIMS}:
        name, is_study, _ = record.replace("/results/", "/").partition("-study.json.xz")
        if is_study:
            rows = {row.name for row in make_comparison(load_recipe(name), "study").configs}
            claims = [c for c in CLAIMS if c.record == record]
            slopes = {c.row for c in claims if not math.isnan(c.start)}
            for method in slopes:  # decided over the values of a method: "blur, w 9", "blur, w 11"
                assert len(over({name: {} for name in rows}, method)) > 1, (record, method)
            asked = {r for c in claims for r in (c.row, c.reference)} - slopes
            assert asked <= rows, (record, asked - rows)
            checked += len(asked)
    assert checked > 50


@pytest.mark.parametrize("table", ["table_1", "table_2", "table_5"])
def test_the_paper_scale_on_cifar_is_the_most_probable_one_and_says_so(table):
    recipe = load_recipe(f"explicit_dropout/{table}")
    plan = make_comparison(recipe, "paper")
    assert any("most probable training, not the paper's" in told for told in plan.departures)
    model = {"patch_size": 4, "width": 384, "depth": 7, "heads": 12, "mlp": 384}
    for trial in plan.runs.values():
        assert model.items() <= trial.model.items()
        assert trial.model.get("pool", "cls") == "cls"
        train = trial.train
        assert (train.optimizer, train.batch_size, train.weight_decay) == ("adam", 128, 5e-5)
        assert (train.schedule, train.warmup, train.final_lr, train.epochs) == (
            "cosine",
            5.0,
            0.01,
            200,
        )
    assert 1e-3 in {trial.train.lr for trial in plan.runs.values()}


SHAPES = {  # what the data decides, without the data
    "digits": ({"image_size": 8, "channels": 1, "classes": 10}, lambda: (torch.randn(2, 1, 8, 8),)),
    "cifar10": (
        {"image_size": 32, "channels": 3, "classes": 10},
        lambda: (torch.randn(2, 3, 32, 32),),
    ),
    "cifar100": (
        {"image_size": 32, "channels": 3, "classes": 100},
        lambda: (torch.randn(2, 3, 32, 32),),
    ),
    "digit_captions": (
        {"image_size": 8, "channels": 1, "classes": 2, "vocab": 20, "max_tokens": 5},
        lambda: (torch.randn(2, 1, 8, 8), torch.randint(1, 20, (2, 5))),
    ),
    "gtzan": (
        {"features": 128, "classes": 10, "max_tokens": 129},
        lambda: (torch.randn(2, 129, 128),),
    ),
    "fsdd": (
        {"features": 160, "classes": 10, "max_tokens": 32},
        lambda: (torch.randn(2, 32, 160),),
    ),
    "thumos14": (
        {"features": 512, "classes": 21, "max_tokens": 64, "per_token": True},
        lambda: (torch.randn(2, 64, 512), torch.arange(64).expand(2, 64) >= 60),
    ),
    "tinyshakespeare": ({"vocab": 50}, lambda: (torch.randint(0, 50, (2, 12)),)),
    "bccd": (
        {"image_size": (96, 128), "channels": 3, "classes": 3},
        lambda: (torch.randn(2, 3, 96, 128),),
    ),
    "multi30k": (
        {"source_vocab": 50, "target_vocab": 50},
        lambda: (torch.randint(3, 50, (2, 9)), torch.randint(3, 50, (2, 7))),
    ),
}


def _squares(output):
    return sum(
        t.float().square().mean()
        for t in ([output] if isinstance(output, torch.Tensor) else output[:2])
    )


@BEYOND
@pytest.mark.parametrize("name", NAMES)
def test_the_methods_of_every_row_fit_the_model_of_its_laptop_scale(name):
    plan = make_comparison(load_recipe(name), "laptop")
    torch.manual_seed(0)
    for row in plan.configs:
        trial = plan.runs[row.settings[0].ids[str(plan.seeds[0])]]
        arguments, inputs = SHAPES[trial.data["name"]]
        model = make_model(trial.model, arguments)
        if trial.methods:
            reg = regularize(model, build_methods(trial.methods), **places(trial.sites))
            loss, terms = reg.loss(lambda: model(*inputs()), _squares)  # noqa: B023
        else:
            loss, terms = _squares(model(*inputs())), {}
        loss.backward()
        assert torch.isfinite(loss), row.name
        penalties = [
            m["name"] for m in trial.methods if m["name"] in ("explicit_dropout", "arora_dropout")
        ]
        assert all(any(t.startswith(p) for t in terms) for p in penalties), (row.name, terms)


def test_hidden_key_by_name_is_its_parts_written_out():
    """In a recipe and on the command line; the trial is the same, and the objects are those of `dampen.hidden_key`."""
    parts = "drop_key(rate=0.2, unit='column') + hidden_dropout(rate=0.1) + r_drop(weight=0.5)"
    ((named,), (written,)) = (
        parse_rows(text).values() for text in ("hidden_key(key=0.2, weight=0.5)", parts)
    )  # fmt: skip
    assert named == written
    trial = {"data": {"name": "digits"}, "model": {"name": "vit"}}
    row = {"name": "hidden_key", "key": 0.2, "weight": 0.5}
    ids = {Run.from_dict({**trial, "methods": methods}).id for methods in ([row], written)}
    assert len(ids) == 1
    assert [repr(m) for m in build_methods(written)] == [repr(m) for m in hidden_key(0.2, 0.1, 0.5)]
    with pytest.raises(ConfigError, match="did you mean 'hidden'"):
        Run.from_dict({**trial, "methods": [{"name": "hidden_key", "hiden": 0.2}]})
    assert (
        len(Run.from_dict({**trial, "methods": [{"name": "hidden_key", "weight": 0}]}).methods) == 2
    )


def test_a_row_that_does_not_use_a_grid_value_has_one_point():
    plan = make_comparison(load_recipe("explicit_dropout/table_1"), "laptop")
    points = {r.name: len(r.settings) for r in plan.configs}
    assert points["none + implicit ffn"] == 1
    assert points["explicit v + explicit ffn"] == 2
    values = {
        t.methods[0]["value"] for t in plan.runs.values() if t.methods and "value" in t.methods[0]
    }
    assert values == {0.0005, 0.001}


def test_what_may_be_wrong_with_a_recipe():
    good = {
        "title": "t", "paper": "", "table": "", "cost": "", "command": "", "departures": [], "metric": "accuracy",
        "base": {"seeds": [0]}, "scales": {"laptop": {}}, "rows": [{"name": "a"}],
    }  # fmt: skip
    assert parse_recipe("x", good)[1] == []
    wrong = {
        "rows[0].name: missing": {"rows": [{"methods": []}]},
        "'a' is the name of an earlier row": {"rows": [{"name": "a"}, {"name": "a"}]},
        "did you mean 'published'": {"rows": [{"name": "a", "publshed": {}}]},
        "expected a mean or [mean, sd]": {
            "rows": [{"name": "a", "published": {"accuracy": "high"}}]
        },
        "more than one row says baseline": {"rows": [{"name": n, "baseline": True} for n in "ab"]},
        "did you mean 'seeds'": {"base": {"seed": [0]}},
        "expected different whole numbers": {"base": {"seeds": [0, 0]}},
        "there is no [scales.lapto]; did you mean 'laptop'": {"scale": "lapto"},
        "scales: missing": {"scales": {}},
        "there is no row 'b'": {"scales": {"laptop": {"rows": ["b"]}}},
        "grid.lr: expected a list": {"grid": {"lr": 0.1}},
        "report: expected 'best' or 'all'": {"report": "both"},
    }
    for told, change in wrong.items():
        problems = parse_recipe("x", {**good, **change})[1]
        assert any(told in p for p in problems), (told, problems)
    everything = {**good, "metric": 1, "gird": {}, "rows": [{"nam": "a"}], "base": {"dta": {}}}
    assert len(parse_recipe("x", everything)[1]) >= 5
    with pytest.raises(ConfigError, match="there is no scale 'papre'; did you mean 'paper'"):
        make_comparison(load_recipe("explicit_dropout/table_1"), "papre")
    with pytest.raises(
        ConfigError, match=r"--set trian.lr=1: unknown section 'trian'; did you mean 'train'"
    ):
        make_comparison(
            load_recipe("explicit_dropout/table_1"), settings=["trian.lr=1", "train.lr"]
        )
