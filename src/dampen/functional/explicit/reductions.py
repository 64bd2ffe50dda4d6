"""How the sums over tokens become one number: forms, reductions, padding, precision.

Forms: how much of the bias part b and of the variance part v a penalty takes. With p the rate of
dropout and c = 1 - p (arXiv 2604.20505; derivations in docs/exactness.md):

    paper     J = 1/2 p^2 b                  takes two equal mask entries as independent: bias alone
    exact     J = 1/2 (p^2 b + p (1-p) v)    the true expectation of the paper's definition
    inverted  J = 1/2 p/(1-p) v              the dropout that nn.Dropout does (Wager, Arora et al.)

Reductions: every penalty is a sum over tokens (or over pairs of tokens). A reduction gives each
token a row weight and the whole sum a factor, which holds the 1/2 of the formulas:

    mean        1/2 sum / number of valid tokens in the batch (pairs for query, key, query_key):
                then lambda depends on neither batch size nor length
    sum         1/2 sum
    token_mean  1/2 batch sum of token means: each sample's sum divided by its valid tokens
                (queries), for pairs too
    author      as token_mean, without the 1/2: what the authors' public code does

Padded tokens have row weight 0 and are in no divisor.

Precision: penalties are computed in float32 or wider, whatever the dtype of the model, because the
query-key terms are quartic and would overflow float16.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
from torch import Tensor

FORMS = ("paper", "exact", "inverted")

Number = float | Tensor


class Factors(NamedTuple):
    """Factors of the bias part and of the variance part; None: the form does not have the part."""

    bias: Number | None = None
    variance: Number | None = None


def is_off(weight: object) -> bool:
    """Whether a weight is the plain number 0, which switches its term off for good. A schedule or
    list may be 0 for a while.

    Args:
        weight: what the user gave.

    >>> is_off(0), is_off(0.0), is_off([0.0, 0.0]), is_off(False)
    (True, True, False, False)
    """
    return isinstance(weight, int | float) and not isinstance(weight, bool) and weight == 0


def check_form(form: str, who: str) -> None:
    """Raise for a form that does not exist.

    Args:
        form: paper, exact or inverted.
        who: name of the method, for the error.
    """
    if form not in FORMS:
        raise ValueError(f"{who}: form must be one of {', '.join(FORMS)}, got {form!r}.")


def single(form: str, p: Number) -> Factors:
    """The factors where one mask acts: on the input of a linear map, or on the queries or the keys
    alone.

    Args:
        form: paper, exact or inverted.
        p: rate of the dropout.

    >>> single("exact", 0.5)
    Factors(bias=0.25, variance=0.25)
    """
    if form == "paper":
        return Factors(bias=p * p)
    if form == "exact":
        return Factors(bias=p * p, variance=p * (1 - p))
    return Factors(variance=p / (1 - p))


def combine(factors: Factors, bias: Tensor | None, variance: Tensor | None) -> Tensor:
    """The sum of the parts that the form has, each with its factor.

    Args:
        factors: of the two parts.
        bias: the bias part; None: not needed.
        variance: the variance part; None: not needed.
    """
    terms = [
        f * t
        for f, t in zip(factors, (bias, variance), strict=True)
        if f is not None and t is not None
    ]
    return sum(terms[1:], start=terms[0])


_AUTOCASTS = {
    d
    for d in ("cpu", "cuda", "xpu", "hpu", "mps", "mtia", "xla")
    if torch.amp.is_autocast_available(d)
}


def wide(t: Tensor) -> Tensor:
    """The tensor in float32, or as it is where it is wider.

    Args:
        t: any tensor.
    """
    if t.dtype is torch.float32:
        # nearly always, and called a dozen times per layer
        return t
    return t.to(wide_dtype(t))


def wide_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which the penalty of a tensor is computed.

    Args:
        t: any tensor.
    """
    if t.dtype is torch.float32:
        return torch.float32
    return torch.promote_types(t.dtype, torch.float32)


def as_wide(number: float | Tensor, like: Tensor) -> float | Tensor:
    """A scheduled number; a tensor in the dtype in which the penalty of `like` is computed.

    Args:
        number: a rate or a coefficient.
        like: a tensor whose penalty is computed.
    """
    if isinstance(number, float):
        return number
    return number.to(wide_dtype(like))


