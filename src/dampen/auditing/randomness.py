"""Randomness from call to call: is eval repeatable, do calls, recomputes and ranks
draw what they should?"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from dampen.auditing.record import AuditedModel, Draw, Events, ForwardObserver, equal
from dampen.auditing.report import Audit, AuditFinding
from dampen.auditing.state import seed_all
from dampen.containers import tensors_in

ENOUGH = 16
"""Numbers that a place must have drawn before two equal draws are no coincidence."""


def examine_eval(s: AuditedModel, audit: Audit) -> None:
    """Whether two calls in eval mode give the same output.

    Args:
        s: the model.
        audit: to be filled.
    """
    name = "eval repeatable"
    audit.tested[name] = "two calls in a row, and calls under two seeds, compared to the bit"

    def call(seed: int | None) -> list[Tensor]:
        if seed is not None:
            seed_all(seed)
        with torch.no_grad():
            return [t.detach().clone() for t in tensors_in(s.call())]

    s.prepare(False)
    first, second, reseeded = call(1), call(1), call(2)
    in_a_row = equal(first, second)
    audit.facts[name] = in_a_row and equal(second, reseeded)
    if audit.facts[name] or {"eval_dropout", "eval_random"} & set(audit.kinds()):
        return
    where = _first_that_differs(s, None if not in_a_row else 2)
    if in_a_row:
        audit.findings.append(
            AuditFinding(
                "eval_random", "problem", (where,),
                "random.random or numpy.random changes the output in eval mode",
                "Two calls with one input give two results.",
                "draw only in training: if self.training",
            )
        )  # fmt: skip
        return
    audit.findings.append(
        AuditFinding(
            "eval_changes", "problem", (where,),
            "its output is the first that differs between two equal calls in "
            "eval mode, all generators at the same seed",
            "The module carries something from call to call (a cache, a "
            "counter, running statistics), or its kernel is "
            "not deterministic.",
            "reset what forward keeps, keep it only in training, or: "
            "torch.use_deterministic_algorithms(True)",
        )
    )  # fmt: skip


def _first_that_differs(s: AuditedModel, seed: int | None) -> str:
    """The first module whose output differs between two eval calls in a row; ""
    where none is seen alone."""
    size = next((len(t) for t in tensors_in((s.args, s.kwargs)) if t.ndim), 0)
    s.prepare(False, 1)
    seen = []
    for again in (1, seed or 1):
        seed_all(again)
        with torch.no_grad(), ForwardObserver(s.model, s.kept, 0, batch=size).observing() as record:
            s.call()
        seen.append(record.samples)
    for (name, a), (_, b) in zip(seen[0], seen[1], strict=False):
        if a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()):
            return name
    return ""


def examine_calls(s: AuditedModel, audit: Audit) -> None:
    """Whether two training calls in a row draw other numbers.

    Args:
        s: the model.
        audit: to be filled.
    """
    name = "two calls draw differently"
    records = [s.run(True, base=None, seed=1 if not i else None).record for i in range(3)]
    if not any(_by_module(r.forward) for r in records):
        return
    audit.tested[name] = f"places that draw {ENOUGH} numbers or more, in three training forwards"
    by_module = [_by_module(r.forward) for r in records]
    same = [
        where
        for where, draws in by_module[0].items()
        if sum(d.size for d in draws) >= ENOUGH
        and all(_digests(draws) == _digests(other.get(where, [])) for other in by_module[1:])
    ]
    audit.facts[name] = not same
    if same:
        audit.findings.append(
            AuditFinding(
                "repeated_draws", "problem", tuple(same),
                "three training calls draw the same numbers",
                "Every step drops the same units: this is a smaller model, not dropout.",
                "remove torch.manual_seed(...), or the generator made anew, from forward",
            )
        )  # fmt: skip


def _by_module(draws: Sequence[Draw]) -> dict[str, list[Draw]]:
    found = defaultdict(list)
    for d in draws:
        found[d.site.module].append(d)
    return found


def _digests(draws: Sequence[Draw]) -> list[float]:
    return [d.digest for d in draws]


def examine_recompute(record: Events, audit: Audit) -> None:
    """Whether a checkpoint's recompute draws what its forward drew.

    Args:
        record: of a training forward and its backward.
        audit: to be filled.
    """
    name = "recompute draws the same"
    again = [d for d in record.draws if d.backward]
    if not record.recomputed and not again:
        return
    audit.tested[name] = "draws of the forward and of the recompute in its backward, compared"
    known = {(d.operator, d.size, d.rate, d.digest) for d in record.forward}
    other = [d for d in again if (d.operator, d.size, d.rate, d.digest) not in known]
    audit.facts[name] = not other
    if other:
        where = tuple(dict.fromkeys(d.site.module for d in other))
        audit.findings.append(
            AuditFinding(
                "checkpoint_redraws", "problem", where,
                "the recompute of a checkpoint draws other numbers than its forward",
                "The gradient belongs to other masks than the "
                "loss: training gets worse, without an error.",
                "checkpoint(function, x, use_reentrant=False, preserve_rng_state=True)",
            )
        )  # fmt: skip


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    names = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def draws_of_a_call(s: AuditedModel) -> list[float]:
    """Digests of what one training forward draws, as the generators are now.

    Args:
        s: the model.
    """
    return _digests(s.run(True, base=None, seed=None).record.forward)


def in_process_group() -> bool:
    """Whether this process is one of several that talk to each other."""
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1


def examine_ranks(s: AuditedModel, audit: Audit, mine: list[float]) -> None:
    """Whether two ranks draw the same numbers: measured over a process group, else from one
    generator state.

    Args:
        s: the model.
        audit: to be filled.
        mine: in a process group, the draws of this process from the generators
            as the audit found them.
    """
    name = "ranks draw differently"
    if in_process_group():
        everyone: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(everyone, mine)
        if mine:
            audit.tested[name] = f"a training forward in each of {len(everyone)} processes"
            alike = same_ranks(everyone)
            audit.facts[name] = not alike
            if alike:
                audit.findings.append(ranks_alike(alike))
        return
    drawn = []
    for rank in (0, 1):
        s.prepare(True, 1)
        with _as_rank(rank):
            drawn.append(draws_of_a_call(s))
    if drawn[0]:
        audit.facts[name] = "only if seeded differently" if drawn[0] == drawn[1] else True
        audit.tested[name] = (
            "one process as rank 0 and rank 1 from one generator state; --ranks 2 starts two"
        )


def same_ranks(everyone: Sequence[Sequence[float]]) -> list[int]:
    """The ranks that draw what another one draws.

    Args:
        everyone: what each rank drew.

    >>> same_ranks([[1.0], [2.0], [1.0]])
    [0, 2]
    """
    return [i for i, mine in enumerate(everyone) if mine and list(everyone).count(mine) > 1]


def ranks_alike(ranks: Sequence[int]) -> AuditFinding:
    """The finding that ranks draw the same numbers.

    Args:
        ranks: that do.
    """
    return AuditFinding(
        "ranks_draw_alike", "problem", ("",),
        f"ranks {', '.join(map(str, ranks))} draw the same numbers",
        "Every rank drops the same units of its own batch: the "
        "masks of a step are fewer than they look.",
        "torch.manual_seed(seed + rank) in each process, after the weights are made",
    )  # fmt: skip
