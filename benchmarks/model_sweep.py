"""Which methods work in which models: tiny random models of every library, judged by `benchmarks.model_probe`.

    python -m benchmarks.model_sweep                         # every model, resumable, then the result file and the page
    python -m benchmarks.model_sweep --library timm --only 'swin*'   # some models
    python -m benchmarks.model_sweep --print --only 'swin*'    # what was found, in full
    python -m benchmarks.model_sweep --collect               # the result file and docs/models.md from what has been run
    python -m benchmarks.model_sweep --check                 # whether docs/models.md is what the result file says

Each model runs in a process of its own with a limit of time and memory, and leaves a file in `build/model_sweep`. A
model whose file was written by the present code is not run again; `--keep` keeps files of older code too. A library
that is not installed is named, and its models of the last run stay in the result file."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

import dampen
from benchmarks.libraries import LIBRARIES, subjects
from benchmarks.model_probe import VERSION, Probe, verdict
from benchmarks.tiny_models import NotBuilt, Subject
from dampen.native import library as native
from dampen.studies.files import write_json

ROOT = Path(__file__).parent.parent
RECORD, PAGE = ROOT / "benchmarks/records/model_sweep.json", ROOT / "docs/models.md"
RESULTS = ROOT / "build/model_sweep"
SECONDS, WALL, MEMORY = 150, 900, 8 << 30  # processor time, time on the wall, bytes of one model
BAD = ("WRONG", "SILENT", "CRASH")


def code_version() -> str:
    """A hash of dampen's sources without the studies, and the version of the probe."""
    files = sorted(Path(dampen.__file__).parent.rglob("*.py"))
    studies = f"{os.sep}lab{os.sep}"
    sources = (f.read_bytes() for f in files if studies not in str(f))
    return f"{hashlib.sha256(b''.join(sources)).hexdigest()[:10]}-{VERSION}"


def judge(build: Callable[[], Subject]) -> dict[str, Any]:
    """Build a model and judge all methods on it."""
    try:
        subject = build()
    except NotBuilt as error:
        return {"not built": str(error)[:300]}
    probe = Probe(subject.model, subject.inputs)
    facts = probe.facts
    counts = {
        "attention": len(facts.token_cores),
        "channel attention": len(facts.channel),
        "feed-forward": len(facts.feed_forward),
        "branches": len(facts.branches),
    }
    if not facts.cores:
        return {"model": subject.name, "parts": counts, "verdict": "no attention", "methods": {}}
    findings = probe.run()
    methods = {name: f.to_json() for name, f in findings.items()}
    return {
        "model": subject.name,
        "parts": counts,
        "verdict": verdict(findings),
        "methods": methods,
    }


