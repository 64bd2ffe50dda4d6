"""Attention that a model computes itself, softmax(q k^T + bias + mask) v, found by following the data.

Inside an attention module a product of two tensors may be the scores. What is done to it (scale, bias, mask, softcap,
reshaping) is remembered; if it enters a softmax over its last axis and the result, after dropout, is multiplied with a
third tensor, then that is attention. There, at the second product, q, k, v, the scores and the way from the scores to
the weights are all known, so every stage runs there, in the order of `attention`, and the way is gone again with the
scores that the stages give. The model's own first softmax serves only to go on until then; its dropout waits.

Heads that are mixed on the way (talking heads: a linear map or a convolution over the axis of the heads, before the
softmax, after it or both) are part of the way: keys are hidden after the last mixing before the softmax.

What cannot be told is refused: another function between, a softmax over another axis, weights that the module also uses
for something else (token pruning) or mixes with others (ConViT's gate)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen.masks import keep_keys
from dampen.sockets.channels import tell_heads, tell_rows
from dampen.sockets.equations import Equation, Flipped, product_equation
from dampen.sockets.layout import layout_of
from dampen.sockets.mixing import MOVES_AXES, moved_axes

if TYPE_CHECKING:
    from dampen.regularizer import Call, Regularizer
    from dampen.sockets.state import AttentionSite

_FORM = "to float half double bfloat16 type type_as contiguous clone view reshape unflatten flatten unsqueeze squeeze "
_TO_SCORES = set(
    (
        _FORM + "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ __isub__ mul mul_ __mul__ __rmul__ __imul__ div "
        "div_ __truediv__ __itruediv__ true_divide masked_fill masked_fill_ where clamp clamp_ clip tanh max maximum"
    ).split()
)
_TO_WEIGHTS = set(
    (_FORM + "dropout mul mul_ __mul__ __rmul__ __imul__ masked_fill masked_fill_ where nan_to_num").split()
)
_LOOKS = {"__get__", "size", "dim", "stride", "numel", "is_contiguous", "__len__", "data_ptr", "get_device"}
_MASKS = set("add add_ __add__ __radd__ __iadd__ masked_fill masked_fill_ where max maximum sub __sub__".split())
HIDDEN = 1000.0
"""A score so far below its row's largest is a mask: its weight is zero in every dtype, so -1e4 and -1e9 hide too."""


class Way:
    """A tensor on its way, the function that made it and where it came from."""

    def __init__(self, tensor: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Any) -> None:
        self.tensor, self.func, self.args, self.kwargs = tensor, func, args, kwargs
        self.source: Way | None = source
        self.axes: tuple[int, ...] = tuple(range(tensor.ndim))  # which axis of the scores each of its axes is

    @property
    def in_order(self) -> bool:
        """Whether its axes are those of the scores, in their order."""
        return self.axes == tuple(range(len(self.axes)))

    def again(self, new: Tensor, since: Way) -> Tensor:
        """Go the way from `since` to here with another tensor at its start."""
        if self is since:
            return new
        source = self.source
        if source is None:
            raise RuntimeError("a way of scores has no beginning")  # cannot happen: `since` lies on it
        before = source.again(new, since)
        old = source.tensor
        args = tuple(before if a is old else a for a in self.args)
        kwargs = {k: before if a is old else a for k, a in self.kwargs.items()}
        out: Tensor = self.func(*args, **kwargs)
        return out

    def names(self) -> list[str]:
        """The functions on the way here, the last first."""
        before = [] if self.source is None else self.source.names()
        return [_name(self.func), *before]


class Product:
    """A product of two tensors that may be scores."""

    def __init__(self, equation: Equation, q: Tensor, k: Tensor, start: Way) -> None:
        self.equation, self.q, self.k, self.start = equation, q, k, start
        self.softmax: Way | None = None  # the weights, once its scores have met one
        self.scores: Way | None = None  # what entered it
        self.turned: Way | None = None  # the weights with their last two axes swapped, for values^T weights^T


