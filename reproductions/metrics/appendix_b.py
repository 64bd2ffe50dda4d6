"""Appendix B of Explicit Dropout (arXiv 2604.20505): the paper's penalty split into Arora et al.'s
and a rest.

For a linear map with input X (tokens x features) and weight W (out x in), sums over tokens:

    R_arora = p/(1-p) sum_j ||x_:j||^2 ||W_:j||^2
    R_cross = p^2/2 sum_{j != j'} (X^T X)_jj' (W^T W)_jj'
    J_paper = p^2/2 ||X W^T||^2 = alpha R_arora + R_cross,   alpha = p (1-p) / 2

R_arora is what inverted dropout of single features costs and never negative; R_cross is the
interaction of different features, which is negative where features that occur together are weighted
against each other."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AppendixB(NamedTuple):
    """The two parts as they enter J, and J itself; all 0-d tensors with gradients."""

    arora: Tensor  # alpha R_arora
    cross: Tensor  # R_cross
    paper: Tensor  # J_paper = arora + cross


def alpha(rate: float) -> float:
    """The factor of R_arora in J_paper, p (1-p) / 2."""
    return rate * (1 - rate) / 2


def r_arora(x: Tensor, weight: Tensor, rate: float) -> Tensor:
    """p/(1-p) sum_j ||x_:j||^2 ||W_:j||^2, from two vectors; x is (..., in), weight (out, in)."""
    return rate / (1 - rate) * _power(x) @ weight.square().sum(0)


def r_cross(x: Tensor, weight: Tensor, rate: float) -> Tensor:
    """p^2/2 sum over j != j' of (X^T X)_jj' (W^T W)_jj', as all pairs less the equal ones: no d x d
    matrix is built.
    """
    everything = (x @ weight.t()).square().sum()
    return rate**2 / 2 * (everything - _power(x) @ weight.square().sum(0))


def appendix_b(x: Tensor, weight: Tensor, rate: float) -> AppendixB:
    """Both parts and their sum, for the input and weight of one linear map.

    >>> import torch
    >>> x, w = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, -1.0]])  # two features that cancel
    >>> [round(v.item(), 4) for v in appendix_b(x, w, 0.2)]
    [0.04, -0.04, 0.0]
    """
    arora, cross = alpha(rate) * r_arora(x, weight, rate), r_cross(x, weight, rate)
    return AppendixB(arora, cross, arora + cross)


def _power(x: Tensor) -> Tensor:
    """||x_:j||^2 of each feature over all tokens."""
    return x.flatten(0, -2).square().sum(0)
