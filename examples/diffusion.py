"""A small diffusion transformer (DiT, 2212.09748) that learns to remove noise from scikit-learn's digits.

    dampen audit examples/diffusion.py:build
    dampen compare examples/diffusion.py:train --methods "drop_path(rate=0.1), drop_key, drop_head" --metric mse:min

For real: latents of your autoencoder in `digits`, `DiTTransformer2DModel` of diffusers or your own blocks, and a sampler.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dampen


class Block(nn.Module):
    """Attention and feed-forward, both scaled and shifted by the noise level (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.modulate = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, gate1, d, e, gate2 = self.modulate(c).unsqueeze(1).chunk(6, -1)
        h = self.norm(x) * (1 + a) + b
        x = x + gate1 * self.attn(h, h, h, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm(x) * (1 + d) + e)


class DiT(nn.Module):
    """Patches of 2 x 2 of a noisy 8 x 8 image and its noise level; the output is the noise."""

    def __init__(self, width: int = 32, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.patches, self.level = nn.Linear(4, width), nn.Linear(2, width)
        self.position = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        tokens = self.patches(F.pixel_unshuffle(x, 2).flatten(2).mT) + self.position
        c = F.silu(self.level(torch.stack([t.cos(), t.sin()], -1)))
        for block in self.blocks:
            tokens = block(tokens, c)
        return F.pixel_shuffle(self.head(tokens).mT.unflatten(2, (4, 4)), 2)


def noisy(x: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """cos(t) x + sin(t) noise, t and the noise; with a seed always the same, for measuring."""
    draw = None if seed is None else torch.Generator().manual_seed(seed)
    t = torch.rand(len(x), generator=draw) * torch.pi / 2
    noise = torch.randn(x.shape, generator=draw)
    return t.cos().view(-1, 1, 1, 1) * x + t.sin().view(-1, 1, 1, 1) * noise, t, noise


def digits() -> Tensor:
    return torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1


def build(batch: int = 4) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """For the audit: the model, and a batch."""
    return DiT(), noisy(digits()[:batch], seed=0)[:2]


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """The usual loop; curves for `dampen audit runs/...` are logged after each epoch."""
    fit, valid, test = digits()[:1200].split([400, 400, 400])
    model = DiT()
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 2e-3))
    epochs = trial.params.get("epochs", 20)
    for epoch in range(epochs):
        model.train()
        for i, rows in enumerate(batches := torch.randperm(len(fit)).split(32)):
            reg.progress((epoch + i / len(batches)) / epochs)
            x, t, noise = noisy(fit[rows])
            loss, terms = reg.loss(lambda: model(x, t), lambda out: F.mse_loss(out, noise))  # noqa: B023
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, valid))
    return {"test": measure(model, test), "valid": measure(model, valid)}


@torch.no_grad()
def measure(model: nn.Module, x: Tensor) -> dict[str, float]:
    """Mean squared error of the noise that the model sees."""
    given, t, noise = noisy(x, seed=1)
    return {"mse": F.mse_loss(model.eval()(given, t), noise).item()}
