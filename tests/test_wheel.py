"""What is released: the wheel holds what runs need, its core imports torch alone, and the command runs from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what git tracks so that nothing of the build stays in the tree."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if files.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the source")
    wanted = [
        f
        for f in files.stdout.decode().split("\0")
        if f.startswith(("src/", "pyproject", "README", "LICENSE"))
    ]
    for name in filter(lambda f: (ROOT / f).is_file(), wanted):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        str(place / "dist"),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (built,) = (place / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel unpacked, as pip leaves it."""
    place = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(place)
    return place


def python(installed, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_and_source_pass_twine(wheel):
    files = [str(f) for f in wheel.parent.iterdir()]
    assert len(files) == 2
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_assets_lie_in_the_wheel(installed):
    for pattern in (
        "studies/advice.json",
        "studies/report/assets/*",
        "studies/report/templates/*",
        "native/*.cpp",
        "native/*.h",
        "py.typed",
    ):
        own = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "dampen").glob(pattern)}
        assert own
        assert own <= {p.relative_to(installed) for p in (installed / "dampen").glob(pattern)}


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(installed):
    """No file of the papers' experiments, the benchmarks or the tests, and nothing that needs one."""
    at_top = {p.name for p in installed.iterdir() if not p.name.endswith(".dist-info")}
    assert at_top == {"dampen"}
    assert not list((installed / "dampen").rglob("*.toml"))
    code = """
import sys
from pathlib import Path
root = Path(sys.argv[1])
import importlib, pkgutil, dampen
for module in pkgutil.walk_packages(dampen.__path__, "dampen."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert not [m for m in sys.modules if m.partition(".")[0] in ("reproductions", "benchmarks", "tests")]
from dampen.studies.data import DATASETS
print(sorted(DATASETS))
"""
    told = python(installed, "-W", "ignore", "-c", code, str(installed))
    assert "digits" in told
    assert "cifar10" not in told


@pytest.mark.slow
def test_the_core_imports_torch_alone(installed):
    """What the lab needs is hidden, and a model is still regularized."""
    code = """
import sys, importlib.abc
class Hidden(importlib.abc.MetaPathFinder):
    names = {"numpy", "scipy", "sklearn", "lightning", "torchmetrics", "typer", "rich", "msgspec", "altair",
             "torchvision", "timm", "transformers", "PIL", "jinja2", "filelock"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names - {"numpy"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
import torch, dampen
assert dampen.__file__.startswith(sys.argv[1]), dampen.__file__
model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
reg = dampen.regularize(model, dampen.DropKey(0.1))
loss, _ = reg.loss(lambda: model(torch.randn(2, 4, 8)), lambda out: out.square().mean())
loss.backward()
reg.remove()
assert dampen.audit(model, torch.randn(2, 4, 8)).ok
from dampen.auditing.overfitting import Curve, judge
losses = tuple((t, 1.0) for t in range(20))
assert judge(Curve(losses, losses)).answer == "flat"
with dampen.silence(model):
    model(torch.randn(2, 4, 8))
try:
    dampen.compare
except ModuleNotFoundError as error:
    print(error)
"""
    assert "pip install 'dampen[studies]'" in python(installed, "-c", code, str(installed))


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(installed, tmp_path):
    code = "import sys; from dampen.cli import main; sys.exit(main(sys.argv[1:]))"
    told = python(installed, "-c", code, "list")
    assert "drop_key" in told
    recipe = tmp_path / "my.toml"
    recipe.write_text(
        '[base]\nseeds = [0]\ndata = { name = "digits", limit = 100 }\n'
        'model = { name = "vit", patch_size = 4, width = 16, depth = 1, heads = 2, mlp = 16 }\n'
        'train = { epochs = 1, batch_size = 32 }\n[[rows]]\nname = "plain"\n'
    )
    told = python(
        installed, "-c", code, "run", str(recipe), "--out", str(tmp_path / "runs"), "--workers", "1"
    )
    assert "plain" in told
    assert list((tmp_path / "runs").rglob("final.json"))
