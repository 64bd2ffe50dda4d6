"""The processes of a trial on several devices: one rank each, rank 0 speaks, all stop together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from dampen.studies.errors import Interrupted, LabError, portable
from dampen.studies.processes import start, stop_on_signals
from dampen.studies.run import Run


def launch(
    train: Callable[..., Any],
    trial: Run,
    folder: Path,
    execution: Any,
    report: Callable[..., None],
    stop: Callable[[], bool],
) -> Any:
    """Run `train` in one process per device and return what rank 0 returned; if one rank fails, all are stopped."""
    port = _free_port()
    ranks: list[tuple[Any, Any]] = []
    try:
        for rank in range(trial.train.devices):
            ranks.append(start(_rank, train, trial, folder, execution, rank, port))
        result = _follow(ranks, report, stop)
    except Interrupted:
        raise  # every rank stops by itself
    except BaseException:
        for process, _ in ranks:
            process.kill()
        raise
    finally:
        for process, _ in ranks:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
    return result


def _follow(ranks: list[tuple[Any, Any]], report: Callable[..., None], stop: Callable[[], bool]) -> Any:
    """Pass on what rank 0 reports, pass on the wish to stop, and raise what any rank raised."""
    processes = {pipe: process for process, pipe in ranks}
    result, stopping = None, False
    while processes:
        if not stopping and stop():
            stopping = True
            for pipe in processes:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    pipe.send("stop")
        ready: list[Any] = wait(list(processes), timeout=0.2)
        for pipe in ready:
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                process = processes.pop(pipe)
                process.join(10)
                if process.exitcode != 0:
                    raise LabError(f"A rank died with exit code {process.exitcode}; run again to resume.") from None
                continue
            if kind == "event":
                report(value)
            elif kind == "error":
                raise value
            elif pipe is ranks[0][1]:
                result = value
    return result


def _rank(pipe: Any, train: Callable[..., Any], trial: Run, folder: Path, execution: Any, rank: int, port: int) -> None:
    """The life of one rank. The parent says nothing but 'stop'; a parent that is gone means the same."""
    stop_on_signals(signal.SIG_IGN)  # the parent decides when to stop
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(trial.train.devices)}

    def tell(event: dict[str, Any]) -> None:
        if rank == 0:
            pipe.send(("event", event))

    try:
        pipe.send(("result", train(trial, folder, execution, tell, pipe.poll)))
    except Exception as error:  # any failure goes to the parent, which reports it
        pipe.send(("error", portable(error)))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        out: int = probe.getsockname()[1]
        return out
