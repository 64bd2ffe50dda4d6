"""Several devices: one process per device, Lightning Fabric between them, and sharded states."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.studies.errors import Interrupted, LabError, portable
from dampen.studies.processes import start, stop_on_signals
from dampen.studies.run import Run, TrainOptions

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def make_fabric(options: TrainOptions, accelerator: str) -> Fabric:
    """Fabric for these options; trials on one device share theirs, which keeps nothing of a trial
    (fp16 has a scaler).

    Making one reads the entry points of all installed packages, and the trials of a demo are short.
    """
    shared = options.devices == 1 and options.precision != "fp16"
    make = _shared_fabric if shared else _make_fabric
    return make(accelerator, options.devices, options.strategy, options.precision)


def _make_fabric(accelerator: str, devices: int, strategy: str, precision: str) -> Fabric:
    """Autocast leaves the inputs in float32, and fp16 works on the CPU too."""
    declare_torchvision_operators()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.precision.amp import MixedPrecision
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    class Autocast(MixedPrecision):
        def convert_input(self, data: Any) -> Any:
            return data

    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # no banner per process
    if accelerator == "auto":
        accelerator = (
            "cuda"
            if torch.cuda.is_available()
            else "mps"
            if torch.backends.mps.is_available()
            else "cpu"
        )
    spread: Any = "auto"
    if devices > 1 and strategy == "ddp":
        # scheduled rates are buffers, equal on all ranks; copying them in each pass would break
        # two-pass methods
        spread = DDPStrategy(forward_sync_buffers=False)
    elif devices > 1:
        spread = ModelParallelStrategy(_shard, data_parallel_size=devices, tensor_parallel_size=1)
    plugins: list[Any] = []
    if precision != "fp32":
        plugins.append(
            Autocast("bf16-mixed" if precision == "bf16" else "16-mixed", device=accelerator)
        )
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=spread, plugins=plugins)
    fabric.launch()
    return fabric


_shared_fabric = cache(_make_fabric)


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    """FSDP2: each block is one unit, the rest of the model another."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, nn.ModuleList) and not any(
            isinstance(child, nn.ModuleList) for child in module
        ):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])  # in place
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP holds the weights in pieces."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(p, DTensor) for p in model.parameters())


def whole_model_state(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict with whole tensors on the CPU, on every rank."""
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state: dict[str, Any] = get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True, cpu_offload=False)
        )
        return {k: v.detach().cpu().clone() for k, v in state.items()}
    return {k: v.detach().cpu().clone() for k, v in model.state_dict().items()}


def load_model_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `whole_model_state` gave, sharded or not."""
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        set_model_state_dict(model, dict(state), options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def whole_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state with whole tensors."""
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        return get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
    return optimizer.state_dict()


def load_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Load what `whole_optimizer_state` gave."""
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        set_optimizer_state_dict(
            model, optimizer, state, options=StateDictOptions(full_state_dict=True)
        )
    else:
        optimizer.load_state_dict(state)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP may hold in pieces."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_pieces_like(tensor: Tensor, example: Tensor) -> Tensor:
    """`tensor` cut up as `example` is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(example, DTensor):
        return tensor
    return distribute_tensor(tensor.to(example.device), example.device_mesh, example.placements)


def all_ranks(fabric: Fabric, value: Any) -> list[Any]:
    """`value` of every rank, in the order of the ranks."""
    if fabric.world_size == 1:
        return [value]
    values: list[Any] = [None] * fabric.world_size
    torch.distributed.all_gather_object(values, value)
    return values


def gather_rows(fabric: Fabric, rows: Tensor) -> Tensor:
    """Rows that were dealt out in turn (rank r holds r, r + world, ...), in their old order on
    every rank.
    """
    if fabric.world_size == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(gathered, rows.contiguous())
    return torch.stack(gathered, dim=1).flatten(0, 1)


def equal_buffers(fabric: Fabric, model: nn.Module) -> None:
    """Give every rank the buffers of rank 0 (batch-norm statistics differ between ranks)."""
    if fabric.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, 0)


def launch(
    train: Callable[..., Any],
    trial: Run,
    folder: Path,
    execution: Any,
    report: Callable[..., None],
    stop: Callable[[], bool],
) -> Any:
    """Run `train` in one process per device and return what rank 0 returned; if one rank fails, all
    are stopped.
    """
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


def _follow(
    ranks: list[tuple[Any, Any]], report: Callable[..., None], stop: Callable[[], bool]
) -> Any:
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
                    raise LabError(
                        f"A rank died with exit code {process.exitcode}; run again to resume."
                    ) from None
                continue
            if kind == "event":
                report(value)
            elif kind == "error":
                raise value
            elif pipe is ranks[0][1]:
                result = value
    return result


def _rank(
    pipe: Any,
    train: Callable[..., Any],
    trial: Run,
    folder: Path,
    execution: Any,
    rank: int,
    port: int,
) -> None:
    """The life of one rank. The parent says nothing but 'stop'; a parent that is gone means the
    same.
    """
    stop_on_signals(signal.SIG_IGN)  # the parent decides when to stop
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": "0",
    }
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
