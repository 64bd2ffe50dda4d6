"""ConcreteDropout: dropout whose rates are learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dampen.functional.explicit.reductions import as_wide, wide
from dampen.functional.learnable import device_of, logit, soft_bernoulli, spread
from dampen.masks import drop
from dampen.methods.drop_connect import check_targets
from dampen.regularizer import LinearCall, Regularizer
from dampen.schedules import Value


class ConcreteDropout(Regularizer):
    """Dropout on the inputs of linear layers at rates that are learned, one for each layer and
    role: Concrete Dropout (arXiv 1705.07832).

    y = W ((1 - z) * x) / (1 - p) + b, z = sigmoid((logit p + logit u) / temperature) per token and
    feature, u ~ U(0, 1): a relaxed Bernoulli draw, differentiable in p. The task alone would learn
    p = 0. The divergence of variational dropout holds it back:

    J = weight * [ l^2 / (2 (1 - p)) ||W||^2 + d (log 2 - H(p)) ],

    H(p) the entropy of a draw and d the width of the input, so that p rises where the data are few
    or W is small. The paper's -d H(p) is moved by d log 2, so that the least value is 0. Its factor
    is one over the number of training examples, which is what `weight` should be.

    The rates are parameters: give `reg.parameters()` to the optimizer, without weight decay, which
    would pull p towards 1/2. `reg.state_dict()` has them, and `print(reg)` shows where they are.
    Differences from the paper: in eval there is no draw, as with dropout. `reg.mc_average` averages
    over draws.

    Args:
        rate: p at the start.
        weight: factor of the divergence, 1 / N for N training examples.
        length: l, the length scale of the prior on W.
        targets: as for `DropConnect`: "ffn", "attention", "all" or roles.
        temperature: of the relaxed draw.

    >>> from dampen import ConcreteDropout
    >>> ConcreteDropout(0.1)
    ConcreteDropout(rate=0.1, weight=0.0001, targets=ffn_in ffn_out)
    """

    needs_module = True  # a rate is made for each role before experts are sliced
    rate: Tensor
    weight: Tensor

    def __init__(
        self,
        rate: Value = 0.1,
        weight: Value = 1e-4,
        length: float = 0.1,
        targets: str | Sequence[str] = "ffn",
        temperature: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value in (("length", length), ("temperature", temperature)):
            if not value > 0:
                raise ValueError(f"ConcreteDropout: {name} must be positive, got {value!r}.")
        self.scheduled("rate", rate)
        self.scheduled("weight", weight, high=math.inf)
        self.length, self.temperature, self.learns = length, temperature, True
        self.roles = check_targets(targets, "ConcreteDropout")

    def prepare(self, model: nn.Module) -> None:
        found = {role for _, role in self.linears}
        if any(isinstance(m, nn.MultiheadAttention) for m in self.neighbors):
            found |= {"q", "k", "v"}  # it has no modules for them
        # parameters of the clone itself: those of a child would enter the model's state_dict
        for role in sorted(self.roles & found):
            start = torch.full(
                (1,), logit(self.rate.item()), dtype=torch.float32, device=device_of(model)
            )
            self.register_parameter(f"{role}_log_odds", nn.Parameter(start))

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        if not self.learns:
            return drop(x, self.current("rate")), weight
        log_odds = wide(getattr(self, f"{call.role}_log_odds"))
        value = divergence(log_odds, call.weight, self.length)
        self.penalize(as_wide(self.current("weight"), value) * value)
        kept = 1 - soft_bernoulli(log_odds, x.shape, self.temperature)
        return x * (kept / (1 - log_odds.sigmoid())).to(x.dtype), weight

    zero_is_identity = True

    def neutral(self) -> None:
        self.learns = False
        super().neutral()

    @property
    def rates(self) -> dict[str, Tensor]:
        """The learned rates of this clone by role."""
        found = dict(self.named_parameters(recurse=False))
        return {name.removesuffix("_log_odds"): p.sigmoid() for name, p in found.items()}

    def extra_repr(self) -> str:
        rate = f"{self.rate.item():.3g}"
        if self.rates:
            rate = " ".join(f"{role} {spread(p, rate)}" for role, p in self.rates.items())
        return (
            f"rate={rate}, weight={self.weight.item():.3g}, targets={' '.join(sorted(self.roles))}"
        )


def divergence(log_odds: Tensor, weight: Tensor, length: float) -> Tensor:
    """l^2 / (2 (1 - p)) ||W||^2 + d (log 2 - H(p)).

    Args:
        log_odds: log(p / (1 - p)), one number.
        weight: W, (out, in).
        length: l.
    """
    log_p, log_q = nn.functional.logsigmoid(log_odds), nn.functional.logsigmoid(-log_odds)
    entropy = -(log_p.exp() * log_p + log_q.exp() * log_q)
    decay = length**2 / 2 * wide(weight).square().sum() * (-log_q).exp()
    return (decay + weight.shape[1] * (math.log(2) - entropy)).sum()
