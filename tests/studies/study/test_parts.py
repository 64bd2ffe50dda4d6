"""The lab's trainer on the user's own model and data, and the identity of that data."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch

import reproductions  # noqa: F401 - two more general readers
from dampen.cli import main
from dampen.studies.data.dataset import DamagedData, MissingData
from dampen.studies.data.sets import recognize
from dampen.studies.errors import ConfigError
from dampen.studies.files import fingerprint
from dampen.studies.request import request_parts
from dampen.studies.trainer.data import load_data
from dampen.studies.trainer.models import make_model
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from tests.studies.user_files import write_bert, write_csv, write_images

BUILD = """
import torch, dampen
from torch.utils.data import TensorDataset

def build(classes, channels, image_size, width=16):
    return dampen.models.ViT(
        image_size=image_size, patch_size=4, channels=channels, width=width, depth=2, heads=2, mlp=16, classes=classes
    )

def load():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 3, 8, 8, generator=draw), torch.arange(90) % 3
    return {"train": TensorDataset(x, y), "test": TensorDataset(x[:30], y[:30])}

def wrong():
    return 3
"""


@pytest.fixture
def build(tmp_path):
    path = tmp_path / "build.py"
    path.write_text(BUILD)
    return path


def first_result(asked, folder, data_dir=None):
    """Train the first trial."""
    trial = next(iter(asked.plan.runs.values()))
    options = Execution(
        threads=1, accelerator="cpu", parts=asked.parts, keep_weights=False, data_dir=data_dir
    )
    return run_trial(trial, folder / trial.id, options)


SHORT = ["train.epochs=1", "train.batch_size=8"]
FINE_TUNE = ["train.epochs=8", "train.batch_size=16", "train.lr=0.003"]


def test_a_csv_is_tokenized_by_bpe_of_its_training_part(tmp_path):
    asked = request_parts(
        None, write_csv(tmp_path / "reviews.csv"), "drop_key", 1, settings=["train.epochs=4"]
    )
    assert next(iter(asked.plan.runs.values())).model["name"] == "text"
    result = first_result(asked, tmp_path)
    assert set(result["test"]) == {"accuracy", "nll", "ece", "brier", "macro_f1", "mcc"}
    assert result["test"]["accuracy"] > 0.9  # the words give the class away
    assert result["data"]["sha256"].keys() == {"reviews.csv"}


def test_text_metrics_agree_with_scikit_learn():
    from sklearn.metrics import f1_score, matthews_corrcoef

    from dampen.studies.metrics import TextMetrics

    draw = torch.Generator().manual_seed(0)
    logits, target = (
        torch.randn(200, 4, generator=draw),
        torch.randint(0, 4, (200,), generator=draw),
    )
    logits[torch.arange(200), target] += 1
    metrics = TextMetrics(4)
    metrics.update(logits[:120], target[:120])
    metrics.update(logits[120:], target[120:])
    found, guess = metrics.compute(), logits.argmax(-1)
    assert found["macro_f1"] == pytest.approx(f1_score(target, guess, average="macro"), abs=1e-6)
    assert found["mcc"] == pytest.approx(matthews_corrcoef(target, guess), abs=1e-6)


@pytest.mark.parametrize(
    "kind",
    ["csv", "tsv", "jsonl", "folder", "npz", "sequences", "datasets", "saved_images", "images"],
)
def test_every_kind_of_own_data_is_recognized_and_other_content_is_another_trial(tmp_path, kind):
    def write(place, seed):
        if kind == "csv":
            return write_csv(place.with_suffix(".csv"), seed=seed)
        if kind == "tsv":
            return write_csv(place.with_suffix(".tsv"), seed=seed, delimiter="\t")
        if kind == "jsonl":
            path = place.with_suffix(".jsonl")
            lines = [{"text": f"word{seed} {i}", "label": i % 2} for i in range(40)]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return path
        if kind == "folder":
            place.mkdir()
            write_csv(place / "train.csv", seed=seed)
            write_csv(place / "test.csv", rows=20, seed=seed + 1)
            return place
        if kind in ("npz", "sequences"):
            draw = np.random.default_rng(seed)
            x = (
                draw.integers(0, 255, (60, 8, 8), dtype=np.uint8)
                if kind == "npz"
                else draw.normal(size=(60, 5, 4))
            )
            np.savez(place.with_suffix(".npz"), x=x, y=np.arange(60) % 3)
            return place.with_suffix(".npz")
        if kind == "images":
            return write_images(place, seed)
        import datasets

        labels = datasets.ClassLabel(names=["no", "yes"])
        if kind == "datasets":
            rows = {
                "text": [f"word{seed} {i}" for i in range(40)],
                "label": [i % 2 for i in range(40)],
            }
            made = datasets.Dataset.from_dict(
                rows, features=datasets.Features(text=datasets.Value("string"), label=labels)
            )
        else:
            from PIL import Image

            draw = np.random.default_rng(seed)
            pictures = [
                Image.fromarray(draw.integers(0, 255, (8, 8, 3), dtype=np.uint8)) for _ in range(40)
            ]
            kinds = datasets.Features(image=datasets.Image(), label=labels)
            made = datasets.Dataset.from_dict(
                {"image": pictures, "label": [i % 2 for i in range(40)]}, features=kinds
            )
        made.save_to_disk(str(place))
        return place

    one, two = write(tmp_path / "one", 1), write(tmp_path / "two", 2)
    first, second = (
        request_parts(None, path, "drop_key", 1, settings=SHORT) for path in (one, two)
    )
    assert not set(first.plan.runs) & set(second.plan.runs)
    assert first.folder != second.folder
    moved = tmp_path / "elsewhere" / one.name
    moved.parent.mkdir()
    (shutil.copytree if one.is_dir() else shutil.copy)(one, moved)
    assert set(request_parts(None, moved, "drop_key", 1, settings=SHORT).plan.runs) == set(
        first.plan.runs
    )
    trial = next(iter(first.plan.runs.values()))
    data = load_data(trial.data, None, first.parts, trial.seed)
    assert len(data.classes) in (2, 3)
    model = make_model(trial.model, data.model_args, first.parts)
    batch = data.train.batch([0, 1])
    assert model(*batch["inputs"]).shape == (2, len(data.classes))
    changed = next(p for p in ([one] if one.is_file() else sorted(one.rglob("*"))) if p.is_file())
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises((DamagedData, MissingData)):
        load_data(trial.data, None, first.parts, trial.seed)


@pytest.mark.parametrize("name", ["folder", "text", "parallel"])
def test_two_folders_of_the_general_readers_never_mix(tmp_path, name):
    for place, words in (("one", "a b c"), ("two", "a b d")):
        folder = tmp_path / place
        if name == "folder":
            write_images(folder, seed=len(words) + ord(words[-1]))
            continue
        folder.mkdir()
        if name == "text":
            (folder / "input.txt").write_text(words * 500)
        else:
            for part in ("train", "valid", "test"):
                for language in ("en", "de"):
                    (folder / f"{part}.{language}").write_text(f"{words}\n" * 30)
    asked = [
        request_parts(None, name, "drop_key", 1, data_dir=str(tmp_path / place))
        for place in ("one", "two")
    ]
    assert not set(asked[0].plan.runs) & set(asked[1].plan.runs)
    assert asked[0].folder != asked[1].folder
    trial = next(iter(asked[0].plan.runs.values()))
    load_data(trial.data, str(tmp_path / "one"))
    with pytest.raises(DamagedData, match="has changed"):
        load_data(trial.data, str(tmp_path / "two"))


def test_a_fingerprint_reads_a_file_again_only_when_size_or_time_changed(tmp_path, monkeypatch):
    import os

    from dampen.studies import files as module

    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    (folder / "b").write_text("2")
    for file in folder.iterdir():
        os.utime(file, (1, 1))
    read = []
    monkeypatch.setattr(
        module,
        "file_hash",
        lambda path, real=module.file_hash: read.append(path.name) or real(path),
    )
    first = fingerprint(folder)
    assert sorted(read) == ["a", "b"]
    assert fingerprint(folder) == first
    assert sorted(read) == ["a", "b"]
    (folder / "b").write_text("3")
    os.utime(folder / "b", (2, 2))
    assert fingerprint(folder) != first
    assert sorted(read) == ["a", "b", "b"]
    (folder / ".hidden").write_text("x")
    assert fingerprint(folder) == fingerprint(folder)
    (tmp_path / "cache" / "fingerprints.json").write_text("damaged")
    assert fingerprint(folder) == fingerprint(folder)
    (folder / "b").rename(folder / "c")
    assert fingerprint(folder) != first


@pytest.mark.slow
def test_a_function_builds_the_model_and_another_reads_the_data(tmp_path, build, capsys):
    command = [
        "compare",
        "--data",
        f"{build}:load",
        "--model",
        f"{build}:build(width=8)",
        "--seeds",
        "1",
        "--json",
    ]
    command += [
        "--methods",
        "drop_key, drop_head, params(mixup=0.2), params(label_smoothing=0.1, weight_decay=0.5)",
    ]
    command += [
        "--out",
        str(tmp_path / "runs"),
        "--workers",
        "1",
        "--threads",
        "1",
        "--set",
        "train.epochs=1",
    ]
    with pytest.raises(SystemExit) as end:
        main([*command, "--set", "train.batch_size=16"])
    told = json.loads(capsys.readouterr().out)
    assert end.value.code == 0, told
    assert told["trials"] == {"finished": 5}
    config = json.loads(next((tmp_path / "runs").glob("*/*/config.json")).read_text())
    assert str(tmp_path) not in json.dumps(config)  # records have no paths of a machine


def test_a_timm_model_gets_the_size_of_the_images(tmp_path):
    images = write_images(tmp_path / "photos")
    model = "timm/vit_tiny_patch16_224(depth=2, embed_dim=16, num_heads=2, patch_size=4)"
    asked = request_parts(
        model, images, "drop_key, drop_path, layer_drop", 1, settings=[*SHORT, "data.size=16"]
    )
    result = first_result(asked, tmp_path)
    assert result["status"] == "finished"


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("hub") / "tiny-bert")


def test_a_model_folder_is_fine_tuned_with_its_own_tokenizer(tmp_path, tiny_bert):
    from transformers import AutoModel

    data = write_csv(tmp_path / "reviews.csv")
    rows = "drop_key(rate=0.1), drop_head, r_drop + drop_key(rate=0.1)"
    asked = request_parts(f"hf/{tiny_bert}", data, rows, 1, settings=FINE_TUNE)
    trial = next(iter(asked.plan.runs.values()))
    assert trial.data["tokenizer"] == "model"
    loaded = load_data(trial.data, None, asked.parts, 0)
    model = make_model(trial.model, loaded.model_args, asked.parts)
    saved = AutoModel.from_pretrained(tiny_bert).embeddings.word_embeddings.weight
    assert torch.equal(model.model.bert.embeddings.word_embeddings.weight, saved)
    for one in asked.plan.runs.values():
        options = Execution(threads=1, accelerator="cpu", parts=asked.parts, keep_weights=False)
        assert run_trial(one, tmp_path / one.id, options)["test"]["accuracy"] > 0.6
    (tiny_bert / "config.json").touch()  # the time is another, the content the same
    again = request_parts(f"hf/{tiny_bert}", data, rows, 1, settings=FINE_TUNE)
    assert set(again.plan.runs) == set(asked.plan.runs)


def test_a_model_that_drops_by_itself_is_told_of(tmp_path, tiny_bert):
    """Plain has the dropout of the model's configuration, and every other row has it beside its own."""
    data = write_csv(tmp_path / "reviews.csv")
    asked = request_parts(f"hf/{tiny_bert}", data, "drop_key", 1, settings=FINE_TUNE)
    rates = "attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1"
    assert f"drops by itself ({rates}), in every row, plain too" in asked.remark
    assert asked.plan.departures == [asked.remark]  # which stands in every report
    off = asked.remark.partition("write ")[2].replace("--set ", "").split()
    without = request_parts(f"hf/{tiny_bert}", data, "drop_key", 1, settings=[*FINE_TUNE, *off])
    assert (without.remark, without.plan.departures) == ("", [])
    trial = next(iter(without.plan.runs.values()))
    model = make_model(
        trial.model, load_data(trial.data, None, without.parts, 0).model_args, without.parts
    )
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_a_bad_part_is_blamed_on_that_part(tmp_path, build, capsys):
    data = write_csv(tmp_path / "reviews.csv")
    for arguments, words in [
        (["--model", "hf/nowhere"], "--model is not valid"),
        (["--model", "vit(depth=)"], "--model is not valid"),
        (["--model", f"{build}:bild"], "has no function 'bild'"),
        (["--data", "reviews.cvs"], "unknown dataset or path 'reviews.cvs' (no such file: /"),
        (["--data", "digitz"], "; did you mean 'digits'?"),
        (["--data", f"{build}:wrong"], "must return a dict with train"),
        (["--methods", "params(weight_dekay=1)"], "did you mean 'weight_decay'"),
    ]:
        given = [] if "--data" in arguments else ["--data", str(data)]
        with pytest.raises(SystemExit) as end:
            main(["compare", *given, *arguments, "--out", str(tmp_path)])
        assert end.value.code in (2, 3)
        assert words in capsys.readouterr().err, arguments


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("text,label\na,1\nb\n", "row 2 does not have the columns"),
        (
            "words,label\na,1\n",
            "no column named like a text; it has words, label. Pass --set data.text=NAME",
        ),
        ("text,label\na,1\nb,1\n", "all examples are of one class"),
        ("text,label\na,\n", "row 1 has no 'label'"),
    ],
)
def test_tables_that_cannot_be_used_say_why(tmp_path, content, words):
    path = tmp_path / "t.csv"
    path.write_text(content)
    asked = request_parts(None, path, "drop_key", 1)
    with pytest.raises(DamagedData, match=words):
        load_data(next(iter(asked.plan.runs.values())).data, None, asked.parts, 0)


def test_what_is_not_recognized_says_what_would_be(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"1")
    with pytest.raises(
        MissingData, match="Supported: a folder with one folder of images per class"
    ):
        recognize(tmp_path / "x.bin")
    np.savez(tmp_path / "flat.npz", x=np.zeros((4, 3)), y=np.arange(4))
    with pytest.raises(MissingData, match="shape"):
        recognize(tmp_path / "flat.npz")
    with pytest.raises(ConfigError, match="say --model file.py:build"):
        path = tmp_path / "b.py"
        path.write_text(BUILD)
        request_parts(None, f"{path}:load", "drop_key", 1)


def test_pairs_of_texts_and_named_columns(tmp_path):
    path = tmp_path / "pairs.csv"
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["premise", "hypothesis", "gold"])
        out.writerows([[f"a {i}", f"b {i}", i % 3] for i in range(60)])
    asked = request_parts(None, path, "drop_key", 1, settings=["data.label=gold"])
    data = load_data(next(iter(asked.plan.runs.values())).data, None, asked.parts, 0)
    ids, padding = data.train.batch([0, 1])["inputs"]
    assert ids.shape == padding.shape
    assert (ids[0] == 2).sum() == 2  # an end after each text
