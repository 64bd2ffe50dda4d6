"""Accuracy under changed pixels: FGSM and PGD within an eps ball, noise, blur and lost contrast;
what pixels mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.diagnostics import wilson_interval
from dampen.diagnostics.predictions import Data, device_of, flat, in_mode, move, run, split
from dampen.studies.plugins import Trained


@dataclass(frozen=True)
class Pixels:
    """Bounds of valid pixels, and the normalization `(x - mean) / std` (per channel) that the model
    expects.

    `normalized=True` says that the data at hand are normalized already; they are brought back to
    pixels first.

    >>> pixels = Pixels(mean=[0.5], std=[0.25], normalized=True)
    >>> pixels.from_data(torch.zeros(1, 1, 2, 2)).unique()
    tensor([0.5000])
    """

    bounds: tuple[float, float] = (0.0, 1.0)
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    normalized: bool = False

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"bounds must be (low, high) with low < high: got {self.bounds}.")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"Every std must be positive: got {list(self.std)}.")
        if self.normalized and self.mean is None and self.std is None:
            raise ValueError(
                "normalized=True needs the mean and std that the data were normalized with."
            )

    @property
    def range(self) -> float:
        """The width of the bounds."""
        return self.bounds[1] - self.bounds[0]

    def from_data(self, images: Any) -> Tensor:
        """Images of the data as pixels within the bounds.

        Args:
            images: as the data hold them.
        """
        if isinstance(images, Mapping) and len(images) == 1:  # {"pixel_values": ...}
            images = next(iter(images.values()))
        if not isinstance(images, Tensor) or images.dim() != 4 or not images.is_floating_point():
            if isinstance(images, Tensor):
                got = f"{images.dtype} {tuple(images.shape)}"
            else:
                got = type(images).__name__
            raise TypeError(
                f"Expected floating-point images (batch, channels, height, width): got {got}."
            )
        if self.normalized:
            mean, std = self._statistics(images)
            images = images * std + mean
        (low, high), tolerance = self.bounds, 1e-3 * self.range
        if images.numel() and (images.min() < low - tolerance or images.max() > high + tolerance):
            raise ValueError(
                f"The images leave the bounds [{low:g}, {high:g}]: they reach from "
                f"{images.min():.4g} to "
                f"{images.max():.4g}. Give the right bounds, or, if the data are normalized, "
                "Pixels(mean=..., std=..., normalized=True)."
            )
        # rounding of the normalization only
        out: Tensor = images.clamp(low, high)
        return out

    def to_model(self, pixels: Tensor) -> Tensor:
        """Pixels as the model expects them.

        Args:
            pixels: within the bounds.
        """
        mean, std = self._statistics(pixels)
        return (pixels - mean) / std

    def preprocessing(self, like: Tensor) -> dict[str, Any]:
        """The same normalization as foolbox takes it.

        Args:
            like: images, for the number of channels and the dtype.
        """
        mean, std = self._statistics(like)
        return {"mean": mean.flatten(), "std": std.flatten(), "axis": -3}

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        channels = like.shape[1]
        rows = []
        for name, values, default in (("mean", self.mean, 0.0), ("std", self.std, 1.0)):
            row = torch.tensor(
                [default] if values is None else list(values), dtype=like.dtype, device=like.device
            )
            if len(row) not in (1, channels):
                raise ValueError(
                    f"{name} must hold one number or one per channel ({channels}): got {len(row)}."
                )
            rows.append(row.expand(channels).reshape(1, channels, 1, 1))
        return rows[0], rows[1]


def pixels_of(trained: Trained) -> Pixels:
    """What the images of a trained model's data mean: they come normalized.

    Args:
        trained: the model with its data.
    """
    data = trained.data
    if data.task != "image" or data.normalization is None:
        raise ValueError(f"needs images; {data.name} is a data set for {data.task}")
    mean, std = data.normalization.mean.tolist(), data.normalization.std.tolist()
    return Pixels(mean=mean, std=std, normalized=True)


# Severities 1 to 5, chosen for small images in the manner of Hendrycks and Dietterich (arXiv
# 1903.12261); accuracies under them are comparable with each other, not with published numbers of
# that benchmark.
CORRUPTIONS: dict[str, tuple[float, ...]] = {
    # standard deviation, as a share of the pixels' range
    "noise": (0.04, 0.08, 0.12, 0.18, 0.26),
    # standard deviation of the Gaussian, in pixels
    "blur": (0.4, 0.6, 0.8, 1.0, 1.5),
    # what is left of the distance from each channel's mean
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),
}


@dataclass(frozen=True)
class Corruptions:
    """Accuracy without corruption, and under each kind at severities 1 to 5."""

    n: int
    clean_accuracy: float
    accuracy: dict[str, list[float]]
    mean_accuracy: float  # over all kinds and severities
    settings: dict[str, tuple[float, ...]]
    seed: int


def add_noise(images: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise, drawn image by image so that the split into batches does not matter.

    Args:
        images: (B, C, H, W).
        amount: standard deviation of the noise.
        generator: where random numbers come from; None: torch's global generator.
    """
    noise = torch.stack(
        [torch.randn(images.shape[1:], generator=generator) for _ in range(len(images))]
    )
    return images + amount * noise.to(images)


