"""Residual branches, found in any block by following the data.

While a block runs, each of its tensors is known as *clean* (computed from the block's input without
any map: a norm, a reshape, the input itself, a sum of the residual stream) or by the sublayers
whose maps it went through. An addition of a clean tensor and one that came through a sublayer is a
residual addition, the second operand is the branch, with whatever the block has put in it
(LayerScale, DropPath, dropout, a post-norm), and the sum is clean again. So pre-norm, post-norm,
sandwich, parallel and decoder blocks of any library are read without an adapter of their own.

Where both operands came through a map, two forms are read as well. *A projected shortcut*: one
operand is the stream after a single map and nothing else but norms and pooling, and it is not as
large as the stream was, so that the stream itself could not have been added (MViT, Hiera,
ResNet-like blocks). *A stream that was remade*: the other operand was computed from this one, x +
f(x), where x is the stream after a single map (TinyViT's convolution, NextViT), after maps of its
groups of channels (EdgeNeXt) or after an attention that changed its size (LeViT's downsampling);
there is no residual around these maps, so nothing to drop.

In the end every sublayer that ran must have been added and the block's output must be clean; a
block that adds in some other way raises.

To follow every tensor costs more than the methods that use it. So what a forward did is remembered:
its torch functions in their order, and where the operands of each residual addition came from, by
whatever rule it was found. While the next forward calls the same functions, it is only compared
with that; where it departs, it is followed from its start after all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import enter_function_mode, function_mode, leave_function_mode, version_of
from dampen.calls import BranchCall
from dampen.containers import first_of, tensors_in
from dampen.hooks.context import Frame, close_frame, frame_of, open_frame
from dampen.names import leave_out
from dampen.regularizer import Regularizer

if TYPE_CHECKING:
    from dampen.hooks.context import Layer


# --- where a tensor came from
#
# Where the tensors of a block's forward came from: through which sublayers, made by which
# function of which others.

MAPS = set(
    "linear addmm matmul __matmul__ bmm mm baddbmm einsum "
    "conv1d conv2d conv3d _grouped_mm grouped_mm".split()
)
_AFFINE = MAPS | set(
    "layer_norm batch_norm group_norm rms_norm avg_pool2d avg_pool1d "
    "max_pool2d max_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool2d amax mean view reshape reshape_as permute "
    "transpose movedim flatten unflatten contiguous "
    "squeeze unsqueeze __getitem__ pad to float half bfloat16 mul "
    "__mul__ interpolate boolean_dispatch leave".split()
)
# what a stream may go through beside that while maps remake it: groups of channels, positions
_REMAKING = _AFFINE | set("cat concat chunk split unbind shift".split())
CLEAN: frozenset[str] = frozenset()


class Origins:
    """The known tensors of one forward."""

    def __init__(self, roots: Sequence[Tensor]) -> None:
        self.tensors: list[
            Tensor
        ] = []  # those that are known, kept alive so that an id means one tensor
        self.labels: list[frozenset[str]] = []  # the sublayers that each came through; none: clean
        self.makers: list[
            tuple[str, list[int]]
        ] = []  # the function that made each, and what of the known it read
        self.places: dict[
            int, int
        ] = {}  # id -> index, outside of compiled graphs, which know no ids
        for root in roots:
            self.put(root, CLEAN)

    def of(self, value: Any) -> frozenset[str] | None:
        """The sublayers that a tensor came through; None where it is not known."""
        place = self.place(value)
        return None if place is None else self.labels[place]

    def place(self, value: Any) -> int | None:
        """The number of a known tensor."""
        if not isinstance(value, Tensor):
            return None
        if not torch.compiler.is_compiling():
            return self.places.get(id(value))
        for i in range(len(self.tensors) - 1, -1, -1):
            if self.tensors[i] is value:
                return i
        return None

    def put(
        self, out: Any, labels: frozenset[str], name: str = "", read: Sequence[int] = ()
    ) -> None:
        """Know what a function gave, and by which of the known."""
        for value in (out,) if isinstance(out, Tensor) else leaves((out,), {}):
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                continue
            # indices of tokens that an attention keeps (ATS) are no branch, nor is what they pick
            if value.dtype.is_floating_point or value.dtype.is_complex:
                self.tensors.append(value)
                self.labels.append(labels)
                self.makers.append((name, list(read)))
                if not torch.compiler.is_compiling():
                    self.places[id(value)] = len(self.tensors) - 1

    def is_single_map(self, place: int) -> bool:
        """Whether a tensor is the stream after one linear map, and norms,
        pooling and reshaping alone."""
        return self._count_maps(place, _AFFINE) == 1

    def is_remade(self, place: int) -> bool:
        """Whether a tensor is the stream after linear maps, of groups of its channels too, and
        nothing else but norms, pooling, reshaping and positions (EdgeNeXt's convolutions)."""
        return self._count_maps(place, _REMAKING) is not None

    def map_behind(self, place: int) -> int:
        """What the last linear map before a tensor gave, or the tensor
        itself where there is none."""
        todo = [place]
        while todo:
            here = todo.pop()
            if self.makers[here][0] in MAPS:
                return here
            todo.extend(p for p in self.makers[here][1] if self.labels[p])
        return place

    def is_beside_a_map(self, place: int) -> bool:
        """Whether a tensor is a part of a linear map rather than a sublayer: a map, or several in a
        row with nothing between them but dropout (LoRA)."""
        maps = self._count_maps(place, _AFFINE | {"dropout"})
        return maps == 1 or (
            maps is not None and not any(x.startswith("attention") for x in self.labels[place])
        )

    def _count_maps(self, place: int, allowed: frozenset[str] | set[str]) -> int | None:
        """How many linear maps lie between the stream and a tensor; None where anything does that
        is not allowed."""
        maps, seen, todo = 0, {place}, [place]
        while todo:
            name, read = self.makers[todo.pop()]
            if name not in allowed:
                return None
            maps += name in MAPS
            fresh = {p for p in read if self.labels[p]} - seen
            seen |= fresh
            todo.extend(fresh)
        return maps

    def comes_from(self, place: int, start: int, mapped: bool = False) -> bool:
        """Whether a tensor was computed from another one, through at least one map
        (or any way: `mapped`)."""
        todo: list[tuple[int, bool]] = [(place, mapped)]
        seen: set[tuple[int, bool]] = set()
        while todo:
            here, mapped = todo.pop()
            if here == start:
                if mapped:
                    return True
                continue
            name, read = self.makers[here]
            mapped = mapped or name in MAPS or name == "scaled_dot_product_attention"
            fresh = {(p, mapped) for p in read if p >= start} - seen
            seen |= fresh
            todo.extend(fresh)
        return False


def leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments and what lists among them hold."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            found.extend(value)
        else:
            found.append(value)
    return found


# --- what one forward did
#
# What one forward of a block did, so that the next one need only be compared with it; see
# `ResidualSocket`.

ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


class Found(NamedTuple):
    """A residual addition, by whatever rule it was found."""

    labels: frozenset[str]  # the sublayers of the branch
    branch_first: bool  # whether the left operand is the branch
    read: bool  # whether anything was computed from the sum before it
    around: frozenset[str] = (
        frozenset()
    )  # sublayers that remade the stream: no residual goes around them
    projected: bool = False  # whether the other operand is a projected shortcut
    resized: bool | None = (
        None  # whether it is of another size than the stream, where the rule required that
    )


class Addition(NamedTuple):
    """A residual addition that is remembered, and which calls made its operands."""

    left: int
    right: int
    found: Found


class Memory(NamedTuple):
    """What one forward of a block did, call by call; an attention module that
    ends is a call of None."""

    functions: tuple[Any, ...]
    additions: dict[
        int, Addition | None
    ]  # by the number of the call; None: an attention, which reports its layout
    result: int  # the call that gave the block's output
    # whether all that is done with the stream is `stream + branch`: then see `StreamSocket`
    by_operator: bool
    roles: tuple[str, ...]  # of the branches, in their order
    attended: tuple[int, ...]  # how many attention modules had run before each
    apart: (
        bool  # whether every sum was read before the next one: no two branches stand side by side
    )
    roots: int  # tensors that the block was given
    closed: (
        bool  # whether an attention module is one call: nothing inside it matters to the branches
    )


Entry = tuple[Any, tuple[Any, ...], dict[str, Any], Any, int, Found | None]
"""A call: function, arguments, what came out, attentions it ran in, and what is known of it where
it is a residual addition."""


def remember(
    roots: Sequence[Tensor], log: Sequence[Entry], out: Tensor, layout_known: bool, may_stream: bool
) -> Memory | None:
    """A forward, for the next; None where an operand of an addition was made by no call of its own.

    Args:
        roots: what the block was given.
        log: the calls of the forward.
        out: the block's output.
        layout_known: whether it is known which axis is the batch.
        may_stream: whether the next forwards may leave the additions to the stream.
    """
    whole = _remember(roots, log, out)
    if whole is None:
        return None
    by_operator = may_stream and _by_operator(roots, log, whole.additions)
    nested = any(func is None and within > 1 for func, *_, within, _ in log)
    if layout_known and not nested:
        outside = [entry for entry in log if entry[0] is None or not entry[4]]
        if sum(entry[5] is not None for entry in outside) == len(whole.roles):
            found = _remember(roots, outside, out)
            if found is not None:
                return found._replace(by_operator=by_operator, closed=True)
    return whole._replace(by_operator=by_operator)


def _remember(roots: Sequence[Tensor], log: Sequence[Entry], out: Tensor) -> Memory | None:
    """The same of these calls, before it is known how the next forward is compared with it."""
    made = {id(root): -1 - i for i, root in enumerate(roots)}
    additions: dict[int, Addition | None] = {}
    roles: list[str] = []
    attended: list[int] = []
    ended = 0
    for number, (func, args, _, result, _, found) in enumerate(log):
        if found is not None:
            left, right = made.get(id(args[0])), made.get(id(args[1]))
            if left is None or right is None:
                return None
            additions[number] = Addition(left, right, found)
            roles.append(role_of(found.labels))
            attended.append(ended)
        elif func is None:
            ended += 1
            made[id(first_of(result))] = number
        elif attends(func):
            additions[number] = None
        # a function that returns its argument (`to` the same dtype) has made nothing
        made.setdefault(id(result), number)
    if id(out) not in made:
        return None
    functions = tuple(entry[0] for entry in log)
    apart = all([plan.found.read for plan in additions.values() if plan is not None][1:])
    return Memory(
        functions, additions, made[id(out)], False, tuple(roles), tuple(attended), apart,
        len(roots), False,
    )  # fmt: skip


RESHAPES = (Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten)
"""Methods after which the stream is still the stream (Swin adds in two shapes)."""


def _by_operator(
    roots: Sequence[Tensor], log: Sequence[Entry], additions: dict[int, Addition | None]
) -> bool:
    """Whether every sum is `stream + branch` by the operator, on the block's input or the sum
    before, whatever shape it was given since, and nothing else is ever added to the stream."""
    x = roots[0]
    if x.ndim < 3 or (x.ndim == 3 and x.shape[0] == x.shape[1]):
        return False
    stream, others = [x], roots[1:]
    for number, (func, args, _, out, _, found) in enumerate(log):
        adds = getattr(func, "__name__", "") in ADDITIONS
        plan = additions.get(number)
        if adds and plan is not None:
            residual = args[1] if plan.found.branch_first else args[0]
            same = residual.shape == args[0].shape == args[1].shape
            if func is not Tensor.add or not _among(residual, stream) or not same:
                return False
            stream = [out]
        elif adds or func is torch.add or found is not None:
            if any(_among(value, stream) or _among(value, others) for value in args):
                return False
        elif func in RESHAPES and _among(args[0], stream):
            stream.append(out)
    return True


def _among(value: Any, tensors: Sequence[Tensor]) -> bool:
    return any(value is t for t in tensors)


def attends(func: Any) -> bool:
    """Whether a torch function is attention as a whole."""
    return func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward


def role_of(labels: frozenset[str]) -> str:
    """attention, ffn, or parallel for both."""
    kinds = sorted({label.split()[0] for label in labels})
    return kinds[0] if len(kinds) == 1 else "parallel"


# --- following the data

_LOOKS = {
    "__get__",
    "size",
    "dim",
    "stride",
    "numel",
    "is_contiguous",
    "is_floating_point",
    "is_neg",
    "data_ptr",
    "get_device",
    "__len__",
}


# These take the shape of a tensor and nothing of what is in it: a mask made by `x.new_zeros` is not
# the stream, and scores + mask is no residual addition (torchvision's Swin).
_BLANK = {
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
}


def call_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as a mode received it."""
    if (
        getattr(func, "__name__", "") == "unflatten"
    ):  # its super() cannot be traced below a mode by torch.compile
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


class ResidualSocket(TorchFunctionMode):
    """Shows each residual branch of one block's forward to the regularizers,
    just before it is added."""

    def __init__(
        self,
        regularizers: Sequence[Regularizer],
        roots: Sequence[Tensor],
        layer: Layer,
        frame: Frame,
    ) -> None:
        super().__init__()
        self.regularizers, self.layer, self.frame, self.roots = regularizers, layer, frame, roots
        self.root = roots[0]  # the block's first input
        self.log: list[Entry] = []
        self.memory: Memory | None = (
            None if torch.compiler.is_compiling() else layer.residual_memory
        )
        self.removed = False  # whether a skip was left out
        self.buffers: list[
            tuple[Tensor, int]
        ] = []  # of the block, with their versions, where it is followed
        if not torch.compiler.is_compiling() and self.memory is None:
            self.buffers = [
                (b, version_of(b)) for b in frame.block.buffers() if not b.is_inference()
            ]
        self._fresh()
        frame.residual = self

    def _fresh(self) -> None:
        self.origins = Origins(self.roots)
        self.found: list[str] = []
        self.covered: set[str] = set()  # the sublayers whose branches were added
        self.last: Tensor | None = None  # the last sum
        self.read = False  # whether anything was computed from it
        self.resized: int | None = None  # elements of the last sum with a projected shortcut
        self.left_inside = 0  # residuals inside a branch, which are not dropped by themselves

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.memory is not None:
            if self.memory.closed and self.frame.inside:
                return call_torch(func, args, kwargs)
            number = len(self.log)
            if number < len(self.memory.functions) and func is self.memory.functions[number]:
                if number not in self.memory.additions:
                    out = func(*args, **kwargs)
                    self.log.append((func, args, kwargs, out, self.frame.inside, None))
                    return out
                plan = self.memory.additions[number]
                if plan is None:
                    self._see_batch(args)
                    return self._run(func, args, kwargs, None)
                made = self._made(plan.left) is args[0] and self._made(plan.right) is args[1]
                if made and self._is_as_large(plan.found, args):
                    self.read = plan.found.read
                    return self._run(func, args, kwargs, plan.found)
        name = getattr(func, "__name__", "")
        if name in _LOOKS:
            return call_torch(func, args, kwargs)
        self._follow()
        found = self._find(args) if name in ADDITIONS and len(args) == 2 and not kwargs else None
        out = self._run(func, args, kwargs, found)
        if found is None:
            self._note(func, args, kwargs, out)
        return out

    def _run(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Found | None
    ) -> Any:
        """Run a call, which may be an addition of a branch, and keep it."""
        if found is None:
            out = call_torch(func, args, kwargs)
        else:
            residual, branch = (args[1], args[0]) if found.branch_first else args
            out = self._add(residual, branch, found)
        if not torch.compiler.is_compiling():
            self.log.append((func, args, kwargs, out, self.frame.inside, found))
        return out

    def leave_attention_out(self) -> bool:
        """Close this mode while an attention module runs that is one call;
        `come_back` opens it again."""
        closed = self.memory is not None and self.memory.closed
        return closed and self.step_aside()

    def step_aside(self) -> bool:
        """Close this mode if it is the innermost; whether it was."""
        if function_mode() is not self:
            return False
        leave_function_mode()
        return True

    def come_back(self) -> None:
        """Open the mode that stepped aside."""
        enter_function_mode(self)

    def saw(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """A function of the block that dampen has run in its place, with whatever methods do there,
        as one call."""
        if self.memory is not None:
            number, memory = len(self.log), self.memory
            if memory.closed and self.frame.inside:
                return
            same = number < len(memory.functions) and func is memory.functions[number]
            if not same or number in memory.additions:
                self._follow()
        if not torch.compiler.is_compiling():
            self.log.append((func, args, {}, out, self.frame.inside, None))
        if self.memory is None:
            self._note(func, args, {}, out)

    # --- a forward that is followed

    def _find(self, args: tuple[Any, ...]) -> Found | None:
        """What the sum of two tensors is, where it is one of the stream and a branch."""
        left, right = self.origins.of(args[0]), self.origins.of(args[1])
        # scalars are sums inside another method's penalty, never a stream of tokens
        if left is None or right is None or not args[0].ndim == args[1].ndim >= 2:
            return None
        if bool(left) != bool(right):
            return Found(left or right, bool(left), self.read)
        if left and right and not self.frame.inside:
            found = self._remade(args[0], args[1], False) or self._remade(args[1], args[0], True)
            self.left_inside += found is None and self._is_around_a_map(args)
            return found
        return None

    def _is_around_a_map(self, args: tuple[Any, ...]) -> bool:
        """Whether a sum inside a branch is y + f(y) with a map in f, a residual that is not dropped
        by itself."""
        one, other = (self.origins.place(value) for value in args)
        if one is None or other is None:
            return False
        return self.origins.comes_from(other, one) or self.origins.comes_from(one, other)

    def _remade(self, residual: Tensor, branch: Tensor, branch_first: bool) -> Found | None:
        """The addition, where `residual` is a projected shortcut or the stream
        remade; None: neither."""
        known = self.origins
        made, other = known.place(residual), known.place(branch)
        if made is None or other is None:
            return None
        resized = residual.numel() != self._stream().numel()
        single, attended = (
            known.is_single_map(made),
            any(x.startswith("attention") for x in known.labels[made]),
        )
        same_size = residual.shape[0] == len(self.root) and residual.numel() == self.root.numel()
        remade = single or (same_size and not attended and known.is_remade(made))
        if known.comes_from(other, made) and (remade or (attended and resized)):
            labels = (known.labels[other] - known.labels[made]) or frozenset(
                [f"ffn {len(self.found)}"]
            )
            around = known.labels[made] if attended else CLEAN
            return Found(labels, branch_first, self.read, around, resized=resized)
        # the inside of an activation, x + 0.04 x^3 or b x + a x^2, reads one map on both sides
        derived = single and known.comes_from(other, known.map_behind(made), mapped=True)
        if single and resized and not derived and not known.is_beside_a_map(other):
            return Found(
                known.labels[other], branch_first, self.read, projected=True, resized=resized
            )
        return None

    def _stream(self) -> Tensor:
        return self.root if self.last is None else self.last

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Where the result of a call came from."""
        read, labels = [], CLEAN
        name = getattr(func, "__name__", "")
        if name in _BLANK:
            return
        out = (
            args[0] if name == "__setitem__" else out
        )  # experts that write their tokens into one tensor
        for value in leaves(args, kwargs):
            place = self.origins.place(value)
            if place is not None:
                read.append(place)
                labels = labels | self.origins.labels[place]
                self.read = self.read or value is self.last
        if read:
            whole = attends(func)
            if name in ADDITIONS and len(read) == 1:  # something that does not come from the block
                name = "shift"
            if whole:
                self._see_batch(args)
            if whole or (name in MAPS and not labels):
                labels = self._label(whole)
            self.origins.put(out, labels, name, read)

    # --- a forward like the last one

    def _made(self, number: int) -> Any:
        """What the call with this number gave; the block's inputs are counted from -1 downwards."""
        if number < 0:
            return self.roots[-1 - number]
        func, _, _, out, _, _ = self.log[number]
        return first_of(out) if func is None else out

    def _is_as_large(self, found: Found, args: tuple[Any, ...]) -> bool:
        """Whether a shortcut has changed its size as before, where that was a
        reason to take it for one."""
        residual: Tensor = args[1] if found.branch_first else args[0]
        return (
            found.resized is None or (residual.numel() != self._stream().numel()) == found.resized
        )

    def _follow(self) -> None:
        """From now on follow the tensors, and do so for the calls that were
        only compared until here."""
        if self.memory is None:
            return
        self.memory = None
        if self.regularizers:
            # what the first forwards of an attention learn changes the functions of the next one
            self.layer.residual_departures += 1
        inside, self.frame.attended = self.frame.inside, 0
        self._fresh()
        for func, args, kwargs, out, within, found in self.log:
            self.frame.inside = within
            if func is None:
                self._left(out)
            elif found is None:
                self._note(func, args, kwargs, out)
            else:
                self._added(out, args[1] if found.branch_first else args[0], found)
        self.frame.inside = inside

    def leave(self, out: Any) -> None:
        """An attention module has run: its output came through it, unless it has added its residual
        itself (ALBERT)."""
        number = len(self.log)
        if (
            self.memory is not None
            and number < len(self.memory.functions)
            and self.memory.functions[number] is None
        ):
            self.frame.attended += 1
        else:
            self._follow()
            self._left(out)
        if not torch.compiler.is_compiling():
            self.log.append((None, (), {}, out, self.frame.inside, None))

    def _left(self, out: Any) -> None:
        labels = self._label(True)
        self.frame.attended += 1
        for value in tensors_in(out):
            if not (self.origins.of(value) == CLEAN and labels <= self.covered):
                place = self.origins.place(value)
                # what ran inside a closed attention is not known, but it was more than a map
                name, read = ("attention", []) if place is None else ("leave", [place])
                self.origins.put(value, labels, name, read)

    def _label(self, whole: bool) -> frozenset[str]:
        """The name of the sublayer that is running."""
        kind = "attention" if self.layer.attentions else "mixer"
        if self.frame.inside:
            return frozenset([f"{kind} {self.frame.attended + 1}"])
        return frozenset([f"{kind + ' beside' if whole else 'ffn'} {len(self.found)}"])

    def _see_batch(self, args: tuple[Any, ...]) -> None:
        """Attention's own layout (B, H, N, D) shows that a block works on (N, B, D)."""
        q = args[0] if args else None
        if isinstance(q, Tensor):
            self.see_queries(q)

    def see_queries(self, q: Tensor) -> None:
        """The same of an attention that dampen runs itself, which calls no function of torch.

        Args:
            q: (B, H, N, D).
        """
        x = self.root
        if q.ndim != 4 or x.ndim != 3 or x.shape[0] == x.shape[1]:
            return
        self.frame.layout_seen = True
        if x.shape[1] == q.shape[0] and x.shape[0] == q.shape[2]:
            self.frame.sequence_first = True

    def _add(self, residual: Tensor, branch: Tensor, found: Found) -> Tensor:
        role = role_of(found.labels)
        flat = self._flattened(branch)
        axis = 1 if self.frame.sequence_first else None
        call = BranchCall(
            role, residual, self.layer.site, batch_axis=axis, memory=self.frame.memory
        )
        branch = branch if flat is None else branch.unflatten(0, flat)
        for r in self.regularizers:
            branch = r.branch(branch, call)
        branch = branch if flat is None else branch.flatten(0, 1)
        self.removed = self.removed or not call.skip
        if self.removed and self.found and not self.read:
            raise RuntimeError(
                f"The block at '{self.layer.site.name}' adds "
                f"{self.found[-1]} and {role} to the same input, side by "
                "side: one skip goes around both, and to take it from one would lose the other. "
                f"To continue, {leave_out(self.layer.site.name)}."
            )
        if call.skip:
            out = torch.add(residual, branch)
        else:  # in the dtype and shape that the sum would have had
            out = branch.to(torch.promote_types(residual.dtype, branch.dtype)).expand_as(residual)
        self._added(out, residual, found)
        return out

    def _added(self, out: Tensor, residual: Tensor, found: Found) -> None:
        self.found.append(role_of(found.labels))
        self.covered |= found.labels | found.around
        if found.projected:
            self.resized = residual.numel()
        self.origins.put(out, CLEAN)
        self.last, self.read = out, False

    def _flattened(self, branch: Tensor) -> tuple[int, int] | None:
        """Batch and tokens of a branch that the block has flattened (OPT), or None; an error where
        samples are lost."""
        x = self.root
        if branch.ndim == 2 and x.ndim == 3 and branch.shape[0] == x.shape[0] * x.shape[1]:
            return x.shape[0], x.shape[1]
        if branch.shape[0] != x.shape[0]:
            raise RuntimeError(
                f"The block at '{self.layer.site.name}' got "
                f"{tuple(x.shape)} and adds a branch of shape "
                f"{tuple(branch.shape)}, whose first axis is not its samples "
                "(windows?), so that methods that draw per "
                "sample would draw for something else. To "
                f"continue, {leave_out(self.layer.site.name)}."
            )
        return None

    def check(self, block: nn.Module, expected: int, out: Any) -> None:
        """Raise where a sublayer that ran was not added, or the block returns something
        else than the stream."""
        first = first_of(out)
        if self.memory is not None:
            if len(self.log) == len(self.memory.functions) and first is self._made(
                self.memory.result
            ):
                self.layer.residual_same += 1
                return
            self._follow()
        kind = "attention" if self.layer.attentions else "mixer"
        attended = {f"{kind} {i + 1}" for i in range(self.frame.attended)}
        missing = sorted(attended - self.covered)
        wants_ffn = expected > len(self.layer.attentions)
        # without attention one branch may hold all of the block (ConvNeXt's
        # convolution and feed-forward)
        if (
            wants_ffn
            and self.layer.attentions
            and not any(label.startswith("ffn") for label in self.covered)
        ):
            missing.append("ffn")
        # attentions that target_modules= or attention= left out
        unmarked = expected - wants_ffn - len(self.layer.attentions)
        if (
            unmarked
            and sum(label.startswith("attention") for label in self.covered)
            < len(attended) + unmarked
        ):
            missing.append("attention")
        # a sum of another size than the block's output was inside a sublayer, and its shortcut none
        inner = first is not None and self.resized not in (None, first.numel())
        if not missing and first is not None and self.origins.of(first) == CLEAN and not inner:
            self._remember(first)
            return
        names = ", ".join(sorted({r.name for r in self.regularizers}))
        why = (
            f"{', '.join(missing)} not among them" if missing else "and its output is not their sum"
        )
        raise RuntimeError(
            f"{type(block).__name__} at '{self.layer.site.name}': "
            f"found {len(self.found)} residual additions "
            f"({', '.join(self.found) or 'none'}), {why}, so {names} cannot act on its branches. "
            "Write the block as x = x + branch(x) (or norm(x + branch(x))) per sublayer, or "
            f"{leave_out(self.layer.site.name)}."
        )

    def _functions(self) -> list[Any]:
        return [entry[0] for entry in self.log]

    def _remember(self, out: Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self.layer.inner_sums = self.left_inside
        stateless = all(
            version_of(b) == version for b, version in self.buffers
        )  # a stream may have to run again
        # only F.scaled_dot_product_attention shows a layout, and only to a block of (B, N, D)
        shown = (
            self.frame.layout_seen
            or self.root.ndim != 3
            or not any(map(attends, self._functions()))
        )
        known = shown and not self.frame.sequence_first
        may_stream = stateless and known and not self.removed
        self.layer.residual_memory = remember(self.roots, self.log, out, known, may_stream)
        self.layer.residual_same = 0


# --- layers that are no module
#
# Residual branches of layers that are no module: the model keeps attention and feed-forward
# side by side in a list or a dictionary and adds their residuals itself (vit-pytorch,
# x-transformers, FT-Transformer).
#
# The module whose forward runs them, the owner, is followed as a block is, all
# of its layers at once. A branch is what came through a part of a layer, and belongs to the
# layer whose part ran last. What the owner computes outside of these parts (an embedding, a
# convolution between stages, a head) makes no branch.


class OwnerSite:
    """What is kept on a module that runs layers which are no modules."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layers: list[tuple[Layer, bool]] = []  # with whether each has a feed-forward


class PartSite:
    """What is kept on a part of such a layer: attention, feed-forward, a norm."""

    def __init__(self, layer: Layer, owner: str) -> None:
        self.layer, self.owner = layer, owner


class OwnerFrame(Frame):
    """The frame of an owner's forward: attention runs in the frames of its layers."""

    def __init__(self, frames: Sequence[Frame], block: nn.Module) -> None:
        self.frames = list(frames)
        super().__init__(None, block)

    @property
    def inside(self) -> int:
        return sum(frame.inside for frame in self.frames)

    @inside.setter
    def inside(self, value: int) -> None:
        """Counted in the frames of the layers."""


class OwnerSocket(ResidualSocket):
    """Shows each residual branch of an owner's layers to the regularizers of its layer."""

    def __init__(
        self, site: OwnerSite, acting: dict[int, list[Regularizer]], roots: Any, frame: OwnerFrame
    ) -> None:
        self.site, self.acting, self.current = site, acting, site.layers[0][0]
        self.branches: dict[int, list[str]] = {}  # layer -> the roles of its branches so far
        self.running = 0  # parts that are running
        super().__init__([r for rs in acting.values() for r in rs], roots, self.current, frame)
        self.memory = None  # followed anew in every forward

    def enter(self, layer: Layer) -> None:
        """A part of a layer starts."""
        self.current, self.running = layer, self.running + 1
        self.branches.setdefault(id(layer), [])

    def _label(self, whole: bool) -> frozenset[str]:
        return super()._label(whole) if self.running else CLEAN

    def _add(self, residual: Tensor, branch: Tensor, found: Found) -> Tensor:
        self.layer, self.regularizers = self.current, self.acting.get(id(self.current), [])
        self.branches.setdefault(id(self.current), []).append(role_of(found.labels))
        return super()._add(residual, branch, found)

    def check_all(self) -> None:
        """Raise where a part that ran was not added."""
        names = ", ".join(sorted({r.name for rs in self.acting.values() for r in rs}))
        attended = {f"attention {i + 1}" for i in range(self.frame.attended)}
        missing = ["attention"] if attended - self.covered else []
        for layer, feeds in self.site.layers:
            roles = self.branches.get(id(layer))
            if roles is not None and feeds and not {"ffn", "parallel"} & set(roles):
                missing.append(f"the feed-forward of '{layer.site.name}'")
        if missing:
            raise RuntimeError(
                f"{type(self.frame.block).__name__} at '{self.site.name}' runs "
                "its layers itself, and not every branch "
                "was seen to be added to the residual stream "
                f"({', '.join(missing)} not), so {names} cannot act on "
                "its branches. Write them as x = x + branch(x), or "
                f"{leave_out(self.site.layers[0][0].site.name)}."
            )


class OfLayer:
    """The socket of an owner, as the attention of one of its layers reports to it."""

    def __init__(self, socket: OwnerSocket, layer: Layer) -> None:
        self.socket, self.layer = socket, layer

    def leave(self, out: Any) -> None:
        self.socket.leave(out)

    def see_queries(self, q: Tensor) -> None:
        self.socket.see_queries(q)


def owner_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that runs layers which are no modules, with the stage branch open."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: OwnerSite = self._dampen_owner
        acting = {
            id(layer): [r for r in layer.active(self) if "branch" in r.stages]
            for layer, _ in site.layers
        }
        if not any(acting.values()):
            return base(self, *args, **kwargs)
        opened = [layer for layer, _ in site.layers if frame_of(layer) is None]
        for layer in opened:
            open_frame(layer)
        frames: list[Any] = [frame_of(layer) for layer, _ in site.layers]
        roots = [t for t in leaves(args, kwargs) if isinstance(t, Tensor)]
        roots.sort(key=lambda t: not t.is_floating_point())
        socket = OwnerSocket(site, acting, roots, OwnerFrame(frames, self))
        try:
            for (layer, _), frame in zip(site.layers, frames, strict=True):
                frame.residual = OfLayer(socket, layer)
            with socket:
                out = base(self, *args, **kwargs)
            socket.check_all()
            return out
        finally:
            for frame in frames:
                frame.residual = None
            for layer in opened:
                close_frame(layer, layer.frames[-1])

    return forward


def part_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a part of a layer that is no module: it says which layer is running."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: PartSite = self._dampen_part
        frame = frame_of(site.layer)
        if frame is not None and isinstance(frame.residual, OfLayer):
            socket = frame.residual.socket
            socket.enter(site.layer)
            try:
                return base(self, *args, **kwargs)
            finally:
                socket.running -= 1
        if any("branch" in r.stages for r in site.layer.active(self)):
            raise RuntimeError(
                f"A part of the layer '{site.layer.site.name}' ran outside "
                f"the forward of '{site.owner}', which holds "
                "it, so its residual branches cannot be seen. Call "
                f"that, or {leave_out(site.layer.site.name)}."
            )
        return base(self, *args, **kwargs)

    return forward


def owner_of(model: nn.Module, name: str) -> str:
    """The module whose forward runs the parts of the layer `name`: the closest one around them that
    has a forward."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        above = ".".join(parts[:end])
        if not isinstance(model.get_submodule(above), nn.ModuleList | nn.ModuleDict):
            return above
    return ""


def parts_with_forward(module: nn.Module) -> list[nn.Module]:
    """The modules that run where an element of a list does: itself, or what it holds."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [module]
    return [part for child in module.children() for part in parts_with_forward(child)]
