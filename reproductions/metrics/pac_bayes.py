"""A PAC-Bayes bound on the test error under Gaussian weight noise: what AttentionDrop's printed
bound should be.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dampen.diagnostics import predict

Data = Any
"""Batches (inputs, labels), or mappings with "labels": something to iterate over more than once."""


@dataclass(frozen=True)
class PacBayesBound:
    """An upper bound, at confidence `1 - delta - delta_mc`, on the test error of the model with
    noisy weights.
    """

    bound: float
    noisy_error: float  # mean training error over the drawn weights
    noisy_error_bound: float  # upper bound on its expectation, for having drawn only so many
    error: float  # training error of the weights without noise
    kl: float  # KL(posterior || prior), in nats
    n: int  # training predictions
    parameters: int
    sigma: float
    prior_sigma: float
    draws: int
    delta: float
    delta_mc: float
    choices: int
    seed: int


def gaussian_kl(
    squared_distance: float, parameters: int, sigma: float, prior_sigma: float
) -> float:
    """KL(N(w, sigma^2 I) || N(w0, prior_sigma^2 I)) in nats, with `squared_distance` = |w - w0|^2.

    `1/2 (d s^2/sp^2 + |w - w0|^2/sp^2 - d - d ln(s^2/sp^2))`: never negative, zero only if the two
    are equal.

    >>> gaussian_kl(4.0, 10, sigma=0.5, prior_sigma=0.5)
    8.0
    """
    for name, value in (("sigma", sigma), ("prior_sigma", prior_sigma)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite: got {value}.")
    excess = (sigma / prior_sigma) ** 2 - 1
    # ln(1 + t) by log1p: near sigma = prior_sigma both terms are tiny and nearly cancel, times
    # millions of parameters.
    return 0.5 * (parameters * (excess - math.log1p(excess)) + squared_distance / prior_sigma**2)


def binary_kl(q: float, p: float) -> float:
    """KL between coins with chances q and p of heads, in nats; infinite where p excludes what q
    allows.

    >>> binary_kl(0.0, 0.5) == math.log(2)
    True
    """
    heads = 0.0 if q == 0 else math.inf if p == 0 else q * math.log(q / p)
    tails = 0.0 if q == 1 else math.inf if p == 1 else (1 - q) * math.log((1 - q) / (1 - p))
    return heads + tails


def binary_kl_inverse(q: float, budget: float) -> float:
    """The largest p >= q with `binary_kl(q, p) <= budget`, rounded up, by bisection.

    >>> round(binary_kl_inverse(0.0, 0.1), 6) == round(1 - math.exp(-0.1), 6)
    True
    """
    if not 0 <= q <= 1 or not budget >= 0:
        raise ValueError(f"Expected q in [0, 1] and a budget >= 0: got q={q}, budget={budget}.")
    low, high = q, 1.0
    while low < (middle := (low + high) / 2) < high:
        if binary_kl(q, middle) <= budget:
            low = middle
        else:
            high = middle
    return high


def pac_bayes_bound(
    model: nn.Module,
    train: Data,
    sigma: float,
    prior: Mapping[str, Tensor] | None = None,
    prior_sigma: float | None = None,
    draws: int = 100,
    delta: float = 0.04,
    delta_mc: float = 0.01,
    choices: int = 1,
    seed: int = 0,
) -> PacBayesBound:
    """Bound the test error of the model under Gaussian weight noise N(w, sigma^2 I), from its
    training data alone.

    With m training examples, prior P = N(w0, prior_sigma^2 I) and posterior Q = N(w, sigma^2 I),
    with probability 1 - delta over the training data (Langford and Seeger; Maurer, arXiv
    cs/0411099): `kl(train error of Q || test error of Q) <= (KL(Q || P) + ln(2 sqrt(m) / delta)) /
    m`. The training error of Q is a mean over `draws` weights; Chernoff's bound turns that mean
    into an upper bound that fails with probability `delta_mc` (as in Dziugaite and Roy, arXiv
    1703.11008): `kl(mean || error) <= ln(1/delta_mc) / draws`. Both are inverted numerically. What
    is bounded is the 0-1 error of the noisy model, not of the model itself, and for independent
    examples: predictions per token of one sequence are not. With far more weights than examples the
    bound is often 1 and says nothing; that, too, is a result.

    `prior` holds w0 by parameter name, e.g. a copy of the initial weights; None means zeros. It and
    `prior_sigma` (default: sigma) must not depend on the training data; whoever tries several
    values on the data and keeps the best says how many with `choices`: delta and delta_mc are then
    shared out among them (union bound). Frozen parameters get no noise and count as fixed in
    advance. BatchNorm's running statistics come from the data and no KL accounts for them, so such
    models are refused.

    The KL here is that of the whole weight vector. AttentionDrop (arXiv 2504.12088) prints a KL per
    logit which is negative for sigma > 0.242 and must not be used as printed: a KL divergence is
    never negative, and a negative one would "prove" a test error below the training error. 0.242 =
    1/sqrt(2 pi e) is where the differential entropy of a Gaussian changes its sign, so the printed
    term behaves as an entropy alone, without the prior's part.

    The weights are restored bit for bit, and noise comes from a generator of its own.

    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(500, 3)  # synthetic, separable
    >>> model = nn.Linear(3, 2, bias=False)
    >>> _ = model.load_state_dict({"weight": torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]])})
    >>> result = pac_bayes_bound(model, [(x, (x[:, 0] < 0).long())], sigma=0.3, prior_sigma=1.0)
    >>> result.noisy_error < result.noisy_error_bound < result.bound < 0.4
    True
    """
    _check(model, train, draws, delta, delta_mc, choices)
    prior_sigma = sigma if prior_sigma is None else prior_sigma
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError(
            "No parameter requires a gradient: noise would touch nothing. Unfreeze what was "
            "trained."
        )
    parameters = sum(p.numel() for p in named.values())
    kl = gaussian_kl(_squared_distance(named, prior), parameters, sigma, prior_sigma)

    error, n = _error(model, train)
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    with _weights_restored(list(named.values())) as weights:
        for _ in range(draws):
            with torch.no_grad():
                for p, w in zip(named.values(), weights, strict=True):
                    noise = torch.randn(w.shape, generator=generator)
                    p.copy_(w + sigma * noise.to(w))
            total += _error(model, train)[0]
    noisy = total / draws
    noisy_bound = binary_kl_inverse(noisy, math.log(choices / delta_mc) / draws)
    bound = binary_kl_inverse(noisy_bound, (kl + math.log(2 * math.sqrt(n) * choices / delta)) / n)
    return PacBayesBound(
        bound,
        noisy,
        noisy_bound,
        error,
        kl,
        n,
        parameters,
        sigma,
        prior_sigma,
        draws,
        delta,
        delta_mc,
        choices,
        seed,
    )


def _check(
    model: nn.Module, train: Data, draws: int, delta: float, delta_mc: float, choices: int
) -> None:
    if draws < 1 or choices < 1:
        raise ValueError(
            f"draws and choices must be at least 1: got draws={draws}, choices={choices}."
        )
    if not (delta > 0 and delta_mc > 0 and delta + delta_mc < 1):
        raise ValueError(
            f"delta and delta_mc are chances of failure, positive with a sum below 1: got {delta} "
            f"and {delta_mc}."
        )
    if isinstance(train, Iterator):
        raise TypeError(
            "The data are read once per draw: got an iterator. Give a list of batches or a "
            "DataLoader."
        )
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None:
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) keeps running statistics of the "
                "training data, for "
                "which no KL accounts: the bound would not hold. Use a model without BatchNorm, "
                "e.g. with LayerNorm."
            )


def _squared_distance(named: Mapping[str, Tensor], prior: Mapping[str, Tensor] | None) -> float:
    total = 0.0
    for name, p in named.items():
        difference = p.detach().double()
        if prior is not None:
            if name not in prior:
                close = difflib.get_close_matches(name, list(prior), n=1)
                hint = f"; the nearest is {close[0]!r}" if close else ""
                raise ValueError(
                    f"The prior has no weights for {name!r}{hint}. Give one tensor per trained "
                    "parameter."
                )
            if prior[name].shape != p.shape:
                raise ValueError(
                    f"The prior for {name!r} has shape {tuple(prior[name].shape)}, the model "
                    f"{tuple(p.shape)}."
                )
            difference = difference - prior[name].detach().to(difference)
        total += float(difference.square().sum())
    return total


def _error(model: nn.Module, data: Data) -> tuple[float, int]:
    logits, labels = predict(model, data)
    return float((logits.argmax(dim=1) != labels).double().mean()), len(labels)


@contextmanager
def _weights_restored(parameters: list[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Copies of the weights; whatever the body does to the parameters is undone, bit for bit."""
    weights = [p.detach().clone() for p in parameters]
    try:
        yield weights
    finally:
        with torch.no_grad():
            for p, w in zip(parameters, weights, strict=True):
                p.copy_(w)
