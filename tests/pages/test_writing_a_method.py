"""The page on writing a method: its class is short and complete, and keeps the contracts."""

import re
from pathlib import Path

import pytest

from dampen.checking import CONTRACTS, check_regularizer
from dampen.checking.contracts import ONCE
from dampen.extensions import from_file
from dampen.regularizer import STAGES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "writing_a_method.md"
CODE = next(iter(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)))


def test_the_class_is_short():
    assert len([line for line in CODE.splitlines() if line.strip()]) <= 12


def test_every_hook_point_is_listed_in_order():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert tuple(listed) == tuple(STAGES)


@pytest.mark.slow
def test_the_class_keeps_the_contracts(tmp_path, monkeypatch):
    """All of them in the smallest model, but those that need a compiler or two processes."""
    (tmp_path / "my.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    make = from_file("my.py:HeadDropout")
    contracts = [c for c in CONTRACTS if c not in ONCE]
    outcomes = check_regularizer(make, subjects=["vit"], contracts=contracts)
    assert {o.state for o in outcomes} == {"kept"}
    assert len(outcomes) >= 10
