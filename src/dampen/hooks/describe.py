"""The printed report of a regularized model: what sits where, at which rate or weight, and which
kernel runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dampen.hooks.builtin_dropout import describe_own
from dampen.hooks.discover.sites import (
    find_attentions,
    find_layers,
    find_outside,
    find_unnamed,
    parts_of,
)
from dampen.native import library
from dampen.regularizer import ATTENTION_STAGES, MODEL_STAGES, Regularizer, needs_matrix

if TYPE_CHECKING:
    from dampen.handle import Handle
    from dampen.hooks.context import Layer


def describe(reg: Handle) -> str:
    """One line per layer, and the reason for each kernel once."""
    if "_dampen_model" not in vars(reg.model):
        return "dampen: removed"
    methods = ", ".join(dict.fromkeys(type(m).__name__ for m in reg.methods))
    layers = f"{len(reg.layers)} layer{'s' * (len(reg.layers) != 1)}"
    lines = [
        f"dampen: {methods} on {type(reg.model).__name__}, {layers}, progress {reg._progress:.3g}, "
        f"{reg.passes} pass{'es' if reg.passes > 1 else ''} per step"
    ]
    for r in reg.clones:
        if r.stages & set(MODEL_STAGES):
            lines.append(f"  (model)  {r}")
    if reg.passes > 1:
        lines.append(f"  (passes)  {reg.prefix.describe()}")
    groups = _equal_layers(reg)
    width = max(len(name) for name, _ in groups)
    lines += [f"  {name:<{width}}  {told}" for name, told in groups]
    parts = [
        *_coverage(reg),
        *_outside(reg),
        *_inner(reg),
        *_library(reg),
        *_unreached(reg),
        *_zeros(reg),
        *_own(reg),
        *_native(reg),
    ]
    return "\n".join([*lines, *parts])


def _equal_layers(reg: Handle) -> list[tuple[str, str]]:
    """Names of neighboring layers where the same happens, with what does."""
    groups: list[tuple[list[str], str]] = []
    for layer in reg.layers:
        here = "; ".join(map(str, layer.clones)) or "-"
        told = f"{here}  [{'; '.join(_kernels(layer)) or 'attention untouched'}]"
        if groups and groups[-1][1] == told:
            groups[-1][0].append(layer.site.name)
        else:
            groups.append(([layer.site.name], told))
    return [(span(names), told) for names, told in groups]


def span(names: list[str]) -> str:
    """Several names of layers as one.

    Args:
        names: in the order of the layers.

    >>> span(["blocks.0", "blocks.1", "blocks.2"]), span(["a", "b.0"]), span(["a"])
    ('blocks.0-2', 'a ... b.0 (2 layers)', 'a')
    """
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    differing = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len(differing) == 1 and len({len(p) for p in parts}) == 1 and differing[0] % 2:
        at = differing[0]
        numbers = [int(p[at]) for p in parts]
        if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            first = parts[0]
            whole = [*first[:at], f"{numbers[0]}-{numbers[-1]}", *first[at + 1 :]]
            return "".join(whole)
    return f"{names[0]} ... {names[-1]} ({len(names)} layers)"


def _native(reg: Handle) -> list[str]:
    """The command that builds the native kernels, where the model is on a CPU
    and they are not built."""
    on_cpu = all(p.device.type == "cpu" for p in reg.model.parameters())
    if not on_cpu or library.available() or "dampen doctor --build" not in library.status():
        return []
    return ["  (note)  native kernels for this processor are not built: dampen doctor --build"]


def _coverage(reg: Handle) -> list[str]:
    """The methods that do not act in every layer: "FeedForwardDropout:
    feed-forward in 2 of 8 layers"."""
    lines = []
    for m in {type(m).__name__: m for m in reg.methods}.values():
        for part in sorted(parts_of(m)):
            acting = [
                layer
                for layer in reg.layers
                if all(c.acts_here for c in layer.clones if c.name == m.name)
            ]
            reached = sum(part in layer.reached.get(m.name, ()) for layer in acting)
            if m.stages != {"tokens"} and reached < len(reg.layers):
                lines.append(
                    f"  (partial)  {type(m).__name__}: {part} "
                    f"in {reached} of {len(reg.layers)} layers"
                )
    return lines


def _outside(reg: Handle) -> list[str]:
    """What lies in no layer, beside the methods that do not reach it: feed-forward layers and
    residual blocks (convolutional stages, a feed-forward that the model itself holds), attention
    whose names do not show it."""
    layers = find_layers(reg.model, whole_stacks=True)
    unnamed = find_unnamed(reg.model)
    lines = []
    for m in {type(m).__name__: m for m in reg.methods}.values():
        for part in sorted(parts_of(m)):
            reached = sum(part in layer.reached.get(m.name, ()) for layer in reg.layers)
            of_attention = part in ("attention", "projections")
            left = unnamed
            if not of_attention:
                left = find_outside(reg.model, layers, residual=part == "blocks")
            if left and m.stages != {"tokens"}:
                lines.append(
                    f"  (outside)  {type(m).__name__}: {part} in {reached} "
                    f"of {len(reg.layers)} layers, and not in "
                    f"{', '.join(spans(left))}, which no layer holds"
                )
    return lines


