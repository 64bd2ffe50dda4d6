"""A log-mel front end: from samples to decibels per mel band and frame, on `torch.stft`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LogMel:
    """Short-time power spectrum, summed into mel bands, in decibels.

    `10 log10(max(M |STFT(x)|^2, floor))` with a periodic Hann window, frames centered on multiples
    of `hop` (reflected at the ends), and M triangular filters, equally spaced and of peak 1 on
    O'Shaughnessy's mel scale `2595 log10(1 + f/700)`, or of area 1 with `area=True`.

    >>> LogMel(rate=8000, fft=256, hop=80, bands=40)(torch.zeros(2, 800)).shape
    torch.Size([2, 11, 40])
    """

    rate: int
    fft: int = 2048
    hop: int = 1024
    bands: int = 64
    low: float = 0.0
    high: float | None = None
    floor: float = 1e-8
    area: bool = False

    def __post_init__(self) -> None:
        if (
            min(self.rate, self.fft, self.hop, self.bands) < 1
            or not 0 <= self.low < self.top <= self.rate / 2
        ):
            raise ValueError(f"Sizes count from 1 and 0 <= low < high <= rate / 2: got {self}.")

    @property
    def top(self) -> float:
        return self.rate / 2 if self.high is None else self.high

    def __call__(self, wave: Tensor) -> Tensor:
        """Samples (..., n) to decibels (..., frames, bands), 1 + n // hop frames."""
        if wave.shape[-1] <= self.fft // 2:  # too short to reflect: silence after it
            wave = torch.nn.functional.pad(wave, (0, self.fft // 2 + 1 - wave.shape[-1]))
        window = torch.hann_window(self.fft, device=wave.device)
        spectrum = torch.stft(
            wave, self.fft, self.hop, window=window, pad_mode="reflect", return_complex=True
        )
        power = spectrum.real.square() + spectrum.imag.square()  # (..., fft/2 + 1, frames)
        mel = power.transpose(-1, -2) @ self.filters().to(wave.device)
        return 10 * torch.log10(mel.clamp(min=self.floor))

    def filters(self) -> Tensor:
        """The triangles, (fft/2 + 1, bands)."""
        edges = _hertz(
            torch.linspace(_mel(self.low), _mel(self.top), self.bands + 2, dtype=torch.float64)
        )
        frequency = torch.linspace(0, self.rate / 2, self.fft // 2 + 1, dtype=torch.float64)[
            :, None
        ]
        left, middle, right = edges[:-2], edges[1:-1], edges[2:]
        rising = (frequency - left) / (middle - left)
        falling = (right - frequency) / (right - middle)
        triangles = torch.minimum(rising, falling).clamp(min=0)
        if self.area:
            triangles = triangles * 2 / (right - left)
        return triangles.float()


def _mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)


def _hertz(mel: Tensor) -> Tensor:
    return 700 * (10 ** (mel / 2595) - 1)


def resample(wave: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples at another rate, by scipy's polyphase filter; unchanged where the rates agree."""
    if rate == wanted:
        return wave
    from scipy.signal import resample_poly

    divisor = math.gcd(rate, wanted)
    out: np.ndarray = resample_poly(wave, wanted // divisor, rate // divisor).astype(np.float32)
    return out


def stack_frames(frames: Tensor, count: int) -> Tensor:
    """Join `count` successive frames (T, F) into one token (T', count * F); the last one is filled
    by repetition.

    >>> stack_frames(torch.arange(3.0)[:, None], 2)
    tensor([[0., 1.],
            [2., 2.]])
    """
    return _grouped(frames, count).flatten(1)


def summarize_frames(frames: Tensor, count: int) -> Tensor:
    """Mean and standard deviation of each feature over `count` successive frames: (T, F) to (T', 2
    F).

    >>> summarize_frames(torch.tensor([[0.0], [2.0], [5.0]]), 2)
    tensor([[1., 1.],
            [5., 0.]])
    """
    groups = _grouped(frames, count)
    return torch.cat([groups.mean(dim=1), groups.std(dim=1, correction=0)], dim=1)


def _grouped(frames: Tensor, count: int) -> Tensor:
    """(T, F) to (T', count, F); the last group is filled by repetition."""
    if count < 1:
        raise ValueError(f"stack counts frames per token from 1: got {count}.")
    short = -len(frames) % count
    if short:
        frames = torch.cat([frames, frames[-1:].expand(short, -1)])
    return frames.reshape(len(frames) // count, count, -1)
