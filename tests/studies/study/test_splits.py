"""Splits that are drawn anew for each seed, and cross-validation."""

import json

import numpy as np
import pytest
import torch

from dampen.cli import main
from dampen.studies.checks import check_data
from dampen.studies.request import request_parts
from dampen.studies.run import Run
from dampen.studies.trainer.data import load_data
from tests.studies.user_files import write_csv


def rows_of(split):
    return {tuple(x.flatten().tolist()) for x in split.images}


def test_split_seed_draws_train_and_validation_anew_and_keeps_the_test_part():
    one, two = (
        load_data({"name": "digits", "split_seed": "seed"}, None, None, seed) for seed in (0, 1)
    )
    same = load_data({"name": "digits"}, None, None, 1)
    assert rows_of(one.train) != rows_of(two.train)
    assert rows_of(one.test) == rows_of(two.test)
    assert rows_of(same.train) == rows_of(load_data({"name": "digits"}, None, None, 0).train)
    assert check_data({"name": "digits", "split_seed": "seeds"}, "data.")
    assert check_data({"name": "digits", "folds": 1}, "data.")
    assert not check_data({"name": "digits", "split_seed": "seed", "folds": 3}, "data.")


def test_each_seed_draws_its_own_validation_and_test_split_where_nothing_is_said():
    one = Run.from_dict({"data": {"name": "digits"}, "model": {"name": "vit"}})
    first, again, other = (load_data(one.data, None, None, seed) for seed in (0, 0, 1))
    for part in ("train", "valid", "test"):
        assert rows_of(getattr(first, part)) == rows_of(getattr(again, part))
        assert rows_of(getattr(first, part)) != rows_of(getattr(other, part))
    assert first.info["drawn"] == ["valid", "test"]
    assert not any("fixed" in text for text in first.info["departures"])
    assert (len(first.train), len(first.valid), len(first.test)) == tuple(
        other.info["examples"].values()
    )


def test_a_number_fixes_every_draw_and_a_limit_is_drawn_by_the_seed_too():
    def data(**more):
        return Run.from_dict({"data": {"name": "digits", **more}, "model": {"name": "vit"}}).data

    one, two = (load_data(data(split_seed=5), None, None, seed) for seed in (0, 1))
    assert all(
        rows_of(a) == rows_of(b)
        for a, b in zip(one.splits.values(), two.splits.values(), strict=True)
    )
    one, two = (load_data(data(test_seed=5), None, None, seed) for seed in (0, 1))
    assert rows_of(one.test) == rows_of(two.test)
    assert rows_of(one.train) != rows_of(two.train)
    one, two = (load_data(data(limit=100, test_limit=50), None, None, seed) for seed in (0, 1))
    assert rows_of(one.train) | rows_of(one.valid) != rows_of(two.train) | rows_of(two.valid)
    assert rows_of(one.test) != rows_of(two.test)
    assert len(one.test) == 50


def test_an_old_trial_has_the_split_it_had():
    parts = {"data": {"name": "digits"}, "model": {"name": "vit"}, "seed": 3}
    old, new = Run.from_stored(parts), Run.from_dict(parts)
    assert old.id != new.id
    assert (old.format, new.format) == (1, 2)
    assert Run.from_stored(old.to_dict()) == Run.from_dict(old.to_dict()) == old
    assert Run.from_stored(new.to_dict()) == new
    before = load_data({"name": "digits"}, None, None, 0)
    found = load_data(old.data, None, None, old.seed)
    assert [rows_of(s) for s in found.splits.values()] == [
        rows_of(s) for s in before.splits.values()
    ]


@pytest.mark.parametrize("kind", ["digits", "table"])
def test_every_example_is_tested_once_in_a_round_of_folds(kind, tmp_path):
    if kind == "digits":
        data, parts = {"name": "digits", "folds": 4}, None
    else:
        asked = request_parts(None, write_csv(tmp_path / "t.csv"), "drop_key", 1, folds=4)
        trial = next(iter(asked.plan.runs.values()))
        data, parts = trial.data, asked.parts
    folds = [load_data(data, None, parts, seed) for seed in range(8)]
    total = sum(len(getattr(folds[0], part)) for part in ("train", "valid", "test"))
    for first in (0, 4):
        assert sum(len(fold.test) for fold in folds[first : first + 4]) == total
    content = [fold.test.batch(torch.arange(len(fold.test)))["target"].tolist() for fold in folds]
    assert content[0] != content[4] or kind == "table"  # another round is another draw
    if kind == "digits":
        for first in (0, 4):
            tested = [rows_of(fold.test) for fold in folds[first : first + 4]]
            assert not tested[0] & tested[1]
            for fold in folds[first : first + 4]:
                assert not rows_of(fold.test) & rows_of(fold.train)
                assert not rows_of(fold.valid) & rows_of(fold.train)
    assert "fold 1 of 4 in round 2" in " ".join(folds[4].info["departures"])


