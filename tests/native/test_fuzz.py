"""The fuzzer of the native kernels: 2,000 cases against float64, and cases beside memory that may not be read."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from benchmarks import native_fuzz

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.slow
def test_two_thousand_cases():
    counts = native_fuzz.run(2000)
    assert not counts.failed, "\n".join(counts.failed[:10])
    assert abs(counts.z()) < 5
    assert counts.runs["attention: native"] > 500
    assert counts.runs["attention: differentiated twice"] > 10
    for kind in ("dropout", "tap", "taps of several maps"):
        assert counts.runs[kind] > 50
    for name in native_fuzz.LAYOUTS:
        assert counts.runs[f"layout: {name}"] > 20


def command(*arguments, cache):
    env = {**os.environ, "DAMPEN_CACHE": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, timeout=300
    )


def test_nothing_is_read_past_its_end(native_cache):
    """In a process of its own, because a read past the end would end it."""
    done = command(
        "-m", "benchmarks.native_fuzz", "--cases", "250", "--guarded", cache=native_cache
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "250 cases, 0 wrong" in done.stdout


def test_the_guard_would_catch_it(native_cache):
    """The next number behind a guarded tensor cannot be read."""
    read = (
        "import ctypes, torch, benchmarks.native_fuzz as f; t = f.guarded(torch.ones(5, 3)); end = t.data_ptr() + 60;"
        "assert t.sum() == 15; ctypes.string_at(end - 4, 4); print('inside', flush=True); ctypes.string_at(end, 4)"
    )
    done = command("-c", read, cache=native_cache)
    assert done.stdout == "inside\n"
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("attend", lambda q, k, v, keep, o, lse, top, s: o.mul_(1.001)),
        ("attend_backward", lambda q, k, v, keep, o, lse, top, grads, s: grads[3].mul_(1.01)),
    ],
)
def test_a_wrong_number_is_found(built, monkeypatch, name, spoil):
    """The fuzzer itself: a kernel that is off by a thousandth does not pass."""
    right = getattr(built, name)

    def wrong(*given):
        right(*given)
        spoil(*given)

    monkeypatch.setattr(built, name, wrong)
    assert len(native_fuzz.run(60).failed) > 3


def test_a_key_too_many_is_found(built, monkeypatch):
    """As is one that hides more keys than its rate says."""
    right = built.attend

    def more(*given):
        settings = given[-1]
        rate = settings.rate * (1.2 if settings.rate < 0.6 else 1.0)
        right(*given[:-1], settings._replace(rate=rate))

    monkeypatch.setattr(native_fuzz, "KINDS", (native_fuzz.attention_case,))
    assert abs(native_fuzz.run(60).z()) < 5
    monkeypatch.setattr(built, "attend", more)
    assert native_fuzz.run(60).z() > 5


def test_other_layouts_are_other_layouts():
    import random

    for name, make in native_fuzz.LAYOUTS.items():
        torch.manual_seed(0)
        t = make(random.Random(0), (2, 3, 4, 5), torch.float32)
        assert t.shape == (2, 3, 4, 5)
        assert t.dtype is torch.float32
        plain = t.is_contiguous() and not t.is_neg() and t.data_ptr() % 4 == 0
        assert plain == (name in ("contiguous", "single axes with odd strides"))
