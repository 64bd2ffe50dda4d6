"""Ends the process that imports it when its parent is gone, while it imports; see dampen/studies/processes.py.

The server that workers are forked from looks for its parent only between requests. Importing torch takes seconds, in
which it would outlive a command that has failed and hold its output open (`dampen ... | tee log` would wait). So a
thread watches meanwhile, and ends before anything is forked. This module lies outside the package because importing
anything inside it imports torch first.
"""

import os
import signal
import sys
import threading

_done = threading.Event()
_parent = int(os.environ.get("DAMPEN_SERVER_OF", os.getppid()))


def _watch() -> None:
    while not _done.wait(0.1):
        if os.getppid() != _parent:
            os._exit(0)


def _begin() -> None:
    _thread.start()
    # Sent to the whole group, these are meant for the command; the server goes with it, and without a word.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def end() -> None:
    """Stop watching: from now on the server itself notices."""
    _done.set()
    if _thread.ident is not None:
        _thread.join()


_thread = threading.Thread(target=_watch, daemon=True)
# Only in the server: who imports this to read it (documentation, doctests) must still hear Ctrl-C.
if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    _begin()
