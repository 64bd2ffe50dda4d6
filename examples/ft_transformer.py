"""FT-Transformer (2106.11959) on a table: each number becomes a token. scikit-learn's diabetes data, 442 patients.

    dampen audit examples/ft_transformer.py:build
    dampen compare examples/ft_transformer.py:train --methods "drop_key, hidden_dropout, drop_path" --metric rmse:min

For real: your table in `table`, standardized, with an embedding for each category beside the numbers.
"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F

import dampen


class FTTransformer(nn.Module):
    """A token for each feature (x_j * W_j + b_j), a class token, pre-norm blocks, a head on the class token."""

    def __init__(self, features: int, width: int = 32, depth: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, width) / width**0.5)
        self.bias = nn.Parameter(torch.randn(features, width) / width**0.5)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens)[:, 0]).squeeze(-1)


def table() -> tuple[Tensor, Tensor]:
    """Ten measurements of each patient and the progress of the disease, both standardized."""
    x, y = (torch.tensor(a, dtype=torch.float32) for a in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def build(batch: int = 4) -> tuple[nn.Module, Tensor]:
    """For the audit: the model, and a batch."""
    x, _ = table()
    return FTTransformer(x.shape[1]), x[:batch]


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """The usual loop; curves for `dampen audit runs/...` are logged after each epoch."""
    x, y = table()
    fit, valid, test = torch.arange(len(x)).split([242, 100, 100])
    model = FTTransformer(x.shape[1])
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 1e-3))
    epochs = trial.params.get("epochs", 40)
    for epoch in range(epochs):
        model.train()
        for i, rows in enumerate(batches := fit[torch.randperm(len(fit))].split(32)):
            reg.progress((epoch + i / len(batches)) / epochs)
            loss, terms = reg.loss(lambda: model(x[rows]), lambda out: F.mse_loss(out, y[rows]))  # noqa: B023
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, x[valid], y[valid]))
    return {"test": measure(model, x[test], y[test]), "valid": measure(model, x[valid], y[valid])}


@torch.no_grad()
def measure(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    """Root of the mean squared error, in standard deviations, and the error itself."""
    mse = F.mse_loss(model.eval()(x), y).item()
    return {"rmse": mse**0.5, "mse": mse}
