"""The pages of PLAN.md's questions: their statistics against slow references, every outcome, and what has not run."""

import math
import random
import re
import statistics
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dampen.studies import load_recipe, make_comparison, write_report
from reproductions import campaign
from reproductions.pages import answers, planned
from reproductions.pages import planned_statistics as own
from tests.studies.synthetic_runs import edit, write_trial

pytestmark = pytest.mark.filterwarnings(
    r"ignore:.*(a rate above 0\.5|a width above 9) hurts:UserWarning"
)
BY_SLUG = {question.slug: question for question in planned.QUESTIONS}


def ran(records, experiment, value, metric="accuracy", seeds=6, noise=0.01, decay=None):
    """A result file of an experiment with invented runs: `value` of configuration, setting and seed; None diverged."""
    group, table = experiment.split("/")
    folder = records / "runs" / f"{group}-{table}-study"
    folder.mkdir(parents=True)
    recipe = load_recipe(experiment)
    recipe = replace(
        recipe, grid={k: v if recipe.report == "all" else v[:1] for k, v in recipe.grid.items()}
    )
    plan = make_comparison(recipe, "study", seeds=range(seeds), check_names=False)
    if decay is not None:
        rows = {
            "baseline": {
                "axes": [],
                "tried": 8,
                "trials": [],
                "chosen": {"train.weight_decay": decay},
            }
        }
        plan.header["search"] = {
            "storage": "tuning",
            "settings": 8,
            "seeds": [1000],
            "metric": metric,
            "rows": rows,
        }
    plan.save(folder)
    for row in plan.configs:
        for point in row.settings:
            for seed, id in point.ids.items():
                write_trial(folder / id, plan.runs[id], 0.0, 1.0, int(seed), epochs=2)
                found = value(row.name, point.grid, int(seed))
                if found is None:
                    final = {"status": "diverged", "test": {}}
                else:
                    final = {"test": {metric: found + random.Random(id).gauss(0, noise)}}
                if metric != "accuracy":
                    final |= {"primary": [metric, "min"], "selection": [metric, "min"]}
                edit(folder / id / "final.json", **final)
    target = records / group / "results" / f"{table}.json.xz"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_report([folder], target, "pack", curves=False)


def tables(tmp_path, slug):
    return planned.tables_of(BY_SLUG[slug], tmp_path)


def page(tmp_path, slug):
    """With the sentences that fit an outcome: those written by hand are of the committed results."""
    question = BY_SLUG[slug]
    plan = planned.PLAN.read_text()
    return planned.page(question, planned.tables_of(question, tmp_path), plan, written={})


def number(name):
    return float(name.rsplit(" ", 1)[-1])


# --- what has not run ------------------------------------------------------------------------------------------------


def test_every_experiment_of_the_campaign_has_a_page():
    named = {name for question in planned.QUESTIONS for name in question.experiments}
    assert named == set(campaign.EXPERIMENTS)


@pytest.mark.parametrize("slug", BY_SLUG)
def test_a_page_without_results_names_the_command_and_quotes_the_plan(slug, tmp_path):
    told = page(tmp_path, slug)
    assert "**Not run yet.**" in told
    (command,) = [
        line for line in told.splitlines() if line.startswith("python -m reproductions.campaign")
    ]
    names = command.partition("--only ")[2].partition(" --data-dir")[0].split()
    assert tuple(names) == BY_SLUG[slug].experiments
    quoted = [line.removeprefix("> ") for line in told.splitlines() if line.startswith("> ")]
    plan = [line.strip() for line in planned.PLAN.read_text().splitlines()]
    assert quoted
    assert all(line in plan for line in quoted)


def test_an_experiment_that_the_plan_does_not_name_is_an_error():
    with pytest.raises(ValueError, match="PLAN.md does not name small_data/unheard"):
        planned.excerpt(["small_data/unheard"], planned.PLAN.read_text())


def test_the_committed_pages_are_up_to_date():
    assert planned.main(["--check"]) == 0, "run `python -m reproductions.pages.planned`"


# --- sentences written by hand ----------------------------------------------------------------------------------------


