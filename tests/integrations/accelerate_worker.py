"""One process of a two-process training under Accelerate; run by test_accelerate.py.

python -m torch.distributed.run --nproc_per_node=2 tests/integrations/accelerate_worker.py KIND FOLDER
"""

import sys

import torch
from accelerate import Accelerator
from torch.nn import functional as F

import dampen
from dampen.integrations import accelerate as integration


def vit():
    torch.manual_seed(0)
    return dampen.models.ViT(image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16).train()


def batches():
    """Synthetic: 8 batches of 4 images."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 3) for _ in range(8)]


def methods(kind):
    if kind == "penalty":
        return [dampen.ExplicitDropout(value=3.0, ffn=dampen.linear(5.0, 1.0, along="progress"))]
    if kind == "two_pass":
        return [dampen.DropKey(0.3), dampen.RDrop(2.0)]
    return [dampen.DropKey(0.3)]


def train(model, reg, accelerator, optimizer, accumulation, rank=0, ranks=1):
    """Each rank takes its part of every batch."""
    losses = []
    for step, (x, y) in enumerate(batches()):
        torch.manual_seed(10 * step + rank)
        part = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
        reg.progress(step // accumulation / (8 // accumulation))
        with accelerator.accumulate(model):
            loss, _ = reg.loss(lambda x=x[part]: model(x), lambda out, y=y[part]: F.cross_entropy(out, y))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def main(kind, folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = vit()
    reg = dampen.regularize(model, methods(kind))
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    integration.install(accelerator, reg)
    losses = train(wrapped, reg, accelerator, optimizer, 2, accelerator.process_index, accelerator.num_processes)
    if accelerator.is_main_process:
        torch.save({"losses": losses, "weights": model.state_dict(), "ranks": accelerator.num_processes}, folder)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
