"""A recipe's search: the same settings for all rows, ties, edges, seeds of its own, and one real run on digits."""

import json
import math
import tomllib

import pytest

from dampen.cli import main
from dampen.studies.comparison import Comparison, design_of, make_comparison
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.recipe import parse_recipe
from dampen.studies.report import make_report
from dampen.studies.report.formats import to_json
from dampen.studies.report.summary import tuned
from dampen.studies.request import comparison
from dampen.studies.search_space import Axis, Tried, design, read_axis, remarks, select
from dampen.studies.tuning import count_runs, tune, tuned_recipe, tuning_plan

RECIPE = """
title = "tuned"
metric = "accuracy"
[base]
seeds = [0, 1, 2]
data = { name = "digits", limit = 80, test_limit = 40 }
model = { name = "vit", patch_size = 4, width = 8, depth = 1, heads = 2, mlp = 8 }
train = { epochs = 1, batch_size = 32 }
[search]
settings = 4
"train.lr" = { low = 1e-3, high = 1e-2, log = true }
"train.weight_decay" = { low = 0.01, high = 3, log = true }
rate = { low = 0.05, high = 0.6 }
weight = [0.3, 1, 3]
[[rows]]
name = "baseline"
baseline = true
[[rows]]
name = "dropkey"
methods = [{ name = "drop_key", rate = "$rate" }]
[[rows]]
name = "R-Drop"
methods = [
  { name = "drop_key", rate = { linear = { start = 0.1, end = "$rate" } } },
  { name = "r_drop", weight = "$weight" },
]
search = { rate = { low = 0.2, high = 0.9 }, weight = { low = 0.1, high = 10, log = true } }
"""


def recipe(*changes, name="tuned"):
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    found, problems = parse_recipe(name, tomllib.loads(text))
    if problems:
        raise ConfigError(name, problems)
    return found


def tried(*results, key="rate"):
    """Settings 0, 1, 2 ... of one axis with what validation said on each seed."""
    return [
        Tried({key: float(i)}, {str(s): v for s, v in enumerate(own)})
        for i, own in enumerate(results)
    ]


def axis(count, key="rate"):
    return [Axis(key, 0.0, float(count - 1))]


# --- which settings -----------------------------------------------------------------------------------------------


def test_all_rows_try_the_same_learning_rates_and_decays_and_as_many_settings():
    _, settings = design_of(recipe(("settings = 4", "settings = 12")), None)
    assert {len(own) for own in settings.values()} == {12}
    common = [[(s["train.lr"], s["train.weight_decay"]) for s in own] for own in settings.values()]
    assert common[0] == common[1] == common[2]
    assert set(settings["baseline"][0]) == {"train.lr", "train.weight_decay"}
    assert set(settings["R-Drop"][0]) == {"train.lr", "train.weight_decay", "rate", "weight"}


def test_the_values_of_an_axis_are_spread_evenly_in_every_row():
    """A Latin hypercube: one value in each twelfth of the range, in every row, on every axis."""
    axes, settings = design_of(recipe(("settings = 4", "settings = 12")), None)
    for row, own in axes.items():
        for one in own:
            places = sorted(one.place(s[one.key]) for s in settings[row])
            assert [int(12 * p) for p in places] == list(range(12))
    assert all(0.2 <= s["rate"] <= 0.9 for s in settings["R-Drop"])
    counts = [
        s["weight"] for s in design({"row": [Axis("weight", choices=(0.3, 1, 3))]}, 12)["row"]
    ]
    assert sorted(counts) == [0.3] * 4 + [1] * 4 + [3] * 4


def test_the_settings_depend_on_the_recipe_alone():
    assert design_of(recipe(), None) == design_of(recipe(name="another"), None)


def test_a_value_said_on_the_command_line_is_not_searched():
    axes, _ = design_of(recipe(), None, ["train.lr=0.004"])
    assert [a.key for a in axes["baseline"]] == ["train.weight_decay"]
    plan = tuning_plan(recipe(), None, ["train.lr=0.004"], [])
    assert {t.train.lr for t in plan.runs.values()} == {0.004}


