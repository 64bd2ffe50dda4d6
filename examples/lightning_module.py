"""A LightningModule and its Trainer, compared with three regularizers.

dampen compare examples/lightning_module.py:train --methods "drop_key(rate=0.3), drop_head, explicit_dropout(ffn=1)"
"""

import lightning
import torch
from plain_loop import measure
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dampen


class Classifier(lightning.LightningModule):
    """A small ViT; the handle adds what the row's methods ask for."""

    def __init__(self, trial: dampen.Trial, steps: int) -> None:
        super().__init__()
        self.model = dampen.models.ViT(
            image_size=8, patch_size=2, channels=1, width=32, depth=2, heads=4, mlp=64, classes=10
        )
        self.trial, self.steps = trial, steps
        self.reg = trial.regularize(self.model)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        self.reg.progress(min(1.0, self.global_step / self.steps))
        loss, terms = self.reg.loss(lambda: self.model(x), lambda out: F.cross_entropy(out, y))
        self.trial.log(step=self.global_step, train=terms)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.trial.params.get("lr", 3e-3))


def train(trial: dampen.Trial) -> dict[str, float]:
    """Fit, then measure on the second half of the digits."""
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    epochs = trial.params.get("epochs", 20)
    loader = DataLoader(TensorDataset(images[:400], labels[:400]), batch_size=32, shuffle=True)
    module = Classifier(trial, epochs * len(loader))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet).fit(module, loader)
    trial.log(valid=measure(module.model, images[400:800], labels[400:800]))
    return measure(module.model, images[800:], labels[800:])
