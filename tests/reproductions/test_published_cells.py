"""Every published number stands in a recipe, cell by cell; a cell that no recipe has, or has otherwise, fails.

The published figures lie in reproductions/pages/published.
$DAMPEN_PAPERS names another folder with the same files, to compare with that.
"""

import os
import re
import tomllib
from pathlib import Path

import pytest

from dampen.studies.recipe import list_recipes, load_recipe
from reproductions.pages import claims

PAPERS = Path(os.environ.get("DAMPEN_PAPERS", Path(claims.__file__).parent / "published"))
NOT_FIGURES = {("explicit_dropout", "protocol"), ("explicit_dropout", "table_5", "learning_rates")}
UNREPORTED = -1


def leaves(value, path=()):
    """Every number of a paper's file, under the keys and places that lead to it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from leaves(inner, (*path, i))
    elif isinstance(value, int | float) and value != UNREPORTED:
        yield path, value


def papers():
    return {p.stem: tomllib.loads(p.read_text()) for p in sorted(PAPERS.glob("*.toml"))}


def rows(name):
    return {row["name"]: row for row in load_recipe(name).rows}


def numbers(text):
    """The numbers in a row's note, signs and units apart."""
    return [float(n) for n in re.findall(r"(?<![\w.-])[+-]?(\d+\.\d+)", text)]


def explicit_dropout(paper):
    """Four tables of twelve rows, and the grid."""
    found = {}
    tables = {
        "cifar10": (1, "accuracy"),
        "cifar100": (2, "accuracy"),
        "thumos14_kinetics": (3, "frame_map"),
        "gtzan": (4, "accuracy"),
    }
    for i, row in enumerate(paper["tables_1_to_4"]["rows"]):
        name = f"{row['attention'].replace('_', ' ')} + {row['ffn']} ffn"
        for column, (table, metric) in tables.items():
            for j, value in enumerate(
                rows(f"explicit_dropout/table_{table}")[name]["published"][metric]
            ):
                found["tables_1_to_4", "rows", i, column, j] = value
        for j, value in enumerate(numbers(rows("explicit_dropout/table_3")[name]["note"])):
            found["tables_1_to_4", "rows", i, "thumos14_activitynet", j] = value
    rates = paper["table_5"]["learning_rates"]
    for term in ("k", "q", "v", "av"):
        for point in rows("explicit_dropout/table_5")[f"explicit {term} + explicit ffn"][
            "published_grid"
        ]:
            weight = next(w for w in paper["table_5"][term] if float(w) == point["grid"]["lambda"])
            for j, value in enumerate(point["published"]["accuracy"]):
                found["table_5", term, weight, rates.index(point["grid"]["train.lr"]), j] = value
    return found


def dropkey(paper):
    """Schedules on two sets, ImageNet with the rate, detection."""
    found = {}
    for i, data in enumerate(("cifar10", "cifar100")):
        for name, row in rows(f"dropkey/schedules_{data}").items():
            if "published" in row:
                found["schedules", name, i] = row["published"]["accuracy"]
    for name, row in rows("dropkey/imagenet").items():
        model, kind = name.split(", ")
        found["imagenet", model, 0 if kind == "attention dropout" else 1] = row["published"][
            "accuracy"
        ]
        if kind == "DropKey" and len(paper["imagenet"][model]) == 3:
            found["imagenet", model, 2] = row["methods"][0]["rate"]["linear"][0]
    detection = next(n for n in list_recipes() if n in ("dropkey/detr", "dropkey/coco_detr"))
    figures = [row["published"] for row in rows(detection).values() if row.get("published")]
    for figure in figures:
        (value,) = figure.values()
        found["coco_detr", "ap", paper["coco_detr"]["ap"].index(value)] = value
    return found