def test_rows_can_leave_an_axis_out():
    changed = recipe(("baseline = true\n", 'baseline = true\nsearch = { "train.lr" = false }\n'))
    axes, settings = design_of(changed, None)
    assert [a.key for a in axes["baseline"]] == ["train.weight_decay"]
    decays = [[s["train.weight_decay"] for s in own] for own in settings.values()]
    assert decays[0] == decays[1] == decays[2]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([("settings = 4\n", "")], "search.settings: missing"),
        ([("settings = 4", "settings = 1")], "search.settings: expected a whole number from 2"),
        (
            [("low = 0.05, high = 0.6", "low = 0.6, high = 0.05")],
            "search.rate: low must be less than high",
        ),
        ([("low = 0.05, high = 0.6", "lo = 0.05, high = 0.6")], "search.rate.lo: unknown key"),
        ([("low = 0.01, high = 3,", "low = 0, high = 3,")], "a logarithmic range starts above 0"),
        ([("[0.3, 1, 3]", "[1]")], "search.weight: expected at least two different values"),
        (
            [("settings = 4", "settings = 4\nstrength_settings = 0")],
            "strength_settings: expected a whole number from 1",
        ),
        (
            [("low = 0.05, high = 0.6", "low = 0.05, high = 0.6, start = 0.7")],
            "start must lie between low and high",
        ),
        (
            [("seeds = [0, 1, 2]", "seeds = [0]\ntuning_seeds = [7, 8]")],
            "a search needs at least 3",
        ),
        (
            [("seeds = [0, 1, 2]", "seeds = [0, 7]\ntuning_seeds = [7, 8, 9]")],
            "are seeds of the table too",
        ),
        ([("rate = { low = 0.05", "share = { low = 0.05")], "search.share: no row says '$share'"),
        (
            [('[[rows]]\nname = "b', '[grid]\nrate = [0.1]\n[[rows]]\nname = "b')],
            "leave out the other",
        ),
    ],
)
def test_a_search_that_cannot_be_meant_is_refused(changes, told):
    with pytest.raises(ConfigError) as error:
        make_comparison(recipe(*changes))
    assert told in str(error.value)


def test_a_scale_may_name_fewer_tuning_seeds_and_another_number_of_settings():
    scales = '[scales.laptop]\ntuning_seeds = [7]\nsearch = { settings = 3 }\n[scales.paper]\n[[rows]]\nname = "b'
    found = recipe(('[[rows]]\nname = "b', scales))
    assert len(tuning_plan(found, "laptop", [], []).runs) == 3 * 3
    assert len(tuning_plan(found, "paper", [], []).runs) == 3 * 4 * 3


ONE_LIST = [
    ('"train.lr" = { low = 1e-3, high = 1e-2 }', '"train.lr" = [0.001, 0.002, 0.003]'),
    ('"train.weight_decay" = { low = 0.01, high = 3, log = true }', ""),
]


def test_lists_that_make_too_few_settings_are_refused():
    with pytest.raises(ConfigError, match="its axes make only 3 different settings of 4"):
        make_comparison(
            recipe(
                ("low = 1e-3, high = 1e-2, log = true }", "low = 1e-3, high = 1e-2 }"), *ONE_LIST
            )
        )


def test_planning_twelve_rows_with_sixty_seeds_takes_no_time_to_speak_of(monkeypatch):
    """Counted, not timed: each trial is hashed once."""
    from dampen.studies.run import Run

    hashed = []
    before = Run.canonical
    monkeypatch.setattr(Run, "canonical", lambda self: hashed.append(1) or before(self))
    plan = make_comparison(recipe(), seeds=range(60))
    plan.labels(plan.chosen())
    assert len(plan.chosen()) == 3 * 60
    assert len(hashed) == 3 * 60


# --- which is chosen ----------------------------------------------------------------------------------------------


