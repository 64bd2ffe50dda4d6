"""Every module of the user's that a function imports is part of its identity, wherever Python finds it."""

import json
import os
import subprocess
import sys
import time

import pytest

from dampen.studies.request import request_own
from dampen.studies.run import Run
from dampen.studies.trainer.user_function import _import, function_in_file
from dampen.studies.user_code import code_in_file, digest_of_file, sources_of
from tests.studies.study.conftest import SCRIPT

PRINT_IDS = """
import sys
from dampen.studies.request import request_own
from dampen.studies.trainer.user_function import function_in_file
asked = request_own(function_in_file(sys.argv[1] + ":train"), "drop_key", 1, folder=sys.argv[2])
print(*sorted(asked.plan.runs), sep="\\n")
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package in a folder of its own, `elsewhere/mylib`, of which the model is imported."""
    for name in [m for m in sys.modules if m.partition(".")[0] == "mylib"]:
        monkeypatch.delitem(sys.modules, name)  # that of another test
    package = tmp_path / "elsewhere" / "mylib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("from mylib.sizes import WIDTH\n")
    (package / "sizes.py").write_text("WIDTH = 16\n")
    return package


@pytest.fixture
def project(tmp_path, library):
    """A script that imports the package."""
    file = tmp_path / "project" / "train.py"
    file.parent.mkdir()
    file.write_text("from mylib.model import WIDTH\n" + SCRIPT.replace("width=16", "width=WIDTH"))
    return file


def ids(project, tmp_path, **environment):
    """The ids of the runs, as a fresh Python plans them."""
    command = [sys.executable, "-c", PRINT_IDS, str(project), str(tmp_path / "runs")]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def on_path(library):
    return {"PYTHONPATH": f"{library.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_a_module_on_pythonpath_enters_the_identity(project, library, tmp_path):
    """The issue's case: 'already recorded' after mylib/model.py had changed."""
    before = ids(project, tmp_path, **on_path(library))
    (library / "sizes.py").write_text("WIDTH = 16  # as before\n")
    assert ids(project, tmp_path, **on_path(library)) == before
    (library / "sizes.py").write_text("WIDTH = 24\n")
    assert not set(ids(project, tmp_path, **on_path(library))) & set(before)


def test_a_module_found_by_sys_path_insert_enters_the_identity(project, library, tmp_path):
    start = f"import sys\nsys.path.insert(0, {str(library.parent)!r})\n"
    project.write_text(start + project.read_text())
    before = ids(project, tmp_path)
    (library / "sizes.py").write_text("WIDTH = 24\n")
    assert not set(ids(project, tmp_path)) & set(before)


def test_an_editable_install_enters_the_identity(project, library, tmp_path, monkeypatch):
    """Setuptools' editable finder sits on sys.meta_path; site-packages has no file of the package."""
    import importlib.util

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "mylib":
                return importlib.util.spec_from_file_location(
                    name, library / "__init__.py", submodule_search_locations=[str(library)]
                )
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    before = digest_of_file(project)
    assert set(sources_of(project).files) == {
        "train.py",
        "mylib/__init__.py",
        "mylib/model.py",
        "mylib/sizes.py",
    }
    (library / "sizes.py").write_text("WIDTH = 24\n")
    assert digest_of_file(project) != before


def test_installed_packages_and_the_standard_library_do_not_count(project, library, tmp_path):
    site = tmp_path / "site-packages"
    (tmp_path / "elsewhere").rename(site)
    project.write_text("import json, torch, dampen\n" + project.read_text())
    assert list(sources_of(project).files) == ["train.py"]
    assert list(sources_of(project, [site]).files) != ["train.py"]  # only where it is told so


def test_what_cannot_be_tracked_is_named(project, library, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(library.parent))
    more = (
        "import importlib\n\n\ndef load(name):\n"
        "    importlib.import_module('mylib.sizes')\n    return importlib.import_module(name)\n"
    )
    project.write_text(project.read_text() + more)
    asked = request_own(function_in_file(f"{project}:train"), "drop_key", 1, folder=tmp_path / "r")
    line = project.read_text().count("\n")
    assert f"not tracked: train.py, line {line}: import_module(name)." in asked.remark
    assert asked.plan.header["code"]["untracked"] == [f"train.py, line {line}: import_module(name)"]


@pytest.fixture
def older(project, library, tmp_path, monkeypatch):
    """A finished run as 0.2 recorded it: under the hash of the files below the project alone."""
    monkeypatch.syspath_prepend(str(library.parent))
    folder = tmp_path / "runs"

    def request():
        _import.cache_clear()
        return request_own(function_in_file(f"{project}:train"), "drop_key", 1, folder=folder)

    asked = request()
    earlier = code_in_file(project, "train").earlier
    asked.plan.runs = {
        run.id: run
        for run in (
            Run.from_dict(r.to_dict() | {"function": r.function | {"code": earlier}})
            for r in asked.plan.runs.values()
        )
    }
    for config in asked.plan.configs:
        found = [r for r in asked.plan.runs.values() if list(r.methods) == config.methods]
        config.settings[0].ids = {"0": found[0].id}
    asked.plan.save(folder)
    for id in asked.plan.runs:
        (folder / id).mkdir()
        content = {"id": id, "status": "finished", "test": {"accuracy": 0.5}}
        content |= {"valid": {}, "primary": ["accuracy", "max"], "selection": ["accuracy", "max"]}
        (folder / id / "final.json").write_text(json.dumps(content))
    return request, set(asked.plan.runs)


def test_ids_of_older_records_are_recognized_where_nothing_has_changed(older, library):
    request, recorded = older
    assert set(request().plan.runs) == recorded
    later = time.time() + 100
    os.utime(library / "sizes.py", (later, later))
    asked = request()
    assert not set(asked.plan.runs) & recorded
    assert "has changed since" in asked.remark


def test_the_commit_of_the_users_code_is_recorded(project, library, tmp_path, monkeypatch, run):
    monkeypatch.syspath_prepend(str(library.parent))
    where = project.parent
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=where, check=True, capture_output=True)

    def request(name):
        _import.cache_clear()
        function = function_in_file(f"{project}:train")
        return request_own(function, "drop_key", 1, params={"epochs": 1}, folder=tmp_path / name)

    clean = request("clean")
    code = clean.plan.header["code"]
    assert len(code["commit"]) == 12
    assert code["dirty"] is False
    run(clean)
    (first, *_) = clean.plan.runs
    (session,) = json.loads((clean.folder / first / "environment.json").read_text())["sessions"]
    assert session["code"] == {"commit": code["commit"], "dirty": False}
    project.write_text(project.read_text() + "# changed\n")
    assert request("dirty").plan.header["code"]["dirty"] is True
