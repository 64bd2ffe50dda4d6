"""A trial that is pretrained as a masked autoencoder: what goes before, what enters, what is recorded and refused."""

import json
from dataclasses import replace

import pytest
import torch

from dampen.studies.checks import check_trial
from dampen.studies.comparison import make_comparison
from dampen.studies.diagnose import find_trials, from_run
from dampen.studies.errors import ConfigError, Diverged, Interrupted, LabError
from dampen.studies.report import make_report
from dampen.studies.request import comparison
from dampen.studies.run import Run
from dampen.studies.store import PRETRAIN, RunStore
from dampen.studies.trainer.checkpoint import load_newest
from dampen.studies.trainer.data import load_data
from dampen.studies.trainer.models import load_pretrained, prepared_by
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial
from reproductions.models.mae import MaskedAutoencoder
from tests.studies.interrupted import interrupt_at, log_without_times, same

GRAY = {"name": "token_graying", "kind": "dct", "eps": 0.8}
DECODER = {
    "decoder_width": 16,
    "decoder_depth": 1,
    "decoder_heads": 2,
    "decoder_mlp": 16,
    "hide": 0.5,
}


@pytest.fixture
def pretrained(small):
    """A small trial with a pretraining of its own length; keywords go into `train`."""

    def make(methods=(), seed=0, pretrain=None, **train):
        before = {"model": DECODER, "train": {"epochs": 2}} if pretrain is None else pretrain
        plain = small(methods, seed, **{"epochs": 1, **train}).to_dict()
        return Run.from_dict(
            {**plain, "model": plain["model"] | {"patch_size": 2}, "pretrain": before}
        )

    return make


def test_what_goes_before_differs_only_where_said(pretrained):
    trial = pretrained([GRAY], seed=3, condition_every=2)
    first = trial.pretraining()
    assert first.model == {
        "name": "mae",
        "patch_size": 2,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp": 32,
        **DECODER,
    }
    assert (first.data, first.methods, first.seed) == (trial.data, trial.methods, 3)
    assert first.train == replace(trial.train, epochs=2, condition_every=None)
    assert pretrained([GRAY], pretrain={"methods": []}).pretraining().methods == ()


def test_a_trial_without_pretraining_keeps_its_name(small, pretrained):
    plain = small()
    assert "pretrain" not in plain.canonical()
    for nothing in (None, False, {}):
        assert Run.from_dict({**plain.to_dict(), "pretrain": nothing}).id == plain.id
    one, other = pretrained(), pretrained(pretrain={"model": DECODER, "train": {"epochs": 3}})
    assert one.id != other.id
    assert Run.from_dict(one.to_dict()) == one


def test_the_encoder_enters_and_the_record_tells(tmp_path, pretrained, quick):
    trial = pretrained([GRAY])
    result = run_trial(trial, tmp_path, replace(quick, keep_weights=False))
    first = RunStore(tmp_path / PRETRAIN).final()
    assert first["primary"] == ["reconstruction", "min"]
    assert result["pretrain"]["valid"] == first["valid"]
    assert result["primary"] == ["accuracy", "max"]
    start = TrialState(trial, quick, load_pretrained(tmp_path)).raw.state_dict()
    fresh = TrialState(replace(trial, pretrain=None), quick).raw.state_dict()
    weights = load_newest(tmp_path / PRETRAIN, "weights")[0]["model"]
    for name, value in start.items():
        expected = fresh[name] if name.startswith("head.") else weights[f"encoder.{name}"]
        assert torch.equal(value, expected), name


def test_the_autoencoder_learns_and_validation_hides_the_same_patches(tmp_path, pretrained, quick):
    trial = pretrained(pretrain={"model": DECODER, "train": {"epochs": 12}}).pretraining()
    run_trial(trial, tmp_path, quick)
    errors = [line["valid"]["reconstruction"] for line in RunStore(tmp_path).lines()]
    assert errors[-1] < 0.9 * errors[0]
    s = TrialState(trial, quick)
    assert s.evaluate("valid") == s.evaluate("valid")
    images, noise = s.data.valid.batch([0, 1])["inputs"]
    assert torch.equal(noise, s.data.valid.batch([1, 0])["inputs"][1].flip(0))
    expected = s.raw.eval()(images, noise).loss
    assert torch.equal(s.raw(images, noise).loss, expected)
    assert len(s.data.train.batch([0])["inputs"]) == 1  # training draws anew each time


@pytest.mark.parametrize("stops", [(3, 4), (9,)])
def test_cut_off_while_pretraining_it_ends_as_if_nothing_had_happened(
    tmp_path, pretrained, quick, stops
):
    drop = {"name": "drop_key", "rate": 0.2}
    trial = pretrained([drop])
    whole = run_trial(trial, tmp_path / "whole", quick)
    for at in stops:
        report, stop = interrupt_at({at})
        with pytest.raises(Interrupted, match=f"{PRETRAIN} resumes it"):
            run_trial(trial, tmp_path / "cut", quick, report, stop)
    result = run_trial(trial, tmp_path / "cut", quick)
    first = RunStore(tmp_path / "cut" / PRETRAIN).final()
    assert first["resumed"] == len(stops)
    drop_times = {"pretrain": {k: v for k, v in result["pretrain"].items() if k != "seconds"}}
    assert same(result | drop_times, whole | {"pretrain": drop_times["pretrain"]})
    assert same(first, RunStore(tmp_path / "whole" / PRETRAIN).final())
    for folder in (".", PRETRAIN):
        assert log_without_times(tmp_path / "cut" / folder) == log_without_times(
            tmp_path / "whole" / folder
        )


