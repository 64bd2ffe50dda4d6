"""Low-rank adapters (peft's LoRA) beside the linear maps of a model: found, and read at each forward."""

from __future__ import annotations

from typing import Any

from torch import nn

from dampen.functional.explicit.layers import LowRank
from dampen.regularizer import UnsupportedModel


def is_lora(module: nn.Module) -> bool:
    """Whether a module is a LoRA layer as peft makes them: y = base_layer(x) + s B A x."""
    return all(
        hasattr(module, name)
        for name in ("base_layer", "lora_A", "lora_B", "scaling", "active_adapters")
    )


def connect_adapters(model: nn.Module) -> int:
    """Tell each regularized map of the adapter that lies around it; how many have one."""
    count = 0
    for module in model.modules():
        if is_lora(module):
            site = vars(module.base_layer).get("_dampen_linear")
            if site is not None:
                site.adapter = module
                count += 1
    return count


def read_adapter(lora: Any, where: str) -> LowRank | None:
    """The adapters at work in this forward; None where they are switched off, or merged into the weight."""
    if lora.disable_adapters or lora.merged:
        return None
    names = [n for n in lora.active_adapters if n in lora.lora_A]
    variant = next((n for n in names if n in getattr(lora, "lora_variant", {})), None)
    if variant is not None:
        raise UnsupportedModel(
            f"the adapter '{variant}' at '{where}' is no plain LoRA (DoRA or another variant), so W + s B A is not its "
            "map and the penalty would be of something else. Penalize maps without it, or leave the layer out."
        )
    if not names:
        return None
    return LowRank(
        tuple((lora.lora_A[n].weight, lora.lora_B[n].weight, float(lora.scaling[n])) for n in names)
    )
