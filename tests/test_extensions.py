"""A method written outside the package, in under 40 lines, appears everywhere: entry points, files, list, compare."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dampen
from dampen.checking import check_regularizer
from dampen.extensions import from_file
from dampen.registry import find_method

METHOD = '''"""A method of one's own."""

import torch
from dampen import Regularizer
from dampen.schedules import Value


class HeadNoise(Regularizer):
    """Multiply each head's output by 1 + noise, per sample; its mean stays."""

    stochastic = True

    def __init__(self, rate: Value = 0.1) -> None:
        super().__init__()
        self.scheduled("rate", rate)

    def heads(self, o, call):
        noise = torch.randn(*o.shape[:2], 1, 1, device=o.device, dtype=o.dtype)
        return o * (1 + self.rate.to(o.dtype) * noise)
'''


METRIC = '''"""A metric and a model of one's own."""

from torch import nn
from dampen.studies.metrics import Metrics
from dampen.studies.metric import Metric


class TopTwo(Metrics):
    description = Metric("top_two", "top-2 accuracy", percent=True, margin=0.5)
    tasks = ("image",)

    def __init__(self):
        self.right = self.count = 0

    def update(self, logits, target, valid=None, index=None):
        self.right += (logits.topk(2).indices == target[:, None]).any(1).sum().item()
        self.count += len(target)

    def compute(self):
        return {"top_two": self.right / self.count}


class Flat(nn.Module):
    def __init__(self, image_size=8, channels=1, classes=10):
        super().__init__()
        self.map = nn.Linear(channels * image_size**2, classes)

    def forward(self, images):
        return self.map(images.flatten(1))
'''


@pytest.fixture
def package(tmp_path):
    """An installed package with the method as an entry point: a module and its metadata, as pip leaves them."""
    assert len(METHOD.splitlines()) < 40
    (tmp_path / "noisy.py").write_text(METHOD)
    info = tmp_path / "noisy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
    (tmp_path / "measured.py").write_text(METRIC)
    points = "[dampen.methods]\nhead_noise = noisy:HeadNoise\n[dampen.metrics]\ntop_two = measured:TopTwo\n"
    points += "[dampen.models]\nflat = measured:Flat\n"
    (info / "entry_points.txt").write_text(points)
    return tmp_path


def run(package, *arguments, ok=True):
    source = str(Path(dampen.__file__).parents[1])
    path = os.pathsep.join([source, str(package), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "dampen", *arguments],
        cwd=package,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) is ok, done.stderr + done.stdout
    return done.stdout + done.stderr


def test_a_packages_method_is_listed_and_shown(package):
    rows = json.loads(run(package, "list", "--json"))
    assert {"name": "head_noise", "stages": ["heads"]}.items() <= {
        k: v for row in rows if row["name"] == "head_noise" for k, v in row.items()
    }.items()
    assert "Multiply each head's output" in run(package, "show", "head_noise")
    assert "Multiply each head's output" in run(package, "show", "noisy.py:HeadNoise")


@pytest.mark.slow
def test_it_is_compared_by_name_and_from_a_file(package):
    tiny = "--data digits --seeds 1 --set train.epochs=1 --set data.limit=100 --set train.batch_size=32 --json".split()
    told = run(package, "compare", *tiny, "--methods", "head_noise, noisy.py:HeadNoise(rate=0.3)")
    rows = json.loads(told[told.index("{") : told.rindex("}") + 1])["rows"]
    assert [r["name"] for r in rows] == ["plain", "head_noise", "noisy.py:HeadNoise(rate=0.3)"]
    assert all(r["n"] == 1 for r in rows)
    assert all(0.0 <= r["metrics"]["top_two"]["mean"] <= 100.0 for r in rows)
    assert max(r["metrics"]["top_two"]["mean"] for r in rows) > 1.0  # described as percent


def test_models_of_packages_are_known_by_name(package):
    told = run(
        package,
        "compare",
        "--data",
        "digits",
        "--model",
        "flat",
        "--methods",
        "head_noise",
        ok=False,
    )
    assert "unknown model" not in told
    assert "attention" in told  # there is none in it to regularize


def test_other_code_is_another_trial(package, monkeypatch):
    from dampen.studies.run import Run

    monkeypatch.chdir(package)
    spec = {"data": {"name": "digits"}, "model": {"name": "vit"}, "methods": ["noisy.py:HeadNoise"]}
    first = Run.from_dict(spec)
    (package / "noisy.py").write_text(METHOD + "\n# a comment\n")
    assert Run.from_dict(spec).id == first.id
    (package / "noisy.py").write_text(METHOD.replace("1 + self", "1 - self"))
    assert Run.from_dict(spec).id != first.id


def test_recipes_take_it(package, monkeypatch):
    from dampen.studies.methods_text import build_methods, check_methods

    monkeypatch.chdir(package)
    assert check_methods([{"name": "noisy.py:HeadNoise", "rate": 0.2}], "methods") == []
    assert build_methods([{"name": "noisy.py:HeadNoise", "rate": 0.2}])[0].name == "head_noise"
    (problem,) = check_methods([{"name": "noisy.py:HeadNoise", "rte": 0.2}], "methods")
    assert "did you mean 'rate'" in problem


def test_it_keeps_the_contracts(package, monkeypatch):
    monkeypatch.chdir(package)
    outcomes = check_regularizer(
        from_file("noisy.py:HeadNoise"),
        subjects=["vit"],
        contracts=["eval_exact", "state_dict", "gradients_finite", "documented", "remove"],
    )
    assert {o.state for o in outcomes} == {"kept"}


def test_a_broken_method_is_reported_with_its_stage_and_site(package, monkeypatch, capsys):
    monkeypatch.chdir(package)
    (package / "noisy.py").write_text(METHOD.replace("return o *", "return o.nothing *"))
    with pytest.raises(
        dampen.checking.ContractBroken, match=r"HeadNoise\.heads at 'blocks\.0.*AttributeError"
    ) as error:
        check_regularizer(
            from_file("noisy.py:HeadNoise"), ["vit"], ["gradients_finite", "remove"], progress=True
        )
    assert "remove on vit" in capsys.readouterr().err
    assert "gradients_finite on vit" in str(error.value)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("nowhere.py:X", "there is no file nowhere.py"),
        ("noisy.py:HeadNois", r"noisy.py has no 'HeadNois'. It has: .*HeadNoise"),
        ("noisy.py:torch", "not a subclass of dampen.Regularizer"),
        ("broken.py:X", r"broken.py cannot be imported: ZeroDivisionError"),
    ],
)
def test_what_may_be_wrong_with_a_file(package, monkeypatch, reference, told):
    monkeypatch.chdir(package)
    (package / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=told):
        find_method(reference)


def test_an_error_inside_a_stage_says_where(package, monkeypatch):
    monkeypatch.chdir(package)
    (package / "noisy.py").write_text(METHOD.replace("return o *", "return o.nothing *"))
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=2, heads=2, mlp=16)
    dampen.regularize(model, find_method("noisy.py:HeadNoise")(0.1))
    with pytest.raises(AttributeError) as error:
        model(torch.randn(2, 3, 8, 8))
    assert error.value.__notes__ == ["dampen: raised in HeadNoise.heads at 'blocks.0'"]
