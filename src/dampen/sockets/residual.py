"""Residual branches, found in any block by following the data.

While a block runs, each of its tensors is known as *clean* (computed from the block's input without any map: a norm,
a reshape, the input itself, a sum of the residual stream) or by the sublayers whose maps it went through. An addition
of a clean tensor and one that came through a sublayer is a residual addition, the second operand is the branch, with
whatever the block has put in it (LayerScale, DropPath, dropout, a post-norm), and the sum is clean again. So pre-norm,
post-norm, sandwich, parallel and decoder blocks of any library are read without an adapter of their own.

Where both operands came through a map, two forms are read as well. *A projected shortcut*: one operand is the stream
after a single map and nothing else but norms and pooling, and it is not as large as the stream was, so that the stream
itself could not have been added (MViT, Hiera, ResNet-like blocks). *A stream that was remade*: the other operand was
computed from this one, x + f(x), where x is the stream after a single map (TinyViT's convolution, NextViT) or after an
attention that changed its size (LeViT's downsampling); there is no residual around that map, so nothing to drop.

In the end every sublayer that ran must have been added and the block's output must be clean; a block that adds in some
other way raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
_AFFINE = _MAPS | set(
    "layer_norm batch_norm group_norm rms_norm avg_pool2d avg_pool1d max_pool2d max_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool2d amax mean view reshape reshape_as permute transpose movedim flatten unflatten contiguous "
    "squeeze unsqueeze __getitem__ pad to float half bfloat16 mul __mul__ interpolate boolean_dispatch leave".split()
)
CLEAN: frozenset[str] = frozenset()


def call_torch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function as a mode received it."""
    if getattr(func, "__name__", "") == "unflatten":  # its super() cannot be traced below a mode by torch.compile
        return torch.unflatten(*args, **kwargs)
    return func(*args, **kwargs)