def blur(images: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian cut at 4 sigma, repeating the border pixels.

    Args:
        images: (B, C, H, W).
        sigma: of the Gaussian, in pixels.
    """
    radius = math.ceil(4 * sigma)
    x = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (x / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(images.shape[1], 1, -1)
    padded = F.pad(images, (radius, radius, radius, radius), mode="replicate")
    across = F.conv2d(padded, kernel[:, :, None, :], groups=images.shape[1])
    return F.conv2d(across, kernel[:, :, :, None], groups=images.shape[1])


def lower_contrast(images: Tensor, factor: float) -> Tensor:
    """Pull every pixel toward the mean of its channel in its image.

    Args:
        images: (B, C, H, W).
        factor: what is left of the contrast, in [0, 1].
    """
    mean = images.mean(dim=(2, 3), keepdim=True)
    return mean + factor * (images - mean)


def corrupt(
    images: Tensor,
    kind: str,
    severity: int,
    bounds: tuple[float, float] = (0.0, 1.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Corrupt images (B, C, H, W) whose pixels lie in `bounds`; noise is drawn from `generator`
    (seed 0 if none).

    Args:
        images: (B, C, H, W).
        kind: a name in `CORRUPTIONS`.
        severity: 1 to 5.
        bounds: (low, high) of valid pixels.
        generator: where random numbers come from; None: torch's global generator.

    >>> corrupt(torch.rand(2, 3, 8, 8), "contrast", severity=5).shape
    torch.Size([2, 3, 8, 8])
    """
    if kind not in CORRUPTIONS:
        raise ValueError(f"Unknown corruption: got {kind!r}; known are {', '.join(CORRUPTIONS)}.")
    if severity not in range(1, 6):
        raise ValueError(f"severity must be 1, 2, 3, 4 or 5: got {severity!r}.")
    low, high = bounds
    amount = CORRUPTIONS[kind][severity - 1]
    if kind == "noise":
        if generator is not None:
            generator = generator
        else:
            generator = torch.Generator().manual_seed(0)
        images = add_noise(images, amount * (high - low), generator)
    elif kind == "blur":
        images = blur(images, amount)
    else:
        images = lower_contrast(images, amount)
    return images.clamp(low, high)


@torch.no_grad()
def measure_corruptions(
    model: nn.Module,
    data: Data,
    kinds: Sequence[str] = tuple(CORRUPTIONS),
    pixels: Pixels | None = None,
    seed: int = 0,
) -> Corruptions:
    """Accuracy of an image classifier under each corruption and severity, in one pass over `data`.

    The model runs in eval mode and its modes are restored. The noise of an image depends on `seed`
    and on its place in the data alone, and only its size grows with severity.

    Args:
        model: any model that returns logits; left as it was.
        data: batches (inputs, labels), or mappings with "labels".
        kinds: names in `CORRUPTIONS`.
        pixels: what the inputs mean: bounds, and normalization if there is any.
        seed: of the random numbers; the global random state is restored.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    >>> result = measure_corruptions(model, [(torch.rand(6, 1, 4, 4), torch.tensor([0, 1] * 3))])
    >>> {kind: len(accuracy) for kind, accuracy in result.accuracy.items()}
    {'noise': 5, 'blur': 5, 'contrast': 5}
    """
    for kind in kinds:
        if kind not in CORRUPTIONS:
            raise ValueError(
                f"Unknown corruption: got {kind!r}; known are {', '.join(CORRUPTIONS)}."
            )
    pixels, device = pixels or Pixels(), device_of(model)
    # One generator per severity from one seed: all draw the same noise, at different sizes.
    generators = {s: torch.Generator().manual_seed(seed) for s in range(1, 6)}
    clean = n = 0
    correct = {kind: [0] * 5 for kind in kinds}
    with in_mode(model):
        for batch in data:
            inputs, labels = split(batch)
            images, labels = pixels.from_data(move(inputs, device)), labels.to(device)
            clean += _correct(model, pixels.to_model(images), labels)
            n += len(labels)
            for kind in kinds:
                for s in range(1, 6):
                    changed = corrupt(images, kind, s, pixels.bounds, generators[s])
                    correct[kind][s - 1] += _correct(model, pixels.to_model(changed), labels)
    if not n:
        raise ValueError(
            "There is nothing to corrupt: the data held no example. Was it an exhausted loader?"
        )
    accuracy = {kind: [c / n for c in counts] for kind, counts in correct.items()}
    flat_list = [a for row in accuracy.values() for a in row]
    mean = sum(flat_list) / len(flat_list) if flat_list else math.nan
    return Corruptions(n, clean / n, accuracy, mean, {k: CORRUPTIONS[k] for k in kinds}, seed)


def _correct(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    logits, kept = flat(run(model, images), labels)
    if len(kept) != len(images):
        raise ValueError(
            "Corruptions need one labeled prediction per image: some labels are missing or ignored."
        )
    return int((logits.argmax(dim=1) == kept).sum())


@dataclass(frozen=True)
class Robustness:
    """Accuracy under one attack, with everything needed to repeat it. `eps` and `step` are in units
    of the pixels."""

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


def fgsm(
    model: nn.Module, data: Data, eps: float = 8 / 255, pixels: Pixels | None = None, seed: int = 0
) -> Robustness:
    """Accuracy after one step of size `eps` along the sign of the loss gradient (Goodfellow, arXiv
    1412.6572).

    Args:
        model: any model that returns logits; left as it was.
        data: batches (inputs, labels), or mappings with "labels".
        eps: largest change of a pixel, in the units of the pixels.
        pixels: what the inputs mean: bounds, and normalization if there is any.
        seed: of the random numbers; the global random state is restored.

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2))
    >>> weights = {"weight": torch.tensor([[-1.0], [1.0]]), "bias": torch.tensor([1.0, 0.0])}
    >>> _ = model[1].load_state_dict(weights)
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
    """Accuracy after `steps` projected gradient steps within `eps` (Madry et al., arXiv
    1706.06083).

    Pixels move by at most `eps` and stay within `pixels.bounds`; the normalization that the model
    expects is part of the attacked function, so that eps means the same whatever the normalization.
    The model runs in eval mode, and its modes, gradients and the global random state are afterwards
    what they were. An example counts as robust only if it is classified correctly before and after
    the attack.

    Args:
        model: any model that returns logits; left as it was.
        data: batches (inputs, labels), or mappings with "labels".
        eps: largest change of a pixel, in the units of the pixels.
        step: size of one step.
        steps: how many.
        random_start: start at a random point within eps.
        pixels: what the inputs mean: bounds, and normalization if there is any.
        seed: of the random numbers; the global random state is restored.
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
            f"An attack needs eps >= 0, step >= 0 and at least one step: got eps={eps}, "
            f"step={step}, steps={steps}."
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
                wrapped,
                bounds=pixels.bounds,
                device=device,
                preprocessing=pixels.preprocessing(images),
            )
            logits, labels = flat(victim(images), labels.to(device))
            if len(labels) != len(images):
                raise ValueError(
                    "Attacks need one labeled prediction per image: some labels are missing or "
                    "ignored."
                )
            right = logits.argmax(dim=1) == labels
            _, _, fooled = attack(victim, images, labels, epsilons=eps)
            n += len(labels)
            clean += int(right.sum())
            robust += int((right & ~fooled).sum())
    if not n:
        raise ValueError(
            "There is nothing to attack: the data held no example. Was it an exhausted loader?"
        )
    low, high = wilson_interval(robust, n)
    return Robustness(
        name,
        "linf",
        eps,
        step,
        steps,
        random_start,
        pixels.bounds,
        seed,
        n,
        clean / n,
        robust / n,
        low,
        high,
    )


@contextmanager
def _untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep parameters' gradients and the global random state as they are: foolbox calls backward
    and draws."""
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
        warnings.filterwarnings(
            "ignore", message=r".*scipy\.ndimage.*", category=DeprecationWarning
        )
        try:
            import foolbox
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"Attacks need foolbox, and {error.name} is not installed here. Run: pip install "
                "foolbox",
                name=error.name,
            ) from error
    return foolbox