def no_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """A context in which matrix products keep their dtype, although the caller may be under
    autocast.

    Args:
        device: type of a device, as "cpu".
    """
    if device in _AUTOCASTS and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


REDUCTIONS = ("mean", "sum", "token_mean", "author")


class RowWeights(NamedTuple):
    """Row weights (B, N) or None where all are 1, and the factor of the whole sum."""

    weights: Tensor | None
    factor: Number


class Pairs(NamedTuple):
    """Row weights of queries (B, N) and keys (B, M) or None where all are 1, and the factor of the
    whole sum."""

    queries: Tensor | None
    keys: Tensor | None
    factor: Number


def check_reduction(reduction: str, who: str) -> None:
    """Raise for a reduction that does not exist.

    Args:
        reduction: mean, sum, token_mean or author.
        who: name of the method, for the error.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"{who}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}."
        )


def token_rows(
    reduction: str,
    batch: int,
    tokens: int,
    valid: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> RowWeights:
    """The weights for a sum over tokens; `valid` is (B or 1, N), False on padded tokens.

    Args:
        reduction: mean, sum, token_mean or author.
        batch: number of samples.
        tokens: how many a projection read.
        valid: bool, False on padding; None: all tokens count.
        dtype: of the result.

    >>> token_rows("mean", batch=4, tokens=5, valid=None)
    RowWeights(weights=None, factor=0.025)
    """
    half = 1.0 if reduction == "author" else 0.5
    if valid is None:
        divisor = {"mean": batch * tokens, "sum": 1}.get(reduction, tokens)
        return RowWeights(None, half / max(1, divisor))
    weights = valid.to(dtype).expand(batch, tokens)
    if reduction == "sum":
        return RowWeights(weights, half)
    if reduction == "mean":
        return RowWeights(weights, half / weights.sum().clamp(min=1))
    return RowWeights(weights / weights.sum(1, keepdim=True).clamp(min=1), half)


def pair_rows(
    reduction: str,
    batch: int,
    queries: int,
    keys: int,
    valid: Tensor | None,
    valid_keys: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Pairs:
    """The weights for a sum over pairs of a query and a key.

    Args:
        reduction: mean, sum, token_mean or author.
        batch: number of samples.
        queries: N.
        keys: M.
        valid: bool, False on padding; None: all tokens count.
        valid_keys: bool (B or 1, M); None: all keys count.
        dtype: of the result.

    >>> pair_rows("mean", batch=4, queries=5, keys=5, valid=None, valid_keys=None).factor
    0.005
    """
    rows = token_rows("sum" if reduction == "mean" else reduction, batch, queries, valid, dtype)
    if valid_keys is None:
        key_weights = None
    else:
        key_weights = valid_keys.to(dtype).expand(batch, keys)
    if reduction != "mean":
        return Pairs(rows.weights, key_weights, rows.factor)
    if rows.weights is None and key_weights is None:
        return Pairs(None, None, token_rows("mean", batch * queries, keys, None).factor)
    n = queries if rows.weights is None else rows.weights.sum(1)
    m = keys if key_weights is None else key_weights.sum(1)
    return Pairs(rows.weights, key_weights, 0.5 / (n * m).sum().clamp(min=1))  # type: ignore[union-attr]


def author_weight(weight: float, batch: int, tokens: int | None = None) -> float:
    """A lambda as the authors publish it, converted to our `reduction="mean"`, so that settings can
    be typed as published.

    The authors' code adds up the samples' token means without the 1/2, so their lambda counts 2 x
    batch times as much for value, attended value and feed-forward; for query, key and query_key it
    divides by n where we divide by the n^2 pairs: give `tokens` for those.

    Args:
        weight: lambda of arXiv 2604.20505, whose useful window is 5e-4 to 1e-3 at rate 0.2.
        batch: the batch size that it was published for.
        tokens: n, for query, key and query_key only.

    >>> round(author_weight(5e-4, batch=64), 6)  # value, attended value, ffn
    0.064
    >>> round(author_weight(5e-4, batch=64, tokens=65), 6)  # query, key, query_key
    4.16
    """
    for name, count in (("batch", batch), ("tokens", 1 if tokens is None else tokens)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"author_weight: {name} is a whole number of at least 1, got {count!r}."
            )
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0 <= weight < float("inf")
    ):
        raise ValueError(f"author_weight: weight is a finite number >= 0, got {weight!r}.")
    return 2.0 * batch * (1 if tokens is None else tokens) * weight
