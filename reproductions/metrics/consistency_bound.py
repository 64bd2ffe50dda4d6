"""A bound on the averaged prediction in which consistency appears: what two draws disagree about is
gained.

With p the predicted probabilities under one draw of the masks, p1 and p2 two independent draws, q =
E p the averaged prediction and e the label as a unit vector, for any number of classes

    Brier(average) = E ||q - e||^2 = E ||p - e||^2 - 1/2 E ||p1 - p2||^2            exactly
    1/2 ||p1 - p2||^2 <= KL(p1 || p2)                                               Pinsker, the
    consistency term

The distribution over masks is the same before and after training, so there is no KL to pay for it:
on examples that training has not seen both expectations are bounded by Chernoff, the first from
above, the second from below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen.diagnostics import predict
from reproductions.metrics.pac_bayes import Data, binary_kl_inverse

ONE_PER_FORWARD = ("BlurredAttention", "LayerDrop", "DropConnect", "Mixout")
"""Methods one of whose draws serves a whole batch: its examples are then not independent."""


@dataclass(frozen=True)
class ConsistencyBound:
    """Brier scores (0 to 2) at confidence 1 - delta each, with what they were measured on."""

    bound: float  # of the averaged prediction: one_draw_bound - disagreement_bound
    error_bound: float  # of its 0-1 error, at most twice its Brier score
    one_draw: float  # measured E ||p - e||^2
    one_draw_bound: float  # its upper bound, at 1 - delta / 2
    disagreement: float  # measured 1/2 E ||p1 - p2||^2
    disagreement_bound: float  # its lower bound, at 1 - delta / 2
    kl: float  # measured E KL(p1 || p2): the consistency term, never below the disagreement
    average: (
        float  # the averaged prediction's Brier score on these examples, estimated without bias
    )
    plain: float  # the model without draws, as it is in eval mode
    plain_bound: float  # its upper bound, at 1 - delta
    n: int
    draws: int
    delta: float
    seed: int


def consistency_bound(
    model: nn.Module, data: Data, handle: Any, draws: int = 8, delta: float = 0.05, seed: int = 0
) -> ConsistencyBound:
    """Bound the Brier score of the prediction averaged over random masks, from examples that
    nothing was fitted to.

    `handle` is what `regularize` returned; its random methods (and the model's own dropout) draw
    anew in each of `draws` passes over `data`, which holds independent examples that neither
    training nor any choice has seen. What is bounded is the prediction averaged over infinitely
    many draws, as `handle.mc_average` approaches it.

    >>> import dampen
    >>> _ = torch.manual_seed(0)
    >>> sizes = {"image_size": 8, "patch_size": 4, "channels": 1, "classes": 3}
    >>> model = dampen.models.ViT(**sizes, width=8, depth=1, heads=2, mlp=8)
    >>> handle = dampen.regularize(model, dampen.DropKey(0.5))
    >>> data = [(torch.randn(200, 1, 8, 8), torch.randint(3, (200,)))]  # synthetic
    >>> found = consistency_bound(model, data, handle)
    >>> found.disagreement_bound <= found.disagreement <= found.kl, found.bound >= found.average
    (True, True)
    """
    _check(handle, draws, delta)
    logits, labels = predict(model, data)
    target = F.one_hot(labels, logits.shape[1]).double()
    plain = (logits.double().softmax(1) - target).square().sum(1)
    samples = _draw(model, data, handle, draws, seed)
    logs = [s.double().log_softmax(1) for s in samples]
    probabilities = torch.stack([log.exp() for log in logs])  # (draws, n, classes)
    one = (probabilities - target).square().sum(2).mean(0)
    # 1/2 of the mean of ||p_j - p_k||^2 over all pairs of different draws, without visiting the
    # pairs
    spread = probabilities.square().sum(2).mean(0) - probabilities.mean(0).square().sum(1)
    apart = (spread * draws / (draws - 1)).clamp(min=0)
    kl = torch.stack([_kl(logs[i], logs[i + 1]) for i in range(draws - 1)]).mean()
    n, half = len(labels), math.log(2 / delta)
    upper = _upper(one, 2.0, half)
    lower = 1 - _upper(1 - apart, 1.0, half)
    bound = max(0.0, upper - lower)
    return ConsistencyBound(
        bound=bound,
        error_bound=min(1.0, 2 * bound),
        one_draw=one.mean().item(),
        one_draw_bound=upper,
        disagreement=apart.mean().item(),
        disagreement_bound=lower,
        kl=kl.item(),
        average=(one - apart).mean().item(),
        plain=plain.mean().item(),
        plain_bound=_upper(plain, 2.0, math.log(1 / delta)),
        n=n,
        draws=draws,
        delta=delta,
        seed=seed,
    )


def _upper(values: Tensor, highest: float, budget: float) -> float:
    """Chernoff's upper bound on the mean of independent values in [0, highest]: kl(mean || mu) <=
    budget / n.
    """
    mean = min(1.0, values.mean().item() / highest)
    return highest * binary_kl_inverse(mean, budget / len(values))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum(1).mean()


def _draw(model: nn.Module, data: Data, handle: Any, draws: int, seed: int) -> list[Tensor]:
    """The logits of each pass, with random masks in eval mode; the random state is restored."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        with handle.mc_mode():
            return [predict(model, data)[0] for _ in range(draws)]


def _check(handle: Any, draws: int, delta: float) -> None:
    if draws < 2 or not 0 < delta < 1:
        raise ValueError(
            f"Two draws are needed to disagree, and delta in (0, 1): got draws={draws}, "
            f"delta={delta}."
        )
    if handle is None:
        raise ValueError("needs random masks: the model has no method attached")
    names = [type(m).__name__ for m in handle.methods]
    shared = [name for name in names if name in ONE_PER_FORWARD]
    if shared:
        raise ValueError(
            f"needs independent examples, but {shared[0]} draws once for a whole batch"
        )
    if not any(m.stochastic and m.passes == 1 for m in handle.methods):
        raise ValueError(f"needs random masks: {', '.join(names)} draw none")
