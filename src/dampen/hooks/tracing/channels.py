"""Which channel of which linear map each element of an attention's operands came from.

Each output of a linear layer has a companion tensor of the same shape. It holds, for each element,
the number of the map and of its channel. Whatever only moves elements (view, permute, split,
contiguous, ...) is done to that companion as well, and what works on each element alone (a norm, a
scale, an added bias) leaves it be. At the attention the companions then say without any convention
which axis is the heads (Hiera's windows are as many), and which rows of a fused or convolutional
projection make q, k and v, however they are interleaved (LeViT, TinyViT, MaxViT, DeBERTa). Where
they do not say it, the numbers that arrive must be among those of the columns
that the convention claims.

It costs a few small calls, so a site whose first forward had nothing unusual is not followed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dampen.calls import claimed_rows
from dampen.hooks.discover.roles import is_convolution
from dampen.regularizer import Call, LinearCall

if TYPE_CHECKING:
    from dampen.hooks.context import AttentionSite

_MOVES = set(
    "view reshape reshape_as view_as permute transpose swapaxes swapdims "
    "movedim moveaxis t contiguous clone flatten "
    "unflatten squeeze unsqueeze expand expand_as chunk split "
    "split_with_sizes unbind narrow select __getitem__ "
    "tensor_split repeat_interleave roll unfold __get__".split()
)
_EACH = set(
    "batch_norm layer_norm rms_norm group_norm normalize mul mul_ "
    "__mul__ __rmul__ __imul__ div div_ __truediv__ "
    "__itruediv__ dropout to float half double bfloat16 type_as".split()
)
_ADDS = set("add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __rsub__ __isub__".split())
_WIDTH = 1 << 20  # channels of one map, at most


class Channels:
    """The companions of one forward of an attention module."""

    def __init__(self) -> None:
        self.maps: list[LinearCall | None] = []
        self.outputs: list[Tensor] = []  # what each of these maps gave out
        self.known: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id -> the tensor, kept alive, and its companion

    def start(self, y: Tensor, axis: int, call: LinearCall | None = None) -> None:
        """A map has given out `y` with its channels along an axis."""
        size = y.shape[axis]
        if size >= _WIDTH or y.numel() == 0:
            return
        numbers = torch.arange(size, device=y.device) + len(self.maps) * _WIDTH
        shape = [1] * y.ndim
        shape[axis] = size
        self.maps.append(call)
        self.outputs.append(y)
        self.known[id(y)] = (y, numbers.view(shape).expand(y.shape))

    def of(self, tensor: Tensor) -> Tensor | None:
        """The companion of a tensor, where it has one."""
        found = self.known.get(id(tensor))
        return None if found is None else found[1]

    def follow(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """A torch function has run: its outputs get companions where its input had one."""
        moves = (
            name in _MOVES and func is not F.unfold
        )  # which makes windows of an image, unlike the tensor's method
        if self.known and name in _ADDS:
            self._add(args, kwargs, out)
        elif self.known and name in ("cat", "concat"):
            self._join(args, kwargs, out)
        if self.known and name in ("pad", "_pad"):
            self._pad(args, out)
        if not self.known or not (moves or name in _EACH):
            return
        given = (
            next((a for a in args if isinstance(a, Tensor)), None) if args else kwargs.get("input")
        )
        companion = None if given is None else self.of(given)
        if companion is None:
            return
        if not moves:
            if isinstance(out, Tensor) and out.shape == given.shape:  # type: ignore[union-attr]
                self.known[id(out)] = (out, companion)
            return
        if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
            return  # other bits, not other places
        if name in (
            "view",
            "view_as",
        ):  # a companion repeats one line of numbers in memory, so it may need a copy
            func = Tensor.reshape if name == "view" else Tensor.reshape_as
        new_args = tuple(companion if a is given else a for a in args)
        new_kwargs = {k: companion if a is given else a for k, a in kwargs.items()}
        with torch.no_grad():
            moved = func(*new_args, **new_kwargs)
        pairs = (
            [(out, moved)]
            if isinstance(out, Tensor)
            else list(zip(out, moved, strict=True))
            if _many(out)
            else []
        )
        for made, its in pairs:
            if isinstance(made, Tensor) and isinstance(its, Tensor) and made.shape == its.shape:
                self.known[id(made)] = (made, its)

    def _pad(self, args: tuple[Any, ...], out: Any) -> None:
        """A border around an image (HaloNet) belongs to the channels of what it surrounds."""
        companion = self.of(args[0]) if args and isinstance(args[0], Tensor) else None
        if companion is None or not isinstance(out, Tensor) or out.ndim != companion.ndim:
            return
        for axis, (old, new) in enumerate(zip(companion.shape, out.shape, strict=True)):
            if old != new:
                first = companion.narrow(axis, 0, 1)
                if not bool((first == companion).all()):
                    return
                companion = first.expand(
                    [new if i == axis else n for i, n in enumerate(companion.shape)]
                )
        self.known[id(out)] = (out, companion)

    def _add(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """A sum is of the channels of its one part that came from a map (a bias
        of its own, a rotary)."""
        parts = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        of_maps = [a for a in parts if self.of(a) is not None]
        one = len(of_maps) == 1 and isinstance(out, Tensor) and out.shape == of_maps[0].shape
        if one and (companion := self.of(of_maps[0])) is not None:
            self.known[id(out)] = (out, companion)

    def _join(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Tensors side by side, where all of them came from maps (a rotary on
        some of the channels)."""
        parts = args[0] if args else kwargs.get("tensors", ())
        companions = [c for part in parts if (c := self.of(part)) is not None]
        if companions and len(companions) == len(parts):
            axes = {k: v for k, v in kwargs.items() if k in ("dim", "axis")}
            self.known[id(out)] = (out, torch.cat(companions, *args[1:], **axes))

    def gave(self, call: LinearCall) -> Tensor | None:
        """What a map has given out."""
        return next(
            (y for y, made in zip(self.outputs, self.maps, strict=True) if made is call), None
        )


