"""The long campaign goes on from what another machine had finished."""

from pathlib import Path

from reproductions import campaign

NAME = "explicit_dropout/table_3"


def begun(out: Path) -> Path:
    """A study with one finished trial, one unfinished, and a plan, in the search folder as the runner leaves them."""
    search = campaign.folder(NAME, out) / "search"
    for trial, files in {
        "a": ("config.json", "final.json", "log.jsonl", "lock", "last.pt"),
        "b": ("config.json",),
    }.items():
        (search / trial).mkdir(parents=True)
        for name in files:
            (search / trial / name).write_text(f"{trial} {name}")
    (search / "plan.json").write_text("{}")
    return search


def test_finished_trials_are_kept_and_restored(tmp_path):
    search = begun(tmp_path / "here")
    campaign.keep(NAME, tmp_path / "here", tmp_path / "records")
    campaign.restore(NAME, tmp_path / "there", tmp_path / "records")
    restored = campaign.folder(NAME, tmp_path / "there") / "search"
    found = {str(path.relative_to(restored)) for path in restored.rglob("*") if path.is_file()}
    assert found == {"plan.json", "a/config.json", "a/final.json", "a/log.jsonl"}
    assert all((restored / name).read_bytes() == (search / name).read_bytes() for name in found)


def test_a_folder_that_has_begun_stays_as_it_is(tmp_path):
    begun(tmp_path / "here")
    campaign.keep(NAME, tmp_path / "here", tmp_path / "records")
    own = campaign.folder(NAME, tmp_path / "here") / "search" / "a" / "final.json"
    own.write_text("newer")
    campaign.restore(NAME, tmp_path / "here", tmp_path / "records")
    assert own.read_text() == "newer"


def test_nothing_finished_keeps_nothing(tmp_path):
    campaign.keep(NAME, tmp_path / "here", tmp_path / "records")
    assert not campaign.unfinished(NAME, tmp_path / "records").exists()