def test_cut_off_while_fine_tuning_the_pretraining_is_not_run_again(tmp_path, pretrained, quick):
    trial = pretrained(epochs=2, pretrain={"model": DECODER, "train": {"epochs": 1}})
    whole = run_trial(trial, tmp_path / "whole", quick)
    events = []

    def stop():
        return any(e["kind"] == "progress" and "phase" not in e and e["step"] == 2 for e in events)

    with pytest.raises(Interrupted):
        run_trial(trial, tmp_path / "cut", quick, events.append, stop)
    assert {e["phase"] for e in events if "phase" in e} == {"pretraining"}
    events.clear()
    result = run_trial(trial, tmp_path / "cut", quick, events.append)
    assert not any("phase" in e for e in events)
    assert result["last_weights"] == whole["last_weights"]
    assert len(RunStore(tmp_path / "cut" / PRETRAIN).sessions()) == 1


def test_a_pretraining_that_diverges_closes_the_trial(tmp_path, pretrained, quick):
    trial = pretrained(pretrain={"model": DECODER, "train": {"lr": 1e30, "epochs": 3}})
    for _ in range(2):  # the second time it is read, not run
        with pytest.raises(
            Diverged, match=r"In the pretraining \(pretrain/\): Training stopped at step"
        ):
            run_trial(trial, tmp_path, quick)
    final = RunStore(tmp_path).final()
    assert (final["id"], final["status"], final["primary"]) == (
        trial.id,
        "diverged",
        ["accuracy", "max"],
    )
    assert RunStore(tmp_path).trial() == trial
    RunStore(tmp_path).reopen()  # dampen run --retry
    assert RunStore(tmp_path).final() is RunStore(tmp_path / PRETRAIN).final() is None


def test_damaged_pretrained_weights_are_not_used(tmp_path, pretrained, quick):
    trial = pretrained(pretrain={"model": DECODER, "train": {"epochs": 1}})
    run_trial(trial.pretraining(), tmp_path / PRETRAIN, quick)
    (path,) = (tmp_path / PRETRAIN).glob("weights-*.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        LabError, match=r"no pretrained weights: .* is damaged.* Delete .* to run the trial again"
    ):
        run_trial(trial, tmp_path, quick)


def test_diagnosis_and_report_see_the_classifier(tmp_path, pretrained, quick):
    trial = pretrained([GRAY], pretrain={"model": DECODER, "train": {"epochs": 1}})
    run_trial(trial, tmp_path / trial.id, quick)
    assert find_trials(tmp_path) == [tmp_path / trial.id]
    trained = from_run(
        tmp_path / trial.id
    )  # the prior of the PAC-Bayes bound must not have seen any data
    fresh = TrialState(replace(trial, pretrain=None), quick).raw
    assert all(torch.equal(trained.initial[name], p) for name, p in fresh.named_parameters())
    with pytest.raises(LabError, match="is a pretraining; diagnose the classifier above it"):
        from_run(tmp_path / trial.id / PRETRAIN)
    assert [e.summary.n for table in make_report([tmp_path]).tables for e in table.entries] == [1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"pretrain": {"epochs": 3}},
            r"pretrain.epochs: unknown key; known: data, methods, model, sites, train",
        ),
        ({"pretrain": 4}, r"pretrain: expected a table such as .*, got 4"),
        ({"pretrain": {"train": 4}}, r"pretrain.train: expected a table, got 4"),
        (
            {"pretrain": {"train": {"epohs": 4}}},
            r"pretrain.train.epohs: unknown key; did you mean 'epochs'",
        ),
        (
            {"model": {"name": "convmixer"}},
            r"pretrain: a masked autoencoder pretrains model 'vit', not 'convmixer'",
        ),
    ],
)
def test_bad_input_is_told_where_it_was_written(pretrained, change, words):
    with pytest.raises(ConfigError, match=words):
        Run.from_dict({**pretrained().to_dict(), **change})


def test_a_recipe_tells_the_problems_of_its_pretraining_with_the_others():
    recipe = comparison("digits", None, "drop_key", 1)
    recipe.base["pretrain"] = {"train": {"epochs": 0}}
    with pytest.raises(
        ConfigError, match=r"plain: pretrain\.train\.epochs: must be 1 or more, got 0"
    ):
        make_comparison(recipe)


def test_names_are_checked_before_anything_runs(pretrained):
    trial = pretrained(pretrain={"model": {"decoder_widht": 3}})
    assert check_trial(trial) == [
        "pretrain.model.decoder_widht: unknown key; did you mean 'decoder_width'?"
    ]
    trial = Run.from_dict({"data": {"name": "fsdd"}, "model": {"name": "mae"}})
    assert check_trial(trial) == [
        "model.name: 'mae' needs image data; 'fsdd' is a data set for audio"
    ]


def test_an_autoencoder_can_be_compared_by_its_own_metric():
    recipe = comparison(
        "digits", "mae(patch_size=2, depth=1)", "token_graying(kind='dct', eps=0.9)", 1
    )
    assert recipe.metric == "reconstruction"
    assert len(make_comparison(recipe).runs) == 2


def test_only_images_can_lose_their_labels():
    data = load_data({"name": "digits"}, None)
    data.task = "audio"
    model = MaskedAutoencoder(image_size=8, patch_size=2, channels=1, width=16, depth=1, heads=2)
    with pytest.raises(ConfigError, match="'mae' needs image data; digits is a data set for audio"):
        prepared_by(model, "mae", data)


def test_the_record_is_plain_json(tmp_path, pretrained, quick):
    trial = pretrained(pretrain={"model": DECODER, "train": {"epochs": 1}})
    run_trial(trial, tmp_path, quick)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["pretrain"] == {"model": DECODER, "train": {"epochs": 1}}
