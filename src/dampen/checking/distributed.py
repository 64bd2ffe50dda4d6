"""Contract 13: two processes equal one. DDP and FSDP2 over gloo, one launch for many methods."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dampen.checking.subjects import (
    IMAGE,
    SUBJECTS,
    Attached,
    ContractBroken,
    Make,
    Subject,
    require,
    same,
    subject_for,
    with_example,
)

Check = Callable[[Make, int], None]


def check_distributed(makes: Sequence[Make], processes: int = 2) -> None:
    """Run every regularizer under DDP and FSDP2 in `processes` processes; raise `ContractBroken`
    with all that differ.

    Deterministic methods must have the gradients of one process on the joined batch. Stochastic
    ones may draw differently on each rank; their weights must stay equal over several steps.
    `makes` must be picklable: classes or functions of a module.

    Args:
        makes: one per regularizer.
        processes: how many.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (processes, list(makes), folder), nprocs=processes)
        reports = sorted(Path(folder).glob("rank*.txt"))
        failures = [line for report in reports for line in report.read_text().splitlines()]
    if len(reports) != processes:
        raise ContractBroken(f"only {len(reports)} of {processes} processes came to the end")
    if failures:
        raise ContractBroken("\n".join(failures))


def _work(rank: int, processes: int, makes: list[Make], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=processes)
    failures = []
    for make in map(with_example, makes):
        for check in CHECKS:
            try:
                check(make, rank)
            except Exception as error:  # every failure is reported, with its method
                failures.append(
                    f"{check.__name__}, {make().name}, rank {rank}: {type(error).__name__}: {error}"
                )
            dist.barrier()
    dist.destroy_process_group()
    Path(folder, f"rank{rank}.txt").write_text("\n".join(f.replace("\n", " ") for f in failures))


def ddp_equals_one_process(make: Make, rank: int) -> None:
    """Gradients of a deterministic method under DDP are those of one process on the joined
    batch.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        rank: of this process.
    """
    method = make()
    if method.stochastic or method.passes > 1:
        return
    alone, trial = Attached(make, _vit(make)), Attached(make, _vit(make))
    images = _images()
    alone.step(images)
    wrapped = DistributedDataParallel(trial.model)
    trial.step(_share(images, rank), run=wrapped)
    expected = alone.gradients()
    for name, gradient in trial.gradients().items():
        same(gradient, expected[name], f"gradient of {name} under DDP", 1e-4)


def ddp_stays_in_step(make: Make, rank: int) -> None:
    """Three steps under DDP: nothing hangs, all weights stay equal on all ranks.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        rank: of this process.
    """
    trial = Attached(make, _vit(make))
    wrapped = DistributedDataParallel(trial.model)
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    for step in range(3):
        trial.reg.progress(step / 3)
        trial.step(_share(_images(), rank), seed=10 * step + rank, run=wrapped)
        optimizer.step()
    _require_equal_on_all_ranks(trial.model)


def fsdp_trains(make: Make, rank: int) -> None:
    """fully_shard after regularize works; remove() afterwards refuses and leaves everything as it
    is.

    Args:
        make: makes the regularizer: a class, or a function without arguments.
        rank: of this process.
    """
    trial = _sharded_by_blocks(make)
    optimizer = torch.optim.SGD(trial.model.parameters(), lr=0.1)
    for step in range(2):
        loss, _, _ = trial.step(_share(_images(), rank), seed=step)
        require(torch.isfinite(loss), "the loss under FSDP is not finite")
        optimizer.step()
    try:
        trial.reg.remove()
    except RuntimeError as refusal:
        require("FSDP" in str(refusal), f"remove() after fully_shard says: {refusal}")
    else:
        raise ContractBroken("remove() after fully_shard did not refuse")
    trial.step(_share(_images(), rank), seed=9)


def fsdp_state_is_whole(make: Make, rank: int) -> None:
    """`reg.state_dict()` of a sharded model loads into one that is not, and the other way, to the
    bit."""
    alone, trained = Attached(make, _vit(make)), _sharded_by_blocks(make)
    optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.5)
    trained.step(_images(), seed=3)
    optimizer.step()
    state = trained.reg.state_dict()
    alone.reg.load_state_dict(state)
    other = _sharded_by_blocks(make)
    other.reg.load_state_dict(alone.reg.state_dict())
    for name, value in state["parameters"].items():
        kind = type(value)
        require(kind is Tensor, f"one process cannot load the state of {name}, a {kind.__name__}")
        for where, found in {"one process": alone, "a sharded model": other}.items():
            loaded = found.reg.state_dict()["parameters"][name]
            same(loaded, value, f"{name}, loaded into {where}", 0.0)


def fsdp_by_linear_layer(make: Make, rank: int) -> None:
    """With every linear layer a unit of its own, the loss is that of one process, or the method
    refuses in words."""
    alone, trial = Attached(make, _vit(make)), Attached(make, _vit(make))
    for block in trial.model.blocks:  # type: ignore[union-attr]
        for layer in [m for m in block.modules() if isinstance(m, nn.Linear)]:
            fully_shard(layer)
        fully_shard(block)
    fully_shard(trial.model)
    expected = alone.step(_images(), seed=4)[0]
    try:
        loss = trial.step(_images(), seed=4)[0]
    except RuntimeError as refusal:
        understood = "fully_shard(block)" in str(refusal)
        require(understood, f"sharded by linear layers, it says: {refusal}")
        return
    same(loss, expected, "the loss sharded by linear layers and in one process", 1e-5)


def _sharded_by_blocks(make: Make) -> Attached:
    trial = Attached(make, _vit(make))
    for block in trial.model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    fully_shard(trial.model)
    return trial


CHECKS: tuple[Check, ...] = (
    ddp_equals_one_process, ddp_stays_in_step,
    fsdp_trains, fsdp_state_is_whole, fsdp_by_linear_layer,
)  # fmt: skip


def _vit(make: Make) -> Subject:
    return subject_for(make, SUBJECTS["vit"])


def _images() -> dict[str, Tensor]:
    """A joined batch whose two halves get the labels that they have in the whole (0 to 4, then 0 to
    4 again)."""
    return {"images": torch.randn(10, 3, IMAGE, IMAGE, generator=torch.Generator().manual_seed(5))}


def _share(batch: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    return {k: v.chunk(2)[rank] for k, v in batch.items()}


def _require_equal_on_all_ranks(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        low, high = p.detach().clone(), p.detach().clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        require(torch.equal(low, high), f"{name} differs between ranks")