class ResidualSocket(TorchFunctionMode):
    """Shows each residual branch of one block's forward to the regularizers, just before it is added."""

    def __init__(
        self, regularizers: Sequence[Regularizer], roots: Sequence[Tensor], layer: Layer, frame: Frame
    ) -> None:
        super().__init__()
        self.regularizers, self.layer, self.frame = regularizers, layer, frame
        self.root = roots[0]  # the block's first input
        self.tensors: list[Tensor] = []  # those that are known, kept alive so that an id means one tensor
        self.origins: list[frozenset[str]] = []  # the sublayers that each came through; none: clean
        self.makers: list[tuple[str, list[int]]] = []  # the function that made each, and what of the known it read
        self.places: dict[int, int] = {}  # id -> index, outside of compiled graphs, which know no ids
        self.found: list[str] = []
        self.covered: set[str] = set()  # the sublayers whose branches were added
        self.last: Tensor | None = None  # the last sum
        self.read = False  # whether anything was computed from it
        self.removed = False  # whether a skip was left out
        self.resized: int | None = None  # elements of the last sum with a projected shortcut
        frame.residual = self
        for root in roots:
            self._put(root, CLEAN)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        attends = func is F.scaled_dot_product_attention or func is F.multi_head_attention_forward
        if name in _LOOKS:
            return call_torch(func, args, kwargs)
        if name in _ADDITIONS and len(args) == 2 and not kwargs:
            left, right = self._origin(args[0]), self._origin(args[1])
            # scalars are sums inside another method's penalty, never a stream of tokens
            if left is not None and right is not None and args[0].ndim == args[1].ndim >= 2:
                if bool(left) != bool(right):
                    residual, branch, labels = (args[1], args[0], left) if left else (args[0], args[1], right)
                    return self._add(residual, branch, labels)
                if left and right and not self.frame.inside:
                    for residual, branch in ((args[0], args[1]), (args[1], args[0])):
                        labels = self._remade(residual, branch)
                        if labels:
                            return self._add(residual, branch, labels)
        read, labels = [], CLEAN
        for value in _leaves(args, kwargs):
            place = self._place(value)
            if place is not None:
                read.append(place)
                labels = labels | self.origins[place]
                self.read = self.read or value is self.last
        out = call_torch(func, args, kwargs)
        if read:
            if attends:
                self._see_batch(args)
            if attends or (name in _MAPS and not labels):
                labels = self._label(attends)
            self._put(out, labels, name, read)
        return out

    def leave(self, out: Any) -> None:
        """An attention module has run: what it gives out came through it, unless it has added its residual itself
        (ALBERT)."""
        labels = self._label(True)
        self.frame.attended += 1
        for value in _leaves((out,), {}):
            if isinstance(value, Tensor) and not (self._origin(value) == CLEAN and labels <= self.covered):
                place = self._place(value)
                self._put(value, labels, "leave", [] if place is None else [place])

    def _remade(self, residual: Tensor, branch: Tensor) -> frozenset[str]:
        """The sublayers of `branch`, where `residual` is a projected shortcut or the stream remade; none: neither."""
        made, other = self._place(residual), self._place(branch)
        if made is None or other is None:
            return CLEAN
        stream = self.root if self.last is None else self.last
        resized = residual.numel() != stream.numel()
        single, attended = self._is_single_map(made), any(x.startswith("attention") for x in self.origins[made])
        if self._comes_from(other, made) and (single or (attended and resized)):
            if attended:
                self.covered |= self.origins[made]  # no residual goes around it
            return (self.origins[other] - self.origins[made]) or frozenset([f"ffn {len(self.found)}"])
        derived = self._comes_from(other, made, mapped=True)  # the inside of an activation: x + 0.04 x^3
        if single and resized and not derived and not self._is_beside_a_map(other):
            self.resized = residual.numel()
            return self.origins[other]
        return CLEAN

    def _is_single_map(self, place: int) -> bool:
        """Whether a tensor is the stream after one linear map, and norms, pooling and reshaping alone."""
        return self._count_maps(place, _AFFINE) == 1

    def _is_beside_a_map(self, place: int) -> bool:
        """Whether a tensor is a part of a linear map rather than a sublayer: a map, or several in a row with nothing
        between them but dropout (LoRA)."""
        maps = self._count_maps(place, _AFFINE | {"dropout"})
        return maps == 1 or (maps is not None and not any(x.startswith("attention") for x in self.origins[place]))

    def _count_maps(self, place: int, allowed: set[str]) -> int | None:
        """How many linear maps lie between the stream and a tensor; None where anything does that is not allowed."""
        maps, seen, todo = 0, {place}, [place]
        while todo:
            name, read = self.makers[todo.pop()]
            if name not in allowed:
                return None
            maps += name in _MAPS
            fresh = {p for p in read if self.origins[p]} - seen
            seen |= fresh
            todo.extend(fresh)
        return maps

    def _comes_from(self, place: int, start: int, mapped: bool = False) -> bool:
        """Whether a tensor was computed from another one, through at least one map (or any way: `mapped`)."""
        todo: list[tuple[int, bool]] = [(place, mapped)]
        seen: set[tuple[int, bool]] = set()
        while todo:
            here, mapped = todo.pop()
            if here == start:
                if mapped:
                    return True
                continue
            name, read = self.makers[here]
            mapped = mapped or name in _MAPS or name == "scaled_dot_product_attention"
            fresh = {(p, mapped) for p in read if p >= start} - seen
            seen |= fresh
            todo.extend(fresh)
        return False

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
        place = self._place(value)
        return None if place is None else self.origins[place]

    def _place(self, value: Any) -> int | None:
        """The number of a known tensor."""
        if not isinstance(value, Tensor):
            return None
        if not torch.compiler.is_compiling():
            return self.places.get(id(value))
        for i in range(len(self.tensors) - 1, -1, -1):
            if self.tensors[i] is value:
                return i
        return None

    def _put(self, out: Any, labels: frozenset[str], name: str = "", read: Sequence[int] = ()) -> None:
        for value in (out,) if isinstance(out, Tensor) else _leaves((out,), {}):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.tensors.append(value)
                self.origins.append(labels)
                self.makers.append((name, list(read)))
                if not torch.compiler.is_compiling():
                    self.places[id(value)] = len(self.tensors) - 1

    def _add(self, residual: Tensor, branch: Tensor, labels: frozenset[str]) -> Tensor:
        kinds = sorted({label.split()[0] for label in labels})
        role = kinds[0] if len(kinds) == 1 else "parallel"
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
        self.found.append(role)
        self.covered |= labels
        self._put(out, CLEAN)
        self.last, self.read = out, False
        return out

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
        attended = {f"attention {i + 1}" for i in range(self.frame.attended)}
        missing = sorted(attended - self.covered)
        wants_ffn = expected > len(self.layer.attentions)
        if wants_ffn and not any(label.startswith("ffn") for label in self.covered):
            missing.append("ffn")
        unmarked = expected - wants_ffn - len(self.layer.attentions)  # attentions that sites= or attention= left out
        if unmarked and sum(label.startswith("attention") for label in self.covered) < len(attended) + unmarked:
            missing.append("attention")
        first = next((v for v in _leaves((out,), {}) if isinstance(v, Tensor)), None)
        # a sum of another size than the block's output was inside a sublayer, and its shortcut none
        inner = first is not None and self.resized not in (None, first.numel())
        if not missing and first is not None and self._origin(first) == CLEAN and not inner:
            return
        names = ", ".join(sorted({r.name for r in self.regularizers}))
        why = f"{', '.join(missing)} not among them" if missing else "and its output is not their sum"
        raise RuntimeError(
            f"{type(block).__name__} at '{self.layer.site.name}': found {len(self.found)} residual additions "
            f"({', '.join(self.found) or 'none'}), {why}, so {names} cannot act on its branches. "
            "Write the block as x = x + branch(x) (or norm(x + branch(x))) per sublayer, or leave it out with sites=."
        )


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments and what lists among them hold."""
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple):
            found.extend(value)
        else:
            found.append(value)
    return found
