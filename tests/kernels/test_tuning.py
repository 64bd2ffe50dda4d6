"""The kernel table of the user's machine: measured, kept, read safely, and never inside a graph."""

import json
import os
import subprocess
import sys
import warnings

import pytest
import torch

import dampen
from dampen.kernels import kernel as kernels
from dampen.kernels import tuning
from dampen.native import library

MEASURED = {("cpu", "float32"): [(16, 1.5, 1.4), (32, 1.2, 1.1), (64, 0.9, 0.8)]}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, and the table that comes with the package."""
    monkeypatch.setenv("DAMPEN_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels, "PLAIN_BELOW", dict(kernels.PLAIN_BELOW))
    monkeypatch.setattr(kernels, "_tuned", False)
    return tmp_path


def kernel_at(keys):
    q = torch.randn(1, 1, keys, 8)
    return kernels.choose_kernel(q, q, []).name


@pytest.mark.parametrize(
    ("ratios", "limit"),
    [
        ([1.5, 1.2, 0.9, 0.7], 64),
        ([0.9, 0.8, 0.7, 0.6], 0),  # fused always
        ([1.5, 1.4, 1.3, 1.2], 129),  # plain wherever it was measured
        ([1.5, 0.99, 1.4, 0.5], 128),  # one noisy length does not end it
        ([1.5, 0.6, 1.05, 0.5], 32),
    ],
)
def test_crossover_takes_the_limit_that_costs_least(ratios, limit):
    lengths = (16, 32, 64, 128)
    assert tuning.crossover([(n, r, r) for n, r in zip(lengths, ratios, strict=True)]) == limit


def test_crossover_of_nothing_is_fused_always():
    assert tuning.crossover([]) == 0


def test_without_a_cache_the_package_table_holds(cache):
    assert tuning.load() == {}
    assert kernel_at(40) == "plain"
    assert kernel_at(64) == "fused"


def test_saved_limits_decide_the_kernel(cache):
    path = tuning.save({("cpu", "float32"): [(16, 1.5, 1.4), (32, 0.9, 0.8)]})
    assert path.parent == cache
    assert kernel_at(40) == "fused"
    assert kernel_at(31) == "plain"
    assert "below 32 keys" in kernels.choose_kernel(*[torch.randn(1, 1, 8, 8)] * 2, []).why


def test_regularize_reads_the_cache_before_anything_is_compiled(cache):
    tuning.save({("cpu", "float32"): [(16, 0.9, 0.8)]})  # fused always
    model = dampen.models.ViT(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp=16).train()
    reg = dampen.regularize(model, dampen.DropKey(0.1))
    assert kernels.PLAIN_BELOW["cpu", torch.float32, kernels._HALF_IN_HARDWARE] == 0
    torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 3, 8, 8))
    with library.torch_only("whether native kernels are loaded depends on the tests before"):
        model(torch.randn(2, 3, 8, 8))
    assert all(ran.startswith("fused") for ran in reg.kernels().values())


def test_a_first_use_inside_a_graph_reads_no_file(cache, monkeypatch):
    monkeypatch.setattr(tuning, "load", lambda: pytest.fail("a file was read inside a graph"))
    q = torch.randn(1, 2, 8, 8)
    torch.compile(lambda q: dampen.attention(q, q, q), backend="eager", fullgraph=True)(q)
    assert not kernels._tuned


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"keys": 64', '"keys": "many"'),
        lambda text: text.replace('"keys": 64', '"keys": -1'),
        lambda text: text.replace('"dtype": "float32"', '"dtype": "float33"'),
        lambda text: text.replace('"torch": "', '"torch": "0.'),
        lambda text: "\x00\xff",
    ],
)
def test_a_damaged_cache_is_ignored_with_a_warning(cache, damage):
    path = tuning.save(MEASURED)
    assert tuning.load() == {("cpu", torch.float32): 64}
    path.write_text(damage(path.read_text()), encoding="latin-1")
    with pytest.warns(RuntimeWarning, match="dampen doctor --tune"):
        assert tuning.load() == {}
    with pytest.warns(RuntimeWarning):
        assert kernel_at(40) == "plain"  # the package's own table
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_at(40)  # said once


def test_the_table_of_another_machine_is_not_read(cache, monkeypatch):
    tuning.save(MEASURED)
    monkeypatch.setattr(tuning, "machine_key", lambda: {"cpu": "another"})
    assert tuning.load() == {}


def test_saving_leaves_nothing_half_written(cache):
    path = tuning.save(MEASURED)
    tuning.save(MEASURED)
    assert [p.name for p in cache.iterdir()] == [path.name]
    content = json.loads(path.read_text())
    assert content["fused_over_plain"] == {"cpu float32": [list(r) for r in MEASURED["cpu", "float32"]]}


def test_tune_measures_keeps_and_applies(cache):
    told = []
    path, measured = tuning.tune(rounds=1, lengths=(4, 8), dtypes=("float32",), progress=lambda *at: told.append(at))
    assert list(measured) == [("cpu", "float32")]
    assert [n for n, _, _ in measured["cpu", "float32"]] == [4, 8]
    assert all(bare > 0 and masked > 0 for _, bare, masked in measured["cpu", "float32"])
    assert told == [(0, 2), (1, 2)]
    limit = tuning.load()["cpu", torch.float32]
    assert limit in (0, 8, 9)
    assert kernels.PLAIN_BELOW["cpu", torch.float32, kernels._HALF_IN_HARDWARE] == limit
    assert path.exists()


def test_the_two_kernels_that_are_measured_agree():
    q, k, v = torch.randn(3, 2, 8, 16, 32).unbind(0)
    keep = torch.rand(2, 8, 16, 16) > 0.3
    for mask in (None, keep):
        torch.testing.assert_close(tuning._plain(q, k, v, mask), tuning._fused(q, k, v, mask))


def test_doctor_says_which_table_is_used(cache):
    from dampen.studies.doctor import _kernels

    assert "comes with dampen" in _kernels().found
    tuning.save(MEASURED)
    assert "float32 64" in _kernels().found


def test_importing_the_package_reads_no_cache(cache):
    tuning.save(MEASURED).write_text("damaged")
    code = "import sys, dampen; dampen.regularize; sys.exit('dampen.kernels.tuning' in sys.modules)"
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