def run_one(library: str, name: str, build: Callable[[], Subject], code: str) -> dict[str, Any]:
    """Judge one model in a process of its own."""
    path = result_path(library, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(path, build, code)
    deadline = time.monotonic() + WALL
    status = 0
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    if not path.exists():
        why = (
            f"the process ended with signal {os.WTERMSIG(status)}"
            if os.WIFSIGNALED(status)
            else "no result"
        )
        why = f"longer than {WALL} s" if time.monotonic() > deadline else why
        write_json(path, {"code": code, "failed": why})
    return json.loads(path.read_text())


def _child(path: Path, build: Callable[[], Subject], code: str) -> None:
    """What the process does; it never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        signal.signal(signal.SIGPROF, _late)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        started = time.process_time()
        try:
            result = judge(build)
        except TimeoutError:
            result = {"failed": f"longer than {SECONDS} s of processor time"}
        except MemoryError:
            result = {"failed": "more memory than allowed"}
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = "/".join(last.filename.split("/")[-3:])
            result = {
                "failed": f"probe: {type(error).__name__}: {str(error)[:200]} ({where}:{last.lineno})"
            }
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_json(
            path, {"code": code, "seconds": round(time.process_time() - started, 1), **result}
        )
    finally:
        sys.stdout.flush()
        os._exit(0)


def _late(*_: Any) -> None:
    raise TimeoutError


def result_path(library: str, name: str) -> Path:
    return RESULTS / library / f"{name.replace('/', '__')}.json"


def sweep(
    library: str, only: Sequence[str], keep: bool, again: Sequence[str], minutes: float | None
) -> None:
    """Run what has not been run by this code."""
    code = code_version()
    stop = time.monotonic() + minutes * 60 if minutes is not None else float("inf")
    for name, build in subjects(library):
        if only and not any(fnmatch(name, pattern) for pattern in only):
            continue
        path = result_path(library, name)
        if path.exists():
            old = json.loads(path.read_text())
            if again and old.get("verdict", "not built") not in again:
                continue
            if not again and (keep or old.get("code") == code):
                continue
        if time.monotonic() > stop:
            print(f"{library}: stopped after {minutes:g} minutes; the same command goes on")
            return
        print_case(library, name, run_one(library, name, build, code))


def print_case(library: str, name: str, case: dict[str, Any]) -> None:
    """One model's findings, the good ones in one line."""
    said = case.get("verdict") or f"not built: {case.get('not built', case.get('failed'))}"
    print(f"{library} {name}: {said} {case.get('parts', '')} {case.get('seconds', '')}", flush=True)
    for method, found in case.get("methods", {}).items():
        if found["outcome"] not in ("works", "not applicable"):
            print(f"    {method}: {found['outcome']}: {found.get('why', '')}", flush=True)


def collect() -> dict[str, Any]:
    """The result file: what has been run, and from the last one what has not."""
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    libraries = record.get("libraries", {})
    versions = record.get("versions", {})
    for library in LIBRARIES:
        cases = dict(libraries.get(library, {}))
        for path in sorted((RESULTS / library).glob("*.json")):
            cases[path.stem.replace("__", "/")] = _short(json.loads(path.read_text()))
        if cases:
            libraries[library] = dict(sorted(cases.items()))
            versions[library] = _version(library) or versions.get(library, "")
    versions["torch"] = torch.__version__.split("+")[0]
    return {"versions": versions, "code": code_version(), "libraries": libraries}


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(LIBRARIES[library].package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _short(case: dict[str, Any]) -> dict[str, Any]:
    """A case without what nobody looks up."""
    if "verdict" not in case:
        return {
            "not built": (case.get("not built") or case.get("failed", ""))[:160],
            "code": case["code"],
        }
    methods = {
        name: (
            f["outcome"]
            if not f.get("why") or f["outcome"] == "not applicable"
            else [f["outcome"], f["why"][:300]]
        )
        for name, f in case["methods"].items()
    }
    return {"verdict": case["verdict"], "code": case["code"], "methods": methods}


def outcome(found: str | list[str]) -> str:
    return found if isinstance(found, str) else found[0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", choices=tuple(LIBRARIES), action="append", help="default: all")
    parser.add_argument("--only", default="", help="comma-separated names or patterns, as in swin*")
    parser.add_argument(
        "--keep", action="store_true", help="do not run again what older code has run"
    )
    parser.add_argument(
        "--again", default="", help="run again those with one of these verdicts: WRONG,SILENT,CRASH"
    )
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--print", action="store_true", help="print what was found, run nothing")
    parser.add_argument(
        "--collect", action="store_true", help="write the result file and the page, run nothing"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if docs/models.md differs from the result file"
    )
    options = parser.parse_args(arguments)
    from benchmarks.models_page import page

    if options.check:
        if PAGE.read_text() != page(json.loads(RECORD.read_text())):
            sys.exit(
                f"{PAGE.name} is not what {RECORD.name} says: run python -m benchmarks.model_sweep --collect"
            )
        return
    libraries = options.library or list(LIBRARIES)
    only = [part for part in options.only.split(",") if part]
    if options.print:
        for library in libraries:
            for path in sorted((RESULTS / library).glob("*.json")):
                if not only or any(fnmatch(path.stem, pattern) for pattern in only):
                    print_case(library, path.stem, json.loads(path.read_text()))
        return
    if not options.collect:
        torch.set_num_threads(1)
        os.environ["DAMPEN_NATIVE"] = "0"  # native kernels hide keys where no record sees it
        native.reset()
        warnings.simplefilter("ignore")
        for library in libraries:
            missing = LIBRARIES[library].missing()
            if missing:
                print(f"{library}: {missing}; its models are left out")
                continue
            again = [v for v in options.again.split(",") if v]
            LIBRARIES[library].warm()
            sweep(library, only, options.keep, again, options.minutes)
    if options.collect or not only:
        record = collect()
        write_json(RECORD, record)
        PAGE.write_text(page(record))
        for library, cases in record["libraries"].items():
            print(library, dict(Counter(c.get("verdict", "not built") for c in cases.values())))


if __name__ == "__main__":
    main()
