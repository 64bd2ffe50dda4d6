"""Where the tensors of a block's forward came from: through which sublayers, made by which function of which others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

MAPS = set(
    "linear addmm matmul __matmul__ bmm mm baddbmm einsum conv1d conv2d conv3d _grouped_mm grouped_mm".split()
)
_AFFINE = MAPS | set(
    "layer_norm batch_norm group_norm rms_norm avg_pool2d avg_pool1d max_pool2d max_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool2d amax mean view reshape reshape_as permute transpose movedim flatten unflatten contiguous "
    "squeeze unsqueeze __getitem__ pad to float half bfloat16 mul __mul__ interpolate boolean_dispatch leave".split()
)
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
        """Whether a tensor is the stream after one linear map, and norms, pooling and reshaping alone."""
        return self._count_maps(place, _AFFINE) == 1

    def map_behind(self, place: int) -> int:
        """What the last linear map before a tensor gave, or the tensor itself where there is none."""
        todo = [place]
        while todo:
            here = todo.pop()
            if self.makers[here][0] in MAPS:
                return here
            todo.extend(p for p in self.makers[here][1] if self.labels[p])
        return place

    def is_beside_a_map(self, place: int) -> bool:
        """Whether a tensor is a part of a linear map rather than a sublayer: a map, or several in a row with nothing
        between them but dropout (LoRA)."""
        maps = self._count_maps(place, _AFFINE | {"dropout"})
        return maps == 1 or (
            maps is not None and not any(x.startswith("attention") for x in self.labels[place])
        )

    def _count_maps(self, place: int, allowed: frozenset[str] | set[str]) -> int | None:
        """How many linear maps lie between the stream and a tensor; None where anything does that is not allowed."""
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
