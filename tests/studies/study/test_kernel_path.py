"""Records name the kernels of a trial, a trial that resumes stays on its own, and rows are paired within one path."""

import json

import pytest

from dampen.native import library
from dampen.studies.errors import LabError, Stopped
from dampen.studies.store import RunStore
from dampen.studies.table import comparison_table, read_runs
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial


@pytest.fixture
def native(tmp_path, monkeypatch):
    """Switches the native kernels on and off."""
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path / "native"))
    try:
        library.build()
    except library.BuildError as error:
        pytest.skip(f"no native kernels: {error}")

    def switch(on):
        monkeypatch.setenv("DAMPEN_NATIVE", "1" if on else "0")
        library.reset()

    yield switch
    monkeypatch.undo()
    library.reset()


def trial_of(asked, row):
    (planned,) = (r for r in asked.plan.configs if r.name == row)
    return asked.plan.runs[planned.settings[0].ids["0"]]


def begin(asked, row):
    """Run the first trial of a row until it has a checkpoint, and stop."""
    trial, calls = trial_of(asked, row), []

    def stop():
        calls.append(1)
        return len(calls) >= 4

    with pytest.raises(Stopped):
        run_trial(
            trial, asked.folder / trial.id, Execution(threads=1, function=asked.function), stop=stop
        )
    return lambda: run_trial(
        trial, asked.folder / trial.id, Execution(threads=1, function=asked.function)
    )


def test_a_resumed_trial_keeps_its_path_bit_exactly(native, ask, tmp_path):
    ends = {}
    for on in (False, True):
        native(on)
        whole = ask(seeds=1, folder=tmp_path / f"whole{on}")
        trial = trial_of(whole, "drop_key(rate=0.2)")
        result = run_trial(
            trial, whole.folder / trial.id, Execution(threads=1, function=whole.function)
        )
        assert result["kernels"] == ("native" if on else "torch")
        (session,) = json.loads((whole.folder / trial.id / "environment.json").read_text())[
            "sessions"
        ]
        assert session["kernels"] == result["kernels"]
        ends[on] = result["last_weights"]
    assert ends[True] != ends[False]  # the two draw from different streams
    native(False)
    resume = begin(ask(seeds=1, folder=tmp_path / "cut"), "drop_key(rate=0.2)")
    native(True)
    result = resume()
    assert (result["kernels"], result["last_weights"]) == ("torch", ends[False])
    assert library.path() == "native"  # for the next trial


def test_a_trial_begun_on_native_kernels_is_refused_without_them(native, ask, tmp_path):
    native(True)
    asked = ask(seeds=1)
    methods, plain = begin(asked, "drop_key(rate=0.2)"), begin(asked, "plain")
    native(False)
    with pytest.raises(
        LabError, match="began on the native kernels.*DAMPEN_NATIVE=0.*delete the folder"
    ):
        methods()
    assert plain()["status"] == "finished"  # a model without methods uses neither


def test_rows_are_paired_within_one_path_and_old_records_as_before(native, ask, run):
    native(False)
    asked = ask("drop_key(rate=0.2), drop_head(rate=0.2)", seeds=3, reference="drop_key(rate=0.2)")
    run(asked)
    first = next(iter(asked.plan.configs[1].settings[0].ids.values()))
    path = asked.folder / first / "final.json"
    result = {k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}

    def table(kernels):
        written = (
            result | {"kernels": kernels}
            if kernels
            else {k: v for k, v in result.items() if k != "kernels"}
        )
        RunStore(asked.folder / first).finish(written)
        return comparison_table(asked.plan, read_runs(asked.plan, asked.folder))

    for kernels, pairs in (("torch", 3), ("native", 2), (None, 3)):
        found = table(kernels)
        entry = found.entry("drop_head(rate=0.2)")
        assert (entry.comparison.n, entry.cost.n) == (pairs, pairs), kernels
        assert entry.unpaired == (["0"] if kernels == "native" else [])
        assert ("other kernels" in entry.told(found.metric)) == (kernels == "native")
