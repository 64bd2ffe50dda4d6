"""The shared prefix of a two-pass step: blocks below the first perturbed one are computed once.

In the first pass each block that runs before anything is perturbed leaves its output; in the second
it gives that output back, if it gets the same arguments. So every reader of a lower block (the next
block, a skip connection, a list of hidden states) gets in the second pass exactly what a second
computation would have given, and the gradients of both passes meet in one graph. What cannot be
shared is computed again, and `why` says why: a block that draws at random or keeps a state of its
own, one that gets a cache or hands out something beside its output (an inner hook), or one whose
input differs between the passes, because something random is below it. Where it is known from the
start that no block can be shared, both passes may be one doubled batch (`doubled.py`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import has_forward_hooks, in_functorch, pytree, version_of
from dampen.calls import Penalty
from dampen.containers import tensors_in
from dampen.regularizer import MODEL_STAGES, Regularizer
from dampen.two_pass.doubled import (
    BEGUN_APART,
    PLAIN,
    DoubledBatch,
    own_randomness,
    plan_doubled,
    same,
)

if TYPE_CHECKING:
    from dampen.hooks.discover.sites import LayerPlan


class SharedBlocks:
    """The state of one two-pass step, shared by all blocks of a model."""

    def __init__(self) -> None:
        self.mode = ""  # "record" in the first pass, "replay" in the second, else off
        self.open = False  # nothing has been perturbed yet in this first pass
        self.gradients = True
        self.why = ""  # why two full passes are run, once that is known
        self.shared: list[str] = []  # blocks that were computed once in the last step
        self.doubled = DoubledBatch(
            "blocks below the first perturbed one can be shared"
        )  # the other way, where nothing can be shared
        self.trying = False  # this step was begun as one doubled batch
        self.sites: list[PrefixSite] = []
        self.thread: dict[
            str, int
        ] = {}  # whose step of two passes is under way; a dict, to be claimed in one move

    @contextlib.contextmanager
    def step(self, passes: int, model: nn.Module) -> Iterator[None]:
        """Around the passes of one step; nothing is kept afterwards."""
        if passes < 2:
            yield
            return
        refuse_gathered_blocks(model)
        me = threading.get_ident()
        if self.thread.setdefault("at work", me) != me:
            raise RuntimeError(
                "A step of two passes is under way in another thread, "
                "and both would share what the blocks keep "
                "between the passes. Give each thread a copy of "
                "the model (copy.deepcopy(reg) copies both)."
            )
        self.shared = []
        try:
            yield
        finally:
            self.mode = ""
            self.doubled.forget()
            for site in self.sites:
                site.forget()
            self.thread.clear()

    def begin(self, index: int, passes: int) -> None:
        """Before pass `index` of a step of `passes`."""
        if passes < 2:
            return
        if index == 0:
            self.trying = passes == 2 and self.doubled.starts()
        elif self.trying and self.doubled.turn:
            self.doubled.turn = index + 1
        if self.trying:
            return
        if torch.is_inference_mode_enabled() or in_functorch():
            self.mode = ""  # no versions, no comparisons there: two full passes, this time
            return
        if index and not self.why and not any(site.asked is not None for site in self.sites):
            self.why = "no block could be recorded in the first pass (torch.compile runs them inside a graph)"
        self.mode = "" if self.why else "replay" if index else "record"
        self.open, self.gradients = True, torch.is_grad_enabled()

    def give_up(self, why: str) -> None:
        """Run two full passes from here on."""
        self.mode, self.why, self.shared = "", why, []

    def describe(self) -> str:
        """One line for the report."""
        if self.doubled.used:
            return f"one batch that holds every sample twice: {self.why}"
        if self.why:
            note = f"; no doubled batch: {self.doubled.note}" if self.doubled.note else ""
            return f"two full passes: {self.why}{note}"
        if self.shared:
            return f"{len(self.shared)} blocks are computed once for both passes, {self.shared[0]} to {self.shared[-1]}"
        first = next((s for s in self.sites if s.perturbed), None)
        below = self.sites.index(first) if first else len(self.sites)
        return f"{below} blocks below the first perturbed one can be computed once; no step yet"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "mode": "", "open": False, "thread": {}, "trying": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(
            {"doubled": DoubledBatch(BEGUN_APART), "trying": False, **state}
        )  # 0.1 had none


class PrefixSite:
    """What is kept on a block: its arguments and its output, between the two passes."""

    def __init__(
        self, prefix: SharedBlocks, name: str, clones: Sequence[Regularizer], perturbed: bool
    ) -> None:
        self.prefix, self.name, self.clones, self.perturbed = prefix, name, list(clones), perturbed
        self.forget()

    def forget(self) -> None:
        self.asked: list[Any] | None = None
        self.output: Any = None
        self.versions: list[int] = []
        self.penalties: list[dict[str, Penalty]] = []

    def record(self, block: nn.Module, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the block and keep what it gives, unless it cannot be shared."""
        asked = pytree.tree_leaves((args, kwargs))
        if why := self._unfit(block, asked):
            self.prefix.give_up(why)
            return base(block, *args, **kwargs)
        buffers = [(b, version_of(b)) for b in block.buffers()]
        random = _random_state(asked)
        idle = [
            c for c in self.clones if c.stochastic
        ]  # their rate is 0, but they may draw all the same
        for clone in idle:
            clone.asleep = True
        try:
            output = base(block, *args, **kwargs)
        finally:
            for clone in idle:
                clone.asleep = False
        if any(version_of(b) != version for b, version in buffers):
            self.prefix.give_up(
                f"'{self.name}' updates a state of its own (batch norm), once per pass"
            )
        elif random != _random_state(asked):
            self.prefix.give_up(f"'{self.name}' draws at random")
        else:
            self.asked, self.output, self.versions = asked, output, _versions(output)
            self.penalties = [dict(c._penalties) for c in self.clones]
        return output

    def replay(self, block: nn.Module, base: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Give the first pass's output again, if the question is the same."""
        if not same(self.asked or [], pytree.tree_leaves((args, kwargs))):
            self.prefix.give_up(
                f"the input of '{self.name}' differs between "
                "the passes: something random is below it"
            )
        elif _versions(self.output) != self.versions:
            self.prefix.give_up(f"the output of '{self.name}' is changed in place above it")
        else:
            self.prefix.shared.append(self.name)
            for clone, penalties in zip(self.clones, self.penalties, strict=True):
                clone._penalties = dict(penalties)
            return self.output
        return base(block, *args, **kwargs)

    def _unfit(self, block: nn.Module, asked: list[Any]) -> str:
        if self.asked is not None:
            return f"'{self.name}' runs several times in one pass"
        if torch.is_grad_enabled() != self.prefix.gradients:
            return f"'{self.name}' runs under reentrant checkpointing"
        if getattr(block, "_is_replica", False):
            return "nn.DataParallel runs copies of the blocks"
        strange = next((v for v in asked if not isinstance(v, PLAIN)), None)
        if strange is not None:
            kind = type(strange).__name__
            return f"'{self.name}' gets a {kind}, which may carry states upwards (transformers: use_cache=False)"
        hooked = next((m for m in block.modules() if m is not block and has_forward_hooks(m)), None)
        return (
            ""
            if hooked is None
            else f"a hook inside '{self.name}' ({type(hooked).__name__}) reads a lower state"
        )

    def __getstate__(self) -> dict[str, Any]:
        clean = PrefixSite(self.prefix, self.name, self.clones, self.perturbed)
        return clean.__dict__


def prefix_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a block whose output may serve both passes."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: PrefixSite = self._dampen_prefix
        if torch.compiler.is_compiling():  # inside a graph inputs cannot be compared
            return base(self, *args, **kwargs)
        prefix = site.prefix
        if prefix.mode == "record" and prefix.open:
            if not site.perturbed:
                return site.record(self, base, args, kwargs)
            prefix.open = False
        if prefix.mode == "record" and site.asked is not None:
            # found now and not at the second pass: a step that shared half would sum its gradients
            # in another order than all later ones, and a run that is resumed
            # there would differ by an ulp
            prefix.give_up(f"'{site.name}' runs several times in one pass")
        if prefix.mode == "replay" and site.asked is not None:
            return site.replay(self, base, args, kwargs)
        return base(self, *args, **kwargs)

    return forward


def plan_prefix(
    plans: Sequence[LayerPlan],
    clones: Mapping[str, Sequence[Regularizer]],
    own: Sequence[Regularizer],
) -> tuple[SharedBlocks, list[tuple[nn.Module, PrefixSite]]]:
    """Which blocks could share their output: a site for each, and why none can where
    that is known beforehand."""
    prefix, found = SharedBlocks(), []
    for plan in plans:
        here = list(clones.get(plan.name, ()))
        perturbing = [c for c in here if perturbs(c)]
        inside = own_randomness(plan.block.named_modules()) if plan.block is not None else []
        if plan.block is None:
            if perturbing:
                prefix.why = f"no module is the block around '{plan.name}'"
            continue
        site = PrefixSite(prefix, plan.name, here, bool(perturbing or inside))
        found.append((plan.block, site))
        if site.perturbed and len(found) == 1:
            by = (
                type(perturbing[0]).__name__
                if perturbing
                else f"the model's own '{plan.name}.{inside[0]}'"
            )
            prefix.why = f"the first block, '{plan.name}', is perturbed already by {by}"
    random = [
        c for c in own if c.stochastic and c.stages & {"inputs", "embeddings"} and not c.always_idle
    ]
    if random:
        prefix.why = f"{type(random[0]).__name__} perturbs the input"
    if prefix.why:
        every = [*(c for here in clones.values() for c in here), *own]
        prefix.doubled = plan_doubled(every, plans[0].block if plans else None)
    prefix.sites = [site for _, site in found]
    return prefix, [] if prefix.why else found


def perturbs(clone: Regularizer) -> bool:
    """Whether a clone draws anything in its layer, at any time of training."""
    return clone.stochastic and bool(clone.stages - set(MODEL_STAGES)) and not clone.always_idle


def refuse_gathered_blocks(model: nn.Module) -> None:
    """Raise where DeepSpeed's ZeRO-3 gathers whole blocks: it then expects one forward of each
    before a backward, and two end in an assertion that says nothing of it."""
    if not hasattr(next(model.parameters(), None), "ds_id"):
        return
    whole = next((name for name, m in model.named_modules() if getattr(m, "_z3_leaf", False)), None)
    if whole is not None:
        raise RuntimeError(
            f"DeepSpeed's ZeRO-3 gathers '{whole}' as a whole "
            "(set_z3_leaf_modules), and can then run it once before a "
            "backward, but two passes are compared here. Leave "
            "set_z3_leaf_modules out, and with it the penalties that "
            "need it (ExplicitDropout on q, k or v, ExplicitMixout); or "
            "leave R-Drop and Consistency out; or use "
            "ZeRO-2, which runs both."
        )


def _versions(output: Any) -> list[int]:
    return [version_of(t) for t in tensors_in(output)]


def _random_state(asked: list[Any]) -> list[bytes]:
    """The state of the generators that the block could draw from."""
    states = [torch.get_rng_state()]
    for device in {t.device for t in asked if isinstance(t, Tensor) and t.is_cuda}:
        states.append(torch.cuda.get_rng_state(device))
    return [s.numpy().tobytes() for s in states]
