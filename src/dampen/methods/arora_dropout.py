"""Arora et al.'s penalty: the expectation of inverted dropout on single linear maps."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from dampen.functional.explicit.layers import Term, map_penalty, multiply
from dampen.functional.explicit.projections import check_roles, sequence_first, tap_projection
from dampen.functional.explicit.reductions import as_wide, is_off, no_autocast
from dampen.regularizer import Call, LinearCall, Regularizer
from dampen.schedules import Value

TERMS = {"query": "q", "key": "k", "value": "v"}


class AroraDropout(Regularizer):
    """The closed form of inverted dropout on a linear map, of Arora et al. (arXiv 2003.03397): a
    baseline of Explicit Dropout's tables (arXiv 2604.20505).

    R = p/(1-p) sum_j (mean_i x_ij^2) ||W_:j||^2, the mean over the valid tokens of the batch, on
    the chosen projections or on both feed-forward maps. It is twice the `form="inverted"` of
    `ExplicitDropout` for value and feed-forward; on queries and keys it looks at the projection
    alone, where `ExplicitDropout` looks at the scores.

    Args:
        query, key, value, ffn: the weights; a number, a schedule or one value per layer. The plain
            number 0 switches a term off.
        rate: p of the dropout that the penalty replaces.

    >>> from dampen import AroraDropout
    >>> AroraDropout(ffn=0.05)
    AroraDropout(ffn=0.05, rate=0.2)
    """

    stochastic = False
    needs_valid = True
    reads_adapters = True
    multiplies = True
    reads_product = False
    rate: Tensor
    swapped: bool | None = None  # whether the feed-forward sees (N, B, D); None: not known yet

    def __init__(
        self, query: Value = 0, key: Value = 0, value: Value = 0, ffn: Value = 0, rate: Value = 0.2
    ) -> None:
        super().__init__()
        weights = {"query": query, "key": key, "value": value, "ffn": ffn}
        for term, weight in weights.items():
            self.scheduled(term, weight, high=math.inf)
        self.scheduled("rate", rate)
        self.terms = frozenset(term for term, weight in weights.items() if not is_off(weight))
        reads = {role for term, role in TERMS.items() if term in self.terms}
        feeds = {"ffn_in", "ffn_out"} if "ffn" in self.terms else set()
        self.roles = frozenset(reads | feeds | ({"qkv", "kv"} if reads else set()))
        self.stages = frozenset(
            ({"qkv"} if reads else set()) | ({"product"} if feeds or not reads else set())
        )
        self.needs_valid = bool(self.terms)  # type: ignore[misc]

    example: ClassVar[dict[str, Any]] = {"value": 0.05, "ffn": 0.05}

    def _is_idle(self) -> bool:
        """Without weights nothing is left, whatever the rate."""
        return self.zero_is_identity and not any(
            self._numbers.get(term) for term in getattr(self, "terms", ("rate",))
        )

    @property
    def does_nothing(self) -> bool:
        return not self.terms

    def prepare(self, model: nn.Module) -> None:
        self.swapped = sequence_first(self.neighbors)

    def check_layer(self, roles: set[str], where: str) -> None:
        check_roles(type(self).__name__, self.roles, roles, where)

    def multiply(self, call: LinearCall) -> Tensor | None:
        """Both feed-forward maps, each with its penalty in one."""
        if "ffn" not in self.terms or call.role not in ("ffn_in", "ffn_out"):
            return None
        found = multiply(call, self._term("ffn", call.input), self._swapped())
        if found is not None:
            self.penalize(found[1], "ffn")
        if found is None:
            return None
        return found[0]

    def product(self, y: Tensor, call: LinearCall) -> Tensor:
        """The same beside the map."""
        if "ffn" in self.terms and call.role in ("ffn_in", "ffn_out"):
            with no_autocast(y.device.type):
                self.penalize(map_penalty(call, self._term("ffn", y), self._swapped()), "ffn")
        return y

    def _swapped(self) -> bool:
        if self.swapped is None:
            return sequence_first(self.neighbors)
        return self.swapped

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """The projections: the model's mask is known here."""
        with no_autocast(q.device.type):
            for term, role, operand in (("query", "q", q), ("key", "k", k), ("value", "v", v)):
                if term in self.terms and call.is_first(
                    role, (self.serial, term)
                ):  # the form has no part that is read off the operand, so it passes as it is
                    self.penalize(
                        tap_projection(role, operand, call, self._term(term, operand))[1], term
                    )
        return q, k, v

    def _term(self, name: str, like: Tensor) -> Term:
        """Twice the weight, because Arora et al. have no 1/2."""
        weight, rate = (as_wide(self.current(n), like) for n in (name, "rate"))
        return Term(2 * weight, rate, "inverted", "mean")

    def extra_repr(self) -> str:
        values = [f"{t}={getattr(self, t).item():.3g}" for t in (*TERMS, "ffn") if t in self.terms]
        return ", ".join([*(values or ["every weight is 0"]), f"rate={self.rate.item():.3g}"])
