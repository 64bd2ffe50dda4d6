"""How well a masked autoencoder guesses what it does not see."""

from __future__ import annotations

from torch import Tensor

from dampen.studies.plugins import Metrics, require_batches


class ReconstructionMetrics(Metrics):
    """`reconstruction`: the mean over images of the squared error on hidden patches.

    >>> import torch
    >>> metrics = ReconstructionMetrics()
    >>> metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([0, 0]))
    >>> metrics.update(torch.tensor([6.0]), torch.tensor([0]))
    >>> metrics.compute()
    {'reconstruction': 3.0}
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(
        self,
        logits: Tensor,
        target: Tensor,
        valid: Tensor | None = None,
        index: Tensor | None = None,
    ) -> None:
        """`logits` are the errors, one per image."""
        self.total += logits.detach().double().sum().item()
        self.count += len(logits)

    def compute(self) -> dict[str, float]:
        require_batches(self.count)
        return {"reconstruction": self.total / self.count}