def _many(out: Any) -> bool:
    return isinstance(out, list | tuple)


def attends_over_channels(
    companions: Sequence[Tensor | None], q: Tensor, given: Sequence[int] | None
) -> bool:
    """Whether the rows of q (B, H, rows, columns) are channels and its columns tokens (Restormer,
    XCiT), so that the scores are those of channels with channels. The companions of q and k show
    it; where they do not, as in a compiled graph, the shapes do: columns as many as the tokens of
    what the module was given, rows times heads its channels."""
    for companion in companions[:2]:
        if companion is None:
            continue
        down, across = (
            bool((companion != companion.narrow(axis, 0, 1)).any()) for axis in (-2, -1)
        )
        if down != across:
            return down
    if given is None or len(given) not in (3, 4):
        return False
    rows, columns = q.shape[-2:]
    layouts = [(given[1], given[2])] if len(given) == 3 else []
    layouts += (
        [(given[2] * given[3], given[1]), (given[1] * given[2], given[3])]
        if len(given) == 4
        else []
    )
    return any(columns == n and rows != n and rows * q.shape[-3] == c for n, c in layouts)


class Heads(NamedTuple):
    """Which leading axis of an operand (..., tokens, channels) counts heads."""

    axis: int | None  # None where there is one head, or no other axis beside a merged one
    number: int  # less than the axis is long where heads are merged with the batch in it
    first: bool = (
        False  # whether a merged axis is (heads, batch), as `torch.cat(x.split(d, 2), 0)` makes
    )


def head_axis(companion: Tensor) -> Heads | None:
    """Where the heads of an operand (..., tokens, channels) are; None where the
    companion does not show it."""
    leading = companion[..., 0, 0]
    if not bool((companion[..., :1, :] == companion).all()):
        return None  # a channel that changes from token to token
    varying = [i for i in range(leading.ndim) if bool((leading != leading.narrow(i, 0, 1)).any())]
    if not varying:
        return Heads(None, 1)
    if len(varying) > 1:
        return None
    axis = varying[0]
    line = leading.movedim(axis, -1).reshape(-1, leading.shape[axis])[0]
    heads = len(set(line.tolist()))
    if heads == len(line):
        return Heads(axis, heads)
    if len(line) % heads:
        return None
    if bool((line.view(-1, heads) == line[:heads]).all()):
        return Heads(None if leading.ndim == 1 else axis, heads)
    by_head = line.view(heads, -1)
    return Heads(axis, heads, first=True) if bool((by_head == by_head[:, :1]).all()) else None