class EagerAttention:
    """Follows the tensors of one forward of an attention module."""

    def __init__(self, module: nn.Module, site: AttentionSite, watch: Callable[..., None]) -> None:
        self.module, self.site, self.where, self.watch = module, site, site.name, watch
        self.ways: list[tuple[Way, Product]] = []
        self.weights: list[tuple[Tensor, Tensor]] = []  # the model's own, and those that took their place
        self.done = 0
        self.why = "no softmax of a product of two tensors was seen"
        self.told = False  # whether `why` names what stood in the way first

    def call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        regularizers: Sequence[Regularizer],
        call: Call,
        run: Callable[..., Any],
    ) -> Any:
        """Run a torch function of the module; `run` runs one as it is."""
        name = _name(func)
        if name in _LOOKS:
            return run(func, args, kwargs)
        if name == "einsum" and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], *args[1])
        found = self._known(args, kwargs)
        equation = product_equation(name, args, kwargs)
        if equation is not None:
            if found is None:
                return self._product(equation, func, args, kwargs, run)
            way, product = found
            turned = name != "einsum" and equation.right is way.tensor and product.turned is way
            if product.softmax is not None and turned:
                flipped = Flipped(equation.left, equation.right, None)
                return self._attend(flipped, way, product, func, args, kwargs, regularizers, call)
            if product.softmax is not None and equation.left is way.tensor and product.turned is None:
                return self._attend(equation, way, product, func, args, kwargs, regularizers, call)
        if found is None:
            return run(func, args, kwargs)
        way, product = found
        if name == "softmax" and product.softmax is None:
            return self._softmax(way, product, func, args, kwargs, run)
        if product.softmax is None:
            return self._follow(way, product, func, args, kwargs, run, _TO_SCORES)
        if name == "dropout":  # it waits until the weights are those of the stages
            self.ways.append((Way(way.tensor, func, args, kwargs, way), product))
            return way.tensor
        if name == "transpose" and product.turned is None and _swaps_last(args, kwargs, way.tensor.ndim):
            out = run(func, args, kwargs)
            product.turned = Way(out, func, args, kwargs, way)
            self.ways.append((product.turned, product))
            return out
        return self._follow(way, product, func, args, kwargs, run, _TO_WEIGHTS)

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor is on its way from scores to the product with values."""
        return any(way.tensor is tensor for way, _ in self.ways)

    def _known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Way, Product] | None:
        """The newest way that one of the arguments has come."""
        if not self.ways:
            return None
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                for way, product in reversed(self.ways):
                    if way.tensor is value:
                        return way, product
        return None

    def _product(
        self, equation: Equation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Tensor:
        out: Tensor = run(func, args, kwargs)
        weights = isinstance(equation.left, nn.Parameter) or isinstance(equation.right, nn.Parameter)
        if not weights and out.ndim >= 2:  # a product with a bare parameter is a linear map
            start = Way(out, func, args, kwargs, None)
            self.ways.append((start, Product(equation, equation.left, equation.right, start)))
        return out

    def _follow(
        self,
        way: Way,
        product: Product,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
        allowed: set[str],
    ) -> Any:
        name, numel = _name(func), way.tensor.numel()
        out = run(func, args, kwargs)
        axes = moved_axes(name, way.axes, args, kwargs) if name in MOVES_AXES or not way.in_order else None
        if name in allowed | MOVES_AXES and isinstance(out, Tensor) and out.numel() == numel and axes != ():
            here = Way(out, func, args, kwargs, way)
            here.axes = here.axes if axes is None else axes
            self.ways.append((here, product))
        elif product.softmax is not None:
            self._refuse(f"it also uses its attention weights in '{name}'")
        else:
            self._tell(f"its scores go through '{name}' before the softmax")
        return out

    def _softmax(
        self, way: Way, product: Product, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Any
    ) -> Tensor:
        out: Tensor = run(func, args, kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        scores = way.tensor
        if not product.equation.scores_last(product.start.tensor, scores):
            self._tell(f"its scores {tuple(scores.shape)} have no axes for queries and keys at their end")
        elif not way.in_order:
            self._tell(f"its softmax sees the axes of its scores in the order {way.axes}")
        elif dim not in (-1, scores.ndim - 1):
            self._tell(f"its softmax is over axis {dim} of {tuple(scores.shape)}, not over the keys at the end")
        else:
            product.scores = way
            product.softmax = Way(out, func, args, kwargs, way)
            self.ways.append((product.softmax, product))
            self._tell("its attention weights were never multiplied with values")
        return out

    def _tell(self, why: str) -> None:
        if not self.told:
            self.why, self.told = why, True

    def _attend(
        self,
        equation: Equation,
        way: Way,
        product: Product,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        regularizers: Sequence[Regularizer],
        call: Call,
    ) -> Tensor:
        """The product with the values: every stage runs here."""
        if product.scores is None or product.softmax is None or way.tensor.ndim < 2:
            raise RuntimeError("values met weights without a softmax")  # cannot happen: the caller has looked
        scores = product.scores.tensor
        leading, keys = scores.shape[:-2], scores.shape[-1]
        if not way.in_order or not equation.contracts_last or equation.values.shape[equation.key_axis] != keys:
            self._refuse("its attention weights are not multiplied with one value per key")
        companions = self._companions(product.equation, equation, leading, call)
        told = tell_heads(self.site, call, companions, leading)
        layout = layout_of(leading, self.module, self.where, scores.shape[-2], call.given, told)
        operands = (*product.equation.tokens_last(), equation.values_last())
        q, k, v = (layout.fold(t.reshape(*_fit(t, leading), *t.shape[-2:])) for t in operands)
        tell_rows(self.site, call, [None if c is None else layout.fold(c) for c in companions])
        self._check_tokens(q, k, call)
        call.shape, call.kv_heads, call.device = (*q.shape[:3], k.shape[2]), k.shape[1], q.device
        call.head_size, call.value_size, call.scale, call.is_causal = q.shape[3], v.shape[3], 1.0, False
        s = layout.fold(scores)
        call.bias, call.mask = None, _visible(s, set(product.scores.names()))
        call.scores = s
        self.watch(call, before=True)
        new_q, new_k, new_v = q, k, v
        for r in regularizers:
            if "qkv" in r.stages:
                new_q, new_k, new_v = r.qkv(new_q, new_k, new_v, call)
        if new_q is not q or new_k is not k:
            start = product.equation.remake(layout.unfold(new_q), layout.unfold(new_k), product.start)
            s = layout.fold(product.scores.again(start, product.start))
            call.scores = s
        s = _stages_of_scores(s, new_q, new_k, regularizers, call)
        a = product.softmax.again(layout.unfold(s), product.scores)
        if any("probs" in r.stages for r in regularizers):
            folded = layout.fold(a)
            for r in regularizers:
                if "probs" in r.stages:
                    folded = r.probs(folded, call)
            a = layout.unfold(folded)
        a = way.again(a, product.softmax)
        self.weights.append((way.tensor, a))
        values = equation.values
        replaced = values if new_v is v else equation.values_back(layout.unfold(new_v))
        o: Tensor = func(*(a if x is way.tensor else replaced if x is values else x for x in args), **kwargs)
        if any("heads" in r.stages for r in regularizers):
            o = self._heads(o, equation, layout, regularizers, call)
        call.scores = None
        self.done += 1
        self.watch(call, before=False)
        return o

    def _companions(
        self, scores: Equation, outputs: Equation, leading: Sequence[int], call: Call
    ) -> list[Tensor | None]:
        """Where the channels of queries, keys and values came from, in the shapes of these."""
        if call.followed is None:
            return [None, None, None]
        q, k = (call.followed.of(t) for t in (scores.left, scores.right))
        v = call.followed.of(outputs.values)
        like = scores.like(q, k).tokens_last()
        ordered = [None if q is None else like[0], None if k is None else like[1]]
        ordered.append(None if v is None else outputs.like(None, v).values_last())
        return [None if c is None else c.reshape(*_fit(c, leading), *c.shape[-2:]) for c in ordered]

    def put_weights(self, out: Any) -> Any:
        """A module's output with the attention weights, where it gives them out, as the stages left them."""
        if not self.weights or not isinstance(out, tuple):
            return out
        return tuple(next((new for old, new in self.weights if old is x), x) for x in out)

    def _heads(
        self, o: Tensor, equation: Equation, layout: Any, regularizers: Sequence[Regularizer], call: Call
    ) -> Tensor:
        ordered = equation.outputs_last(o)
        folded = layout.fold(ordered.reshape(*layout.leading, *ordered.shape[-2:]))
        for r in regularizers:
            if "heads" in r.stages:
                folded = r.heads(folded, call)
        return equation.outputs_back(layout.unfold(folded).reshape(ordered.shape))

    def _check_tokens(self, q: Tensor, k: Tensor, call: Call) -> None:
        """Refuse attention over channels (XCiT, DaViT), whose scores are those of channels with channels."""
        name = type(self.module).__name__.lower()
        if "xca" in name or "channel" in name or "crosscovariance" in name:
            self._refuse("it attends over channels, not over tokens")

    def _refuse(self, why: str) -> None:
        raise RuntimeError(
            f"{type(self.module).__name__} at '{self.where}' computes its attention itself, but {why}, so regularizers "
            "cannot act inside it. Leave the layer out with sites=, or call F.scaled_dot_product_attention there."
        )


