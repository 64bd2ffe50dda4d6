"""Accuracy under attack: FGSM and PGD in the maximum norm, through foolbox."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dampen.diagnostics.calibration import wilson_interval
from dampen.diagnostics.pixels import Pixels
from dampen.diagnostics.predictions import Data, device_of, flat, in_mode, move, run, split


@dataclass(frozen=True)
class Robustness:
    """Accuracy under one attack, with everything needed to repeat it. `eps` and `step` are in units of the pixels."""

    attack: str
    norm: str
    eps: float
    step: float
    steps: int
    random_start: bool
    bounds: tuple[float, float]
    seed: int
    n: int
    clean_accuracy: float
    accuracy: float  # right before the attack and still right after it
    accuracy_low: float  # 95 % Wilson interval
    accuracy_high: float


def fgsm(model: nn.Module, data: Data, eps: float = 8 / 255, pixels: Pixels | None = None, seed: int = 0) -> Robustness:
    """Accuracy after one step of size `eps` along the sign of the loss gradient (Goodfellow, arXiv 1412.6572).

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    >>> _ = model[1].load_state_dict({"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.tensor([1.0, 0.0])})
    >>> data = [(torch.tensor([0.45, 0.52, 0.9]).reshape(3, 1, 1, 1), torch.tensor([0, 1, 1]))]
    >>> fgsm(model, data, eps=0.04).accuracy  # 0.52 is moved to 0.48, below the border at 0.5
    0.6666666666666666
    """
    return _attack(model, data, "fgsm", eps, eps, 1, False, pixels or Pixels(), seed)


def pgd(
    model: nn.Module,
    data: Data,
    eps: float = 8 / 255,
    step: float = 2 / 255,
    steps: int = 10,
    random_start: bool = True,
    pixels: Pixels | None = None,
    seed: int = 0,
) -> Robustness:
    """Accuracy after `steps` projected gradient steps within `eps` (Madry et al., arXiv 1706.06083).

    Pixels move by at most `eps` and stay within `pixels.bounds`; the normalization that the model expects is part of
    the attacked function, so that eps means the same whatever the normalization. The model runs in eval mode, and its
    modes, gradients and the global random state are afterwards what they were. An example counts as robust only if
    it is classified correctly before and after the attack.
    """
    return _attack(model, data, "pgd", eps, step, steps, random_start, pixels or Pixels(), seed)


class _Logits(nn.Module):
    """A module that returns logits whatever its model returns."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return run(self.model, x)


def _attack(
    model: nn.Module,
    data: Data,
    name: str,
    eps: float,
    step: float,
    steps: int,
    random_start: bool,
    pixels: Pixels,
    seed: int,
) -> Robustness:
    if not (eps >= 0 and step >= 0 and steps >= 1):
        raise ValueError(
            f"An attack needs eps >= 0, step >= 0 and at least one step: got eps={eps}, step={step}, steps={steps}."
        )
    foolbox = _foolbox()
    if name == "fgsm":
        attack = foolbox.attacks.LinfFastGradientAttack(random_start=False)
    else:
        attack = foolbox.attacks.LinfProjectedGradientDescentAttack(
            abs_stepsize=step, steps=steps, random_start=random_start
        )
    device = device_of(model)
    n = clean = robust = 0
    with in_mode(model), _untouched(model, device), torch.enable_grad():
        torch.manual_seed(seed)
        wrapped = _Logits(model).eval()
        for batch in data:
            inputs, labels = split(batch)
            images = pixels.from_data(move(inputs, device))
            victim = foolbox.PyTorchModel(
                wrapped, bounds=pixels.bounds, device=device, preprocessing=pixels.preprocessing(images)
            )
            logits, labels = flat(victim(images), labels.to(device))
            if len(labels) != len(images):
                raise ValueError("Attacks need one labeled prediction per image: some labels are missing or ignored.")
            right = logits.argmax(dim=1) == labels
            _, _, fooled = attack(victim, images, labels, epsilons=eps)
            n += len(labels)
            clean += int(right.sum())
            robust += int((right & ~fooled).sum())
    if not n:
        raise ValueError("There is nothing to attack: the data held no example. Was it an exhausted loader?")
    low, high = wilson_interval(robust, n)
    return Robustness(
        name, "linf", eps, step, steps, random_start, pixels.bounds, seed, n, clean / n, robust / n, low, high
    )


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep parameters' gradients and the global random state as they are: foolbox calls backward and draws."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for p in wanted:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in wanted:
                p.requires_grad_(True)


def _foolbox() -> Any:
    with warnings.catch_warnings():
        # foolbox 3.3 imports from a namespace that SciPy has deprecated; nothing a user can act on.
        warnings.filterwarnings("ignore", message=r".*scipy\.ndimage.*", category=DeprecationWarning)
        try:
            import foolbox
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Attacks need foolbox, and {error.name} is not installed here. Run: pip install 'dampen[attacks]'",
                name=error.name,
            ) from error
    return foolbox
