"""The page on reliability says what its record says, and what attacks and counts does what it claims."""

import json
import os
import random

import pytest

from benchmarks import mutation, native_fuzz
from benchmarks.reliability.__main__ import ATTACKS
from benchmarks.reliability.disks import Disk
from benchmarks.reliability.fuzz import harmed
from benchmarks.reliability.page import ADDED, BAD, PAGE, RECORD, page
from benchmarks.reliability.subject import Patience


def test_the_page_is_up_to_date():
    told = page(json.loads(RECORD.read_text()), list(ATTACKS))
    assert PAGE.read_text(encoding="utf-8") == told, "run python -m benchmarks.reliability --page"


def test_every_test_that_the_page_names_is_there():
    named = [test for _, _, test in ADDED if test]
    assert len(named) > 7
    assert all((mutation.ROOT / test).is_file() for test in named)


def test_nothing_recorded_was_lost_wrong_a_traceback_or_a_hang():
    rows = json.loads(RECORD.read_text())["attacks"]
    assert {name: [row.get(key, 0) for key in BAD] for name, row in rows.items()} == {
        n: [0] * 4 for n in rows
    }
    assert set(rows) <= set(ATTACKS)


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(tmp_path, seed, monkeypatch):
    monkeypatch.setattr(os, "fsync", os.fsync)  # both are put back after the test
    monkeypatch.setattr(os, "replace", os.replace)
    disk, events = Disk(tmp_path), []
    disk.listen(lambda: events.append(1))
    safe, log = tmp_path / "safe", tmp_path / "log"
    safe.write_bytes(b"old")
    with safe.open("rb") as file:
        os.fsync(file.fileno())
    (tmp_path / "new").write_bytes(b"new and longer")
    with (tmp_path / "new").open("rb") as file:
        os.fsync(file.fileno())
    os.replace(tmp_path / "new", safe)  # and the folder is not synced
    log.write_bytes(b"first line\n")
    with log.open("ab") as file:
        os.fsync(file.fileno())
        file.write(b"second line\n")
    disk.lose(random.Random(seed))
    assert len(events) == 4
    assert safe.read_bytes() in (b"old", b"new and longer")
    assert log.read_bytes().startswith(b"first line\n")


def test_harmed_inputs_are_harmed():
    rng = random.Random(0)
    content = bytes(range(200))
    assert sum(harmed(content, rng) != content for _ in range(100)) > 95


def test_patience_ends_but_not_before_the_first_turn():
    patience = Patience()
    patience.allow(-1)
    assert list(patience.turns(5)) == [0]
    patience.allow(None)
    assert list(patience.turns(3)) == [0, 1, 2]


def test_scores_leave_out_what_cannot_be_told_apart():
    (file, part), _ = next(iter(mutation.EQUIVALENT.items()))
    mutant = {
        "file": file,
        "operator": "x",
        "occurrence": 0,
        "line": 1,
        "before": "a",
        "after": part,
    }
    row = {
        "possible": 100,
        "sampled": 5,
        "killed": 2,
        "by time": 1,
        "survived": [mutant, {**mutant, "after": "zz"}],
    }
    lines, listed = mutation.table({"masks": row})
    assert lines == ["| masks | 100 | 5 | 3 | 1 | 1 |"]
    assert [line.endswith("not noticed") for line in listed] == [False, True]


def test_every_mutated_module_and_its_tests_are_there():
    for name, module in mutation.MODULES.items():
        assert list((mutation.SOURCE / "dampen").glob(module.files)), name
        assert all((mutation.ROOT / "tests" / test).exists() for test in module.tests), name


def test_native_kernels_had_no_crash_and_no_wrong_number():
    for row in json.loads(native_fuzz.RECORD.read_text()).values():
        assert row["crashes"] == row["counts"]["failed"] == []
        assert abs(row["z"]) < 5


def test_types_and_docstrings_are_no_code_to_mutate():
    one, two = (
        'def f(x: int | None) -> int:\n    "a"\n    return 1',
        'def f(x: int + None):\n    "b"\n    return 1',
    )
    assert (
        mutation._meaning(one)
        == mutation._meaning(two)
        != mutation._meaning("def f(x):\n    return 2")
    )


def test_mutants_are_sampled_by_their_seed():
    pytest.importorskip("cosmic_ray", reason="cosmic-ray is not installed")
    module = mutation.MODULES["stats"]
    chosen, possible = mutation._sampled(module, 3, random.Random(1))
    assert possible > 100
    assert chosen == mutation._sampled(module, 3, random.Random(1))[0]
    assert all(m.before != m.after for m in chosen)
