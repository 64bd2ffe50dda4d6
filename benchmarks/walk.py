"""How far a reader walks: calls and files of one training step and of one comparison, and the size of each place.

    python -m benchmarks.walk [--write | --check]

`--write` renews the result file, `--check` fails where a figure has grown by more than 10 % since. The step is one
training step of [DropKey, ExplicitDropout(value, ffn)] on timm's vit_tiny (12 blocks, 17 tokens, batch 8), after three
steps to warm up. The comparison is `dampen compare` of two methods and the baseline with three seeds, in its own
process; what its workers do is not counted.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dampen"
RESULT = Path(__file__).with_name("records") / "walk.json"
ROOM = 1.1
"""A figure may grow by this factor before `--check` fails."""
LONG_LINE = 100
SHORTEST, LONGEST = 60, 500  # lines of a file


@dataclass
class Walk:
    """What `sys.setprofile` sees of the package."""

    calls: int = 0
    changes: int = 0
    files: set[str] = field(default_factory=set)
    functions: set[tuple[str, str]] = field(default_factory=set)
    last: str = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # Bodies of modules and classes run once, on import: they are no calls.
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        file = code.co_filename
        if not file.startswith(str(PACKAGE)):
            return
        self.calls += 1
        self.changes += file != self.last
        self.files.add(file)
        self.functions.add((file, code.co_qualname))
        self.last = file

    def figures(self) -> dict[str, int]:
        return {
            "calls": self.calls,
            "files": len(self.files),
            "functions": len(self.functions),
            "changes of file": self.changes,
        }


def walked(run: Callable[[], object]) -> dict[str, int]:
    """Count the calls into the package while `run` runs."""
    walk = Walk()
    sys.setprofile(walk)
    try:
        run()
    finally:
        sys.setprofile(None)
    return walk.figures()


def steps() -> dict[str, dict[str, int]]:
    """A step by torch's kernels, and one by the native kernels where they are built."""
    from dampen.native import available
    from dampen.native.library import torch_only

    with torch_only("this walk is by torch's kernels"):
        found = {"step": step()}
    if available():
        found["step, native kernels"] = step()
    return found


def step() -> dict[str, int]:
    """One training step of two methods on timm's vit_tiny."""
    import timm
    import torch

    import dampen

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=10).train()
    methods = [dampen.DropKey(0.1), dampen.ExplicitDropout(value=0.05, ffn=0.05)]
    handle = dampen.regularize(model, methods)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))

    def one() -> None:
        loss, _ = handle.loss(
            lambda: model(images), lambda out: torch.nn.functional.cross_entropy(out, labels)
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        one()
    return walked(one)


COMPARE = """
import json, sys
sys.path.insert(0, {root!r})
from benchmarks.walk import walked
from dampen.cli import main
arguments = ["compare", "--data", "digits", "--model", "vit(patch_size=2, width=16, depth=1, heads=2, mlp=16)",
             "--methods", "drop_key(rate=0.1), drop_path(rate=0.1)", "--seeds", "3", "--set", "train.epochs=1",
             "--workers", "1", "--out", {out!r}]
def run():
    try:
        main(arguments)
    except SystemExit as end:
        if end.code:
            raise
print("WALK", json.dumps(walked(run)))
"""


def compare() -> dict[str, int]:
    """`dampen compare` of nine short runs."""
    with tempfile.TemporaryDirectory() as out:
        code = COMPARE.format(root=str(ROOT), out=out)
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
    found = [
        line.removeprefix("WALK ") for line in done.stdout.splitlines() if line.startswith("WALK ")
    ]
    if not found:
        raise SystemExit(
            f"dampen compare ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        )
    figures: dict[str, int] = json.loads(found[0])
    return figures


def places() -> dict[str, list[Path]]:
    """The Python files of each place."""
    source = sorted(PACKAGE.rglob("*.py"))
    outer = (PACKAGE / "studies", PACKAGE / "cli")
    studies = [p for p in source if any(p.is_relative_to(place) for place in outer)]
    return {
        "library": [p for p in source if p not in set(studies)],
        "studies and command": studies,
        "reproductions": sorted((ROOT / "reproductions").rglob("*.py")),
        "benchmarks": sorted((ROOT / "benchmarks").rglob("*.py")),
        "tests": sorted((ROOT / "tests").rglob("*.py")),
    }


def size(files: list[Path]) -> dict[str, float]:
    """Lines, files, and how the code is written."""
    texts = [p.read_text(encoding="utf-8") for p in files]
    lines = [len(t.splitlines()) for t in texts]
    total = max(sum(lines), 1)
    trees = [ast.parse(t) for t in texts]
    conditional = sum(isinstance(n, ast.IfExp) for tree in trees for n in ast.walk(tree))
    public = [f for tree in trees for f in _public_functions(tree)]
    described = sum("Args:" in (ast.get_docstring(f) or "") for f in public)
    return {
        "files": len(files),
        "lines": sum(lines),
        "lines of code": sum(map(_code_lines, texts)),
        "files under 60 lines": sum(n < SHORTEST for n in lines),
        "files over 500 lines": sum(n > LONGEST for n in lines),
        "lines over 100 columns": sum(
            len(line) > LONG_LINE for t in texts for line in t.splitlines()
        ),
        "conditional expressions per 1,000 lines": round(1000 * conditional / total, 1),
        "comment lines per 1,000 lines": round(1000 * sum(map(_comment_lines, texts)) / total, 1),
        "public functions with arguments": len(public),
        "of them with an Args section": described,
    }


def _public_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Functions and methods without an underscore that take arguments."""
    found: list[ast.FunctionDef] = []
    for scope in [
        tree,
        *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")),
    ]:
        for node in scope.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if [a for a in arguments if a.arg not in ("self", "cls")]:
                    found.append(node)
    return found


def _comment_lines(text: str) -> int:
    """Lines that hold a comment alone."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)


def _code_lines(text: str) -> int:
    """Lines without those that are empty, a comment or part of a docstring: what a wider layout or a longer
    description does not change."""
    apart = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for t in tokens if t.type not in apart for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def measure() -> dict[str, Any]:
    return {
        **steps(),
        "compare": compare(),
        "sizes": {name: size(files) for name, files in places().items()},
    }


def grown(found: dict[str, Any], recorded: dict[str, Any]) -> list[str]:
    """Figures of the walks and line counts of the places that have grown by more than the room.

    >>> grown({"step": {"calls": 120}}, {"step": {"calls": 100}})
    ['step, calls: 120, recorded 100']
    """
    problems = []
    for part in ("step", "step, native kernels", "compare"):
        problems += [
            f"{part}, {name}: {value}, recorded {recorded[part][name]}"
            for name, value in found.get(part, {}).items()
            if value > ROOM * recorded[part][name]
        ]
    for place, figures in found.get("sizes", {}).items():
        before = recorded["sizes"].get(place, figures)
        problems += [
            f"{place}, {name}: {figures[name]}, recorded {before[name]}"
            for name in ("files", "lines")
            if figures[name] > ROOM * before[name]
        ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="renew the result file")
    parser.add_argument(
        "--check", action="store_true", help="fail where a figure has grown by more than 10 %%"
    )
    options = parser.parse_args()
    found = measure()
    print(json.dumps(found, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if not options.check:
        return 0
    problems = grown(found, json.loads(RESULT.read_text(encoding="utf-8")))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
