"""PEFT: LoRA before or after `regularize`, and LoRA's own dropout by layer.

    model = get_peft_model(base, LoraConfig(...))          # LoRA first: nothing else to do
    reg = dampen.regularize(model, ExplicitDropout(value=0.05))

    reg = dampen.regularize(base, ExplicitDropout(value=0.05))
    model = get_peft_model(base, LoraConfig(...))          # LoRA afterwards: say so
    dampen.integrations.peft.connect(reg)

Penalties of an adapted map are those of W + s B A, in closed form
(`dampen.functional.explicit.layers`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn

from dampen.handle import Handle
from dampen.hooks.discover.roles import connect_adapters, is_lora


def connect(reg: Handle) -> int:
    """Inform the regularized layers of adapters that came after `regularize`; returns how many maps
    have one.

    Without it a penalty would read the frozen W alone. Methods that cannot read adapters are
    refused.

    Args:
        reg: the handle that `dampen.regularize` returned.
    """
    blind = next(
        (m for m in reg.methods if not m.reads_adapters and m.roles and not m.stochastic), None
    )
    count = connect_adapters(reg.model)
    if count == 0 and not any(is_lora(m) for m in reg.model.modules()):
        raise ValueError(
            f"{type(reg.model).__name__} has no LoRA layers. Call connect(reg) after "
            "get_peft_model or add_adapter."
        )
    if count and blind is not None:
        raise ValueError(
            f"{blind} reads weights that adapters now change, and cannot read the adapters."
        )
    return count


def lora_dropout(model: nn.Module, rates: Mapping[str, float]) -> int:
    """Set LoRA's own dropout by patterns of dotted names, the last that matches counts:
    `{"*.q_proj": 0.1, "*.11.*": 0.3}`. peft has one rate for all layers. Returns how many layers
    were set; a pattern that matches none raises.

    Args:
        model: a PEFT model.
        rates: pattern of dotted names -> rate; the last that matches counts.
    """
    layers = {name: m for name, m in model.named_modules() if is_lora(m)}
    chosen: dict[str, float] = {}
    for pattern, rate in rates.items():
        found = [name for name in layers if fnmatch.fnmatch(name, pattern)]
        if not found:
            raise ValueError(
                f"no LoRA layer matches {pattern!r}. There are {', '.join(layers) or 'none'}."
            )
        if isinstance(rate, bool) or not 0 <= rate < 1:
            raise ValueError(f"lora_dropout[{pattern!r}] is a probability in [0, 1), got {rate!r}.")
        chosen.update(dict.fromkeys(found, rate))
    for name, rate in chosen.items():
        dropouts: Any = layers[name].lora_dropout
        for adapter in dropouts:
            dropouts[adapter] = nn.Dropout(rate) if rate else nn.Identity()
    return len(chosen)