def test_the_best_mean_over_the_seeds_is_chosen_and_not_the_best_seed():
    found = select(tried((0.5, 0.5, 0.5), (0.6, 0.6, 0.5), (0.9, 0.1, 0.1)), axis(3), "max")
    assert found.chosen.values == {"rate": 1.0}
    found = select(tried((0.5, 0.5, 0.5), (0.6, 0.6, 0.5), (0.9, 0.1, 0.1)), axis(3), "min")
    assert found.chosen.values == {"rate": 2.0}


def test_a_setting_without_a_number_on_one_seed_cannot_win_unless_all_lack_one():
    assert select(tried((0.9, 0.9, None), (0.1, 0.1, 0.1)), axis(2), "max").chosen.values == {
        "rate": 1.0
    }
    assert select(
        tried((0.9, 0.9, float("nan")), (0.1, 0.1, 0.1)), axis(2), "max"
    ).chosen.values == {"rate": 1.0}
    assert select(tried((0.9, None, None), (0.1, 0.1, None)), axis(2), "max").chosen.values == {
        "rate": 1.0
    }
    assert select(tried((None, None), (None, None)), axis(2), "max") is None


@pytest.mark.parametrize("best", [(0, 1, 2, 3, 4), (1, 2, 3), (0, 2, 4), (4, 3, 1), (0, 1)])
def test_ties_go_to_the_middle_in_whatever_order_they_are_written(best):
    import statistics

    results = [(0.9, 0.9) if i in best else (0.1, 0.1) for i in range(5)]
    for order in (1, -1):
        found = select(tried(*results)[::order], axis(5), "max")
        assert found.tied == len(best)
        expected = (
            statistics.median(best) if len(best) % 2 else 1.0
        )  # of 0 and 1 the one nearer to the middle, 2
        assert found.chosen.values == {"rate": float(expected)}


def test_two_settings_that_tie_do_not_go_to_the_weaker():
    assert select(tried((0.5,), (0.5,)), axis(2), "max").chosen.values == {"rate": 1.0}


def test_sums_in_another_order_are_still_a_tie():
    found = select(tried((0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.1, 0.3)), axis(3), "max")
    assert found.tied == 3
    assert found.chosen.values == {"rate": 1.0}
    row = {"tried": 3, "axes": [1], "chosen": {"rate": 1.0}, "tied": 3}
    assert remarks(row) == ["selection: 3 of 3 settings tie; the middle one was taken"]


def test_a_choice_at_an_end_is_reported_with_its_side():
    results = [(0.1,), (0.2,), (0.3,)]
    assert select(tried(*results), axis(3), "max").edges == [("rate", True)]
    assert select(tried(*results), axis(3), "min").edges == [("rate", False)]
    assert select(tried((0.1,), (0.3,), (0.2,)), axis(3), "max").edges == []
    words = [Tried({"unit": u}, {"0": v}) for u, v in (("a", 0.1), ("c", 0.2), ("b", 0.0))]
    assert select(words, [Axis("unit", choices=("a", "c", "b"))], "max").edges == []


def test_extensions_stay_within_bounds():
    rate, problems = read_axis("rate", {"low": 0.1, "high": 0.9}, "search")
    assert not problems
    axes, _ = design_of(recipe(), None)
    (rate,) = (a for a in axes["dropkey"] if a.key == "rate")
    (steep,) = (a for a in axes["R-Drop"] if a.key == "rate")  # the end of a schedule
    assert rate.most == steep.most == 0.95
    assert rate.beyond(True, 2) == [0.6687, 0.7375]
    assert max(steep.beyond(True, 3)) == 0.95
    assert min(rate.beyond(False, 2)) == 0.0
    (weight,) = (a for a in axes["R-Drop"] if a.key == "weight")
    assert max(weight.beyond(True, 1)) > 10
    assert Axis("n", choices=(2, 4, 8)).beyond(True, 3) == [16]
    assert Axis("rate", 0.1, 0.95, most=0.95).beyond(True, 2) == []


# --- the whole way ------------------------------------------------------------------------------------------------


