"""What a report reads may come from anywhere: large, deep, odd or endless files are refused."""

import json
import lzma
import os
import subprocess
import sys

import pytest

from dampen.studies.errors import LabError
from dampen.studies.report import make_report, packs
from dampen.studies.report.packs import check_levels, parse_limited
from tests.studies.synthetic_runs import write_study

WHOLE = {"kind": "dampen records", "version": 1, "folders": {}}


def one_trial(folder):
    return next(p for p in sorted(folder.iterdir()) if (p / "config.json").exists())


def test_a_small_pack_that_unpacks_to_gigabytes_is_refused_in_little_memory(tmp_path):
    coder = lzma.LZMACompressor()
    with (tmp_path / "bomb.json.xz").open("wb") as file:
        for _ in range(300):
            file.write(coder.compress(bytes(2**20)))
        file.write(coder.flush())
    assert (tmp_path / "bomb.json.xz").stat().st_size < 100_000
    code = (
        "import resource, sys\nfrom dampen.studies.report import make_report\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: make_report([sys.argv[1]])\nexcept Exception as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "bomb.json.xz")]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "decompresses to more than 64 MB" in out[0]
    assert int(out[-1]) < 250  # MB


def test_a_pack_of_many_values_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(packs, "MOST_VALUES", 1000)
    with pytest.raises(LabError, match="more than 1,000 values"):
        parse_limited("[" + "[]," * 1000 + "[]]", "x.json")


@pytest.mark.parametrize("levels", [100, 900, 200_000])
def test_a_deep_pack_is_refused_in_words(tmp_path, levels):
    (tmp_path / "deep.json").write_text("[" * levels + "]" * levels)
    with pytest.raises(LabError, match="nested deeper than 64 levels"):
        make_report([tmp_path / "deep.json"])
    check_levels([[[{"a": [1]}]]], "fine")


@pytest.mark.parametrize("file", ["config.json", "final.json", "log.jsonl", "environment.json"])
def test_a_pipe_in_a_folder_is_skipped_with_its_name_and_nothing_waits(tmp_path, file):
    write_study(tmp_path, seeds=3)
    trial = one_trial(tmp_path)
    (trial / file).unlink()
    os.mkfifo(trial / file)
    report = make_report([tmp_path])
    reasons = {s.path: s.reason for s in report.skipped}
    assert "is not an ordinary file" in reasons[f"{trial.name}/{file}"]


def test_a_pipe_in_place_of_a_pack_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pack.json")
    with pytest.raises(LabError, match="neither a folder nor a file"):
        make_report([tmp_path / "pack.json"])


def test_a_large_file_is_skipped_by_its_size(tmp_path):
    write_study(tmp_path, seeds=3)
    trial = one_trial(tmp_path)
    with (trial / "log.jsonl").open("ab") as file:
        file.truncate(packs.MOST_BYTES + 1)  # a hole: it takes no room on the disk
    (skipped,) = [s for s in make_report([tmp_path]).skipped if "log.jsonl" in s.path]
    assert "a report reads at most 64 MB per file" in skipped.reason


@pytest.mark.parametrize(
    "search",
    [
        [],
        {"rows": []},
        {"rows": {"plain": []}},
        {"rows": {"plain": {"axes": [1]}}},
        {"rows": {"plain": {"trials": [{}]}}},
        {"seeds": 3},
    ],
)
def test_a_search_of_another_shape_is_skipped_and_the_page_is_made(tmp_path, search):
    write_study(tmp_path, seeds=3)
    (tmp_path / "search.json").write_text(json.dumps(search))
    report = make_report([tmp_path])
    assert "search.json is not a search result" in report.skipped[0].reason
    assert "Can I trust it?" in report.render("html")


def test_a_bench_of_another_shape_is_skipped(tmp_path):
    keys = ("machine", "ratios", "papers", "alternatives", "memory", "targets", "skipped")
    wrong = {
        "kind": "dampen bench",
        **{key: {} for key in keys},
        "ratios": {"drop_key": {"median": 1}},
    }
    (tmp_path / "bench.json").write_text(json.dumps(wrong))
    with pytest.raises(LabError, match="not a bench result"):
        make_report([tmp_path / "bench.json"])
