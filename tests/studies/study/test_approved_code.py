"""Code that a study folder keeps or names runs only after the user of this machine approved it."""

import base64
import json
import pickle
import py_compile
import shutil
import stat
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import cache_from_source
from pathlib import Path

import pytest

import dampen
from dampen.studies import trust
from dampen.studies.diagnose import find_trials, from_run
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.report import write_report
from dampen.studies.trust import NotApproved
from tests.studies.synthetic_runs import write_study
from tests.studies.user_files import write_bert, write_csv

TRAIN = """
import dampen


def train(trial):
    trial.regularize(dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=1, heads=2, mlp=16))
    return {"nll": 1.0 + trial.seed / 10}
"""
QUICK = {"workers": 1, "threads": 1, "progress": False}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of a function in a file, run once by its author."""
    folder = tmp_path_factory.mktemp("author")
    (folder / "train.py").write_text(TRAIN)
    dampen.compare(
        f"{folder}/train.py:train", methods="drop_key", seeds=1, folder=folder / "s", **QUICK
    )
    return folder / "s"


@pytest.fixture
def received(study, tmp_path, monkeypatch):
    """A copy of it on another machine, whose user approved nothing."""
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trust, "_approved_here", set())
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(study, tmp_path / "s")


@pytest.fixture
def ran(tmp_path):
    """A file that every attack here writes; whether it is there."""
    return tmp_path / "ran"


def evil(ran):
    return f"open({str(ran)!r}, 'w')\n"


class Evil:
    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return (open, (str(self.ran), "w"))


def change(path, **values):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | values))
    return content


def name_plugin(folder, name):
    header = json.loads((folder / "plan.json").read_text())["header"]
    change(folder / "plan.json", header=header | {"plugins": [name]})


def rename_methods(folder, name):
    """Let every method of a plan, and of its runs, be another one."""
    for path in (folder / "plan.json", *folder.glob("*/config.json")):
        path.write_text(path.read_text().replace('"drop_key"', json.dumps(name)))


def plant(kind, folder, ran):
    """One way in which a study can bring code."""
    here = folder.parent
    pickled = base64.b64encode(pickle.dumps(Evil(ran))).decode()
    if kind == "a pickled function":
        change(folder / "function.json", file=None, pickled=pickled)
    elif kind == "a pickled regularizer":
        change(folder / "function.json", objects={"0": pickled})
    elif kind == "a function in a file":
        (here / "evil.py").write_text(evil(ran) + TRAIN)
        digest = dampen.studies.user_code.digest_of_file(here / "evil.py")
        change(folder / "function.json", file=str(here / "evil.py"), pickled=None, code=digest)
    elif kind == "a plug-in beside it":
        (here / "evil_plugin.py").write_text(evil(ran))
        name_plugin(folder, "evil_plugin")
    elif kind == "an installed module":
        name_plugin(folder, "antigravity")
    else:
        assert kind == "a method in a file"
        (here / "evil.py").write_text(evil(ran))
        rename_methods(folder, "evil.py:Mine")


KINDS = (
    "a pickled function",
    "a pickled regularizer",
    "a function in a file",
    "a plug-in beside it",
    "an installed module",
    "a method in a file",
)


@pytest.mark.parametrize("kind", KINDS)
def test_opening_a_study_runs_nothing_and_going_on_is_refused(kind, received, ran, tmp_path):
    plant(kind, received, ran)
    opened = dampen.load(received)
    assert opened.rows
    assert str(opened)
    assert opened._repr_html_()
    assert len(opened.to_pandas()) == 2
    write_report([received], tmp_path / "page.html")
    with pytest.raises(NotApproved, match=r"(?s)sha256 [0-9a-f]{64}.*trust=True") as refused:
        opened.add(seeds=1, progress=False)
    assert "Nothing of it was run" in str(refused.value)
    assert not ran.exists()
    assert "antigravity" not in sys.modules


def test_the_error_names_file_and_hash_and_what_to_type(received):
    with pytest.raises(NotApproved) as refused:
        dampen.load(received).add(seeds=1, progress=False)
    (kept,) = trust.code_of_function(
        dampen.studies.study._function(json.loads((received / "function.json").read_text())),
        received / "function.json",
    )
    told = str(refused.value)
    assert kept.place.endswith("train.py")
    assert kept.place in told
    assert kept.digest in told
    assert f"dampen.load({str(received)!r}, trust=True)" in told
    assert refused.value.exit_code == 2


def test_approved_code_runs_and_stays_approved_until_it_changes(received, study):
    dampen.load(received, trust=True).add(seeds=1, **QUICK)
    assert dampen.load(received).rows[0].summary.n == 2
    trust._approved_here.clear()  # as in the next process
    dampen.load(received).add(seeds=1, **QUICK)
    assert dampen.load(received).rows[0].summary.n == 3
    code = study.parent / "train.py"
    code.write_text(TRAIN + "# the same code to Python, another text\n")
    try:
        with pytest.raises(NotApproved):
            dampen.load(received).add(seeds=1, progress=False)
    finally:
        code.write_text(TRAIN)


@pytest.mark.parametrize("file", ["mine.py", "mine/__init__.py", "mine/inner.py"])
@pytest.mark.parametrize("helper", ["helper.py", "helper/__init__.py", "elsewhere/helper.py"])
def test_what_a_plugin_imports_is_approved_with_it(file, helper, received, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    for name, text in ((file, "import helper\n"), (helper, "import last\n"), ("last.py", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    name_plugin(received, "mine")
    plan = dampen.load(received).plan
    for name in (file, helper, "last.py"):
        trust.approve(trust.code_of_plan(plan, received))
        trust.require_approval(received, trust.code_of_plan(plan, received))
        with (tmp_path / name).open("a") as changed:
            changed.write("attack = 1\n")
        with pytest.raises(NotApproved, match="plug-in mine"):
            trust.require_approval(received, trust.code_of_plan(plan, received))


def test_a_plugin_with_a_file_that_is_no_python_is_still_covered(received, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "template.py").write_text("{{ name }} = \n")
    name_plugin(received, "mine")
    plan = dampen.load(received).plan
    trust.approve(trust.code_of_plan(plan, received))
    (tmp_path / "mine" / "template.py").write_text("attack = 1")
    with pytest.raises(NotApproved):
        trust.require_approval(received, trust.code_of_plan(plan, received))


def test_ones_own_study_needs_no_approval(study):
    trust._approved_here.clear()
    dampen.load(study).add(seeds=1, **QUICK)
    assert dampen.load(study).rows[0].summary.n == 2


def test_approvals_are_the_users_own_and_outside_of_studies(received, tmp_path):
    dampen.load(received, trust=True)
    path = tmp_path / "cache" / trust.APPROVED
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list(received.rglob(f"*{trust.APPROVED}*"))
    path.chmod(0o666)
    with pytest.raises(LabError, match="others can write to it"):
        dampen.load(received).add(seeds=1, progress=False)


def test_approvals_that_cannot_be_kept_hold_for_this_process(received, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    with pytest.warns(UserWarning, match="ends with this process"):
        opened = dampen.load(received, trust=True)
    trust.require_approval(received, trust.code_of_plan(opened.plan, received))


def test_an_earlier_plan_in_the_folder_does_not_run_its_code(received, study, ran):
    """`dampen.compare` joins the rows that a folder has already, and `--until-decided` would go on with them."""
    plant("a method in a file", received, ran)
    with pytest.raises(NotApproved, match=r"evil\.py:Mine"):
        dampen.compare(
            f"{study.parent}/train.py:train", methods="drop_head", seeds=1, folder=received, **QUICK
        )
    assert not ran.exists()


@pytest.mark.parametrize("kind", ["a plug-in beside it", "a method in a file"])
def test_diagnosing_a_study_runs_nothing_that_was_not_approved(kind, tmp_path, monkeypatch, ran):
    monkeypatch.setattr(trust, "_approved_here", set())
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "s", seeds=1)
    plant(kind, tmp_path / "s", ran)
    with pytest.raises(NotApproved, match="--trust"):
        for folder in find_trials(tmp_path / "s"):
            from_run(folder)
    assert not ran.exists()


def test_diagnosing_looks_for_a_plugin_where_the_approval_looked(tmp_path, monkeypatch, ran):
    """Code inside the study folder itself is nowhere on the way upward, so it is no plug-in."""
    monkeypatch.setattr(trust, "_approved_here", set())
    monkeypatch.chdir(tmp_path)
    write_study(tmp_path / "s", seeds=1)
    (tmp_path / "s" / "evil_inside.py").write_text(evil(ran))
    name_plugin(tmp_path / "s", "evil_inside")
    with pytest.raises(LabError, match="evil_inside"):
        find_trials(tmp_path / "s")
    assert not ran.exists()


# --- compiled code, which nobody can read


def compiled(text, source, into):
    """Bytecode of a text that says it belongs to a source, and that Python never compares with it."""
    other = source.with_name("other_text.py")
    other.write_text(text)
    into.parent.mkdir(exist_ok=True)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(other), str(into), str(source), invalidation_mode=mode)
    other.unlink()


@pytest.fixture
def optional(tmp_path, monkeypatch):
    """A study, received and approved, whose function imports a module that is not there."""
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trust, "_approved_here", set())
    code = tmp_path / "author" / "train.py"
    code.parent.mkdir()
    text = "try:\n    import not_there.inner\nexcept ImportError:\n    pass\n"
    code.write_text(TRAIN.replace("import dampen\n", text + "import dampen\n", 1))
    folder = tmp_path / "s"
    dampen.compare(f"{code}:train", methods="drop_key", seeds=1, folder=folder, **QUICK)
    return folder, code


PLACES = ("not_there.pyc", "not_there/__init__.pyc", "not_there/inner.pyc", "not_there", "train")


@pytest.mark.parametrize("name", PLACES)
def test_compiled_code_beside_an_approved_file_needs_an_approval(optional, ran, name):
    folder, code = optional
    if name.endswith(".pyc"):
        compiled(evil(ran), code, code.parent / name)
    else:
        (code.parent / f"{name}{EXTENSION_SUFFIXES[0]}").write_bytes(
            b"Python prefers it to a source"
        )
    with pytest.raises(NotApproved, match="the function"):
        dampen.load(folder).add(seeds=1, progress=False)
    assert not ran.exists()


def test_bytecode_is_not_run_in_place_of_the_approved_source(optional, ran):
    folder, code = optional
    compiled(evil(ran) + code.read_text(), code, Path(cache_from_source(code)))
    dampen.load(folder).add(seeds=1, **QUICK)
    assert dampen.load(folder).rows[0].summary.n == 2
    assert not ran.exists()


@pytest.mark.parametrize("file", ["mine.py", "mine/__init__.py"])
def test_a_plugin_is_imported_from_its_approved_source(file, received, tmp_path, ran, monkeypatch):
    source = tmp_path / file
    source.parent.mkdir(exist_ok=True)
    source.write_text("")
    compiled(evil(ran), source, Path(cache_from_source(source)))
    name_plugin(received, "mine")
    plan = dampen.load(received).plan
    trust.approve(trust.code_of_plan(plan, received))
    trust.require_approval(received, trust.code_of_plan(plan, received))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    __import__("mine")
    del sys.modules["mine"]
    assert not ran.exists()


def test_a_folder_does_not_hide_the_plugin_of_its_name(received, tmp_path):
    """Python imports `mine.py` where the folder `mine` has no `__init__.py`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.py").write_text("")
    name_plugin(received, "mine")
    plan = dampen.load(received).plan
    trust.approve(trust.code_of_plan(plan, received))
    (tmp_path / "mine.py").write_text("attack = 1\n")
    with pytest.raises(NotApproved, match="plug-in mine"):
        trust.require_approval(received, trust.code_of_plan(plan, received))