class Answers:
    """Stands in for the trainer: writes results whose validation is a formula of the trial."""

    def __init__(self, value):
        self.value, self.runs, self.trained = value, [], 0

    def __call__(self, plan, place):
        from dampen.studies.store import RunStore

        self.runs.append(plan)
        for id, trial in plan.runs.items():
            record = RunStore(place / id)
            if record.done:
                continue
            self.trained += 1
            value = self.value(trial)
            final = {"id": id, "status": "finished" if value is not None else "diverged"}
            final |= {"selection": ["accuracy", "max"], "primary": ["accuracy", "max"], "test": {}}
            record.start(trial, {})
            record.finish(final | {"valid": {"accuracy": value}})
        return 0


def settings_of(path, row):
    return json.loads((path / "search.json").read_text())["rows"][row]


def test_a_choice_at_the_end_of_a_range_extends_it_once_for_every_row_alike(tmp_path):
    answers = Answers(lambda t: t.train.lr)
    alone = [
        (
            '"train.weight_decay" = { low = 0.01, high = 3, log = true }\nrate = { low = 0.05, high = 0.6 }',
            "",
        )
    ]
    alone += [("weight = [0.3, 1, 3]", ""), ('"$rate"', "0.2"), ('"$weight"', "1.0")]
    alone += [
        (
            "search = { rate = { low = 0.2, high = 0.9 }, weight = { low = 0.1, high = 10, log = true } }\n",
            "",
        )
    ]
    found = recipe(("settings = 4", "settings = 8"), *alone)
    plan, code = tune(found, make_comparison(found), tmp_path, None, [], [], answers)
    assert code == 0
    assert len(answers.runs) == 2
    assert [len(p.runs) for p in answers.runs] == [3 * 8 * 3, 3 * 2 * 3]
    for row in ("baseline", "dropkey", "R-Drop"):
        told = settings_of(tmp_path, row)
        assert told["extended"] == [{"axis": "train.lr", "end": "upper", "to": 0.01778}]
        assert told["edges"] == [
            {"axis": "train.lr", "end": "upper", "value": 0.01778, "extended": True}
        ]
        assert told["chosen"]["train.lr"] == 0.01778
        assert [t["extension"] for t in told["trials"]] == [False] * 8 + [True] * 2
        (point,) = next(r for r in plan.configs if r.name == row).settings
        assert point.grid == told["chosen"]
        assert set(point.ids) == {"0", "1", "2"}
    assert not {t.seed for t in plan.runs.values()} & {10_000, 10_001, 10_002}


def test_an_extension_stops_before_what_a_method_refuses(tmp_path):
    """Dropout alone may be tuned down to 0; R-Drop on it would compare two equal passes, which it refuses."""
    schedule = '{ name = "drop_key", rate = { linear = { start = 0.1, end = "$rate" } } }'
    given = "search = { rate = { low = 0.2, high = 0.9 }, weight = { low = 0.1, high = 10, log = true } }\n"
    changes = [(schedule, '{ name = "drop_key", rate = "$rate" }'), (given, "")]
    found = recipe(("settings = 4", "settings = 8"), *changes)
    tune(
        found,
        make_comparison(found),
        tmp_path,
        None,
        [],
        [],
        Answers(lambda t: -max((m.get("rate", 0) for m in t.methods), default=0)),
    )
    rates = {
        row: [t["values"]["rate"] for t in settings_of(tmp_path, row)["trials"] if t["extension"]]
        for row in ("dropkey", "R-Drop")
    }
    assert rates["dropkey"][-1] == 0
    assert len(rates["R-Drop"]) == len(rates["dropkey"])  # the budget stays the same
    assert 0 < min(rates["R-Drop"]) < 0.05


