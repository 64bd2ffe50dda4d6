"""The three forms of a penalty: how much of the bias part b and of the variance part v it takes.

With p the rate of dropout and c = 1 - p (arXiv 2604.20505; derivations in docs/exactness.md):

    paper     J = 1/2 p^2 b                    takes two equal mask entries as independent: the squared bias alone
    exact     J = 1/2 (p^2 b + p (1-p) v)      the true expectation of the paper's own definition, plain masks
    inverted  J = 1/2 p/(1-p) v                the dropout that nn.Dropout does (Wager, Arora et al.)
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

FORMS = ("paper", "exact", "inverted")

Number = float | Tensor


class Factors(NamedTuple):
    """Factors of the bias part and of the variance part; None: the form does not have the part."""

    bias: Number | None = None
    variance: Number | None = None


def is_off(weight: object) -> bool:
    """Whether a weight is the plain number 0, which switches its term off for good. A schedule or list may be 0 for
    a while.

    >>> is_off(0), is_off(0.0), is_off([0.0, 0.0]), is_off(False)
    (True, True, False, False)
    """
    return isinstance(weight, int | float) and not isinstance(weight, bool) and weight == 0


def check_form(form: str, who: str) -> None:
    """Raise for a form that does not exist."""
    if form not in FORMS:
        raise ValueError(f"{who}: form must be one of {', '.join(FORMS)}, got {form!r}.")


def single(form: str, p: Number) -> Factors:
    """The factors where one mask acts: on the input of a linear map, or on the queries or the keys alone.

    >>> single("exact", 0.5)
    Factors(bias=0.25, variance=0.25)
    """
    if form == "paper":
        return Factors(bias=p * p)
    if form == "exact":
        return Factors(bias=p * p, variance=p * (1 - p))
    return Factors(variance=p / (1 - p))


def combine(factors: Factors, bias: Tensor | None, variance: Tensor | None) -> Tensor:
    """The sum of the parts that the form has, each with its factor."""
    terms = [f * t for f, t in zip(factors, (bias, variance), strict=True) if f is not None and t is not None]
    return sum(terms[1:], start=terms[0])
