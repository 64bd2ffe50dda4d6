"""The reader of pickles under atheris, which follows the code it reaches: the body of one fuzzing process.

Run by the attack 'fuzzed pickles' of `python -m benchmarks.reliability`, in a process of its own, because the fuzzer
ends the process it runs in; it needs `pip install atheris`. What counts as a failure: any exception but DamagedData, a
value that is none of the kinds a table may hold, an array larger than the file it came from, a crash, more than
`SECONDS` for one input, more than `MEGABYTES` of memory.
"""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np

SECONDS, MEGABYTES, LONGEST = 10, 3000, 2048


def seeds() -> list[bytes]:
    """Small files of the layouts that exist, by every protocol, and the hostile ones of the tests."""
    from tests.reproductions.data.test_unpickle import HOSTILE, python2_batch

    rows = np.arange(12, dtype=np.uint8).reshape(2, 6)
    table = {"labels": [1, 2, 300], "data": rows, "names": [b"a", "b"], b"more": rows.astype(">i4")}
    written = [pickle.dumps(table, protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    return [python2_batch([3, 1], rows), *written, *HOSTILE.values()]


def allowed(value: object, size: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "iu" and value.nbytes <= size
    return type(value) in (int, bytes, str) or (
        isinstance(value, list) and all(type(v) in (int, bytes, str) for v in value)
    )


def one(content: bytes) -> None:
    """Read what the fuzzer made up; whatever this raises is a finding."""
    from dampen.studies.data.dataset import DamagedData
    from reproductions.data.unpickle import safe_unpickle

    try:
        table = safe_unpickle(content, "x")
    except DamagedData:
        return
    wrong = [
        k for k, v in table.items() if type(k) not in (bytes, str) or not allowed(v, len(content))
    ]
    if wrong:
        raise AssertionError(f"The table has what it may not have, under {wrong[:3]}.")


def fuzz(runs: int, corpus: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    with atheris.instrument_imports(include=["reproductions.data.unpickle", "pickletools"]):
        import reproductions.data.unpickle  # noqa: F401
    options = [
        f"-atheris_runs={runs}",
        f"-max_len={LONGEST}",
        f"-timeout={SECONDS}",
        f"-rss_limit_mb={MEGABYTES}",
    ]
    options += ["-seed=1", "-len_control=0", f"-artifact_prefix={corpus}/found-", str(corpus)]
    atheris.Setup([sys.argv[0], *options], one)
    atheris.Fuzz()


def attack(count: int, where: Path) -> Counter[str]:
    """The fuzzing process, its report read: how many inputs, how much code was reached, what was found."""
    try:
        import atheris  # noqa: F401
    except ModuleNotFoundError:
        return Counter({"not possible here: atheris is not installed": 1})
    corpus = where / "corpus"
    corpus.mkdir()
    for i, content in enumerate(seeds()):
        (corpus / f"seed-{i}").write_bytes(content)
    command = [sys.executable, "-m", "benchmarks.reliability.pickles", str(count), str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    told = done.stdout + done.stderr
    executed = re.findall(r"Done (\d+) ", told)
    reached = re.findall(r"cov: (\d+)", told)
    found = len(list(where.rglob("found-*")))
    if done.returncode:
        print(told[-3000:], file=sys.stderr)
    return Counter(
        {
            "repetitions": int(executed[-1]) if executed else 0,
            "tracebacks": found + (done.returncode != 0 and not found),
            "branches reached": int(reached[-1]) if reached else 0,
            "inputs that reached new code": len(list(corpus.glob("*"))) - len(seeds()),
        }
    )


if __name__ == "__main__":
    fuzz(int(sys.argv[1]), Path(sys.argv[2]))