def test_each_fold_is_normalized_by_its_own_training_part(tmp_path):
    """Against the obvious reference: the raw values of the fold's training rows."""
    first, second = (load_data({"name": "digits", "folds": 3}, None, None, seed) for seed in (0, 1))
    for fold in (first, second):
        raw = fold.train.images.float() / 255
        assert fold.normalization.mean.item() == pytest.approx(raw.mean().item(), abs=1e-6)
        assert fold.normalization.std.item() == pytest.approx(
            raw.std(correction=0).item(), abs=1e-6
        )
        assert fold.test.normalization is fold.train.normalization is fold.normalization
        assert fold.info["normalization"] == fold.normalization.facts()
        assert fold.info["examples"] == {part: len(split) for part, split in fold.splits.items()}
    assert first.normalization.mean != second.normalization.mean


def test_arrays_and_vocabularies_come_from_a_folds_own_training_part(tmp_path):
    draw = np.random.default_rng(0)
    x, y = draw.normal(3, 5, (60, 4, 2)).astype("float32"), np.arange(60) % 3
    np.savez(tmp_path / "a.npz", x=x, y=y)
    asked = request_parts(None, tmp_path / "a.npz", "drop_key", 1, folds=3)
    data, parts = next(iter(asked.plan.runs.values())).data, asked.parts
    for seed in (0, 1):
        fold = load_data(data, None, parts, seed)
        inputs = fold.train.inputs[0]
        torch.testing.assert_close(inputs.mean((0, 1)), torch.zeros(2), atol=1e-5, rtol=0)
        torch.testing.assert_close(inputs.std((0, 1), correction=0), torch.ones(2))
        change = fold.normalization  # what is recorded brings the file's own numbers back
        back = torch.cat([s.inputs[0] for s in fold.splits.values()]) * change.std + change.mean
        expected = torch.from_numpy(x).flatten(1)
        torch.testing.assert_close(
            back.flatten(1).sort(0)[0], expected.sort(0)[0], atol=1e-4, rtol=1e-4
        )
    words = [f"{'abc'[i % 3] * 3} word{i} word{i}" for i in range(60)]
    lines = "".join(f"{text},{'abc'[i % 3]}\n" for i, text in enumerate(words))
    (tmp_path / "t.csv").write_text("text,label\n" + lines)
    asked = request_parts(None, tmp_path / "t.csv", "drop_key", 1, folds=3)
    data, parts = next(iter(asked.plan.runs.values())).data, asked.parts
    one, two = (load_data(data, None, parts, seed) for seed in (0, 1))
    assert not torch.equal(one.train.ids[:5], two.train.ids[:5])
    for fold in (one, two):
        assert int(fold.train.ids.max()) < fold.model_args["vocab"]
        longest = {part: int(split.lengths.max()) for part, split in fold.splits.items()}
        assert (
            longest["train"] < longest["test"]
        )  # words of the training part became tokens, those of others did not


def test_trials_with_folds_are_not_those_of_before_the_normalization_changed():
    """The first id is what version 0.1 gave: a record under it was normalized by another draw's statistics."""
    parts = {"data": {"name": "digits", "folds": 3}, "model": {"name": "vit"}}
    trial = Run.from_stored(parts)
    assert trial.id != "0d29b28628013bef"
    assert Run.from_dict(trial.to_dict()).id == trial.id
    assert (
        Run.from_stored({**parts, "data": {"name": "digits", "folds": None}}).id
        == "ac67dd9d0a396449"
    )


@pytest.mark.slow
def test_the_command_averages_the_folds_of_a_seed(tmp_path, capsys):
    data = write_csv(tmp_path / "t.csv", rows=60)
    command = [
        "compare",
        "--data",
        str(data),
        "--methods",
        "drop_key",
        "--seeds",
        "2",
        "--folds",
        "2",
        "--json",
    ]
    command += [
        "--set",
        "train.epochs=1",
        "--set",
        "train.batch_size=8",
        "--workers",
        "1",
        "--threads",
        "1",
    ]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path / "runs")])
    told = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert told["trials"] == {"finished": 8}
    assert [row["n"] for row in told["rows"]] == [2, 2]
    plan = json.loads(next((tmp_path / "runs").glob("*/plan.json")).read_text())
    assert "2 seeds of 2 folds each, averaged" in plan["header"]["title"]
    single = [
        json.loads(p.read_text())["test"]["accuracy"]
        for p in (tmp_path / "runs").glob("*/*/final.json")
    ]
    both = [v for row in told["rows"] for v in row["values"].values()]
    assert sum(both) / 4 == pytest.approx(100 * sum(single) / 8)
