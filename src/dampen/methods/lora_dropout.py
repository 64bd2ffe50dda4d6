"""LoRADropout: drop parts of the low-rank adapters of a fine-tuning."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from dampen.hooks.discover.roles import is_linear, is_lora
from dampen.masks import bernoulli, zero_and_rescale
from dampen.regularizer import LinearCall, Regularizer, UnsupportedModel
from dampen.schedules import Value

Unit = Literal["feature", "rank", "module"]
MAPS: dict[str, frozenset[str]] = {
    "feature": frozenset({"lora_a", "lora_b"}),
    "rank": frozenset({"lora_a"}),
    "module": frozenset({"lora_b"}),
}
"""The maps of an adapter that each unit masks."""


class LoRADropout(Regularizer):
    """Drop input features of A and output features of B in each low-rank adapter: LoRA Dropout
    (arXiv 2404.09610).

    W + s B A becomes W + s diag(m_B) B A diag(m_A) / (1 - p)^2, m ~ Bernoulli(1 - p) per feature,
    one mask per forward for the whole batch. In the paper's words these are rows of A and columns
    of B. The frozen W stays whole, and so does the rank.

    `unit="rank"` drops components of the rank, B diag(m) A / (1 - p), and `unit="module"` whole
    adapters, m B A / (1 - p): rank dropout and module dropout of LyCORIS (arXiv 2309.14859).
    LoRA's own `lora_dropout` is another thing: it drops the input of A, anew for each token.

    Differences from the paper: what stays is divided by 1 - p, so that the expected adapter is
    B A. The paper averages the loss of a step over several draws; here a step has one. Its ensemble
    at test time is `reg.mc_average(lambda: model(x))`.

    Acts on adapters of linear layers as peft makes them. Add them before `regularize`. Adapters of
    embeddings and convolutions stay whole, and so does a bias of B.

    Args:
        rate: p, the probability to drop.
        unit: feature, rank or module.

    >>> from dampen import LoRADropout
    >>> LoRADropout(0.1), LoRADropout(0.2, unit="rank")
    (LoRADropout(rate=0.1, unit=feature), LoRADropout(rate=0.2, unit=rank))
    """

    needs_adapters = True
    roles = MAPS["feature"]
    rate: Tensor

    def __init__(self, rate: Value = 0.1, unit: Unit = "feature") -> None:
        super().__init__()
        if unit not in MAPS:
            raise ValueError(f"LoRADropout: unit must be one of {', '.join(MAPS)}, got {unit!r}.")
        self.scheduled("rate", rate)
        self.unit, self.roles = unit, MAPS[unit]

    def inspect_model(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if not is_lora(module) or not len(module.lora_A):
                continue
            base: nn.Module = module.base_layer
            # these read the weights of A and B, or call both several times in a forward
            if getattr(module, "lora_variant", None) or not _runs_its_maps(base):
                kind = type(base).__name__
                raise UnsupportedModel(
                    f"the adapter '{name}' around {kind} is no plain LoRA of a linear layer (DoRA "
                    "or another variant, or around torch's attention), so LoRADropout cannot mask "
                    "it. Make plain LoRA layers: LoraConfig(use_dora=False, ...)."
                )

    def check_layer(self, roles: set[str], where: str) -> None:
        if not self.roles <= roles:
            raise UnsupportedModel(
                f"LoRADropout acts on LoRA adapters, but '{where}' has none. Add them first: "
                "model = get_peft_model(model, LoraConfig(...)), then regularize."
            )

    def operands(self, x: Tensor, weight: Tensor, call: LinearCall) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        if self.unit == "feature":
            # A is (rank, in) and B is (out, rank): the features are the axis that is not the rank
            shape = (1, columns) if call.role == "lora_a" else (rows, 1)
        else:
            shape = (rows, 1) if self.unit == "rank" else (1, 1)
        rate = self.current("rate")
        return x, zero_and_rescale(weight, bernoulli(shape, rate, weight.device), rate)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, unit={self.unit}"


def _runs_its_maps(base: nn.Module) -> bool:
    """Whether an adapter around this layer runs its maps A and B as modules."""
    return is_linear(base) or isinstance(base, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding)