def _stages_of_scores(s: Tensor, q: Tensor, k: Tensor, regularizers: Sequence[Regularizer], call: Call) -> Tensor:
    """mask and logits: the scores with hidden keys at -inf. What the model hides stays as the model has it."""
    hidden = [h for r in regularizers if "mask" in r.stages and (h := r.mask(q, k, call)) is not None]
    if any("logits" in r.stages for r in regularizers):
        raw = s if call.mask is None else s.masked_fill(~call.mask, 0.0)
        for r in regularizers:
            if "logits" in r.stages:
                raw = r.logits(raw, call)
        s = raw if call.mask is None else torch.where(call.mask, raw, s)
    if not hidden:
        return s
    dropped = ~keep_keys(call.mask, hidden, s.shape[-1])
    return s.masked_fill(dropped if call.mask is None else dropped & call.mask, float("-inf"))


def _visible(s: Tensor, way: set[str]) -> Tensor | None:
    """Which keys the model lets each query see, from its final scores; None: all, as its functions say or as it turns
    out."""
    if not way & _MASKS:
        return None
    low = s.detach()
    seen = (low > torch.finfo(s.dtype).min / 2) & (low > low.amax(-1, keepdim=True) - HIDDEN)
    if not torch.compiler.is_compiling() and bool(seen.all()):
        return None
    return seen


def _swaps_last(args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> bool:
    """Whether a transpose is of the last two axes."""
    axes = [*args[1:3], *(kwargs[k] for k in ("dim0", "dim1") if k in kwargs)]
    return sorted(a % ndim for a in axes if isinstance(a, int)) == [ndim - 2, ndim - 1]


def _fit(t: Tensor, leading: Sequence[int]) -> tuple[int, ...]:
    """The leading axes of an operand as the scores have them: BLOOM's product is (B * H, N, M), its softmax 4-d."""
    own = tuple(t.shape[:-2])
    size = 1
    for n in own:
        size *= n
    total = 1
    for n in leading:
        total *= n
    return tuple(leading) if size == total else own


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
