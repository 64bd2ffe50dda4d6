"""What is generated is up to date, and the README's example runs as printed."""

import re
from pathlib import Path

import pytest

from benchmarks.method_cards import main, markdown, pages
from dampen.checking import CONTRACTS, check_regularizer
from dampen.checking.contracts import ONCE
from dampen.extensions import from_file
from dampen.native.library import torch_only

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_every_method_has_a_card():
    from dampen.registry import methods

    names = {path.stem for path in pages() if path.parent.parent.name == "docs"}
    assert names == {*methods(), "index"}


def test_markdown_closes_its_blocks():
    text = markdown("Do it.\n\nArgs:\n    rate: how much\n\n>>> 1 + 1\n2")
    assert text.count("```") == 2
    assert "- `rate`: how much" in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_runs_and_prints_what_it_says(page, capsys):
    """As it is printed after `pip install dampen`, where nobody has built the native kernels."""
    blocks = re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    example = next(code for language, code in blocks if language == "python")
    printed = next(code for language, code in blocks if language == "text")
    with torch_only("the reader has not built them"):
        exec(compile(example, page, "exec"), {})
    assert capsys.readouterr().out == printed


@pytest.mark.slow
def test_the_method_of_the_readme_keeps_the_contracts(tmp_path, monkeypatch):
    """All of them in the smallest model, but those that need a compiler or two processes."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "(dampen.Regularizer)" in block)
    (tmp_path / "readme_method.py").write_text(
        f"import dampen\nfrom dampen.masks import drop\n\n\n{code}"
    )
    monkeypatch.chdir(tmp_path)
    make = from_file("readme_method.py:HeadDropout")
    outcomes = check_regularizer(
        make, subjects=["vit"], contracts=[c for c in CONTRACTS if c not in ONCE]
    )
    assert {o.state for o in outcomes} == {"kept"}
    assert len(outcomes) >= 10


@pytest.mark.slow
def test_site_builds(tmp_path):
    import subprocess
    import sys

    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").exists()
