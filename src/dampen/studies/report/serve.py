"""The report as a live page on the loopback address: made anew when records change, reloaded by the
page itself."""

from __future__ import annotations

import contextlib
import html
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dampen.studies.errors import LabError
from dampen.studies.report import make_report

HOST = "127.0.0.1"
THREADS, SECONDS = 16, 10.0
"""How many clients are answered at once, and how long a request may take from its
first byte to its last."""
RECORDS = (
    "plan.json",
    "config.json",
    "final.json",
    "log.jsonl",
    "diagnose.json",
    "environment.json",
)


def fingerprint(runs: Sequence[Path | str]) -> str:
    """Changes whenever a record below the folders is added or written to.

    Args:
        runs: the folders, packs or bench results to read.
    """
    digest = sha256()
    for root in runs:
        for folder, folders, files in os.walk(root):
            folders.sort()
            for name in sorted(set(files) & set(RECORDS)):
                try:
                    state = os.stat(os.path.join(folder, name))
                except FileNotFoundError:  # replaced while we looked
                    continue
                digest.update(f"{folder}/{name} {state.st_mtime_ns} {state.st_size}\n".encode())
    return digest.hexdigest()[:16]


class LivePage:
    """The page of some run folders, rendered again only when their records changed."""

    def __init__(self, runs: Sequence[Path | str], split: bool = False):
        self.runs, self.split = list(runs), split
        self._lock = threading.Lock()
        self._version, self._page = "", ""

    def get(self) -> str:
        """The page as of now."""
        with self._lock:
            version = fingerprint(self.runs)
            if version != self._version:
                try:
                    self._page = make_report(self.runs, self.split).render("html", live=version)
                except (
                    Exception
                ) as error:  # whatever state the folders are in, the server keeps running
                    known = isinstance(error, LabError)
                    self._page = _waiting(
                        str(error) if known else "".join(traceback.format_exception(error))
                    )
                self._version = version
            return self._page


def _waiting(message: str) -> str:
    """Shown until there is something to show; reloads by itself."""
    return (
        '<!doctype html><html lang="en"><meta '
        'charset="utf-8"><meta http-equiv="refresh" content="2">'
        '<meta name="color-scheme" content="light dark"><title>dampen report</title>'
        '<body style="font:16px system-ui;max-width:45rem;margin:4rem auto;padding:0 1rem">'
        "<h1>Waiting for runs</h1><pre "
        f"style='white-space:pre-wrap'>{html.escape(message)}</pre></body></html>"
    )


class _Server(ThreadingHTTPServer):
    """Bounded in what clients can make it do: so many threads, so long a queue, and not a word
    about broken ones."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any):
        self._free = threading.BoundedSemaphore(THREADS)
        self._ends: dict[Any, float] = {}  # connection -> when its time is over
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, as soon as one is free; the others wait until those inside are done or
        silent too long."""
        while not self._free.acquire(timeout=0.1):
            self.service_actions()
        self._ends[request] = time.monotonic() + SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._free.release()

    def service_actions(self) -> None:
        """End the requests whose time is over: a client that sends a byte now and
        then is never silent."""
        now = time.monotonic()
        for connection, end in list(self._ends.items()):
            if now > end:
                with contextlib.suppress(OSError):  # already closed
                    connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or spoke no HTTP, is its own business; an
        error of ours is shown."""
        if not isinstance(sys.exception(), OSError | ValueError):
            super().handle_error(request, client_address)


def make_server(
    runs: Sequence[Path | str], port: int = 0, split: bool = False
) -> ThreadingHTTPServer:
    """A server on the loopback address; port 0 takes a free one. Call `serve_forever` on it.

    Args:
        runs: the folders, packs or bench results to read.
        port: 0 takes a free one.
        split: make one table per protocol.
    """
    page = LivePage(runs, split)

    class Handler(BaseHTTPRequestHandler):
        timeout = SECONDS  # of silence

        def do_GET(self) -> None:
            # Only by our own names: another site must not reach us through a
            # name that it points here.
            if self.headers.get("Host", "").rsplit(":", 1)[0] not in (HOST, "localhost"):
                self._send(
                    HTTPStatus.FORBIDDEN,
                    "text/plain",
                    "This page is served to 127.0.0.1 and localhost alone.",
                )
            elif self.path == "/":
                self._send(HTTPStatus.OK, "text/html", page.get())
            elif self.path == "/version":
                self._send(HTTPStatus.OK, "text/plain", fingerprint(page.runs))
            else:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", "There is only one page here: /")

        def _send(self, status: HTTPStatus, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing per request."""

    try:
        server = _Server((HOST, port), Handler)
    except OSError as error:
        raise LabError(
            f"Port {port} cannot be used: {error}. Pass another --port, or 0 for any free one."
        ) from error
    return server


def address(server: ThreadingHTTPServer) -> str:
    """Where to look.

    Args:
        server: a server from `make_server`.
    """
    return f"http://{HOST}:{server.server_address[1]}/"
