"""What a plain model is made of, read off records of its forward: attention, projections, feed-forward, branches.

- The value projection of a core is the linear call whose outputs, marked by the number of their column, arrive at the
  second product.
- A linear call is of a feed-forward where it ends a branch and starts from another linear call of that branch, has no
  core between, and mixes no tokens (a change of one row reaches no other)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.operation_record import Branch, Core, Linear, Trace, record


@dataclass
class Facts:
    """The plain model, read off its records."""

    trace: Trace
    cores: list[Core]
    channel: set[int]  # cores whose keys are not tokens
    values: dict[
        int, tuple[int, Tensor]
    ]  # core -> its value projection and the columns that reach it
    attention: set[str]  # parameters of the projections of attention
    feed_forward: dict[int, Linear]
    branches: list[Branch]
    ambiguous: list[str] = field(default_factory=list)
    own_masks: set[int] = field(
        default_factory=set
    )  # cores whose mask depends on the data, as in sparse attention
    visible: dict[int, Tensor] = field(
        default_factory=dict
    )  # keys that have weight for some other scores: not masked

    @property
    def token_cores(self) -> list[Core]:
        return [c for c in self.cores if c.index not in self.channel]

    @property
    def feed_forward_weights(self) -> set[str]:
        return {e.weights[0] for e in self.feed_forward.values()}


def learn(model: nn.Module, inputs: dict[str, Any]) -> Facts:
    """What the plain model is made of."""
    trace, _ = record(model, inputs, grad=False)
    coded = _coded(model, inputs, trace)
    values: dict[int, tuple[int, Tensor]] = {}
    ambiguous = []
    for core, marked in zip(trace.cores, coded, strict=True):
        found = [i for i in core.v_sources if isinstance(trace.events[i], Linear)]
        if len(found) != 1 or marked is None:
            ambiguous.append(f"{core.module}: {len(found)} linear calls lead to its values")
            continue
        event = trace.events[found[0]]
        assert isinstance(event, Linear)
        codes = marked.unique()
        columns = codes.round().long().unique() - 1
        if (
            not torch.allclose(codes, codes.round(), atol=0.02)
            or columns.min() < 0
            or columns.max() >= event.outs
        ):
            ambiguous.append(f"{core.module}: its values are no copy of a linear call's outputs")
            continue
        values[core.index] = found[0], columns
    attention: set[str] = set()
    ends = {
        i for b in residual_branches(trace) for i in b.last
    }  # a token that skips the projections is no projection
    for core in trace.cores:
        for i in core.sources | core.v_sources:
            event = trace.events[i]
            if isinstance(event, Linear) and i not in ends:
                attention |= set(event.weights)
    done = {c.index for c in trace.cores}
    for linear in trace.linears:
        if linear.sources and linear.sources <= done:
            attention |= set(linear.weights)
    ff = _feed_forward(model, inputs, trace, attention)
    damped, _ = record(model, inputs, change=lambda event, out: out.detach() * 0.9, grad=False)
    own = {
        a.index for a, b in zip(trace.cores, damped.cores, strict=False)
        if a.seen is None or b.seen is None or not torch.equal(a.seen, b.seen)
    }  # fmt: skip
    channel = _over_channels(trace, coded)
    found = Facts(
        trace, trace.cores, channel, values, attention, ff, residual_branches(trace), ambiguous, own
    )
    found.visible = _visible(model, inputs, trace)
    return found


def _visible(model: nn.Module, inputs: dict[str, Any], trace: Trace) -> dict[int, Tensor]:
    """The keys of each core that are no further below the others for some random scores: what a model hides has no
    weight whatever its scores, while a low score may only wait for the highest one to be hidden."""
    visible = {
        c.index: c.seen | c.allowed
        for c in trace.cores
        if c.seen is not None and c.allowed is not None
    }
    for _ in range(3):
        try:
            cores = record(
                model, inputs, change=lambda event, out: torch.randn_like(out) * 0.1, grad=False
            )[0].cores
        except Exception as error:  # a model whose control flow reads its data
            trace.notes.append(f"random scores: {type(error).__name__}")
            break
        for plain, other in zip(trace.cores, cores, strict=False):
            if (
                plain.seen is not None
                and other.seen is not None
                and plain.seen.shape == other.seen.shape
            ):
                before = visible.get(plain.index, plain.seen)
                visible[plain.index] = before | other.seen
    return visible


def _coded(model: nn.Module, inputs: dict[str, Any], plain: Trace) -> list[Tensor | None]:
    """What arrives as values at each core where each linear call's outputs are the number of their column; the
    difference of two such forwards, so that what is added on the way does not count."""
    seen: list[list[Core]] = []
    for factor in (1, 2):

        def mark(event: Linear, out: Tensor, factor: int = factor) -> Tensor | None:
            if not out.is_floating_point():
                return None
            codes = torch.arange(1, event.outs + 1, dtype=out.dtype) * factor
            if event.kind == "conv":
                return codes.view(-1, *[1] * (out.ndim - 2)).expand_as(out)
            return codes.expand_as(out)

        try:
            seen.append(record(model, inputs, change=mark, grad=False)[0].cores)
        except (
            Exception
        ) as error:  # a model whose control flow reads its data: its columns stay unknown
            plain.notes.append(f"columns unknown: {type(error).__name__}")
            return [None] * len(plain.cores)
    if {len(s) for s in seen} != {len(plain.cores)}:
        return [None] * len(plain.cores)
    pairs = [(a.v, b.v) for a, b in zip(*seen, strict=True)]
    return [
        b - a if a is not None and b is not None and a.shape == b.shape else None for a, b in pairs
    ]


def _over_channels(trace: Trace, coded: list[Tensor | None]) -> set[int]:
    """Cores whose keys are channels: where each row of a value is one column of the linear call, not one token."""
    over = set()
    for core, v in zip(trace.cores, coded, strict=True):
        if v is None or v.ndim < 2 or v.shape[-1] < 2 or v.shape[-2] < 2:
            continue
        along_keys = v.flatten(0, -3)[0] if v.ndim > 2 else v
        constant_rows = bool((along_keys == along_keys[:, :1]).all())
        constant_columns = bool((along_keys == along_keys[:1]).all())
        if constant_rows and not constant_columns:
            over.add(core.index)
    return over


def residual_branches(trace: Trace) -> list[Branch]:
    """Branches that end in a linear call, a convolution or a core, and depend on what they are added to."""
    return [b for b in trace.branches if b.last and b.base and not b.parallel]


def _feed_forward(
    model: nn.Module, inputs: dict[str, Any], trace: Trace, attention: set[str]
) -> dict[int, Linear]:
    cores = sum(1 << c.index for c in trace.cores)
    pairs: dict[int, set[int]] = {}
    convolved: set[int] = set()
    for branch in trace.branches:
        for i in branch.last:
            last = trace.events[i]
            if (
                not isinstance(last, Linear)
                or last.kind != "linear"
                or last.outs != branch.shape[-1]
            ):
                continue
            sources = _through_depthwise(trace, last.sources)
            inner = {
                j
                for j in sources
                if branch.events >> j & 1
                and _is_linear(trace, j)
                and not _outside(trace, j, branch)
            }
            routers = {j for j in inner if trace.events[j].outs < last.ins}
            inner, sources = inner - routers, frozenset(sources) - routers
            own = last.ancestors & branch.events
            if inner and inner == set(sources) and not own & cores:
                pairs[i] = inner
                convolved |= {i} if not sources <= last.sources else set()
    if not pairs:
        return {}
    mixing = _mixing(model, inputs, trace, pairs)
    found: dict[int, Linear] = {}
    for last_index, firsts in pairs.items():
        if last_index in mixing - convolved:
            continue
        for i in (last_index, *firsts):
            event = trace.events[i]
            assert isinstance(event, Linear)
            if not set(event.weights) & attention:
                found[i] = event
    return found


def _is_linear(trace: Trace, index: int) -> bool:
    event = trace.events[index]
    return isinstance(event, Linear) and event.kind == "linear"


def _outside(trace: Trace, index: int, branch: Branch) -> bool:
    """Whether an event does not see the tensor that the branch is added to (an input of every layer)."""
    return bool(branch.base & ~trace.events[index].ancestors)


def _through_depthwise(trace: Trace, sources: frozenset[int]) -> frozenset[int]:
    """The sources before a depthwise convolution, where that alone stands between two linear calls."""
    if len(sources) == 1:
        event = trace.events[next(iter(sources))]
        if isinstance(event, Linear) and event.kind == "conv" and event.depthwise:
            return event.sources
    return sources


def _mixing(
    model: nn.Module, inputs: dict[str, Any], trace: Trace, pairs: dict[int, set[int]]
) -> set[int]:
    """The last calls of pairs between which tokens are mixed: a change of one row reaches others."""
    firsts = set().union(*pairs.values())
    wrong: set[int] = set()

    def change(event: Linear, out: Tensor) -> Tensor | None:
        plain = trace.events[event.index] if event.index < len(trace.events) else None
        if (
            not isinstance(plain, Linear)
            or plain.weights != event.weights
            or plain.rows != event.rows
        ):
            return None
        if event.index in pairs and plain.x.shape == event.x.shape:
            rows = (plain.x - event.x).abs().reshape(-1, event.x.shape[-1]).amax(-1) > 1e-6
            rows[len(rows) // 2] = False
            if bool(rows.any()):
                wrong.add(event.index)
        y = out.detach().clone()
        if event.index in firsts:
            y.view(-1, y.shape[-1])[event.rows // 2] += 1.0
        return y

    def reset(event: Linear, out: Tensor) -> Tensor | None:
        changed = change(event, out)
        plain = trace.events[event.index] if event.index < len(trace.events) else None
        if changed is None or not isinstance(plain, Linear):
            return None
        clean = saved.get(event.index)
        if clean is None or clean.shape != out.shape:
            return changed
        y = clean.clone()
        if event.index in firsts:
            y.view(-1, y.shape[-1])[event.rows // 2] += 1.0
        return y

    saved: dict[int, Tensor] = {}

    def keep(event: Linear, out: Tensor) -> None:
        saved[event.index] = out.detach().clone()

    record(model, inputs, change=keep, grad=False)
    record(model, inputs, change=reset, grad=False)
    return wrong
