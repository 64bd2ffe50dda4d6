"""The processes of a trial on several devices: one rank each, rank 0 speaks, all stop together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from dampen.lab.errors import LabError, portable
from dampen.lab.trial import Trial


def launch(
    train: Callable[..., Any],
    trial: Trial,
    folder: Path,
    execution: Any,
    report: Callable[..., None],
    stop: Callable[[], bool],
) -> Any:
    """Run `train` in one process per device and return what rank 0 returned; if one rank dies, all are stopped."""
    context = multiprocessing.get_context("spawn")
    flag = context.Event()
    port = _free_port()
    ranks, pipes = [], []
    for rank in range(trial.train.devices):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank, args=(train, trial, folder, execution, rank, port, theirs, flag), name=f"rank {rank}"
        )
        process.start()
        theirs.close()
        ranks.append(process)
        pipes.append(ours)
    result: Any = None
    problem: BaseException | None = None
    try:
        open_pipes = list(pipes)
        while open_pipes:
            if stop():
                flag.set()
            for ready in wait(open_pipes, timeout=0.2):
                pipe: Any = ready
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    open_pipes.remove(pipe)
                    rank = pipes.index(pipe)
                    ranks[rank].join(10)
                    if ranks[rank].exitcode != 0 and problem is None:
                        problem = LabError(
                            f"rank {rank} died with exit code {ranks[rank].exitcode}; run again to resume."
                        )
                        open_pipes = []
                    continue
                if kind == "event":
                    report(value)
                elif kind == "result" and pipe is pipes[0]:
                    result = value
                elif kind == "error":
                    problem = problem or value
                    open_pipes = [] if not flag.is_set() else open_pipes
    finally:
        for process in ranks:
            if problem is not None and not flag.is_set():
                process.terminate()
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
    if problem is not None:
        raise problem
    return result


def _rank(
    train: Callable[..., Any], trial: Trial, folder: Path, execution: Any, rank: int, port: int, pipe: Any, flag: Any
) -> None:
    """The life of one rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    world = trial.train.devices
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    try:
        result = train(
            trial, folder, execution, lambda event: pipe.send(("event", event)) if rank == 0 else None, flag.is_set
        )
        pipe.send(("result", result))
    except Exception as error:  # any failure goes to the parent, which reports it
        pipe.send(("error", portable(error)))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