def test_every_committed_result_of_the_plan_has_three_sentences():
    for question in planned.QUESTIONS:
        if tables := planned.tables_of(question):
            assert tuple(tables) in answers.WRITTEN, f"write three sentences for {list(tables)}"
            told = planned.answer(question, tables)
            assert len(told) == 3
            assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in told)
            page = (planned.DOCS / "results" / f"{question.slug}.md").read_text()
            assert " ".join(told) in page
            assert "- **Correction family**: " in page
            assert page.count("](../images/") == 1


def test_a_result_that_does_not_bear_the_sentences_out_fails_the_build(tmp_path):
    ran(tmp_path, "small_data/digits", lambda n, g, s: 0.7 + s / 100, seeds=4, decay=1.0)
    found = tables(tmp_path, "digits_panel")
    with pytest.raises(ValueError, match="The records no longer bear this sentence out"):
        planned.answer(BY_SLUG["digits_panel"], found)
    assert planned.answer(BY_SLUG["digits_panel"], found, written={})


def test_the_page_and_the_report_detect_the_same_difference():
    (table,) = planned.tables_of(BY_SLUG["strength"]).values()
    differences = [table.entry(e.name).comparison for e in table.compared()]
    by_hand = f"{statistics.median(c.detectable for c in differences):.2f} points"
    assert own.power(table) == by_hand
    page = (planned.DOCS / "results" / "strength.md").read_text()
    assert page.count(by_hand) == 2  # in the sentence and in the line on trust
    assert set(re.findall(r"detect (?:a difference of )?([\d.]+ points)", page)) == {by_hand}


def test_a_page_with_a_family_of_its_own_shows_no_other_verdicts(tmp_path):
    """X4 is judged depth by depth; the general table would judge the same rows over all depths."""
    ran(tmp_path, "always_skip_attention/skips", fails, seeds=4)
    (content,) = (
        text
        for path, text in planned.pages(tmp_path, draw=False, written={}).items()
        if path.name == "skips.md"
    )
    folded = content.partition("<details")[2]
    assert "| Method | accuracy (%) | n | Cost |" in folded
    assert not re.search(r"worse|better|inconclusive|Holm|[▲▼]", folded)
    assert "worse: -" in content


# --- trends ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "told"),
    [(-0.3, "Accuracy falls as the p"), (0.3, "against the paper"), (0.0, "inconclusive")],
)
def test_trends(effect, told, tmp_path):
    def value(name, grid, seed):
        start = 0.5 if "hard" in name else 9
        above = max(0.0, number(name) - start) if name != "baseline" else 0.0
        return 0.7 + 0.03 * (seed % 3) + effect * above * (1 if "hard" in name else 0.1)

    ran(tmp_path, "attentiondrop/trends", value)
    (table,) = tables(tmp_path, "trends").values()
    found = own.slope(table, "hard masking", 0.5, 2, 0.1)
    ps = [0.5, 0.7, 0.9]
    values = {p: table.entry(f"hard masking, p {p}").values for p in ps}
    slopes = [0.1 * np.polyfit(ps, [values[p][str(seed)] for p in ps], 1)[0] for seed in range(6)]
    low, high = stats.t.interval(1 - 0.05 / 2, 5, statistics.fmean(slopes), stats.sem(slopes))
    assert (found.mean, found.low, found.high) == pytest.approx(
        (statistics.fmean(slopes), low, high)
    )
    assert told in page(tmp_path, "trends")
    assert planned.svg(planned.trend_picture(tables(tmp_path, "trends"))).startswith("<svg")


# --- skips -----------------------------------------------------------------------------------------------------------


def fails(name, grid, seed):
    """Without the feed-forward's skip 12 layers never train, without the attention's half of the runs diverge."""
    if name.startswith("ViT, 12 layers, no feed"):
        return 0.11
    if name.startswith("ViT, 12 layers, no attention"):
        return None if seed % 2 else 0.6
    return 0.8