def test_each_value_by_tuning_seed_is_recorded(tmp_path):
    answers = Answers(lambda t: t.seed - 10_000 - abs(t.train.lr - 0.004))
    tune(recipe(), make_comparison(recipe()), tmp_path, None, [], [], answers)
    record = json.loads((tmp_path / "search.json").read_text())
    assert record["seeds"] == [10_000, 10_001, 10_002]
    for row in record["rows"].values():
        for one in row["trials"]:
            expected = {
                str(s): s - 10_000 - abs(one["values"]["train.lr"] - 0.004) for s in record["seeds"]
            }
            assert one["by_seed"] == pytest.approx(expected)
            assert one["valid"] == pytest.approx(sum(expected.values()) / 3)
        best = max(row["trials"], key=lambda t: t["valid"])
        assert row["valid"] == best["valid"]
        assert row["chosen"]["train.lr"] == best["values"]["train.lr"]


def test_the_same_command_again_trains_nothing_and_chooses_the_same(tmp_path):
    answers = Answers(lambda t: t.train.lr)
    first, _ = tune(recipe(), make_comparison(recipe()), tmp_path, None, [], [], answers)
    trained = answers.trained
    again, _ = tune(recipe(), make_comparison(recipe()), tmp_path, None, [], [], answers)
    assert answers.trained == trained
    assert again == first


def test_a_row_whose_runs_all_failed_stops_and_one_that_diverged_does_not(tmp_path):
    def fails(plan, place):
        plan = Comparison(
            **{**plan.__dict__, "runs": {i: t for i, t in plan.runs.items() if not t.methods}}
        )
        return Answers(lambda t: 0.5)(plan, place) or 1

    with pytest.raises(
        LabError, match="No setting of 'dropkey' can be selected: none of its tuning runs finished"
    ):
        tune(recipe(), make_comparison(recipe()), tmp_path / "failed", None, [], [], fails)
    answers = Answers(lambda t: None if t.methods else 0.5)
    plan, code = tune(
        recipe(), make_comparison(recipe()), tmp_path / "diverged", None, [], [], answers
    )
    assert code == 0
    assert settings_of(tmp_path / "diverged", "dropkey")["chosen"] is None
    assert len(plan.configs) == 3


def test_seeds_of_the_tuning_are_refused_as_seeds_of_the_table(tmp_path):
    plan = make_comparison(recipe(), seeds=[10_001])
    with pytest.raises(ConfigError, match="are tuning seeds"):
        tune(recipe(), plan, tmp_path, None, [], [], Answers(lambda t: 0.5))


def test_one_row_can_be_tuned_alone_and_the_others_later(tmp_path):
    answers = Answers(lambda t: t.train.lr)
    tune(recipe(), make_comparison(recipe()), tmp_path, None, [], ["dropkey"], answers)
    assert {r.name for p in answers.runs for r in p.configs} == {"dropkey"}
    alone = settings_of(tmp_path, "dropkey")
    assert settings_of(tmp_path, "baseline")["chosen"] is None
    tune(recipe(), make_comparison(recipe()), tmp_path, None, [], [], answers)
    assert settings_of(tmp_path, "dropkey") == alone
    assert settings_of(tmp_path, "baseline")["chosen"] is not None


TWO_STAGES = [
    ("settings = 4", "settings = 6\nstrength_settings = 3"),
    ("rate = { low = 0.05, high = 0.6 }", "rate = { low = 0.05, high = 0.6, start = 0.2 }"),
]


def peak(trial, rate=0.5):
    """Validation that is best at learning rate 0.003, weight decay 0.3 and this rate of DropKey."""
    away = abs(math.log(trial.train.lr / 0.003)) + abs(math.log(trial.train.weight_decay / 0.3)) / 5
    found = [
        m["rate"]
        for m in trial.methods
        if m["name"] == "drop_key" and not isinstance(m["rate"], dict)
    ]
    return -away - abs(found[0] - rate) / 10 if found else -away


