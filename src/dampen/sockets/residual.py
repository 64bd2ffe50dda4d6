"""Residual branches, found in any block by following the data.

While a block runs, each of its tensors is known as *clean* (computed from the block's input without any map: a norm,
a reshape, the input itself, a sum of the residual stream) or by the sublayers whose maps it went through. An addition
of a clean tensor and one that came through a sublayer is a residual addition, the second operand is the branch, with
whatever the block has put in it (LayerScale, DropPath, dropout, a post-norm), and the sum is clean again. So pre-norm,
post-norm, sandwich, parallel and decoder blocks of any library are read without an adapter of their own. In the end
every sublayer that ran must have been added and the block's output must be clean; a block that adds in some other way
raises.

To follow every tensor costs more than the methods that ask for it. So what a forward did is remembered: its torch
functions in their order, and where the operands of each residual addition came from. While the next forward calls the
same functions, it is only compared with that; where it departs, it is followed from its start after all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen.calls import BranchCall
from dampen.regularizer import Regularizer

if TYPE_CHECKING:
    from dampen.sockets.frame import Frame
    from dampen.sockets.state import Layer

_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}
_LOOKS = {"__get__", "size", "dim", "stride", "numel", "is_contiguous", "is_floating_point", "get_device", "__len__"}
_MAPS = set("linear addmm matmul __matmul__ bmm mm baddbmm einsum conv1d conv2d conv3d _grouped_mm grouped_mm".split())
CLEAN: frozenset[str] = frozenset()


def call_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as a mode received it."""
    if getattr(func, "__name__", "") == "unflatten":  # its super() cannot be traced below a mode by torch.compile
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


class Addition(NamedTuple):
    """A residual addition of a forward that is remembered: which calls made its operands, and what it was."""

    left: int
    right: int
    labels: frozenset[str]
    branch_first: bool  # whether the left operand is the branch
    read: bool  # whether the sum before it had been read


class Memory(NamedTuple):
    """What one forward of a block did, call by call; an attention module that ends is a call of None."""

    functions: tuple[Any, ...]
    additions: dict[int, Addition | None]  # by the number of the call; None: an attention, which tells its layout
    result: int  # the call that gave the block's output
    by_operator: bool  # whether all that is done with the stream is `stream + branch`: then see `stream.py`
    roles: tuple[str, ...]  # of the branches, in their order


_Entry = tuple[Any, tuple[Any, ...], dict[str, Any], Any, int, frozenset[str] | None]
"""A call: function, arguments, what came out, attentions it ran in, and of an addition the sublayers of its branch."""


