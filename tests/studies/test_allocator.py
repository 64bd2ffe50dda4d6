"""Freed memory stays in processes of the lab: counted in page faults, in processes of their own."""

import json
import os
import platform
import subprocess
import sys

import pytest

COUNT = """
import json, resource, sys, torch
from dampen.studies.processes import describe_malloc, keep_freed_memory
kept = keep_freed_memory() if "keep" in sys.argv else None
for _ in range(40):  # the block wanders over the heap until it has found its place
    torch.ones(2**24)  # 64 MiB: more than glibc ever leaves on the heap by itself
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(2**24)
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(json.dumps({"kept": kept, "faults": faults, "said": describe_malloc()}))
"""
glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is changed"
)


def count(*arguments, **environment):
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"
    }
    command = [sys.executable, "-c", COUNT, *arguments]
    return json.loads(subprocess.check_output(command, env={**clean, **environment}))


@glibc
def test_memory_that_was_freed_is_not_faulted_in_again():
    default, kept = count(), count("keep")
    assert default["said"] == "as found"
    assert kept["said"] == "freed memory kept"
    assert default["faults"] > 100  # five times 16,384 small pages, or 32 huge ones
    assert kept["faults"] < 10


@glibc
def test_what_the_user_says_about_malloc_stays():
    asked = count("keep", MALLOC_ARENA_MAX="2")
    assert asked["kept"] is False
    assert asked["faults"] > 100


def test_workers_keep_freed_memory_and_say_so():
    from dampen.studies.processes import start

    process, pipe = start(_tell)
    assert pipe.recv() == ("freed memory kept" if _possible() else "as found")
    process.join()


def _possible():
    return platform.libc_ver()[0] == "glibc" and not any(
        k.startswith(("MALLOC_", "GLIBC_TUN")) for k in os.environ
    )


def _tell(pipe):
    from dampen.studies.processes import describe_malloc

    pipe.send(describe_malloc())