RECIPE = """
plugins = ["evil_plugin"]
[base]
data = { name = "digits" }
model = { name = "vit" }
[[rows]]
name = "plain"
[[rows]]
name = "theirs"
methods = ["evil.py:Mine"]
"""


@pytest.mark.parametrize("command", [("run", "recipe.toml", "--dry-run"), ("show", "recipe.toml")])
def test_looking_at_a_recipe_imports_no_code_that_it_names(command, tmp_path, ran):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    for name in ("evil.py", "evil_plugin.py"):
        (tmp_path / name).write_text(evil(ran))
    done = subprocess.run(
        [sys.executable, "-m", "dampen", *command], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "theirs" in done.stdout or "2 trials would run" in done.stdout
    assert not ran.exists()
    if "--dry-run" in command:
        assert "imports no code that a recipe names" in done.stderr
        assert "the plug-in evil_plugin, the method evil.py:Mine" in done.stderr


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])  # fmt: skip
def test_a_saved_model_that_needs_its_own_code_is_refused(file, tmp_path, ran):
    folder = write_bert(tmp_path / "bert")
    (folder / "evil.py").write_text(evil(ran))
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    auto = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoTokenizer": "evil.T"}
    path.write_text(json.dumps(content | {"auto_map": auto}))
    table = write_csv(tmp_path / "texts.csv")
    with pytest.raises(ConfigError, match=r"has an auto_map.*dampen runs none of it"):
        dampen.compare(
            model=f"hf/{folder}", data=str(table), methods="drop_head", seeds=1,
            folder=tmp_path / "s", **QUICK
        )  # fmt: skip
    assert not ran.exists()


def test_weights_of_a_saved_model_run_no_code(tmp_path, ran):
    """Pickled weights are read with weights_only."""
    import torch

    folder = write_bert(tmp_path / "bert")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save({"x": Evil(ran)}, folder / "pytorch_model.bin")
    table = write_csv(tmp_path / "texts.csv")
    with pytest.raises((LabError, ValueError, pickle.UnpicklingError)):
        dampen.compare(
            model=f"hf/{folder}", data=str(table), methods="drop_head", seeds=1,
            folder=tmp_path / "s", **QUICK
        )  # fmt: skip
    assert not ran.exists()


def test_every_loader_of_transformers_is_told_to_trust_nothing():
    """In the source: each call of `from_pretrained` and `from_config` for a folder says so."""
    import ast

    root = Path(dampen.__file__).parents[2]
    calls, silent = 0, []
    for path in [*(root / "src").rglob("*.py"), *(root / "reproductions").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if named and node.func.attr in ("from_pretrained", "from_config"):
                calls += 1
                words = {k.arg for k in node.keywords}
                if not {"trust_remote_code", None} & words:
                    silent.append(f"{path.name}:{node.lineno}")
    assert calls >= 6
    assert not silent
