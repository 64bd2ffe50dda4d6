"""How the lab starts processes: on Linux from a server that has imported torch and Fabric once, elsewhere afresh."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

from dampen.lab.allocator import keep_freed_memory


def context() -> Any:
    """The way to start workers and ranks.

    Importing torch and Fabric takes seconds. On Linux a fork server does it once, and every worker, every rank and
    every replacement of a worker that died starts from there at once. Nothing is computed in the server, so that no
    thread pool exists when it forks.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["dampen.lab.preload"])
    return server


def start(target: Any, *arguments: Any) -> tuple[Any, Any]:
    """Start `target(pipe, *arguments)` in a new process; return the process and our end of its pipe."""
    from_here = context()
    ours, theirs = from_here.Pipe()
    process = from_here.Process(target=_begin, args=(dict(os.environ), target, theirs, *arguments))
    process.start()
    theirs.close()
    return process, ours


def _begin(environment: dict[str, str], target: Any, pipe: Any, *arguments: Any) -> None:
    os.environ.update(environment)  # the server's is as old as the server
    keep_freed_memory()
    target(pipe, *arguments)


def warm_up() -> None:
    """Let the server begin to import while this process goes on with something else."""
    if sys.platform == "linux":
        from multiprocessing import forkserver

        context()
        forkserver.ensure_running()
