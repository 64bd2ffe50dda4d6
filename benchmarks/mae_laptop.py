"""A masked autoencoder at laptop scale, pretrained and fine-tuned on CIFAR-10, with and without Token Graying.

    python -m benchmarks.mae_laptop --data-dir DATA [--partial] [--seeds 5] [--json
    records/always_skip_attention/mae.json]

Always Skip Attention (arXiv 2505.01996) fine-tunes an MAE from 83.0 to 83.2 % on ImageNet-1K with DCT graying. Here a
small ViT guesses hidden patches of unlabeled images, then learns to classify fewer labeled ones; graying acts in both
parts, so the autoencoder reconstructs the grayed image. Rows of one seed share weights at the start, batches and
hidden patches. About 40 s per row and seed on one core. The lab trains classifiers, so this stands beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dampen
from dampen.diagnostics.conditioning import measure_conditioning
from dampen.lab.build import derive
from dampen.lab.data import load
from dampen.lab.timing import machine

SIZES = {"width": 64, "depth": 4, "heads": 4, "mlp": 128}
DECODER = {"decoder_width": 32, "decoder_depth": 1, "decoder_heads": 2, "decoder_mlp": 64}
ROWS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "dct 0.95": {"kind": "dct", "eps": 0.95},
    "svd 0.7": {"kind": "svd", "eps": 0.7},
}
PRETRAIN = {"images": 4000, "epochs": 4, "batch": 64, "lr": 1.5e-3}
FINETUNE = {"images": 1500, "epochs": 6, "batch": 64, "lr": 1e-3}
TEST = 2000


def batches(count: int, size: int, epochs: int, seed: int, name: str) -> Iterator[Tensor]:
    """Shuffled indices, the same for every row of a seed."""
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(derive(seed, name, epoch))
        yield from torch.randperm(count, generator=generator)[: count // size * size].split(size)


def optimizer_for(model: nn.Module, lr: float, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)


def pretrain(
    images: Tensor, graying: dict[str, Any] | None, seed: int
) -> tuple[dampen.models.MaskedAutoencoder, float]:
    """An autoencoder after pretraining, and its mean loss over the last epoch."""
    torch.manual_seed(derive(seed, "init"))
    mae = dampen.models.MaskedAutoencoder(patch_size=4, **SIZES, **DECODER)
    reg = dampen.regularize(mae, dampen.TokenGraying(**graying)) if graying else None
    size, epochs = PRETRAIN["batch"], PRETRAIN["epochs"]
    steps = len(images) // size * epochs
    optimizer, schedule = optimizer_for(mae, PRETRAIN["lr"], steps)
    noise = torch.Generator().manual_seed(derive(seed, "hide"))
    losses = []
    for indices in batches(len(images), size, epochs, seed, "pretrain"):
        loss = mae(images[indices], noise=torch.rand(size, 64, generator=noise)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(mae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    if reg is not None:
        reg.remove()
    return mae, statistics.fmean(losses[-(steps // epochs) :])


def finetune(model: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
    """Train all of a classifier, in place."""
    size, epochs = FINETUNE["batch"], FINETUNE["epochs"]
    optimizer, schedule = optimizer_for(model, FINETUNE["lr"], len(images) // size * epochs)
    model.train()
    for indices in batches(len(images), size, epochs, seed, "finetune"):
        F.cross_entropy(model(images[indices]), labels[indices]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = sum(
        (model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(256), labels.split(256), strict=True)
    )
    return right / len(labels)


def run(data: Any, graying: dict[str, Any] | None, seed: int, pretrained: bool = True) -> dict[str, Any]:
    """Pretrain, fine-tune, test."""
    began = time.process_time()
    train = data.train.batch(torch.arange(PRETRAIN["images"]))
    test = data.test.batch(torch.arange(TEST))
    images = train["inputs"][0]
    result: dict[str, Any] = {"seed": seed}
    if pretrained:
        mae, result["reconstruction"] = pretrain(images, graying, seed)
    else:
        torch.manual_seed(derive(seed, "init"))
        mae = dampen.models.MaskedAutoencoder(patch_size=4, **SIZES, **DECODER)
    torch.manual_seed(derive(seed, "head"))
    model = mae.to_classifier(classes=10)
    if graying:
        dampen.regularize(model, dampen.TokenGraying(**graying))
    labeled = FINETUNE["images"]
    finetune(model, images[:labeled], train["target"][:labeled], seed)
    result["accuracy"] = accuracy(model, test["inputs"][0], test["target"])
    layers = measure_conditioning(model, test["inputs"][0], samples=16).layers
    result["ln_condition"] = [{kind: round(c.log_mean, 3) for kind, c in layer.conditions.items()} for layer in layers]
    result["cpu_seconds"] = round(time.process_time() - began, 1)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="where CIFAR-10 lies; default: $DAMPEN_DATA")
    parser.add_argument("--partial", action="store_true", help="accept an incomplete copy of the data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record here, and go on from it where it exists")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    need = {"limit": PRETRAIN["images"] * 10 // 9 + 10, "train_fraction": 0.9, "test_limit": TEST}
    data = load("cifar10", data_dir=options.data_dir, partial=options.partial, **need)
    done = json.loads(options.json.read_text())["rows"] if options.json and options.json.exists() else {}
    rows: dict[str, list[dict[str, Any]]] = {name: done.get(name, []) for name in (*ROWS, "plain, not pretrained")}
    for seed in range(options.seeds):
        for name, found in rows.items():
            if any(r["seed"] == seed for r in found):
                continue
            found.append(run(data, ROWS.get(name), seed, pretrained="not pretrained" not in name))
            print(name, json.dumps({k: v for k, v in found[-1].items() if k != "ln_condition"}), flush=True)
            if options.json:
                write(options.json, rows, data.info)


def write(path: Path, rows: dict[str, list[dict[str, Any]]], info: dict[str, Any]) -> None:
    record = {
        "command": "python -m benchmarks.mae_laptop --data-dir DATA --partial",
        "pretrain": PRETRAIN,
        "finetune": FINETUNE,
        "model": {"patch_size": 4, **SIZES, **DECODER, "hide": 0.75},
        "test_images": TEST,
        "data": {key: info[key] for key in ("name", "partial", "departures") if key in info},
        "machine": machine(),
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
