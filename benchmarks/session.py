"""The recorded terminal session of `dampen compare` in the README: docs/images/session.svg, from a real run.

python -m benchmarks.session
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "session.svg"
COMMAND = (
    "dampen compare --data digits --methods patch_dropout,drop_key --seeds 6 --set data.limit=300"
)
COLUMNS = 110


def main() -> None:
    """Run the command in an empty folder and draw what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *COMMAND.split()],
            cwd=folder,
            env={**os.environ, "COLUMNS": str(COLUMNS)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    lines = done.stdout.rstrip().splitlines()
    kept = [line for line in lines if not re.match(r"\[?\d+/\d+", line)]  # without progress
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}"), soft_wrap=True)
    for line in kept:
        console.print(Text.from_ansi(line), soft_wrap=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(console.export_svg(title="dampen compare"))
    print(f"written to {OUT}")


if __name__ == "__main__":
    main()
