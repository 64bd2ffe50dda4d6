"""The campaign resumes from what another machine had finished."""

from pathlib import Path

import pytest

from reproductions import campaign

NAME = "explicit_dropout/table_2"


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """Result files and kept runs of these tests lie in a folder of their own."""
    monkeypatch.setattr(campaign, "HERE", tmp_path / "reproductions")


def begin(out: Path, folder: str) -> Path:
    """A study with one finished run, one unfinished, and a plan, in the search folder as the runner leaves them."""
    search = out / "explicit_dropout" / folder / "search"
    for run, files in {
        "a": ("config.json", "final.json", "log.jsonl", "lock", "last.pt"),
        "b": ("config.json",),
    }.items():
        (search / run).mkdir(parents=True)
        for name in files:
            (search / run / name).write_text(f"{run} {name}")
    (search / "plan.json").write_text("{}")
    return search


def test_finished_runs_are_kept_and_restored(tmp_path):
    search = begin(tmp_path / "here", "explicit_dropout-table_2-study")
    campaign.keep(NAME, tmp_path / "here")
    campaign.restore(NAME, tmp_path / "there")
    restored = campaign.runs_of(NAME, tmp_path / "there") / "search"
    found = {str(path.relative_to(restored)) for path in restored.rglob("*") if path.is_file()}
    assert found == {"plan.json", "a/config.json", "a/final.json", "a/log.jsonl"}
    assert all((restored / name).read_bytes() == (search / name).read_bytes() for name in found)


def test_a_folder_that_has_begun_stays_as_it_is(tmp_path):
    begin(tmp_path / "here", "explicit_dropout-table_2-study")
    campaign.keep(NAME, tmp_path / "here")
    own = campaign.runs_of(NAME, tmp_path / "here") / "search" / "a" / "final.json"
    own.write_text("newer")
    campaign.restore(NAME, tmp_path / "here")
    assert own.read_text() == "newer"


def test_a_folder_of_an_older_campaign_is_adopted(tmp_path):
    begin(tmp_path / "here", "table_2-study")
    campaign.restore(NAME, tmp_path / "here")
    assert (
        campaign.runs_of(NAME, tmp_path / "here") / "search" / "a" / "final.json"
    ).read_text() == "a final.json"


def test_nothing_finished_keeps_nothing(tmp_path):
    campaign.keep(NAME, tmp_path / "here")
    assert not campaign.unfinished(NAME).exists()


def test_every_study_has_a_recipe_or_settings_and_runs_in_a_folder_of_its_own(tmp_path):
    here = Path(campaign.__file__).parent
    for name in (*campaign.EXPERIMENTS, *campaign.EARLIER):
        assert (here / f"{name}.toml").is_file()
    folders = [campaign.runs_of(name, tmp_path) for name in campaign.STUDIES]
    assert (
        len(set(folders))
        == len({campaign.result_of(name) for name in campaign.STUDIES})
        == len(campaign.STUDIES)
    )


def test_runs_lie_where_the_command_puts_them(tmp_path, monkeypatch):
    from dampen.cli.run import run_name
    from dampen.studies import load_recipe, make_comparison

    name = "always_skip_attention/depth_digits"
    plan = make_comparison(
        load_recipe(str(Path(campaign.__file__).parent / f"{name}.toml")), "study"
    )
    group = name.split("/")[0]
    assert campaign.runs_of(name, tmp_path) == tmp_path / group / run_name(plan, [])


def test_an_interrupted_campaign_keeps_what_has_finished(tmp_path, monkeypatch):
    begin(tmp_path / "here", "explicit_dropout-table_2-study")
    monkeypatch.setattr(campaign, "run", lambda name, data_dir, out: campaign.INTERRUPTED)
    arguments = ["--data-dir", str(tmp_path), "--out", str(tmp_path / "here"), "--only", NAME]
    assert campaign.main(arguments) == campaign.INTERRUPTED
    assert campaign.unfinished(NAME).exists()


@pytest.mark.filterwarnings(r"ignore:.*(a rate above 0\.5|a width above 9) hurts:UserWarning")
def test_the_plan_and_the_recipes_say_how_many_runs_an_experiment_has():
    """In the order of the campaign, counted by the planner of the runs."""
    from dampen.studies import load_recipe, make_comparison
    from dampen.studies.tuning import as_large, count_runs, tuning_plan

    here = Path(campaign.__file__).parent
    lines = [line.split("|") for line in (here / "PLAN.md").read_text().splitlines()]
    costs = {
        cells[2].strip(" `"): cells[3].strip()
        for cells in lines
        if len(cells) == 6 and "/" in cells[2]
    }
    assert tuple(costs) == campaign.EXPERIMENTS
    for name in campaign.EXPERIMENTS:
        recipe = load_recipe(str(here / f"{name}.toml"))
        plan, tuning = make_comparison(recipe, "study"), tuning_plan(recipe, "study", [], [])
        table = len((as_large(plan, tuning) if tuning else plan).chosen())
        counted = f"{count_runs(tuning)} + {table}" if tuning else f"{table}"
        assert costs[name] == counted, name
        assert recipe.cost.startswith(f"{counted} runs of "), name