def test_two_stages_spend_the_same_budget_on_every_row(tmp_path):
    """An own search over the record: first learning rates and decays at one strength, then what each row has left."""
    answers = Answers(peak)
    found = recipe(*TWO_STAGES)
    assert count_runs(tuning_plan(found, None, [], [])) == 3 * (6 + 3) * 3
    tune(found, make_comparison(found), tmp_path, None, [], [], answers)
    assert [len(p.runs) for p in answers.runs][:2] == [3 * 6 * 3, 3 * 3 * 3]
    told = {row: settings_of(tmp_path, row) for row in ("baseline", "dropkey", "R-Drop")}
    values = {row: [t["values"] for t in own["trials"]] for row, own in told.items()}
    common = {
        row: [(s["train.lr"], s["train.weight_decay"]) for s in own] for row, own in values.items()
    }
    assert common["baseline"][:6] == common["dropkey"][:6] == common["R-Drop"][:6]
    assert {s["rate"] for s in values["dropkey"][:6]} == {0.2}
    assert {s["weight"] for s in values["R-Drop"][:6]} == {1.0}  # no start: the middle of 0.1 to 10
    best = max(told["dropkey"]["trials"][:6], key=lambda t: t["valid"])["values"]
    assert [s | {"rate": 0} for s in values["dropkey"][6:9]] == [best | {"rate": 0}] * 3
    assert sorted(s["rate"] for s in values["dropkey"][6:9]) == [
        0.1417,
        0.325,
        0.5083,
    ]  # a third of the range each
    assert told["dropkey"]["chosen"] == best | {"rate": 0.5083}
    around = max(told["baseline"]["trials"][:6], key=lambda t: t["valid"])["values"]
    assert len(set(common["baseline"][:9])) == 9
    for lr, decay in common["baseline"][
        6:9
    ]:  # half the logarithmic range, centered or moved inside
        assert abs(math.log10(lr / around["train.lr"])) <= 0.5
        assert abs(math.log10(decay / around["train.weight_decay"])) <= 0.5 * math.log10(300)
    assert not any(t["extension"] for own in told.values() for t in own["trials"][:9])


def test_the_second_stage_of_a_row_does_not_depend_on_the_others(tmp_path):
    found = recipe(*TWO_STAGES)
    tune(found, make_comparison(found), tmp_path / "all", None, [], [], Answers(peak))
    tune(found, make_comparison(found), tmp_path / "one", None, [], ["dropkey"], Answers(peak))
    assert settings_of(tmp_path / "one", "dropkey") == settings_of(tmp_path / "all", "dropkey")
    again = Answers(peak)
    tune(found, make_comparison(found), tmp_path / "all", None, [], [], again)
    assert again.trained == 0


def test_ties_of_the_first_stage_go_to_the_middle_and_ends_extend_once_after_the_second(tmp_path):
    found = recipe(*TWO_STAGES)
    tune(found, make_comparison(found), tmp_path / "ties", None, [], [], Answers(lambda t: 0.5))
    tied = settings_of(tmp_path / "ties", "dropkey")
    assert (tied["tied"], tied["extended"]) == (9, [])
    answers = Answers(lambda t: peak(t, rate=0.9))
    tune(found, make_comparison(found), tmp_path / "ends", None, [], [], answers)
    end = settings_of(tmp_path / "ends", "dropkey")
    assert [t["extension"] for t in end["trials"]].count(True) == 3  # a quarter of 9, rounded up
    assert {"axis": "rate", "end": "upper", "to": 0.7375} in end["extended"]
    assert end["chosen"] == max(end["trials"], key=lambda t: t["valid"])["values"]


def test_a_row_whose_first_stage_diverged_has_no_second(tmp_path):
    found = recipe(*TWO_STAGES)
    tune(
        found,
        make_comparison(found),
        tmp_path,
        None,
        [],
        [],
        Answers(lambda t: None if t.methods else peak(t)),
    )
    assert len(settings_of(tmp_path, "dropkey")["trials"]) == 6
    assert len(settings_of(tmp_path, "baseline")["trials"]) >= 9


