"""Shared set-up: torchvision's operators before anything imports it, one thread per test process, and a time budget per
part."""

from __future__ import annotations  # old pytest does not name all its types

import os
import sys
import tempfile
from collections import defaultdict

import pytest
import torch
from hypothesis import settings

from dampen.integrations import declare_torchvision_operators
from dampen.native import library

os.environ["DAMPEN_CACHE"] = tempfile.mkdtemp(
    prefix="dampen-tests-"
)  # what this machine has must not matter
declare_torchvision_operators()  # before a test imports timm or transformers
torch.set_num_threads(1)
settings.register_profile("tests", deadline=None)  # a busy machine is no error of the code
settings.load_profile("tests")

BUDGETS = {
    "tests/checking": 1200,
    "tests/hooks": 300,
    "tests/integrations": 300,
    "tests/studies": 600,
    "tests/pages": 200,
    "tests/methods": 150,
    "tests/kernels": 100,
    "tests/native": 150,
}
"""Seconds on one quiet core for each part of the suite, printed with what it took. `make test` should stay under 20
minutes on two cores, so all of it has 2,400 s; every part that is not named has `BUDGET`."""
BUDGET = 60

_spent: dict[str, float] = defaultdict(float)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    """A file that a test loads puts its folder on `sys.path`, and with it the entry points that lie there: processes
    that later tests start would inherit them."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True, scope="module")
def _native_kernels_stay_in_their_module():
    """Kernels that one module builds would draw the random numbers of the next."""
    yield
    assert library.loaded is None, "this module leaves native kernels loaded: library.reset()"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent["/".join(report.nodeid.split("::", 1)[0].split("/")[:2])] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what each part took beside what it may take. Machines differ, so this is a remark and never a failure."""
    terminalreporter.write_line(
        f"time: {sum(_spent.values()):.0f} s in tests, over all processes; part by part:"
    )
    for name, t in sorted(_spent.items(), key=lambda item: -item[1]):
        budget = BUDGETS.get(name, BUDGET)
        if name in BUDGETS or t > budget:
            over = "  over its budget" if t > budget else ""
            terminalreporter.write_line(f"  {name:<24}{t:>6.0f} s of {budget} s{over}")