def test_shares_of_runs_that_train(tmp_path):
    ran(tmp_path, "always_skip_attention/skips", fails, seeds=6)
    (table,) = tables(tmp_path, "skips").values()
    shares = own.shares(table)
    half, none = (
        shares[f"ViT, 12 layers, no {which} skip"] for which in ("attention", "feed-forward")
    )
    assert (half.trained, half.n, none.trained, none.n) == (3, 6, 0, 6)
    for found in (
        half,
        none,
        shares["CNN, 4 layers"],
    ):  # Clopper and Pearson by the beta distribution
        k, n = found.trained, found.n
        assert found.low == pytest.approx(stats.beta.ppf(0.025, k, n - k + 1) if k else 0.0)
        assert found.high == pytest.approx(stats.beta.ppf(0.975, k + 1, n - k) if k < n else 1.0)
    assert half.accuracy.mean == pytest.approx(60, abs=3)
    told = page(tmp_path, "skips")
    assert (
        "At 12 layers 6 of 6 runs train with all skips, 3 of 6 without the attention's, 0 of 6"
        in told
    )
    assert "| ViT, 12 layers, no feed-forward skip | 0 of 6 | 0 to 46 % | none |" in told
    assert planned.svg(planned.share_picture(tables(tmp_path, "skips"))).startswith("<svg")


@pytest.mark.parametrize(
    ("attention", "feed_forward", "told"),
    [
        (0.5, 0.7, "The attention's skip matters more"),
        (0.7, 0.5, "The feed-forward's skip matters more than the attention's, against the paper"),
        (0.6, 0.6, "is inconclusive"),
    ],
)
def test_which_skip_matters_more(attention, feed_forward, told, tmp_path):
    def value(name, grid, seed):
        return attention if "no attention" in name else feed_forward if "no feed" in name else 0.8

    ran(tmp_path, "always_skip_attention/skips", value)
    assert told in page(tmp_path, "skips")


def test_networks_are_judged_within_their_depth(tmp_path):
    ran(
        tmp_path,
        "always_skip_attention/skips",
        lambda name, grid, seed: 0.5 if ", no " in name else 0.8,
    )
    (table,) = tables(tmp_path, "skips").values()
    found = own.judged_by_depth(table)
    assert set(found) == {e.name for e in table.entries if ", no " in e.name}
    deep = [c for name, c in found.items() if "12 layers" in name]
    assert min(c.level for c in deep) == pytest.approx(0.05 / len(deep))  # Holm's first step
    assert all(c.verdict == "worse" for c in found.values())


# --- language --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "told"),
    [
        (0.2, "Dropout hurts in a single epoch, as published"),
        (-0.2, "against the published"),
        (0.0, "single epoch"),
    ],
)
def test_language_over_epochs(effect, told, tmp_path):
    for epochs, decay in ((1, 0.1), (16, 3.0)):

        def value(name, grid, seed, epochs=epochs):
            return 3.0 - 0.05 * epochs + (effect if name == "dropout" and epochs == 1 else 0.0)

        ran(tmp_path, f"language/epochs_{epochs}", value, "bpc", decay=decay)
    found = page(tmp_path, "language")
    assert told in found
    assert "is 0.1 over 1 epoch and 3 over 16 epochs; the common one is 0.1" in found
    assert "Not run yet" in found
    assert "--only language/epochs_4 --data-dir" in found
    assert planned.svg(planned.epoch_picture(tables(tmp_path, "language"))).startswith("<svg")


# --- gradient variance -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "told"),
    [
        (0.9, "is lower by the published size"),
        (0.5, "is lower, but not by the published tenth"),
        (0.985, "is lower, but not by the published tenth"),
        (1.5, "is higher, against the paper"),
    ],
)
def test_gradient_variance(factor, told, tmp_path):
    def value(name, grid, seed):
        return (4.0 + seed) * (factor if name == "blur" else 1.0)

    ran(tmp_path, "attentiondrop/variance", value, "training_variance")
    (table,) = tables(tmp_path, "variance").values()
    blur, dropout = table.entry("blur").values, table.entry("dropout").values
    logs = [math.log(blur[s] / dropout[s]) for s in dropout]
    low, high = stats.t.interval(1 - 0.05 / 3, 5, statistics.fmean(logs), stats.sem(logs))
    found = own.ratio(table, "blur", "dropout", 3)
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)))
    (sentence,) = [s for s in planned.variance({"": table}) if "of blur is" in s]
    assert told in sentence
    assert "hard masking is equal within a tenth" in page(tmp_path, "variance")
    assert planned.svg(planned.ratio_picture(tables(tmp_path, "variance"))).startswith("<svg")


