"""Has a method become dearer? Instructions of a tiny training step, method against plain in one run, by valgrind.

    python -m benchmarks.regression [--json benchmarks/records/instructions.json] [--check]

Instructions do not depend on how busy the machine is; they agree with time in order, not in size. `--check` compares
with the committed record and fails where a ratio rose by more than 5 %. Five methods within two minutes; says so and
ends well where valgrind is not installed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.overhead_off import total
from dampen.hooks.block import STEADY

RECORD = Path(__file__).with_name("records") / "instructions.json"
METHODS = {
    "drop_key": ("DropKey", {"rate": 0.2}),
    "explicit_dropout": ("ExplicitDropout", {"value": 0.06, "ffn": 0.06}),
    "feed_forward_dropout": ("FeedForwardDropout", {"rate": 0.2}),
    "drop_path": ("DropPath", {"rate": 0.2}),
    "drop_head": ("DropHead", {"rate": 0.2}),
}
ALLOWED = 1.05


def steps() -> dict[str, Callable[[], None]]:
    """A training step of the tiny model, plain and with each method."""
    import dampen

    x, y = torch.rand(8, 1, 8, 8), torch.randint(0, 10, (8,))

    def build(name: str | None) -> Callable[[], None]:
        torch.manual_seed(0)
        model = dampen.models.ViT(
            image_size=8, patch_size=2, channels=1, width=48, depth=2, heads=4, mlp=96
        ).train()
        if name is None:

            def plain() -> None:
                F.cross_entropy(model(x), y).backward()

            return plain
        cls, given = METHODS[name]
        reg = dampen.regularize(model, getattr(dampen, cls)(**given))

        def regularized() -> None:
            reg.loss(lambda: model(x), lambda out: F.cross_entropy(out, y))[0].backward()

        return regularized

    return {"plain": build(None), **{name: build(name) for name in METHODS}}


def inside() -> None:
    """Under valgrind: each step until its streams are trusted, then one counted. Python's garbage collector is off
    meanwhile."""
    torch.set_num_threads(1)
    gc.disable()
    for name, step in steps().items():
        for _ in range(STEADY + 1):
            step()
        torch._C._valgrind_toggle()
        step()
        torch._C._valgrind_toggle_and_dump_stats()
        print(name, flush=True)


def count() -> dict[str, float]:
    """Instructions of a step with each method, as a multiple of the plain one."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            "--collect-atstart=no",
        ]
        command += [sys.executable, "-m", "benchmarks.regression", "--inside"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "DAMPEN_NATIVE": "0",
        }
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        counted = {
            name: total(Path(f"{out}.{i + 1}")) for i, name in enumerate(done.stdout.split())
        }
    return {name: counted[name] / counted["plain"] for name in METHODS}


def dearer(now: dict[str, float], before: dict[str, float]) -> list[str]:
    """The methods whose ratio rose by more than is allowed.

    >>> dearer({"a": 1.2, "b": 1.1}, {"a": 1.1, "b": 1.09})
    ['a: 1.200 instead of 1.100']
    """
    return [
        f"{n}: {r:.3f} instead of {before[n]:.3f}"
        for n, r in now.items()
        if n in before and r > ALLOWED * before[n]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--check", action="store_true", help="compare with the committed record")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside()
        return 0
    if shutil.which("valgrind") is None:
        print("not checked: valgrind is not installed (apt install valgrind)")
        return 0
    found = count()
    for name, ratio in found.items():
        print(f"{name:<24} {ratio:.3f}x the instructions of a plain step")
    if options.json:
        from dampen.studies.bench.timing import machine
        from dampen.studies.files import write_json

        what = "instructions of a training step by valgrind callgrind, torch path, method / plain; ViT 2 x 48, batch 8"
        command = "python -m benchmarks.regression --json benchmarks/records/instructions.json"
        write_json(
            options.json, {"command": command, "what": what, "machine": machine(), "ratios": found}
        )
    if not options.check:
        return 0
    if not RECORD.exists():
        print(
            f"nothing to compare with: there is no {RECORD.name} yet; write it with --json {RECORD}"
        )
        return 1
    problems = dearer(found, json.loads(RECORD.read_text())["ratios"])
    print(
        "\n".join(["dearer than the record:", *problems])
        if problems
        else "nothing is dearer than the record"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