def attentiondrop(paper):
    """Five rows by five columns, overhead, and the claim about the gradient."""
    found = {}
    names = {
        "dropout": "dropout",
        "r_drop": "R-Drop",
        "hard_masking": "hard attention masking",
        "blur": "blurred attention smoothing",
        "blur_consistency": "blur + consistency",
    }
    places = {
        "cifar10": ("cifar10", "accuracy"),
        "cifar100": ("cifar100", "accuracy"),
        "bleu": ("translation", "bleu"),
        "ece": ("cifar10", "ece"),
        "pgd_accuracy": ("cifar10", "pgd_accuracy"),
    }
    for key, name in names.items():
        for i, column in enumerate(paper["results"]["columns"]):
            recipe, metric = places[column]
            if (
                value := rows(f"attentiondrop/{recipe}")[name]["published"].get(metric)
            ) is not None:
                found["results", key, i] = value
    for key, name in {
        **{k: names[k] for k in ("hard_masking", "blur")},
        "consistency": "blur + consistency",
    }.items():
        row = rows("attentiondrop/cifar10")[name]
        found["overhead", key, 0] = row["published"]["cost_ratio"]
        (found["overhead", key, 1],) = numbers(row["note"])
    ratios = {
        r["published"]["variance_ratio"]
        for n in ("cifar10", "variance_digits")
        for r in rows(f"attentiondrop/{n}").values()
        if "variance_ratio" in r.get("published", {})
    }
    (ratio,) = ratios
    found["claims", "gradient_variance_reduction"] = pytest.approx(1 - ratio)
    return found


def always_skip_attention(paper):
    """Skips, both ways of graying, what they cost."""
    skips = rows("always_skip_attention/skip_ablation")
    names = {
        "all_skips": "ViT, all skips",
        "no_ffn_skip": "ViT, no feed-forward skip",
        "no_attention_skip": "ViT, no attention skip",
    }
    found = {
        ("skip_ablation", key): skips[name]["published"]["accuracy"] for key, name in names.items()
    }
    (found["skip_ablation", "convmixer_change_without_skips"],) = numbers(
        skips["ConvMixer, no skips"]["note"]
    )
    for name, row in rows("always_skip_attention/token_graying_dct").items():
        model, kind = name.split(", ")
        found["token_graying_dct", model, 0 if kind == "plain" else 1] = row["published"][
            "accuracy"
        ]
    svd = rows("always_skip_attention/token_graying_svd")
    for i, (eps, *_) in enumerate(paper["token_graying_svd"]["rows"]):
        row = svd["plain (eps 1)" if eps == 1.0 else f"SVD, eps {eps}"]
        found["token_graying_svd", "rows", i, 0] = (
            row["methods"][0]["eps"] if row["methods"] else 1.0
        )
        for j, metric in enumerate(("accuracy", "ln_condition_in", "ln_condition_out")):
            found["token_graying_svd", "rows", i, j + 1] = row["published"][metric]
    plain = found["cost", "plain"] = paper["cost"]["plain"]  # days; recipes have the ratios to it
    for kind, name in (("svd", "SVD, eps 0.7"), ("dct", "DCT, eps 0.95")):
        found["cost", kind] = pytest.approx(svd[name]["published"]["cost_ratio"] * plain, rel=5e-4)
    return found


@pytest.mark.parametrize(
    "reader", [explicit_dropout, dropkey, attentiondrop, always_skip_attention]
)
def test_every_cell(reader):
    name = reader.__name__
    paper = papers()[name]
    expected = {
        path: value
        for path, value in leaves(paper)
        if not any((name, *path)[: len(skipped)] == skipped for skipped in NOT_FIGURES)
    }
    found = reader(paper)
    assert found.keys() == expected.keys()
    wrong = {path: (found[path], value) for path, value in expected.items() if value != found[path]}
    assert not wrong, wrong
    assert (
        len(expected)
        >= {
            "explicit_dropout": 248,
            "dropkey": 22,
            "attentiondrop": 31,
            "always_skip_attention": 39,
        }[name]
    )


def test_every_paper_has_a_reader():
    assert set(papers()) == {
        "explicit_dropout",
        "dropkey",
        "attentiondrop",
        "always_skip_attention",
    }


def test_the_grid_is_the_papers():
    protocol = papers()["explicit_dropout"]["protocol"]
    for table in range(1, 6):
        grid = load_recipe(f"explicit_dropout/table_{table}").grid
        assert sorted(grid["lambda"]) == protocol["lambdas"]
        assert sorted(grid["train.lr"]) == protocol["learning_rates"]


def test_a_cell_that_differs_is_found(monkeypatch):
    """The test can fail: one digit changed in a paper's file shows."""
    paper = papers()["dropkey"]
    paper["schedules"]["constant"][1] += 0.1
    expected = dict(leaves(paper))
    found = dropkey(paper)
    assert [path for path in expected if expected[path] != found[path]] == [
        ("schedules", "constant", 1)
    ]