class ResidualSocket(TorchFunctionMode):
    """Shows each residual branch of one block's forward to the regularizers, just before it is added."""

    def __init__(
        self, regularizers: Sequence[Regularizer], roots: Sequence[Tensor], layer: Layer, frame: Frame
    ) -> None:
        super().__init__()
        self.regularizers, self.layer, self.frame, self.roots = regularizers, layer, frame, roots
        self.root = roots[0]  # the block's first input
        self.log: list[_Entry] = []
        self.memory: Memory | None = None if torch.compiler.is_compiling() else layer.residual_memory
        self.removed = False  # whether a skip was left out
        self._fresh()
        frame.residual = self

    def _fresh(self) -> None:
        self.tensors: list[Tensor] = []  # those that are known, kept alive so that an id means one tensor
        self.origins: list[frozenset[str]] = []  # the sublayers that each came through; none: clean
        self.places: dict[int, int] = {}  # id -> index, outside of compiled graphs, which know no ids
        self.found: list[str] = []
        self.covered: set[str] = set()  # the sublayers whose branches were added
        self.last: Tensor | None = None  # the last sum
        self.read = False  # whether anything was computed from it
        for root in self.roots:
            self._put(root, CLEAN)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.memory is not None:
            number = len(self.log)
            if number < len(self.memory.functions) and func is self.memory.functions[number]:
                if number not in self.memory.additions:
                    out = func(*args, **kwargs)
                    self.log.append((func, args, kwargs, out, self.frame.inside, None))
                    return out
                plan = self.memory.additions[number]
                if plan is None or (self._made(plan.left) is args[0] and self._made(plan.right) is args[1]):
                    return self._as_before(plan, func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _LOOKS:
            return call_torch(func, args, kwargs)
        self._follow()
        labels = None
        if name in _ADDITIONS and len(args) == 2 and not kwargs:
            left, right = self._origin(args[0]), self._origin(args[1])
            if left is not None and right is not None and bool(left) != bool(right):
                residual, branch, found = (args[1], args[0], left) if left else (args[0], args[1], right)
                # scalars are sums inside another method's penalty, never a stream of tokens
                labels = found if residual.ndim == branch.ndim >= 2 else None
        if labels is not None:
            out = self._add(residual, branch, labels)
        else:
            out = call_torch(func, args, kwargs)
            self._note(func, args, kwargs, out)
        if not torch.compiler.is_compiling():
            self.log.append((func, args, kwargs, out, self.frame.inside, labels))
        return out

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Where the result of a call came from."""
        known, labels = False, CLEAN
        for value in _leaves(args, kwargs):
            origin = self._origin(value)
            if origin is not None:
                known, labels = True, labels | origin
                self.read = self.read or value is self.last
        if known:
            attends = _attends(func)
            if attends:
                self._see_batch(args)
            if attends or (getattr(func, "__name__", "") in _MAPS and not labels):
                labels = self._label(attends)
            self._put(out, labels)

    # --- a forward like the last one ----------------------------------------------------------------------------------

    def _made(self, number: int) -> Any:
        """What the call with this number gave; the block's inputs are counted from -1 downwards."""
        return self.roots[-1 - number] if number < 0 else self.log[number][3]

    def _as_before(self, plan: Addition | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call at which the forward that is remembered added a branch, or attended."""
        if plan is None:
            self._see_batch(args)
            out, labels = func(*args, **kwargs), None
        else:
            self.read, labels = plan.read, plan.labels
            left, right = args
            out = self._add(right, left, labels) if plan.branch_first else self._add(left, right, labels)
        self.log.append((func, args, kwargs, out, self.frame.inside, labels))
        return out

    def _follow(self) -> None:
        """From now on follow the tensors, and do so for the calls that were only compared until here."""
        if self.memory is None:
            return
        self.memory = None
        inside, self.frame.attended = self.frame.inside, 0
        self._fresh()
        for func, args, kwargs, out, within, labels in self.log:
            self.frame.inside = within
            if func is None:
                self._left(out)
            elif labels is None:
                self._note(func, args, kwargs, out)
            else:
                self._added(out, labels)
        self.frame.inside = inside

    def _remember(self, out: Tensor) -> Memory | None:
        """This forward, for the next; None where an operand of an addition was made by no call of its own."""
        made = {id(root): -1 - i for i, root in enumerate(self.roots)}
        additions: dict[int, Addition | None] = {}
        last, read = self.roots[0], False
        for number, (func, args, kwargs, result, _, labels) in enumerate(self.log):
            read = read or any(value is last for value in _leaves(args, kwargs))
            if labels is not None:
                places = [made.get(id(value)) for value in args]
                if places[0] is None or places[1] is None:
                    return None
                branch_first = self._origin(args[0]) == labels
                additions[number] = Addition(places[0], places[1], labels, branch_first, read)
                last, read = result, False
            elif func is not None and _attends(func):
                additions[number] = None
            made[id(result)] = number
        if id(out) not in made:
            return None
        functions = tuple(entry[0] for entry in self.log)
        return Memory(functions, additions, made[id(out)], self._by_operator(additions), tuple(self.found))

    def _by_operator(self, additions: dict[int, Addition | None]) -> bool:
        """Whether every sum is `stream + branch` by the operator, on the block's input or the sum before, and nothing
        else is ever added to the stream; and the batch is known to come first."""
        x = self.root
        if len(self.roots) != 1 or x.ndim != 3 or x.shape[0] == x.shape[1] or self.frame.sequence_first or self.removed:
            return False
        stream, number_of_last = x, -1
        for number, (func, args, _, out, _, labels) in enumerate(self.log):
            adds = getattr(func, "__name__", "") in _ADDITIONS
            plan = additions.get(number)
            if adds and plan is not None:
                residual, place = (args[1], plan.right) if plan.branch_first else (args[0], plan.left)
                same = residual.shape == args[0].shape == args[1].shape
                if func is not Tensor.add or residual is not stream or place != number_of_last or not same:
                    return False
                stream, number_of_last = out, number
            elif (adds or func is torch.add or labels is not None) and any(value is stream for value in args):
                return False
        return any(plan is None for plan in additions.values())  # an attention has told its layout

    def leave(self, out: Any) -> None:
        """An attention module has run: what it gives out came through it, unless it has added its residual itself
        (ALBERT)."""
        number = len(self.log)
        if self.memory is not None and number < len(self.memory.functions) and self.memory.functions[number] is None:
            self.frame.attended += 1
        else:
            self._follow()
            self._left(out)
        if not torch.compiler.is_compiling():
            self.log.append((None, (), {}, out, self.frame.inside, None))

    def _left(self, out: Any) -> None:
        labels = self._label(True)
        self.frame.attended += 1
        for value in _leaves((out,), {}):
            if isinstance(value, Tensor) and not (self._origin(value) == CLEAN and labels <= self.covered):
                self._put(value, labels)

    def _label(self, attends: bool) -> frozenset[str]:
        """The name of the sublayer that is running."""
        if self.frame.inside:
            return frozenset([f"attention {self.frame.attended + 1}"])
        return frozenset([f"{'attention beside' if attends else 'ffn'} {len(self.found)}"])

    def _see_batch(self, args: tuple[Any, ...]) -> None:
        """Attention's own layout (B, H, N, D) tells a block that works on (N, B, D)."""
        x, q = self.root, args[0] if args else None
        if not isinstance(q, Tensor) or q.ndim != 4 or x.ndim != 3 or x.shape[0] == x.shape[1]:
            return
        if x.shape[1] == q.shape[0] and x.shape[0] == q.shape[2]:
            self.frame.sequence_first = True

    def _origin(self, value: Any) -> frozenset[str] | None:
        """The sublayers that a tensor came through; None where it is not known."""
        if not isinstance(value, Tensor):
            return None
        if not torch.compiler.is_compiling():
            place = self.places.get(id(value))
            return None if place is None else self.origins[place]
        for i in range(len(self.tensors) - 1, -1, -1):
            if self.tensors[i] is value:
                return self.origins[i]
        return None

    def _put(self, out: Any, labels: frozenset[str]) -> None:
        for value in (out,) if isinstance(out, Tensor) else _leaves((out,), {}):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.tensors.append(value)
                self.origins.append(labels)
                if not torch.compiler.is_compiling():
                    self.places[id(value)] = len(self.tensors) - 1

    def _add(self, residual: Tensor, branch: Tensor, labels: frozenset[str]) -> Tensor:
        role = _role(labels)
        flat = self._flattened(branch)
        axis = 1 if self.frame.sequence_first else None
        call = BranchCall(role, residual, self.layer.site, batch_axis=axis)
        branch = branch if flat is None else branch.unflatten(0, flat)
        for r in self.regularizers:
            branch = r.branch(branch, call)
        branch = branch if flat is None else branch.flatten(0, 1)
        self.removed = self.removed or not call.skip
        if self.removed and self.found and not self.read:
            raise RuntimeError(
                f"The block at '{self.layer.site.name}' adds {self.found[-1]} and {role} to the same input, side by "
                "side: one skip goes around both, and to take it from one would lose the other. "
                "Leave the block out with sites=."
            )
        if call.skip:
            out = torch.add(residual, branch)
        else:  # in the dtype and shape that the sum would have had
            out = branch.to(torch.promote_types(residual.dtype, branch.dtype)).expand_as(residual)
        self._added(out, labels)
        return out

    def _added(self, out: Tensor, labels: frozenset[str]) -> None:
        self.found.append(_role(labels))
        self.covered |= labels
        self._put(out, CLEAN)
        self.last, self.read = out, False

    def _flattened(self, branch: Tensor) -> tuple[int, int] | None:
        """Batch and tokens of a branch that the block has flattened (OPT), or None; an error where samples are lost."""
        x = self.root
        if branch.ndim == 2 and x.ndim == 3 and branch.shape[0] == x.shape[0] * x.shape[1]:
            return x.shape[0], x.shape[1]
        if branch.shape[0] != x.shape[0]:
            raise RuntimeError(
                f"The block at '{self.layer.site.name}' got {tuple(x.shape)} and adds a branch of shape "
                f"{tuple(branch.shape)}, whose first axis is not its samples (windows?), so that methods that draw per "
                "sample would draw for something else. Leave the block out with sites=."
            )
        return None

    def check(self, block: nn.Module, expected: int, out: Any) -> None:
        """Raise where a sublayer that ran was not added, or the block gives out something else than the stream."""
        first = (
            out if isinstance(out, Tensor) else next((v for v in _leaves((out,), {}) if isinstance(v, Tensor)), None)
        )
        if self.memory is not None:
            if len(self.log) == len(self.memory.functions) and first is self._made(self.memory.result):
                return
            self._follow()
        attended = {f"attention {i + 1}" for i in range(self.frame.attended)}
        missing = sorted(attended - self.covered)
        wants_ffn = expected > len(self.layer.attentions)
        if wants_ffn and not any(label.startswith("ffn") for label in self.covered):
            missing.append("ffn")
        unmarked = expected - wants_ffn - len(self.layer.attentions)  # attentions that sites= or attention= left out
        if unmarked and sum(label.startswith("attention") for label in self.covered) < len(attended) + unmarked:
            missing.append("attention")
        if not missing and first is not None and self._origin(first) == CLEAN:
            self.layer.residual_memory = None if torch.compiler.is_compiling() else self._remember(first)
            return
        names = ", ".join(sorted({r.name for r in self.regularizers}))
        why = f"{', '.join(missing)} not among them" if missing else "and its output is not their sum"
        raise RuntimeError(
            f"{type(block).__name__} at '{self.layer.site.name}': found {len(self.found)} residual additions "
            f"({', '.join(self.found) or 'none'}), {why}, so {names} cannot act on its branches. "
            "Write the block as x = x + branch(x) (or norm(x + branch(x))) per sublayer, or leave it out with sites=."
        )


def _attends(func: Any) -> bool:
    return func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward


def _role(labels: frozenset[str]) -> str:
    """attention, ffn, or parallel for both."""
    kinds = sorted({label.split()[0] for label in labels})
    return kinds[0] if len(kinds) == 1 else "parallel"


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments and what lists among them hold."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            found.extend(value)
        else:
            found.append(value)
    return found
