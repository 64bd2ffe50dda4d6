"""The Triton kernels compiled for cards that are not here: registers, shared memory, instructions.

Two cards in `make test`, all of them in `make full`.
"""

import json
import os

import pytest

from benchmarks.gpu_compile import RECORD, SHARED, compile_all, problems
from tests.full import FULL

TWO = ("sm_80", "sm_90")


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
)
def test_compiles_for_cards(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = compile_all(SHARED if FULL else TWO, full=FULL)
    assert problems(found, json.loads(RECORD.read_text())["kernels"]) == []


def test_record_of_all_cards():
    """No spills up to heads of 64 in 16 bits, and shared memory that they have."""
    kernels = json.loads(RECORD.read_text())["kernels"]
    assert {key.split()[0] for key in kernels} == set(SHARED)
    assert problems(kernels, kernels) == []


def test_problems_are_found():
    made = {"registers": 255, "spills": 3, "instructions": 120, "shared": 200 * 1024}
    key = "sm_80 attend plain D64 bf16"
    found = problems({key: made}, {key: {**made, "instructions": 100}})
    assert len(found) == 3
    assert problems({key: {**made, "spills": 0, "shared": 0}}, {key: made}) == []
    assert problems({"sm_80 attend plain D128 bf16": made}, {})[-1].endswith(RECORD.name)
