"""What the plug-in adds to `dampen diagnose`: attacks, corruptions and attention maps of a trained run."""

import json
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

import reproductions  # noqa: F401 - registers the sections
from dampen.cli import build
from dampen.studies.diagnose import Settings, diagnose, from_model, from_run
from dampen.studies.diagnose.measure import diagnosis_table, keep
from dampen.studies.report import make_report
from dampen.studies.report.figures import Palette
from dampen.studies.result import parse_diagnosis
from dampen.studies.run import Run
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from reproductions.figures.robustness import attacks, corruptions

OPTIONS = {"robustness.eps": "2,8", "robustness.examples": "40", "robustness.steps": "3"}
QUICK = Settings(examples=200, options=OPTIONS)
ADDED = ("robustness", "corruptions", "attention_maps")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A finished run."""
    sizes = {"patch_size": 2, "width": 16, "depth": 2, "heads": 2, "mlp": 16}
    run = Run.from_dict(
        {
            "data": {"name": "digits", "limit": 400},
            "model": {"name": "vit", **sizes},
            "train": {"epochs": 2, "batch_size": 32, "lr": 3e-3},
            "seed": 0,
        }
    )
    folder = tmp_path_factory.mktemp("runs") / run.id
    run_trial(run, folder, Execution(threads=1, accelerator="cpu"))
    return folder


@pytest.fixture(scope="module")
def result(plain):
    return diagnose(from_run(plain), QUICK, only=[*ADDED, "calibration"])


def test_they_are_measured_beside_dampens_own(result):
    assert result["skipped"] == {}
    assert result["settings"]["options"] == OPTIONS
    json.dumps(result, allow_nan=False)


def test_attacks_state_everything_and_hurt(result):
    attacks = result["robustness"]
    assert [(a["attack"], round(255 * a["eps"])) for a in attacks] == [
        ("fgsm", 2),
        ("pgd", 2),
        ("fgsm", 8),
        ("pgd", 8),
    ]
    for a in attacks:
        assert a["n"] == 40
        assert a["accuracy"] <= a["clean_accuracy"]
        assert a["step"] == pytest.approx(a["eps"] if a["attack"] == "fgsm" else a["eps"] / 4)
        assert a["steps"] == (1 if a["attack"] == "fgsm" else 3)
    by = {(a["attack"], round(255 * a["eps"])): a["accuracy"] for a in attacks}
    assert by["pgd", 8] <= by["pgd", 2]


def test_corruptions_are_measured_on_pixels(result):
    found = result["corruptions"]
    assert {kind: len(a) for kind, a in found["accuracy"].items()} == {
        "noise": 5,
        "blur": 5,
        "contrast": 5,
    }
    assert found["clean_accuracy"] == pytest.approx(result["calibration"]["accuracy"])


def test_attention_maps_are_pictures(result, plain):
    examples = result["attention_maps"]["examples"]
    assert len({e["label"] for e in examples}) == 4
    for e in examples:
        assert (len(e["image"]), len(e["image"][0]), len(e["image"][0][0])) == (8, 8, 3)
        assert (len(e["map"]), len(e["map"][0])) == (4, 4)
        assert e["predicted"] in {str(d) for d in range(10)}
    assert (plain / result["attention_maps"]["file"]).read_bytes()[:4] == b"\x89PNG"
    with Image.open(plain / result["attention_maps"]["heads_file"]) as heads:
        assert heads.size[0] // 64 == heads.size[1] // 64 == 2  # a column per head, a row per layer


def test_pictures_go_beside_the_file_of_a_model_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "its_models.py").write_text(
        "import dampen\n"
        "def small():\n"
        "    return dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp=16)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = from_model("its_models:small", "digits")
    found.picture = tmp_path / "mine.png"
    maps = diagnose(found, QUICK, only=["attention_maps"])["attention_maps"]
    assert (maps["file"], maps["heads_file"]) == ("mine.png", "mine-heads.png")
    assert (tmp_path / "mine-heads.png").is_file()
    sys.modules.pop("its_models")


def test_the_report_draws_them(plain, result):
    keep(plain, result)
    (table,) = make_report([plain.parent]).tables
    palette = Palette([e.name for e in table.ranked()])
    assert [make(table, palette).key for make in (attacks, corruptions)] == [
        "attacks",
        "corruptions",
    ]
    titles = list(diagnosis_table([result]).columns[0].cells)
    assert {"accuracy", "FGSM", "PGD", "corrupted"} <= set(titles)


def test_the_command_takes_their_options(plain):
    arguments = ["diagnose", str(plain), "--only", "robustness", "--fresh", "--json"]
    options = [part for name, value in OPTIONS.items() for part in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(build("diagnose"), [*arguments, *options])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)[0]["robustness"]) == 4


def test_wrong_options_and_data_without_images_are_named(plain, monkeypatch):
    bad = Settings(options={"robustness.eps": "0"})
    found = diagnose(from_run(plain), bad, only=["robustness"])
    assert "sizes of attacks are positive" in found["skipped"]["robustness"]
    trained = from_run(plain)
    monkeypatch.setattr(trained.data, "task", "language")
    found = diagnose(trained, QUICK, only=ADDED)
    assert set(found["skipped"]) == set(ADDED)
    assert "needs images" in found["skipped"]["robustness"]


def test_a_section_that_dampen_does_not_know_is_kept():
    assert parse_diagnosis({"mine": {"x": 1}}).section("mine") == {"x": 1}