def test_strengths_alone_need_no_second_kind_of_stage(tmp_path):
    """With the learning rate and the decay fixed, both stages search the strength, the second close to the best."""
    given = ["train.lr=0.003", "train.weight_decay=0.3"]
    found = recipe(*TWO_STAGES)
    tune(
        found,
        make_comparison(found, settings=given),
        tmp_path,
        None,
        given,
        [],
        Answers(lambda t: peak(t, rate=0.3)),
    )
    rates = [t["values"]["rate"] for t in settings_of(tmp_path, "dropkey")["trials"]]
    assert len(rates) >= 9
    chosen = max(settings_of(tmp_path, "dropkey")["trials"][:6], key=lambda t: t["valid"])[
        "values"
    ]["rate"]
    assert chosen not in rates[6:9]  # nothing is tried twice
    assert max(abs(r - 0.3) for r in rates[6:9]) <= 0.25 * 0.55 + 0.05


def test_a_comparison_is_tuned_with_its_reference_over_rate_learning_rate_and_decay():
    asked = comparison("digits", "vit(depth=1)", "drop_key(rate=0.2), params(weight_decay=0.3)", 3)
    found = tuned_recipe(asked, 5, ["train.lr=0.01"])
    axes, settings = design_of(found, None)
    assert [a.key for a in axes["plain"]] == ["train.lr", "train.weight_decay"]
    assert [a.key for a in axes["drop_key(rate=0.2)"]] == [
        "train.lr",
        "train.weight_decay",
        "drop_key_rate",
    ]
    assert [a.key for a in axes["params(weight_decay=0.3)"]] == ["train.lr"]  # what it says stays
    assert (axes["plain"][0].low, axes["plain"][0].high) == pytest.approx((0.002, 0.05))
    assert {len(own) for own in settings.values()} == {
        4
    }  # and one of the strength alone, at the best of these
    assert {s["drop_key_rate"] for s in settings["drop_key(rate=0.2)"]} == {
        0.2
    }  # what the user wrote
    plan = tuning_plan(found, None, [], [])
    assert len(plan.runs) == 3 * 4 * 3
    assert count_runs(plan) == 3 * 5 * 3


def test_a_real_run_is_tuned_recorded_packed_and_read_back(tmp_path, capsys):
    path = tmp_path / "tuned.toml"
    path.write_text(
        RECIPE.replace("settings = 4", "settings = 2").replace(
            "seeds = [0, 1, 2]", "seeds = [0, 1]"
        )
    )

    def run(*more):
        with pytest.raises(SystemExit) as left:
            main(["run", str(path), "--out", str(tmp_path / "runs"), "--workers", "1", *more])
        assert not left.value.code
        return capsys.readouterr()

    assert "18 runs for selection on validation, then 6 would run" in run("--dry-run").out
    said = run()
    assert "baseline: lr" in said.err
    folder = tmp_path / "runs" / "tuned-laptop"
    record, plan = json.loads((folder / "search.json").read_text()), Comparison.load(folder)
    assert list(record["rows"]) == ["baseline", "dropkey", "R-Drop"]
    for row in plan.configs:
        (point,) = row.settings
        assert point.grid == record["rows"][row.name]["chosen"]
        best = [t for t in record["rows"][row.name]["trials"] if t["values"] == point.grid]
        assert max(t["valid"] for t in record["rows"][row.name]["trials"]) == pytest.approx(
            best[0]["valid"]
        )
        for id in best[0]["ids"].values():
            final = json.loads((folder / "search" / id / "final.json").read_text())
            assert final["valid"]["accuracy"] in best[0]["by_seed"].values()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("final.json")}
    run()
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("final.json")} == before
    pack = tmp_path / "pack.json.xz"
    with pytest.raises(SystemExit):
        main(["report", str(folder), "-o", str(pack), "--format", "pack"])
    (table,) = make_report([pack]).tables
    assert table.study.search == record
    told = json.loads(to_json([table], []))["tables"][0]
    assert told["search"] == record
    assert "Settings were tuned: 2 settings of every method, the baseline too" in tuned(table)
    for entry in table.entries:
        assert set(entry.values) == {"0", "1"}
        assert {r.config["data"]["split_seed"] for r in entry.setting.logged.values()} == {"seed"}
        assert {s: r.final.data["seed"] for s, r in entry.setting.logged.items()} == {
            "0": 0,
            "1": 1,
        }
