"""A plain PyTorch loop on scikit-learn's digits, compared with three regularizers.

dampen compare examples/plain_loop.py:train --methods "drop_key(rate=0.3), drop_path, r_drop + drop_head" --seeds 8
"""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dampen


def train(trial: dampen.Trial) -> dict[str, dict[str, float]]:
    """Train a small ViT; `trial` brings the seed, the row's methods and the parameters."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(y)
    fit, test = train_test_split(torch.arange(len(y)), test_size=0.5, random_state=0, stratify=y)
    fit, valid = fit[:400], fit[400:800]

    model = dampen.models.ViT(
        image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=4, mlp=64, classes=10
    )
    reg = trial.regularize(model)  # on the plain row it does nothing
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 3e-3))
    loader = DataLoader(TensorDataset(images[fit], labels[fit]), batch_size=32, shuffle=True)
    epochs, first = trial.params.get("epochs", 20), 0

    state = trial.resume()  # None at a fresh start
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]

    for epoch in range(first, epochs):
        model.train()
        for i, (xb, yb) in enumerate(loader):
            reg.progress((epoch * len(loader) + i) / (epochs * len(loader)))
            loss, terms = reg.loss(lambda: model(xb), lambda out: F.cross_entropy(out, yb))  # noqa: B023
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log(epoch=epoch + 1, train=terms, valid=measure(model, images[valid], labels[valid]))
        trial.checkpoint(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        )
    return {
        "test": measure(model, images[test], labels[test]),
        "valid": measure(model, images[valid], labels[valid]),
    }


@torch.no_grad()
def measure(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
    """Accuracy and negative log-likelihood."""
    model.eval()
    logits = model(x)
    return {
        "accuracy": (logits.argmax(-1) == y).float().mean().item(),
        "nll": F.cross_entropy(logits, y).item(),
    }


if __name__ == "__main__":
    study = dampen.compare(
        train, methods="drop_key(rate=0.3), drop_path, r_drop + drop_head", seeds=8
    )
    print(study)
    study.report("report.html")
