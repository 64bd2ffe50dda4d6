"""How studies start processes: on Linux from a server that has imported torch and Fabric once,
elsewhere afresh."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SERVER_OF = "DAMPEN_SERVER_OF"
"""The environment variable that names the process that the server belongs to."""


def context() -> Any:
    """The way to start workers and ranks.

    Importing torch and Fabric takes seconds. On Linux a fork server does it once, and every worker,
    every rank and every replacement of a worker that died starts from there at once. Nothing is
    computed in the server, so that no thread pool exists when it forks.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    os.environ[SERVER_OF] = str(
        os.getpid()
    )  # set now: we may be gone before the server looks for its parent
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["dampen.studies.preload"])
    return server


@contextmanager
def end_with_parent() -> Iterator[None]:
    """End this process, the server that workers are forked from, when its parent is
    gone while the block runs.

    The server looks for its parent only between requests. Importing torch takes seconds, in which
    it would outlive a command that has failed and hold its output open (`dampen ... | tee log`
    would wait). So a thread watches, and has ended before anything is forked. In any other process
    the block runs as it is: doctests import every module.
    """
    if not any("multiprocessing.forkserver" in word for word in sys.orig_argv):
        yield
        return
    parent, done = int(os.environ.get(SERVER_OF, os.getppid())), threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            if os.getppid() != parent:
                os._exit(0)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    # Sent to the whole group, these are meant for the command; the server goes
    # with it, and without a word.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _polite(signal.SIG_IGN)
    try:
        yield
    finally:
        done.set()
        thread.join()


def start(target: Any, *arguments: Any) -> tuple[Any, Any]:
    """Start `target(pipe, *arguments)` in a new process; return the process
    and our end of its pipe."""
    from_here = context()
    ours, theirs = from_here.Pipe()
    process = from_here.Process(target=_begin, args=(dict(os.environ), target, theirs, *arguments))
    with without_main():
        process.start()
    theirs.close()
    return process, ours


def stop_on_signals(handler: Any) -> None:
    """What a worker does with the polite signals. Ctrl-C is left to the parent; SIGTERM and SIGHUP
    reach the whole group too when a scheduler or a closing terminal sends them, and must not kill a
    worker before its checkpoint."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _polite(handler)


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error is Ctrl-C in this process; where SIGINT is ignored, user code raised it.

    Args:
        error: any error.
    """
    return (
        isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    )


def _polite(handler: Any) -> None:
    for name in ("SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), handler)


@contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run the user's script again: it may start a
    comparison without a guard.

    Nothing of `__main__` is needed in them: what comes from there is sent by value.
    """
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _begin(environment: dict[str, str], target: Any, pipe: Any, *arguments: Any) -> None:
    os.environ.update(environment)  # the server's is as old as the server
    keep_freed_memory()
    end_soon_after_parent()
    _polite(signal.SIG_DFL)  # the server ignores them, see `end_with_parent`
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target(pipe, *arguments)


ALONE_SECONDS = 3.5
"""How long a worker whose parent is gone may take to write its checkpoint."""


def end_soon_after_parent() -> None:
    """End this worker `ALONE_SECONDS` after its parent is gone, whatever the
    user's function does."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        time.sleep(ALONE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="dampen-parent").start()


def warm_up() -> None:
    """Let the server begin to import while this process does something else."""
    if sys.platform == "linux":
        from multiprocessing import forkserver

        context()
        forkserver.ensure_running()
        atexit.register(_end_server)


def _end_server() -> None:
    """End the server with this process. While it still imports it does not notice that nobody needs
    it any more, and keeps open what it inherited: a program that reads our output through a pipe
    would wait for it."""
    from multiprocessing import forkserver

    # Private, in every Python from 3.4 on; without it the server ends by itself, only later.
    pid = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


# --------------------
# Keep freed memory in the process.
# On Linux glibc gives large blocks back to the system as soon as they lie at the end of the heap,
# and the next training step faults them in anew, page by page: thousands of faults per step, in
# one process hardly any, in the next a tenth of its time. Processes that belong to a study
# therefore keep what they have once needed.


AS_FOUND = "as found"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SIZES = (2**30, 2**25)
"""Bytes: blocks up to this stay on the heap, and free memory at its end below this is not given
back. Older versions of glibc refuse the first."""

_kept = False


def keep_freed_memory() -> bool:
    """Change this process's malloc for good; whether it could be done.

    What the user has said about malloc in the environment (`MALLOC_...`, `GLIBC_TUNABLES`) stays in
    force, and other C libraries stay as they are.
    """
    global _kept
    if not _said() and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # the order counts: the second alone would freeze the limit for blocks at its smallest
        _kept = any(
            mallopt(M_MMAP_THRESHOLD, size) and mallopt(M_TRIM_THRESHOLD, size) for size in SIZES
        )
    return _kept


def describe_malloc() -> str:
    """For records: how this process deals with freed memory."""
    return "freed memory kept" if _kept else "set in the environment" if _said() else AS_FOUND


def _said() -> bool:
    return any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
