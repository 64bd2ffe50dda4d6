"""One process of a two-process training under Accelerate; run by test_accelerate.py.

python -m torch.distributed.run --nproc_per_node=2 tests/integrations/accelerate_worker.py FOLDER

Every kind of method at accumulation 1 and 4, in one go and resumed in the middle. Both ranks see the same batch and
draw the same numbers, so that the mean of their gradients is the gradient of one process. Then the same with half a
batch each, where ranks draw differently.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn import functional as F

import dampen
from dampen.integrations import accelerate as integration
from tests.integrations.tiny import METHODS

HALF = 4


def vit(seed=0):
    torch.manual_seed(seed)
    return dampen.models.ViT(
        image_size=8, patch_size=4, classes=3, width=16, depth=2, heads=2, mlp=16
    ).train()


def batches():
    """Synthetic: 8 batches of 4 images."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4) % 3) for _ in range(8)]


def prepared(kind, accumulation, seed=0):
    """A model under a new accelerator, as a user would make it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model, methods = vit(seed), METHODS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if reg is not None:
        integration.install(accelerator, reg)
    return accelerator, model, wrapped, reg, optimizer


def train(wrapped, reg, accelerator, optimizer, accumulation, start=0, rank=0, ranks=1, save=None):
    """The loss of each micro-batch, the mean over ranks; each of several `ranks` takes its part of every batch."""
    losses = []
    for step, (x, y) in list(enumerate(batches()))[start:]:
        if save is not None and step == HALF:
            accelerator.save_state(str(save))
        torch.manual_seed(10 * step + rank)
        part = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
        with accelerator.accumulate(wrapped):
            if reg is None:
                loss = F.cross_entropy(wrapped(x[part]), y[part])
            else:
                reg.progress(step // accumulation / (8 // accumulation))
                loss, _ = reg.loss(
                    lambda x=x[part]: wrapped(x), lambda out, y=y[part]: F.cross_entropy(out, y)
                )
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    return losses


def run(folder, kind, accumulation):
    """Losses and weights in one go, and those of a run that was resumed in the middle from other weights."""
    folder, found = Path(folder), []
    for resume in (False, True):
        accelerator, model, wrapped, reg, optimizer = prepared(
            kind, accumulation, seed=5 if resume else 0
        )
        if resume:
            accelerator.load_state(str(folder))
        options = {"start": HALF} if resume else {"save": folder}
        losses = train(wrapped, reg, accelerator, optimizer, accumulation, **options)
        found.append(
            {"losses": losses, "weights": {n: p.clone() for n, p in model.state_dict().items()}}
        )
        accelerator.free_memory()
    return found


def main(folder):
    torch.set_num_threads(1)
    results = {}
    for kind in METHODS:
        for accumulation in (1, 4):
            results[f"{kind}-{accumulation}"] = run(
                Path(folder) / f"{kind}-{accumulation}", kind, accumulation
            )
        accelerator, model, wrapped, reg, optimizer = prepared(kind, 2)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        losses = train(wrapped, reg, accelerator, optimizer, 2, rank=rank, ranks=ranks)
        results[f"{kind}-halves"] = {
            "losses": losses,
            "weights": model.state_dict(),
            "ranks": ranks,
        }
    if accelerator.is_main_process:
        torch.save(results, Path(folder) / "out.pt")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
