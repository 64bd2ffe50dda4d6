"""The Triton kernels without a GPU: Triton's interpreter runs them on a CPU.

It has to be switched on before Triton is imported, so the tests in `interpreted/` run in a process
of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_interpreted_kernels(tmp_path):
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "DAMPEN_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    ran = subprocess.run(
        [*command, str(HERE / "interpreted")], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout
