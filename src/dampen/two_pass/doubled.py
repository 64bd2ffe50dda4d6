"""One batch for both passes: where every draw is a sample's own, a batch that holds each sample
twice is two passes.

A small model spends its time on calling operations, not in them, so one forward of twice the batch
costs less than two. The first call of the model's forward in a step runs on the doubled batch and
returns its first half; the second, if it gets the same arguments, returns the other half. So
whatever the user's function does around the model happens twice, as it did. That halves do not
touch each other is not taken for granted: what is known beforehand (draws that a batch shares,
batch norm, penalties, hooks) is refused by name, and once per form of the input the model is run,
with everything random silent, on a batch and on the same batch with strangers behind
it, and must give the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import (
    DropoutModule,
    has_forward_hooks,
    in_functorch,
    pytree,
    saved_tensors_are_hooked,
    version_of,
)
from dampen.regularizer import Regularizer

# --- what is random in the model by itself
#
# What is random in a model by itself, before any regularizer: its dropout, its stochastic
# depth.


def own_randomness(named: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """The modules that draw in training, by name: dropout with p > 0, and modules with a rate of
    the kind (`drop_prob`, `attention_dropout`, `layerdrop`) between 0 and 1.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0))
    >>> own_randomness(model.named_modules())
    ['1']
    """
    return [name for name, m in named if not isinstance(m, Regularizer) and draws(m)]


def draws(module: nn.Module) -> bool:
    """Whether a module, apart from its children, has a drop rate above 0."""
    if isinstance(module, DropoutModule):
        return module.p > 0
    if isinstance(module, nn.RReLU):
        return True
    rates = [
        v for k, v in vars(module).items() if "drop" in k.lower() and isinstance(v, float | int)
    ]
    return any(not isinstance(r, bool) and 0 < r <= 1 for r in rates)


# --- one batch for both passes

DOUBLED_BELOW = 200_000
"""Numbers that enter the first block in one pass (samples x tokens x channels) from which on two
passes are run: there operations take longer than calling them. See `LOG.md` for the ratios that it
was read from."""
BEGUN_APART = "this training began with two passes and keeps their draws"
PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))

Forward = Callable[..., Any]
Silence = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


class DoubledBatch:
    """The doubled batch of one model: whether it may be, and during a step the
    arguments and the other half."""

    def __init__(self, why: str = "", first_block: nn.Module | None = None) -> None:
        self.why = why  # why never, once that is known
        self.note = ""  # why not in the last step
        self.used = False  # whether the last step was one doubled batch
        self.blocks = [] if first_block is None else [first_block]  # where the size is measured
        self.inside: list[nn.Module] | None = None  # the model's modules, to look for hooks
        self.verdicts: dict[
            Any, str
        ] = {}  # form of the input -> why it cannot be doubled, "" where it can
        self.forget()

    def forget(self) -> None:
        """Nothing is kept after a step."""
        self.turn = 0  # 1 and 2 in the first and the second pass of a step
        self.asked: list[Any] | None = None
        self.versions: list[int] = []
        self.second: Any = None
        self.gradients = True

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, of which none is inside a step; their
        modules are looked up anew."""
        fresh = DoubledBatch(self.why)
        return {**fresh.__dict__, "blocks": self.blocks}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """Continue as the training began that a handle's state is of: two passes draw in another
        order than a doubled batch. States of before know nothing of either."""
        self.why = self.why or str(state.get("never_doubled", BEGUN_APART))

    def starts(self) -> bool:
        """Before the first pass: whether this step is to be tried as one doubled batch."""
        self.used = False
        self.note = self.why or _unfit_place()
        self.turn, self.gradients = 0 if self.note else 1, torch.is_grad_enabled()
        return self.turn == 1

    def run(
        self,
        model: nn.Module,
        forward: Forward,
        bare: Forward,
        silence: Silence,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """The model's forward inside a step: `forward` with the methods, `bare`
        without, under `silence`."""
        leaves = [*args, *kwargs.values()]
        if self.turn == 2:
            return self._other_half(forward, leaves, args, kwargs)
        if self.asked is not None:
            self.why = "the model runs several times in one pass"
            return forward(*args, **kwargs)
        self.note = self._unfit(model, leaves) or self._verdict(model, bare, silence, args, kwargs)
        if self.note:
            self.turn = 0
            return forward(*args, **kwargs)
        self.asked, self.versions = leaves, _versions(leaves)
        args, kwargs = doubled(args, kwargs, lambda t: t)
        first, self.second = halves(forward(*args, **kwargs))
        self.used = True
        return first

    def _other_half(self, forward: Forward, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        asked, second, self.asked, self.second = self.asked, self.second, None, None
        if (
            asked is None
        ):  # the function calls the model once more than in the first pass, or for the second time
            return forward(*args, **kwargs)
        if not same(asked, leaves) or _versions(asked) != self.versions:
            self.why, self.used = "the model's input differs between the passes", False
            return forward(*args, **kwargs)
        return second

    def _unfit(self, model: nn.Module, leaves: list[Any]) -> str:
        """What may change between steps."""
        if torch.is_grad_enabled() != self.gradients or saved_tensors_are_hooked():
            return "the model runs under checkpointing, or without the gradients of the rest"
        if any(isinstance(t, Tensor) and t.requires_grad for t in leaves):
            return "the model's input has a gradient of its own"
        if self.inside is None:
            self.inside = [m for m in model.modules() if m is not model]
        hooked = next((m for m in self.inside if has_forward_hooks(m)), None)
        return (
            ""
            if hooked is None
            else f"a hook on a {type(hooked).__name__} would see a doubled batch"
        )

    def _verdict(
        self, model: nn.Module, bare: Forward, silence: Silence, args: Any, kwargs: Any
    ) -> str:
        """Whether an input of this form can be doubled; looked at once for each form."""
        form = tuple((k, _form(v)) for k, v in [*enumerate(args), *kwargs.items()])
        if form not in self.verdicts:
            self.verdicts[form] = shared_in_batch(model) or self._tried(
                model, bare, silence, args, kwargs
            )
        return self.verdicts[form]

    def _tried(
        self, model: nn.Module, bare: Forward, silence: Silence, args: Any, kwargs: Any
    ) -> str:
        leaves = [*args, *kwargs.values()]
        tensors = [t for t in leaves if isinstance(t, Tensor)]
        strange = next((v for v in leaves if not isinstance(v, PLAIN)), None)
        if strange is not None or not tensors:
            return (
                f"the model gets a {type(strange).__name__}"
                if tensors
                else "the model gets no tensor"
            )
        batch = len(tensors[0]) if tensors[0].ndim else 0
        if batch < 2 or any(not t.ndim or len(t) != batch for t in tensors):
            return f"the model's inputs {[tuple(t.shape) for t in tensors]} do not all begin with a batch of several"
        sizes: list[int] = []
        buffers = [(b, version_of(b)) for b in model.buffers()]
        random = torch.get_rng_state()
        with torch.no_grad(), silence(model), measured(self.blocks, sizes):
            alone = pytree.tree_leaves(bare(*args, **kwargs))
            many, more = doubled(args, kwargs, lambda t: t[:1].expand_as(t))
            try:
                together = pytree.tree_leaves(bare(*many, **more))
            except (RuntimeError, ValueError, IndexError) as error:
                return (
                    f"a doubled batch fails ({type(error).__name__}: {str(error).splitlines()[0]})"
                )
        if not torch.equal(random, torch.get_rng_state()):
            torch.set_rng_state(random)
            return "the model draws at random in its own code"
        if any(version_of(b) != version for b, version in buffers):
            return "the model keeps a state that each forward changes"
        if max(sizes, default=0) > DOUBLED_BELOW:
            return f"{max(sizes):,} numbers enter a block, and from {DOUBLED_BELOW:,} on two passes are as fast"
        return _compared(alone, together, batch)


def plan_doubled(clones: Iterable[Regularizer], first_block: nn.Module | None) -> DoubledBatch:
    """What is known at once: every method must say that all it does is each sample's own."""
    within = (c for c in clones if c.stages - {"outputs"} and not c.always_idle)
    shared = next((c for c in within if not c.per_sample), None)
    if first_block is None:
        return DoubledBatch("no module is the first block, so the size is not known")
    why = (
        ""
        if shared is None
        else f"{type(shared).__name__} may draw, or average, over the whole batch"
    )
    return DoubledBatch(why, first_block)


def shared_in_batch(model: nn.Module) -> str:
    """What in a model's modules belongs to a whole batch: statistics, draws of an unknown kind,
    graphs of its shape."""
    for name, m in model.named_modules():
        if getattr(m, "running_mean", None) is not None:
            return f"'{name}' ({type(m).__name__}) has statistics of the batch"
        if m._compiled_call_impl is not None or hasattr(m, "_orig_mod"):
            return f"'{name}' is compiled"
        known = isinstance(
            m, Regularizer | DropoutModule | nn.MultiheadAttention | nn.RReLU
        )  # draw per element
        if not known and draws(m):
            return f"'{name}' ({type(m).__name__}) draws at random, perhaps once for the batch"
    return ""


def doubled(args: Any, kwargs: Any, other: Callable[[Tensor], Tensor]) -> tuple[Any, Any]:
    """The arguments with, behind the batch of each tensor, what `other` makes of it."""

    def twice(value: Any) -> Any:
        return torch.cat([value, other(value)]) if isinstance(value, Tensor) else value

    return tuple(twice(v) for v in args), {k: twice(v) for k, v in kwargs.items()}


def halves(output: Any) -> tuple[Any, Any]:
    """The output of a doubled batch as the outputs of two passes."""
    leaves, form = pytree.tree_flatten(output)
    # not chunk, whose parts may not be changed in place
    pairs = [
        (t[: len(t) // 2], t[len(t) // 2 :]) if isinstance(t, Tensor) else (t, t) for t in leaves
    ]
    return tuple(pytree.tree_unflatten([pair[i] for pair in pairs], form) for i in (0, 1))


def same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether a call has the same arguments as another."""
    if len(first) != len(second):
        return False
    return all(
        a is b
        or (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.shape == b.shape
            and torch.equal(a, b)
        )
        or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)
        for a, b in zip(first, second, strict=True)
    )


@contextlib.contextmanager
def measured(blocks: Sequence[nn.Module], sizes: list[int]) -> Iterator[None]:
    """Inside, `sizes` collects how many numbers enter the blocks, of the first forward alone."""

    def look(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not sizes:
            sizes.append(
                max(
                    (t.numel() for t in (*args, *kwargs.values()) if isinstance(t, Tensor)),
                    default=0,
                )
            )

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield


def _compared(alone: list[Any], together: list[Any], batch: int) -> str:
    """Why the outputs of a batch alone and with as many copies of its first sample
    behind it are not halves."""
    if len(alone) != len(together) or not alone:
        return "the model's output has another form for a doubled batch"
    for a, t in zip(alone, together, strict=True):
        if a is None and t is None:
            continue
        if not isinstance(a, Tensor) or not isinstance(t, Tensor):
            return (
                f"the model's output has a {type(a).__name__} in it (transformers: use_cache=False)"
            )
        if not a.ndim or len(a) != batch or t.shape != (2 * batch, *a.shape[1:]):
            return f"the model's output {tuple(a.shape)} does not begin with the batch (a loss of its own is a mean)"
        expected = torch.cat([a, a[:1].expand_as(a)]).float()
        if not torch.allclose(t.float(), expected, rtol=0.0, atol=_rounding(a), equal_nan=True):
            return "the samples of a batch are not independent in this model"
    return ""


def _rounding(output: Tensor) -> float:
    """How far outputs may lie apart because sums were taken in another
    order: half of the digits."""
    kind, device = output.dtype if output.is_floating_point() else torch.float32, output.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    largest = (
        output.float().abs().nan_to_num(0.0, 0.0, 0.0).amax().item() if output.numel() else 0.0
    )
    return float(torch.finfo(kind).eps ** 0.5 * max(largest, 1e-3))


def _unfit_place() -> str:
    """Where a batch is never doubled: no comparisons, or other processes and
    graphs that know its size."""
    if torch.is_inference_mode_enabled() or in_functorch():
        return "inference mode or a functional transform"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes train the model"
    return ""


def _form(value: Any) -> Any:
    return (
        (value.shape, value.dtype, value.device)
        if isinstance(value, Tensor)
        else (type(value), repr(value))
    )


def _versions(leaves: Sequence[Any]) -> list[int]:
    return [version_of(t) for t in leaves if isinstance(t, Tensor)]
