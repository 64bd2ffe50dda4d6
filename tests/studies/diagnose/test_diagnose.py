"""dampen diagnose: on trained digits from end to end, on other tasks what applies, on models from elsewhere."""

import json
import shutil
import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dampen.cli import build
from dampen.diagnostics import gradient_variance, measure_calibration
from dampen.studies.diagnose import (
    SECTIONS,
    Settings,
    Trained,
    diagnose,
    find_trials,
    from_model,
    from_run,
)
from dampen.studies.diagnose.measure import keep, kept
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.report.diagnosis import measured_figures
from dampen.studies.run import Run
from dampen.studies.store import RunStore
from dampen.studies.trainer.data import derive, seed_all
from dampen.studies.trainer.models import make_model
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial

OWN = ("calibration", "gradient_variance", "attention", "conditioning", "generalization")
"""The sections that dampen has itself; the plug-in `reproductions` adds more."""
QUICK = Settings(examples=200, gradient_batches=3, samples=4)


def trial(methods=(), seed=0):
    return Run.from_dict(
        {
            "data": {"name": "digits", "limit": 400},
            "model": {
                "name": "vit",
                "patch_size": 2,
                "width": 16,
                "depth": 2,
                "heads": 2,
                "mlp": 16,
            },
            "methods": list(methods),
            "train": {"epochs": 2, "batch_size": 32, "lr": 3e-3},
            "seed": seed,
        }
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished trials: plain, and one whose methods act in training and in eval."""
    root = tmp_path_factory.mktemp("runs")
    methods = [
        "token_graying",
        {"name": "drop_key", "rate": 0.3},
        {"name": "explicit_dropout", "value": 0.05},
    ]
    for one in (trial(), trial(methods)):
        run_trial(one, root / one.id, Execution(threads=1, accelerator="cpu"))
    return root


@pytest.fixture(scope="module")
def plain(runs):
    return runs / trial().id


@pytest.fixture(scope="module")
def result(plain):
    return diagnose(from_run(plain), QUICK, only=OWN)


# --- a trial --------------------------------------------------------------------------------------


def test_every_section_is_measured(result):
    assert result["skipped"] == {}
    assert set(OWN) <= set(SECTIONS) & set(result)
    assert set(result["seconds"]) >= set(OWN)
    json.dumps(result, allow_nan=False)


def test_the_rebuilt_model_is_the_one_that_was_tested(runs, plain):
    for folder in find_trials(runs):
        recorded = RunStore(folder).final()["test"]
        found = diagnose(from_run(folder), Settings(examples=10**6), only=["calibration"])[
            "calibration"
        ]
        assert found["accuracy"] == pytest.approx(recorded["accuracy"])
        assert found["nll"] == pytest.approx(recorded["nll"], rel=1e-5)
        assert found["ece"] == pytest.approx(recorded["ece"], rel=1e-4)
        assert found["brier"] == pytest.approx(recorded["brier"], rel=1e-4)


def test_calibration_has_its_interval_and_diagrams(result):
    c = result["calibration"]
    assert c["n"] == 200
    assert c["bins"] == 15
    assert c["accuracy_low"] < c["accuracy"] < c["accuracy_high"]
    assert sum(c["reliability"]["count"]) == sum(c["adaptive_reliability"]["count"]) == 200


def test_gradient_variance_is_that_of_the_training_loss(plain, runs):
    t = from_run(plain)
    found = diagnose(t, QUICK, only=["gradient_variance"])["gradient_variance"]
    order = torch.randperm(len(t.data.train), generator=torch.Generator().manual_seed(0))
    parts = [t.data.train.batch(order[i * 32 : (i + 1) * 32]) for i in range(3)]
    expected = gradient_variance(
        t.model, [(b["inputs"][0], b["target"]) for b in parts]
    )  # no methods: cross-entropy
    assert found["trace"] == pytest.approx(expected.trace)
    assert found["batches"] == 3
    regularized = next(f for f in find_trials(runs) if f != plain)
    assert (
        diagnose(from_run(regularized), QUICK, only=["gradient_variance"])["gradient_variance"][
            "trace"
        ]
        > 0
    )


def test_attention_and_conditioning_by_layer(result):
    layers = result["attention"]["layers"]
    assert [layer["name"] for layer in layers] == ["blocks.0", "blocks.1"]
    for layer in layers:
        assert len(layer["entropy"]) == 2
        assert 0 < layer["entropy_share"] <= 1
        assert 0 < layer["head_similarity"] <= 1
    assert [layer["name"] for layer in result["conditioning"]] == ["blocks.0", "blocks.1"]
    assert {"tokens", "attention", "attention+skip", "ffn", "ffn+skip"} <= set(
        result["conditioning"][0]
    )


def test_generalization_compares_training_with_test(result, plain):
    found = result["generalization"]
    assert found["accuracy_gap"] == pytest.approx(
        found["train"]["accuracy"] - found["test"]["accuracy"]
    )
    assert found["nll_gap"] == pytest.approx(found["test"]["nll"] - found["train"]["nll"])
    t = from_run(plain)
    seed_all(derive(0, "init"))
    fresh = make_model(trial().model, t.data.model_args)
    assert all(torch.equal(p, t.initial[name]) for name, p in fresh.named_parameters())


def test_diagnosing_leaves_the_model_and_the_random_state_alone(plain):
    t = from_run(plain)
    before = {k: v.clone() for k, v in t.model.state_dict().items()}
    state = torch.get_rng_state()
    diagnose(t, QUICK, only=OWN)
    torch.testing.assert_close(t.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in t.model.parameters())


# --- kept in the folder, shown by the report ------------------------------------------------------


def test_what_was_measured_is_not_measured_again(plain, result):
    (plain / "diagnose.json").unlink(missing_ok=True)
    assert kept(plain, QUICK, OWN) is None
    written = keep(plain, result)
    assert kept(plain, QUICK, OWN) == written
    assert kept(plain, Settings(examples=7), OWN) is None  # other settings
    assert kept(plain, QUICK, ["calibration"]) == written
    again = keep(
        plain, diagnose(from_run(plain), QUICK, only=["attention"])
    )  # the other sections stay
    assert set(OWN) <= set(again)
    assert set(again["seconds"]) >= set(OWN)
    other = keep(
        plain, diagnose(from_run(plain), Settings(samples=2), only=["attention"])
    )  # nor do others cost them
    for name in ("calibration", "conditioning"):
        assert other[name] == written[name]
    assert other["measured_with"]["attention"]["samples"] == 2
    assert other["measured_with"]["calibration"]["samples"] == QUICK.samples
    assert kept(plain, QUICK, OWN) is None  # its attention was measured in another way
    assert (
        kept(plain, QUICK, ["calibration"])
        == kept(plain, Settings(samples=2), ["attention"])
        == other
    )
    (plain / "diagnose.json").unlink()


def test_a_section_that_fails_later_is_no_longer_reported(plain, result):
    keep(plain, result)
    failed = {k: v for k, v in result.items() if k != "conditioning"} | {
        "skipped": {"conditioning": "no attention"}
    }
    again = keep(plain, failed)
    assert "conditioning" not in again
    assert again["skipped"]["conditioning"] == "no attention"
    assert "conditioning" not in keep(plain, result)["skipped"]
    (plain / "diagnose.json").unlink()


def test_the_report_draws_every_measurement(runs, plain, result, tmp_path):
    from dampen.studies.report import make_report
    from dampen.studies.report.figures import Palette

    shutil.copytree(plain, tmp_path / plain.name)
    keep(tmp_path / plain.name, result)
    (table,) = make_report([tmp_path]).tables
    figures = {f.key: f for f in measured_figures(table, Palette([e.name for e in table.ranked()]))}
    assert set(figures) == {"calibration", "heads"}
    assert sum(r["count"] for r in figures["calibration"].records) == 200


# --- other tasks ----------------------------------------------------------------------------------


class Words(nn.Module):
    """Synthetic: an embedding and nothing else, so attention is missing."""

    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, tokens):
        return self.table(tokens)


def synthetic_text():
    from dampen.studies.data.dataset import Dataset
    from reproductions.data.corpus import TextSplit

    draw = torch.Generator().manual_seed(0)
    splits = [
        TextSplit(torch.randint(11, (67,), generator=draw), context=8, stride=8) for _ in range(3)
    ]
    return Dataset("synthetic", "language", *splits, classes=[], info={}, model_args={"vocab": 11})


def test_a_language_model_is_measured_token_by_token():
    from dampen.models import LanguageModel

    data = synthetic_text()
    model = LanguageModel(vocab=11, width=16, depth=2, heads=2, mlp=16, context=8)
    found = diagnose(Trained("synthetic", model, data, batch_size=2), QUICK)
    assert set(found["skipped"]) <= {"robustness", "corruptions", "attention_maps"}
    assert found["calibration"]["n"] == 66  # 67 tokens have 66 successors; padding counts nowhere
    assert len(found["conditioning"]) == 2


def test_what_has_no_attention_says_so():
    found = diagnose(Trained("synthetic", Words(11), synthetic_text(), batch_size=2), QUICK)
    assert {"attention", "conditioning"} <= set(found["skipped"])
    assert "no attention module" in found["skipped"]["attention"]
    assert found["calibration"]["n"] == 66


def test_several_classes_at_once_have_no_calibration():
    from dampen.models import FeatureEncoder
    from dampen.studies.data.dataset import Dataset, Normalization
    from reproductions.data.sequences import SequenceSplit

    frames, present = torch.randn(40, 6), (torch.rand(40, 3) > 0.5).float()
    unit = Normalization(torch.zeros(6), torch.ones(6))
    starts, lengths = torch.tensor([0, 8, 16, 24]), torch.tensor([8, 8, 8, 5])
    split = SequenceSplit(frames, starts, lengths, present, 8, unit, per_token=True)
    data = Dataset(
        "synthetic",
        "detection",
        split,
        split,
        split,
        ["a", "b", "c"],
        {},
        {},
        loss="binary_cross_entropy",
    )
    model = FeatureEncoder(6, 3, width=16, heads=2, mlp=16, max_tokens=8, per_token=True)
    found = diagnose(Trained("synthetic", model, data, batch_size=2), QUICK)
    assert "several may be present at once" in found["skipped"]["calibration"]
    assert set(found["skipped"]) & set(OWN) == {"calibration", "generalization"}
    assert found["gradient_variance"]["trace"] > 0
    assert len(found["conditioning"]) == 2


@pytest.mark.parametrize("bad", [{"samples": 0}, {"bins": 0}])
def test_settings_that_measure_nothing_are_errors(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
        Settings(**bad)


def test_unknown_sections_are_errors(plain):
    with pytest.raises(ValueError, match="no section 'colour'"):
        diagnose(from_run(plain), QUICK, only=["colour"])


# --- where models come from -----------------------------------------------------------------------


def test_folders_without_finished_trials_are_errors(tmp_path, plain):
    with pytest.raises(LabError, match="There is no folder"):
        find_trials(tmp_path / "nowhere")
    with pytest.raises(LabError, match="no trial"):
        find_trials(tmp_path)
    shutil.copytree(plain, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "final.json").unlink()
    with pytest.raises(LabError, match="1 runs, none of them finished"):
        find_trials(tmp_path)


def test_lost_or_damaged_weights_are_errors(tmp_path, plain):
    shutil.copytree(plain, tmp_path / "a")
    (weights,) = (tmp_path / "a").glob("weights-*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(LabError, match="damaged"):
        from_run(tmp_path / "a")
    weights.unlink()
    with pytest.raises(LabError, match="holds no weights"):
        from_run(tmp_path / "a")


def test_a_file_of_weights(tmp_path, plain):
    t = from_run(plain)
    path = tmp_path / "weights.pt"
    torch.save(t.model.state_dict(), path)
    spec = "vit(patch_size=2, width=16, depth=2, heads=2, mlp=16)"
    found = from_model(str(path), "digits", spec)
    assert found.name == "weights"
    batches = found.batches("test", 100)
    assert asdict(measure_calibration(found.model, batches)) == asdict(
        measure_calibration(t.model, batches)
    )
    with pytest.raises(ConfigError, match="--model: missing"):
        from_model(str(path), "digits")
    with pytest.raises(ConfigError, match="--data: missing"):
        from_model(str(path), None, spec)
    with pytest.raises(LabError, match="do not fit"):
        from_model(str(path), "digits", "vit(patch_size=2)")
    torch.save(t.model, path)  # a pickled module runs code when it is loaded: refused
    with pytest.raises(LabError, match="cannot|not a state_dict"):
        from_model(str(path), "digits", spec)


def test_a_function_that_returns_a_model(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import dampen\n"
        "def small():\n"
        "    return dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp=16)\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = from_model("my_models:small", "digits")
    assert set(diagnose(found, QUICK, only=["attention", "generalization"])) >= {
        "attention",
        "generalization",
    }
    for place, told in (
        ("my_models:large", "cannot be imported"),
        ("my_models:number", "gave a int"),
        ("x", "neither"),
    ):
        with pytest.raises(ConfigError, match=told):
            from_model(place, "digits")
    sys.modules.pop("my_models")


# --- the command ----------------------------------------------------------------------------------


def test_command_on_a_run_folder(runs, plain):
    arguments = [
        "diagnose",
        str(runs),
        "--examples",
        "100",
    ]
    done = CliRunner().invoke(build("diagnose"), [*arguments, "--only", "calibration,attention"])
    assert done.exit_code == 0, done.output
    assert "accuracy" in done.output
    assert "dampen report" in done.output
    assert json.loads((plain / "diagnose.json").read_text())["settings"]["examples"] == 100
    printed = CliRunner().invoke(
        build("diagnose"), [*arguments, "--only", "calibration", "--json"], env={"COLUMNS": "80"}
    )
    assert len(json.loads(printed.stdout)) == 2
    one = CliRunner().invoke(
        build("diagnose"), ["diagnose", str(plain), *arguments[2:], "--only", "attention"]
    )
    assert "blocks.1" in one.output


def test_command_explains_what_is_wrong(plain):
    for arguments, told in (
        ([str(plain), "--only", "colour"], "there is no section 'colour'"),
        ([str(plain), "--set", "eps"], "expected SECTION.OPTION=VALUE, got 'eps'"),
        (["nowhere"], "neither a folder of runs"),
        (["my_models:small"], "--data: missing"),
    ):
        done = CliRunner().invoke(build("diagnose"), ["diagnose", *arguments])
        assert done.exit_code == 2, done.output
        assert told in done.output