def cut_of(followed: Channels, companion: Tensor) -> tuple[LinearCall, Tensor] | None:
    """The map behind an operand (B, H, tokens, channels), given by its companion, and which of its
    rows make it."""
    codes = companion[:1, :, :1]
    if not bool((companion == codes).all()):
        return None
    codes = codes.flatten()
    if len(set((codes // _WIDTH).tolist())) != 1:
        return None
    if len(set(codes.tolist())) != len(codes):
        return None  # grouped keys, repeated for every query head: the convention knows them
    call = followed.maps[int(codes[0]) // _WIDTH]
    return None if call is None else (call, codes % _WIDTH)


def start_following(site: AttentionSite, call: Call) -> None:
    """The beginning of an attention module's forward. A compiled graph takes what
    eager forwards have found."""
    if torch.compiler.is_compiling():
        call.cuts, call.unknown = dict(site.cuts), site.unknown
        return
    call.unknown = site.unknown
    if site.follow is not False:
        call.followed = Channels()


def tell_heads(
    site: AttentionSite, call: Call, companions: Sequence[Tensor | None], leading: Sequence[int]
) -> Heads | None:
    """Where the heads are among the leading axes of q, k and v, where their companions show it."""
    if call.followed is None:
        return site.told.get(len(leading))
    fitting = [c for c in companions if c is not None and tuple(c.shape[:-2]) == tuple(leading)]
    told = next((t for c in reversed(fitting) if (t := head_axis(c)) is not None), None)
    if len(leading) == 2 and (told is None or told.axis != 0):
        return None  # (B, H) by convention
    if told is not None:
        site.told[len(leading)] = told
        site.follow = True
    return told


def tell_rows(
    site: AttentionSite, call: Call, companions: Sequence[Tensor | None], operands: Sequence[Tensor]
) -> None:
    """Write into the call which rows of which map make q, k and v, from their companions (B, H,
    tokens, channels)."""
    if call.followed is None:
        return
    unusual = False
    for role, companion in zip("qkv", companions, strict=True):
        cut = None if companion is None else cut_of(call.followed, companion)
        name = None if cut is None else next((n for n, m in call.maps.items() if m is cut[0]), None)
        if cut is None or name is None:
            continue
        made, rows = cut
        first, size = int(rows[0]), len(rows)
        whole = bool((rows == torch.arange(first, first + size, device=rows.device)).all())
        call.cuts[role] = name, slice(first, first + size) if whole else rows
        if not whole or not _usual(call, role, name, first, size) or is_convolution(made.module):
            unusual = True
            site.cuts[role] = call.cuts[role]
    for role, operand in zip("vkq", reversed(operands), strict=True):
        _check_claimed(site, call, role, operand)
    site.follow = bool(site.follow) or unusual


def _check_claimed(site: AttentionSite, call: Call, role: str, operand: Tensor) -> None:
    """Note a role of a fused map that the convention (all of q, then k, then v) would
    read from the wrong columns.

    Values are mostly what the map gave out, so they must be among the columns claimed. Rotaries
    change queries and keys: those are doubted only where another role of the map
    departs from the convention."""
    fused = next((n for n in ("qkv", "kv") if n in call.maps and role in n), "")
    if role in call.cuts or role in call.maps or not fused or operand.is_meta:
        return
    made = call.maps[fused]
    y = None if call.followed is None else call.followed.gave(made)
    odd = site.unknown or any(name == fused for name, _ in site.cuts.values())
    if y is None or is_convolution(made.module) or not (role == "v" or odd):
        return
    columns = claimed_rows(call, role)
    if columns is not None and not _same_numbers(y[..., columns], operand):
        site.unknown[role] = fused


def _same_numbers(claimed: Tensor, operand: Tensor) -> bool:
    """Whether all numbers of one are among those of the other: windows, repeated heads and caches
    leave that so."""
    a, b = claimed.detach().flatten(), operand.detach().flatten()
    narrow = a.dtype if a.element_size() <= b.element_size() else b.dtype
    a, b = a.to(narrow).float(), b.to(narrow).float()
    return bool(torch.isin(a, b).all()) or bool(torch.isin(b, a).all())


def _usual(call: Call, role: str, name: str, first: int, size: int) -> bool:
    """Whether the rows are where the convention has them: q, k, v one after the other,
    or a map of their own."""
    total = call.maps[name].weight.shape[0]
    if name == role:
        return first == 0 and size == total
    parts = name if name in ("qkv", "kv") else ""
    return role in parts and size * len(parts) == total and first == parts.index(role) * size
