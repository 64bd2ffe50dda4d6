"""The printed report of a regularized model: what sits where, at which rate or weight, and which kernel runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dampen.regularizer import ATTENTION_STAGES, MODEL_STAGES, Regularizer, needs_matrix

if TYPE_CHECKING:
    from dampen.handle import Regularization
    from dampen.state import Layer


def describe(reg: Regularization) -> str:
    """One line per layer, and the reason for each kernel once."""
    if not reg.layers:
        return "dampen: removed"
    methods = ", ".join(dict.fromkeys(type(m).__name__ for m in reg.methods))
    lines = [
        f"dampen: {methods} on {type(reg.model).__name__}, {len(reg.layers)} layers, progress {reg._progress:.3g}, "
        f"{reg.passes} pass{'es' if reg.passes > 1 else ''} per step"
    ]
    for r in reg.clones:
        if r.stages & set(MODEL_STAGES):
            lines.append(f"  (model)  {r}")
    if reg.passes > 1:
        lines.append(f"  (passes)  {reg.prefix.describe()}")
    width = max(len(layer.site.name) for layer in reg.layers)
    for layer in reg.layers:
        here = "; ".join(map(str, layer.clones)) or "-"
        lines.append(f"  {layer.site.name:<{width}}  {here}  [{'; '.join(_kernels(layer)) or 'attention untouched'}]")
    return "\n".join(lines)


def _kernels(layer: Layer) -> list[str]:
    if layer.kernels:
        return [f"{name.rsplit('.', 1)[-1]}: {kernel}" for name, kernel in layer.kernels.items()]
    return [declared_kernel(layer.clones)] if any(c.stages & set(ATTENTION_STAGES) for c in layer.clones) else []


def declared_kernel(clones: list[Regularizer]) -> str:
    """What the stages alone say, before any forward."""
    if needs_matrix(clones):
        return "plain (a stage needs the matrix of scores); no forward yet"
    return "fused unless the kernel table knows better; no forward yet"
