"""FSDP2 in two gloo processes: the state of learned values and starting weights, and weights that
are freed early."""

import functools
import tempfile
from pathlib import Path

import pytest
import torch

import dampen
from dampen.checking import distributed

LEARNING = [
    functools.partial(dampen.Mixout, 0.5),
    functools.partial(dampen.HardMasking, 0.2, top=0.3, learn=["rate", "top"]),
    functools.partial(dampen.BlurredAttention, 5, 1.0, learn=True),
]
READING = [
    functools.partial(dampen.ExplicitMixout, 0.1),
    functools.partial(dampen.ExplicitDropout, query=0.1),
    functools.partial(dampen.ExplicitDropout, value=0.1),
    functools.partial(dampen.ExplicitDropout, attended_value=0.1),
    functools.partial(dampen.ExplicitDropout, ffn=0.1),
    functools.partial(dampen.AroraDropout, value=0.1),
]


def work(rank, folder):
    """What each process found, one line per failure."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    failures = []
    checks = [(make, distributed.fsdp_state_is_whole) for make in LEARNING]
    checks += [(make, distributed.fsdp_by_linear_layer) for make in READING]
    for make, check in checks:
        try:
            check(make, rank)
        except Exception as error:  # every failure is reported, with its method
            failures.append(
                f"{check.__name__}, {make().name} {make.keywords}: {type(error).__name__}: {error}"
            )
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    Path(folder, f"rank{rank}.txt").write_text("\n".join(failures))


@pytest.mark.slow
def test_states_move_and_freed_weights_are_refused():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=2)
        found = [Path(folder, f"rank{rank}.txt").read_text() for rank in range(2)]
    assert found == ["", ""]