def _inner(reg: Handle) -> list[str]:
    """The methods of residual branches, and the layers where a branch holds residuals of its own
    that were seen and left as they are."""
    left = [layer.site.name for layer in reg.layers if layer.inner_sums]
    acting = {type(m).__name__: m for m in reg.methods if "branch" in m.stages}
    return [
        f"  (inner)  {name}: branches as a whole, and no residual inside a branch of {_names(left)}"
        for name in acting
        if left
    ]


def _library(reg: Handle) -> list[str]:
    """The back ends of a library that are switched while methods are at work, if any."""
    kept = [vars(m) for m in reg.model.modules()]
    found = next((k["_dampen_backend"] for k in kept if "_dampen_backend" in k), None)
    lines = [] if found is None else [f"  (library)  {found.describe()}"]
    unfused = sum("_dampen_attention" in k and k.get("fused_attn") is False for k in kept)
    if unfused:
        lines.append(
            f"  (library)  fused_attn=False of {unfused} attentions is True in training forwards"
        )
    return lines


def _zeros(reg: Handle) -> list[str]:
    """The methods that were requested at 0 and stay there."""
    lines = []
    for name in dict.fromkeys(r.name for r in reg.clones):
        clones = [r for r in reg.clones if r.name == name]
        if all(r.always_idle for r in clones):
            lines.append(
                f"  (note)  {type(clones[0]).__name__} is 0 "
                "everywhere for the whole of training: does nothing"
            )
    return lines


def _own(reg: Handle) -> list[str]:
    """The dropout that the model brings itself, and whether a method does the same once more."""
    rates = reg.builtin_dropout()
    lines = describe_own(rates)
    twice = [r for r in rates if r.kind == "drop path" and r.rate > 0]
    if twice and any(m.name == "drop_path" for m in reg.methods):
        lines.append(
            "  (note)  DropPath acts beside the model's own drop path "
            f"({twice[0]}): a branch must survive both. "
            "reg.set_builtin_dropout(rate=0, target_modules='drop path') leaves DropPath alone"
        )
    return lines


def _unreached(reg: Handle) -> list[str]:
    """The attentions in which nothing happens although the model has them: left
    out, or never run so far."""
    chosen = {name for layer in reg.layers for name in layer.attentions}
    left_out = [
        name or "(the model itself)" for name in find_attentions(reg.model) if name not in chosen
    ]
    acting = [layer for layer in reg.layers if not all(c.idle for c in layer.clones)]
    ran = {name: kernel for layer in acting for name, kernel in layer.kernels.items()}
    skipped = [name for name, kernel in ran.items() if not kernel] if any(ran.values()) else []
    lines = (
        [f"  (skipped)  {_names(skipped)}: not run by the forwards so far, though others were"]
        if skipped
        else []
    )
    if left_out:
        lines.append(
            f"  (left out)  {_names(left_out)}: not chosen by target_modules= or attention="
        )
    return lines


def _names(names: list[str], most: int = 12) -> str:
    short = spans(names)
    more = f" and {len(short) - most} more" if len(short) > most else ""
    return ", ".join(short[:most]) + more


def spans(names: list[str]) -> list[str]:
    """Names with those that follow each other in one list written as one.

    >>> spans(["stem", "blocks.0", "blocks.1", "blocks.2", "blocks.4"])
    ['stem', 'blocks.0-2', 'blocks.4']
    """
    found: list[tuple[str, int, int]] = []  # the name of the list, the first and the last number
    for name in names:
        above, _, last = name.rpartition(".")
        number = int(last) if above and last.isdigit() else -1
        if number > 0 and found and found[-1][0] == above and found[-1][2] == number - 1:
            found[-1] = above, found[-1][1], number
        else:
            found.append((above if number >= 0 else name, number, number))
    return [
        name if first < 0 else f"{name}.{first}" if first == last else f"{name}.{first}-{last}"
        for name, first, last in found
    ]


def _kernels(layer: Layer) -> list[str]:
    if any(layer.kernels.values()):
        return [
            f"{name.rsplit('.', 1)[-1]}: {kernel}"
            for name, kernel in layer.kernels.items()
            if kernel
        ]
    if layer.clones and all(c.idle for c in layer.clones):
        return ["nothing runs at 0"]
    return (
        [declared_kernel(layer.clones)]
        if any(c.stages & set(ATTENTION_STAGES) for c in layer.clones)
        else []
    )


def declared_kernel(clones: list[Regularizer]) -> str:
    """What the stages alone say, before any forward."""
    if needs_matrix(clones):
        return "plain (a stage needs the matrix of scores); no forward yet"
    return "fused unless the kernel table knows better; no forward yet"
