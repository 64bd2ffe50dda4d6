"""Two-pass methods in two processes: batch norm, DDP and FSDP2, with the prefix shared."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dampen

Y = torch.tensor([0, 1, 2, 0])


class Normed(nn.Module):
    """A vision model with batch norm before and after its blocks."""

    def __init__(self):
        super().__init__()
        self.vit = dampen.models.ViT(
            image_size=8, patch_size=4, classes=3, width=16, depth=4, heads=2, mlp=16
        )
        self.before, self.after = nn.BatchNorm2d(3), nn.BatchNorm1d(3)

    def forward(self, x):
        return self.after(self.vit(self.before(x)))


def make(full=False):
    torch.manual_seed(0)
    model = Normed()
    methods = [dampen.DropKey(0.4), dampen.HeadDiversity(0.5), dampen.RDrop(1.0)]
    reg = dampen.regularize(model, methods, "vit.blocks.[23]")
    if full:
        reg.prefix.why = "the test wants two full passes"
    return model, reg


def step(model, reg, run, rank):
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(rank))
    torch.manual_seed(100 + rank)
    loss, _ = reg.loss(lambda: run(x), lambda out: F.cross_entropy(out, Y))
    loss.backward()


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    alone = []  # what each rank would have by itself, in two full passes
    for r in range(2):
        model, reg = make(full=True)
        step(model, reg, model, r)
        alone.append(gradients(model))
    expected = {n: (alone[0][n] + alone[1][n]) / 2 for n in alone[0]}

    model, reg = make()
    step(model, reg, DistributedDataParallel(model), rank)
    assert reg.prefix.shared == ["vit.blocks.0", "vit.blocks.1"], reg.prefix.why
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=f"DDP {name}"
        )

    model, reg = make()
    for block in model.vit.blocks:
        fully_shard(block)
    fully_shard(model)
    step(model, reg, model, rank)
    assert reg.prefix.shared == ["vit.blocks.0", "vit.blocks.1"], reg.prefix.why
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(
            gradient.full_tensor(), expected[name], rtol=1e-4, atol=1e-6, msg=f"FSDP {name}"
        )
    dist.destroy_process_group()
    Path(folder, f"done{rank}").write_text("")


@pytest.mark.slow
def test_shared_prefix_under_ddp_and_fsdp_equals_two_full_passes():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=2)
        assert len(list(Path(folder).glob("done*"))) == 2
