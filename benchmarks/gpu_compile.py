"""Compile the Triton kernels for cards that are not here, and read registers, spills, shared memory
and instructions off the result.

    python -m benchmarks.gpu_compile [--targets sm_80,sm_90] [--write | --check]

Triton's compiler and the disassembler in its wheel need no GPU. `--write` renews
benchmarks/records/gpu_instructions.json, `--check` compares with it (within 10 %).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("records") / "gpu_instructions.json"
SHARED = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64,
}  # fmt: skip
"""KiB of shared memory that one block may have (CUDA programming guide; CDNA 3 ISA)."""
KERNELS = ("attend", "to_queries", "to_keys")
FORMS = {
    "plain": {},
    "hide keys": {"DRAWS": 1},
    "drop weights": {"DRAWS": 2},
    "hide top": {"DRAWS": 3},
    "causal, guarded": {"DRAWS": 1, "GUARD": True, "CAUSAL": True},
    "mask, bias": {"DRAWS": 1, "GUARD": True, "MASKED": 2, "BIASED": True},
    "bits": {"MASKED": 3},
}
TYPES = {"fp16": 2, "bf16": 2, "fp32": 4}
WITHIN = 0.10


def variants(full: bool) -> list[tuple[str, str, int, str]]:
    """Kernel, form, head size, type: a few, or all that matter."""
    few = [(k, form, 64, "bf16") for k in KERNELS for form in ("plain", "hide keys", "bits")]
    if not full:
        return few
    sizes = ((64, "fp16"), (32, "bf16"), (128, "bf16"), (64, "fp32"))
    more = [(k, form, 64, "bf16") for k in KERNELS for form in FORMS]
    more += [(k, "hide keys", size, dtype) for size, dtype in sizes for k in KERNELS]
    more.append(("attend", "mask, bias", 32, "bf16"))
    return list(dict.fromkeys([*few, *more]))


def compile_one(target: str, kernel: str, form: str, size: int, dtype: str) -> dict[str, Any]:
    """What the compiler makes of one kernel for one card.

    Args:
        target: sm_90, gfx942 and the like.
        kernel: attend, to_queries or to_keys.
        form: a key of FORMS.
        size: channels of a head.
        dtype: fp16, bf16 or fp32.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from dampen.kernels.triton import device
    from dampen.kernels.triton.tiles import padded, tile_of

    kind: dict[str, Any] = {
        "DRAWS": 0,
        "GUARD": False,
        "MASKED": 0,
        "BIASED": False,
        "CAUSAL": False,
    }
    kind |= FORMS[form]
    draws, guard, masked, biased, _ = kind.values()
    cuda = target.startswith("sm_")
    generation = int(target[3:]) // 10 if cuda else 0
    tile = tile_of(kernel, size, TYPES[dtype], generation, draws, guard, masked, biased)
    constants = {
        **kind, "PRECISION": "tf32" if dtype == "fp32" else "ieee", "D": size, "BD": padded(size),
        "BM": tile.queries, "BN": tile.keys,
    }  # fmt: skip
    function = getattr(device, kernel)
    pointers = {"LSE": "*fp32", "TOP": "*fp32", "DELTA": "*fp32", "RATE": "*fp32",
                "SEED": "*i64", "BACK": "*i32",
                "MASK": "*i32" if constants["MASKED"] == 3 else "*u8"}  # fmt: skip
    signature, divisible = {}, {}
    for i, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.isupper() and name not in ("H", "G", "N", "M"):
            signature[name] = pointers.get(name, f"*{dtype}")
            divisible[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
            # strides of tokens, heads and samples are multiples of the head size
            if re.fullmatch("[qkv]_[bhn]", name):
                divisible[(i,)] = [["tt.divisibility", 16]]
    card = GPUTarget("cuda", int(target[3:]), 32) if cuda else GPUTarget("hip", target, 64)
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=divisible)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(source, target=card, options=options)
    read = _read_cubin(made.asm["cubin"]) if cuda else _read_amdgcn(made.asm["amdgcn"])
    return {**read, "shared": made.metadata.shared, "tile": list(tile)}


def _read_cubin(cubin: bytes) -> dict[str, int]:
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in ([tools / "cuobjdump", "-res-usage"], [tools / "nvdisasm"])
        )
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_]*)", code)
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None
    spills = sum(n in ("STL", "LDL") for n in names)
    return {"registers": int(found[1]), "spills": spills, "instructions": len(names)}


def _read_amdgcn(code: str) -> dict[str, int]:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", code)[1])  # type: ignore[index]

    names = re.findall(r"^\s+([vs]_\w+|ds_\w+|buffer_\w+|global_\w+)", code, re.MULTILINE)
    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count"),
        "instructions": len(names),
    }


def key_of(target: str, kernel: str, form: str, size: int, dtype: str) -> str:
    return f"{target} {kernel} {form} D{size} {dtype}"


def problems(found: dict[str, dict[str, Any]], record: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with compiled kernels: spills, too much shared memory, other code.

    Args:
        found: by `key_of`.
        record: the committed one.
    """
    wrong = []
    for key, made in found.items():
        target, size, dtype = key.split()[0], *key.split()[-2:]
        if made["shared"] > SHARED[target] * 1024:
            wrong.append(f"{key}: {made['shared']} bytes of shared memory, {target} has fewer")
        if made["spills"] and int(size[1:]) <= 64 and dtype in ("fp16", "bf16"):
            wrong.append(f"{key}: {made['spills']} spills")
        if key not in record:
            wrong.append(f"{key}: not in {RECORD.name}")
            continue
        before, now = record[key]["instructions"], made["instructions"]
        if abs(now - before) > WITHIN * before:
            wrong.append(f"{key}: {now} instructions, {before} in the record")
    return wrong


def compile_all(targets: Iterable[str], full: bool) -> dict[str, dict[str, Any]]:
    """Every variant for every card, by `key_of`.

    Args:
        targets: keys of SHARED.
        full: all variants.
    """
    cases = [(t, *v) for t in targets for v in variants(full)]
    return {key_of(*case): compile_one(*case) for case in cases}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default=",".join(SHARED))
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    found = {}
    for case in [(t, *v) for t in args.targets.split(",") for v in variants(not args.few)]:
        key = key_of(*case)
        found[key] = compile_one(*case)
        print(f"{key:40s} {found[key]}", flush=True)
        if args.write:
            _record({key: found[key]})
    wrong = problems(found, json.loads(RECORD.read_text())["kernels"])
    print("\n".join(wrong) or "no problems")
    return bool(wrong)


def _record(found: dict[str, dict[str, Any]]) -> None:
    import triton

    before = json.loads(RECORD.read_text())["kernels"] if RECORD.exists() else {}
    kernels = dict(sorted({**before, **found}.items()))
    whole = {"triton": triton.__version__, "kernels": kernels}
    RECORD.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
