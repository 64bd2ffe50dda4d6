"""PatchTST (2211.14730) on a time series: a tiny one with random weights, on a synthetic series of seasons and noise.

    dampen audit examples/patchtst.py:build
    dampen compare examples/patchtst.py:train --methods "drop_key, drop_head, feed_forward_dropout" --metric mse:min

For real: your series in `series` (a CSV as a tensor of time x channels), `context_length=512`, `prediction_length=96` and
the sizes of `PatchTSTConfig` as published.
"""

import torch
from torch import Tensor
from transformers import PatchTSTConfig, PatchTSTForPrediction

import dampen

PAST, FUTURE, CHANNELS = 48, 12, 2


def series(steps: int = 600) -> Tensor:
    """Synthetic: two seasons, a walk and noise."""
    draw = torch.Generator().manual_seed(0)
    t = torch.arange(steps).unsqueeze(-1)
    seasons = torch.sin(t / torch.tensor([3.8, 3.8])) + 0.5 * torch.sin(
        t / torch.tensor([11.0, 7.0])
    )
    walk = 0.05 * torch.randn(steps, CHANNELS, generator=draw).cumsum(0)
    return seasons + walk + 0.3 * torch.randn(steps, CHANNELS, generator=draw)


def windows(part: Tensor, every: int = 2) -> tuple[Tensor, Tensor]:
    """(past, future) pairs of a part of the series; the parts follow each other in time."""
    found = part.unfold(0, PAST + FUTURE, every).transpose(1, 2)
    return found[:, :PAST], found[:, PAST:]


def small() -> PatchTSTForPrediction:
    return PatchTSTForPrediction(PatchTSTConfig(
        num_input_channels=CHANNELS, context_length=PAST, prediction_length=FUTURE, patch_length=8,
        patch_stride=4, d_model=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        attention_dropout=0.1, ff_dropout=0.1, loss="mse",
    ))  # fmt: skip


def build(batch: int = 4) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """For the audit: the model, and a batch with its future."""
    past, future = windows(series())
    return small(), {"past_values": past[:batch], "future_values": future[:batch]}


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """The usual loop; curves for `dampen audit runs/...` are logged after each epoch."""
    fit, valid, test = (windows(part) for part in series().split([360, 120, 120]))
    model = small()
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 1e-3))
    epochs = trial.params.get("epochs", 20)
    for epoch in range(epochs):
        model.train()
        for i, rows in enumerate(batches := torch.randperm(len(fit[0])).split(16)):
            reg.progress((epoch + i / len(batches)) / epochs)
            loss, terms = reg.loss(
                lambda: model(past_values=fit[0][rows], future_values=fit[1][rows]),  # noqa: B023
                lambda out: out.loss,
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, *valid))
    return {"test": measure(model, *test), "valid": measure(model, *valid)}


@torch.no_grad()
def measure(model: torch.nn.Module, past: Tensor, future: Tensor) -> dict[str, float]:
    """Mean squared and absolute error of the forecast."""
    error = model.eval()(past_values=past).prediction_outputs - future
    return {"mse": error.square().mean().item(), "mae": error.abs().mean().item()}