# --- forms, panels, coefficients --------------------------------------------------------------------------------------


def test_structures(tmp_path):
    values = {"decreasing": 0.75, "increasing": 0.65, "blocks of 2": 0.7, "crosses of 1": 0.6}
    ran(tmp_path, "dropkey/structures", lambda n, g, s: values.get(n, 0.7), seeds=12, noise=0.001)
    told = page(tmp_path, "forms")
    assert "is better than a constant one, as published (+" in told
    assert "An increasing ratio is worse than a constant one, as published (-" in told
    assert (
        "Dropping blocks and dropping single keys are equal within 0.5 points, as published" in told
    )
    assert "Dropping crosses is worse than dropping single keys" in told
    assert planned.svg(planned.compared(tables(tmp_path, "forms"))).startswith("<svg")


def test_a_panel_names_winners_and_those_that_cannot_be_told_from_the_best(tmp_path):
    values = {"PatchDropout": 0.78, "DropKey": 0.78, "baseline, weight decay 0.05": 0.66}
    ran(
        tmp_path,
        "small_data/noisy_digits",
        lambda n, g, s: values.get(n, 0.7) + s / 100,
        noise=0.002,
        decay=1.0,
    )
    told = page(tmp_path, "noisy_panel")
    (gain,) = re.findall(
        r"Tuning the weight decay gains \+(\S+) \(.* points over the usual 0\.05\.", told
    )
    assert float(gain) == pytest.approx(4, abs=0.3)
    winners = own.winners(next(iter(tables(tmp_path, "noisy_panel").values())))
    assert "DropKey (+" in winners
    assert "PatchDropout (+" in winners
    assert "of 8 methods tuned in the same way (6 seeds, Holm)" in winners
    leaders = own.leaders(next(iter(tables(tmp_path, "noisy_panel").values())))
    assert sorted(
        w for w in ("PatchDropout", "DropKey", "baseline", "hard masking") if w in leaders
    ) == [
        "DropKey",
        "PatchDropout",
    ]


def test_nobody_wins_where_all_are_alike(tmp_path):
    ran(tmp_path, "small_data/cifar10", lambda n, g, s: 0.4 + 0.01 * (s % 4), seeds=5, decay=1.0)
    told = page(tmp_path, "cifar10_panel")
    assert "Significantly better than the tuned baseline: none of 8 methods" in told
    assert "cannot be told apart from it" in told


def test_coefficients_are_described_and_not_judged(tmp_path):
    def value(name, grid, seed):
        best = {"pair": 8.0, "lambda": 1.0, "arora": 0.01, "rate": 0.1}
        return 0.7 - sum(0.02 * abs(math.log10(v / best[k])) for k, v in grid.items())

    ran(tmp_path, "explicit_dropout/coefficients", value, seeds=2, noise=1e-4)
    (table,) = tables(tmp_path, "coefficients").values()
    found = {name: at for name, at, _ in own.best_points(table)}
    assert found["explicit query"] == 8.0
    assert found["Arora value"] == 0.01
    assert set(found) == {e.config.name for e in table.entries if e.config.name != "baseline"}
    assert "have no verdicts" in page(tmp_path, "coefficients")
    assert planned.svg(planned.coefficient_picture(tables(tmp_path, "coefficients"))).startswith(
        "<svg"
    )


def test_all_files_of_the_pages(tmp_path):
    ran(tmp_path, "dropkey/structures", lambda n, g, s: 0.7, seeds=4)
    names = {path.name for path in planned.pages(tmp_path, written={})}
    assert {f"{slug}.md" for slug in BY_SLUG} | {"forms.svg"} == names
    assert "forms.svg" not in {
        path.name for path in planned.pages(tmp_path, draw=False, written={})
    }
