"""What regularizers cost that are attached but switched off: instructions of a training step, counted by valgrind.

    python -m benchmarks.overhead_off [--batch 2] [--json benchmarks/records/overhead_off.json]

Instructions do not depend on how busy the machine is. The model is DESIGN's ViT 7 x 384 with a small batch, which is
conservative: what an attached regularizer costs is per module call, not per sample, so that its share falls as the
batch grows. valgrind has no AVX-512 and no AMX; both sides of each ratio are counted without them. DESIGN's target is
1.005. Needs valgrind; takes some minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

TARGET = 1.005
METHODS = {  # by the kinds of sites that are swapped
    "attention (drop_key)": ["DropKey"],
    "linear maps (feed_forward_dropout)": ["FeedForwardDropout"],
    "every kind of site at once": [
        "DropKey",
        "FeedForwardDropout",
        "DropPath",
        "LayerDrop",
        "TokenGraying",
    ],
}
HELD = contextlib.ExitStack()
"""What is disabled stays so for the whole process: a context that nobody holds would end by itself."""


def steps(batch: int, depth: int) -> dict[str, Callable[[], object]]:
    """A training step and an eval forward, plain and with methods that are attached and disabled."""
    import dampen

    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))

    def build(names: Sequence[str]) -> tuple[Callable[[], object], Callable[[], object]]:
        torch.manual_seed(0)
        model = dampen.models.ViT(depth=depth).train()
        disabled: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if names:
            disabled = dampen.regularize(
                model, [getattr(dampen, name)() for name in names]
            ).disable()
        HELD.enter_context(disabled)

        def train() -> None:
            model.train()
            F.cross_entropy(model(x), y).backward()
            model.zero_grad(set_to_none=True)

        @torch.no_grad()
        def evaluate() -> None:
            model.eval()(x)

        return train, evaluate

    found: dict[str, Callable[[], object]] = {}
    found["plain, train"], found["plain, eval"] = build([])
    for name, names in METHODS.items():
        found[f"{name}, train"], found[f"{name}, eval"] = build(names)
    return found


def inside(batch: int, depth: int) -> None:
    """Run under valgrind: each step once to warm up, once counted, with a dump after each.

    Python's garbage collector is off while instructions are counted: one pass over all objects of the process is 5 % of
    a step, and in which step it falls is chance.
    """
    torch.set_num_threads(1)
    gc.disable()
    for name, step in steps(batch, depth).items():
        step()
        gc.collect()
        torch._C._valgrind_toggle()
        step()
        torch._C._valgrind_toggle_and_dump_stats()
        print(name, flush=True)


def count(batch: int, depth: int) -> dict[str, int]:
    """Instructions of each step."""
    if shutil.which("valgrind") is None:
        raise SystemExit("valgrind is not installed: apt install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "callgrind"
        command = [
            "valgrind",
            "--tool=callgrind",
            f"--callgrind-out-file={out}",
            "--collect-atstart=no",
        ]
        command += [sys.executable, "-m", "benchmarks.overhead_off", "--inside"]
        command += ["--batch", str(batch), "--depth", str(depth)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        names = done.stdout.split("\n")[:-1]
        return {name: total(Path(f"{out}.{i + 1}")) for i, name in enumerate(names)}


def total(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(("totals:", "summary:")):
            return int(line.split()[1])
    raise RuntimeError(f"{path.name} has no total: callgrind wrote something unexpected.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.inside:
        inside(options.batch, options.depth)
        return
    from dampen.studies.bench.timing import machine
    from dampen.studies.files import write_json

    counted = count(options.batch, options.depth)
    ratios = {
        name: instructions / counted[f"plain, {name.rsplit(', ', 1)[1]}"]
        for name, instructions in counted.items()
        if not name.startswith("plain")
    }
    for name, ratio in ratios.items():
        print(f"{name:<45} {ratio:.5f}  {'met' if ratio <= TARGET else 'NOT MET'}")
    if options.json:
        record = {
            "command": f"python -m benchmarks.overhead_off --batch {options.batch} --depth {options.depth}",
            "model": f"ViT {options.depth} x 384, 12 heads, 65 tokens, batch {options.batch}, float32, synthetic",
            "what": "instructions by valgrind callgrind, one thread; attached and disabled / plain",
            "target": TARGET,
            "machine": machine(),
            "instructions": counted,
            "ratios": ratios,
        }
        write_json(options.json, record)


if __name__ == "__main__":
    main()
