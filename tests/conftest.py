"""Shared set-up: torchvision's cure before anything imports it, one thread per test process, and a time budget per
file."""

import os
import sys
import tempfile
from collections import defaultdict

import pytest
import torch

from dampen._torch import cure_torchvision

cure_torchvision()
os.environ["DAMPEN_CACHE"] = tempfile.mkdtemp(prefix="dampen-tests-")  # what `doctor --tune` measured must not matter
torch.set_num_threads(1)

BUDGETS = {
    "tests/checking/test_conformance.py": 900,
    "tests/checking/test_distributed.py": 120,
    "tests/sockets/test_integrations.py": 90,
}
"""Seconds on one quiet core. CI should stay under 25 minutes on two, so every other file has `BUDGET`."""
BUDGET = 60

_spent: dict[str, float] = defaultdict(float)


@pytest.fixture(autouse=True)
def _own_path(monkeypatch):
    """A file that a test loads puts its folder on `sys.path`, and with it the entry points that lie there: processes
    that later tests start would inherit them."""
    monkeypatch.setattr(sys, "path", list(sys.path))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent[report.nodeid.split("::", 1)[0]] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files took longer than they may. Machines differ, so this is a remark and never a failure."""
    over = {name: t for name, t in _spent.items() if t > BUDGETS.get(name, BUDGET)}
    terminalreporter.write_line(f"time: {sum(_spent.values()):.0f} s in tests, over all processes")
    for name, t in sorted(over.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"over its budget of {BUDGETS.get(name, BUDGET)} s: {name} took {t:.0f} s")
