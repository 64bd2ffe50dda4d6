"""One test for each change to the code that once survived all tests: what it broke is said in the name."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import dampen
from dampen import DropKey
from dampen.models import build_model
from dampen.studies.files import atomic_file
from dampen.studies.store import locked
from dampen.studies.trainer.bookkeeping import Bookkeeping
from dampen.studies.trainer.checkpoint import rng_state, set_rng_state


def test_pythons_random_state_is_put_back_on_resume():
    random.seed(3)
    state = rng_state(torch.device("cpu"))
    expected = [random.random() for _ in range(5)], random.gauss(0, 1)
    random.seed(4)
    set_rng_state(state, torch.device("cpu"))
    assert ([random.random() for _ in range(5)], random.gauss(0, 1)) == expected


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_the_generator_of_a_gpu_is_put_back_on_such_a_gpu_only(monkeypatch, device):
    state = rng_state(torch.device("cpu")) | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda *given: pytest.fail(f"CUDA was asked for on {device}.")
    )
    set_rng_state(state, torch.device(device))


def test_content_is_synced_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    happened = []
    fsync, replace = os.fsync, os.replace

    def synced(handle):
        happened.append(("sync", os.fstat(handle).st_ino, os.fstat(handle).st_size))
        fsync(handle)

    def renamed(source, target):
        happened.append(("rename", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    with atomic_file(tmp_path / "a") as file:
        file.write(b"x" * 100_000)
    first, second, third = happened
    assert first == ("sync", *second[1:])  # the very file, with all of its bytes
    assert second == ("rename", (tmp_path / "a").stat().st_ino, 100_000)
    assert third[:2] == ("sync", tmp_path.stat().st_ino)


def test_the_lock_stays_one_file_for_all_who_take_it(tmp_path):
    """Removed by one who lets go, a lock file leaves two holders behind: of the old file and of a new one."""
    with locked(tmp_path):
        inode = (tmp_path / "lock").stat().st_ino
    for _ in range(3):
        with locked(tmp_path):
            assert (tmp_path / "lock").stat().st_ino == inode
    assert (tmp_path / "lock").stat().st_ino == inode


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_first_epoch_that_is_not_a_number_is_never_selected(mode):
    options = SimpleNamespace(select="best")
    s = SimpleNamespace(best=None, stale=0, options=options, weights=dict)
    keeper = SimpleNamespace(s=s, selection=("metric", mode))
    select = Bookkeeping._select
    select(keeper, {"metric": float("nan")}, 1)
    assert s.best is None
    select(keeper, {"metric": 0.5}, 2)
    assert s.best["epoch"] == 2
    select(keeper, {"metric": float("nan")}, 3)
    assert (s.best["epoch"], s.stale) == (2, 1)
    select(keeper, {"metric": 0.6 if mode == "max" else 0.4}, 4)
    assert (s.best["epoch"], s.stale) == (4, 0)


def test_chunks_of_queries_beyond_4096_know_which_rows_they_are():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4300, 4) for _ in range(3))
    hidden = torch.rand(1, 1, 4300, 4300) < 0.5
    keep = ~hidden | torch.eye(4300, dtype=torch.bool)
    reg = DropKey(rate=0.0).train()
    with torch.no_grad():
        out = dampen.attention(q, k, v, attn_mask=keep, regularizers=[reg])
        causal = dampen.attention(q, k, v, is_causal=True, regularizers=[reg])
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, keep))
        torch.testing.assert_close(causal, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def tiny():
    torch.manual_seed(0)
    return build_model(
        "vit", image_size=8, channels=1, classes=3, patch_size=4, width=8, depth=2, heads=2, mlp=8
    )


def test_a_linear_map_that_fails_does_not_switch_the_next_ones_off():
    """The flag that says 'a map multiplies now' must not stay."""
    from dampen import FeedForwardDropout

    model, x = tiny(), torch.randn(4, 1, 8, 8)
    reg = dampen.regularize(model, FeedForwardDropout(rate=0.5))
    model.train()
    expected = []
    for _ in range(2):
        torch.manual_seed(1)
        expected.append(model(x))
    assert torch.equal(*expected)
    block = next(
        m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 8
    )
    weight = block.weight
    with pytest.raises(RuntimeError):
        block.weight = torch.nn.Parameter(torch.zeros(3, 5))
        model(x)
    block.weight = weight
    torch.manual_seed(1)
    assert torch.equal(model(x), expected[0])
    reg.remove()


def test_an_error_inside_mc_mode_ends_it():
    model, x = tiny().eval(), torch.randn(4, 1, 8, 8)
    reg = dampen.regularize(model, DropKey(rate=0.5))
    plain = model(x)

    def fails():
        with reg.mc_mode():
            assert not torch.equal(model(x), plain)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(model(x), plain)
