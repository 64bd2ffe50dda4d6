"""Attention that a model computes itself, softmax(q k^T + bias + mask) v,
found by following the data.

Inside an attention module a product of two tensors may be the scores. What is done to it (scale,
bias, mask, softcap, reshaping) is remembered; if it enters a softmax over its last axis and the
result, after dropout, is multiplied with a third tensor, then that is attention. There, at the
second product, q, k, v, the scores and the way from the scores to the weights are all known, so
every stage runs there, in the order of `attention`, and the way is gone again with the scores that
the stages give. The model's own first softmax serves only to continue until
then; its dropout waits.

Attention sinks, columns of scores that belong to no key (gpt-oss), are part of the way too: they
are laid beside the scores before the softmax and removed after it, and the
stages see the keys alone.

Heads that are mixed on the way (talking heads: a linear map, a convolution or a matrix over the
axis of the heads, before the softmax, after it or both) are part of the way: keys are hidden after
the last mixing before the softmax.

The way that a module's first forward took is remembered by the order of its functions. A later
forward whose scores come the same way to the softmax is at the same place, so the stages run there,
once: no second softmax, no way gone twice, and a function that touches nothing on the way is passed
by. A forward that departs is followed as the first was.

What cannot be recognized raises: another function between, a softmax over another axis, weights
that the module also uses for something else (token pruning) or mixes with others (ConViT's gate),
where a method acts on scores or weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dampen._torch import saved_tensors_are_hooked
from dampen.containers import tensors_in, with_tensors
from dampen.hooks.tracing.channels import attends_over_channels, tell_heads, tell_rows
from dampen.hooks.tracing.products import (
    PRODUCTS,
    Equation,
    Flipped,
    Product,
    Turned,
    Way,
    layout_of,
    name_of,
    product_equation,
)
from dampen.hooks.tracing.scores import (
    Plain,
    are_exponentials,
    fit,
    read_model_mask,
    read_plain,
    stages_of_scores,
)
from dampen.kernels.attend import reads_apart, run_heads
from dampen.names import leave_out
from dampen.regularizer import check_only_reads

if TYPE_CHECKING:
    from dampen.hooks.context import AttentionSite
    from dampen.regularizer import Call, Regularizer


# --- axes that change places, and heads that are mixed
#
# Scores whose axes change places on their way, and heads that are mixed there (talking heads).
#
# A linear map over the last axis, a convolution one position wide over the second, or an einsum
# with a matrix that is a parameter mixes heads where that axis is one of the leading ones of
# the scores; so does a norm over such an axis (DeepViT). Anything that would mix queries or
# keys is not followed.

_MIXES = {"linear", "conv2d", "layer_norm"}
_ALONE = set(
    "to float half double bfloat16 type type_as contiguous clone dropout "
    "nan_to_num tanh clamp mul __mul__ __rmul__ "
    "div __truediv__ add __add__".split()
)
MOVES_AXES = {"permute", "transpose", "swapaxes", "swapdims", "movedim", "einsum", *_MIXES}


def moved_axes(
    name: str, axes: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Which axis of the scores each axis of a function's result is, from those of its input; ()
    where it does not keep them apart.

    >>> moved_axes("permute", (0, 1, 2, 3), (None, 0, 2, 3, 1), {})
    (0, 2, 3, 1)
    """
    numbers = _numbers(args[1:], kwargs)
    size = len(axes)
    if name == "permute" and len(numbers) == size:
        return tuple(axes[n] for n in numbers)
    if name in ("transpose", "swapaxes", "swapdims") and len(numbers) == 2:
        order = list(axes)
        a, b = numbers
        order[a], order[b] = order[b], order[a]
        return tuple(order)
    if name == "movedim" and len(numbers) == 2:
        order = list(axes)
        order.insert(numbers[1] % size, order.pop(numbers[0]))
        return tuple(order)
    leading = size - 2
    if name == "linear":
        return axes if 0 < axes[-1] < leading else ()
    if name == "layer_norm":
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return axes if len(shape) == 1 and axes[-1] < leading else ()
    if name == "einsum":
        return _mixed_by_matrix(axes, args)
    if name == "conv2d":
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        alone = isinstance(weight, Tensor) and tuple(weight.shape[2:]) == (1, 1)
        return axes if alone and size == 4 and axes[1] == 1 else ()
    return axes if name in _ALONE else ()


def mixes_by_matrix(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function is an einsum of a tensor and one matrix that is a parameter."""
    if name != "einsum" or len(args) != 3 or not isinstance(args[0], str):
        return False
    return sum(isinstance(x, nn.Parameter) and x.ndim == 2 for x in args[1:]) == 1


def _mixed_by_matrix(axes: tuple[int, ...], args: tuple[Any, ...]) -> tuple[int, ...]:
    """`moved_axes` of such an einsum, which replaces one letter of the tensor by another
    ("bhij,hg->bgij")."""
    parts = re.fullmatch(r"(\w+),(\w+)->(\w+)", args[0].replace(" ", ""))
    if parts is None:
        return ()
    left, right, out = parts.groups()
    tensor, matrix = (right, left) if isinstance(args[1], nn.Parameter) else (left, right)
    old = [x for x in matrix if x in tensor and x not in out]
    new = [x for x in matrix if x in out and x not in tensor]
    if len(tensor) != len(axes) or len(old) != 1 or len(new) != 1 or len(matrix) != 2:
        return ()
    places = dict(zip(tensor.replace(old[0], new[0]), axes, strict=True))
    if places[new[0]] >= len(axes) - 2 or set(out) != set(places):
        return ()
    return tuple(places[x] for x in out)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for value in (*args, *kwargs.values()):
        found.extend(value if isinstance(value, list | tuple) else [value])
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool)]


_FORM = "to float half double bfloat16 type type_as contiguous clone view reshape unflatten flatten unsqueeze squeeze "
_TO_SCORES = set(
    (
        _FORM + "add add_ __add__ __radd__ __iadd__ sub sub_ __sub__ "
        "__isub__ mul mul_ __mul__ __rmul__ __imul__ div "
        "div_ __truediv__ __itruediv__ true_divide masked_fill masked_fill_ "
        "where clamp clamp_ clip tanh max maximum"
    ).split()
)
_TO_WEIGHTS = set(
    (
        _FORM
        + "dropout mul mul_ __mul__ __rmul__ __imul__ masked_fill masked_fill_ where nan_to_num"
    ).split()
)
_KEEPS_SUMS = set((_FORM + "permute transpose swapaxes movedim dropout").split())
"""After these the rows of the weights sum to what they summed to."""
_IN_PLACE = {
    name
    for name in _TO_SCORES
    if name.endswith("_") != name.endswith("__") or name.startswith("__i")
}
_OF_WEIGHTS = ("mask", "logits", "probs")
"""The stages that are about scores or weights: what the model does to its
weights must then be known."""
_JOINS = {"cat", "concat", "concatenate"}
_DIVIDES = {"div", "div_", "__truediv__", "__itruediv__", "true_divide"}
_NO_SINK = (Ellipsis, slice(None, -1, None))  # weights[..., :-1]
_LOOKS = {
    "__get__",
    "size",
    "dim",
    "stride",
    "numel",
    "is_contiguous",
    "is_floating_point",
    "is_neg",  # read by the native kernels' entry for every tensor that they may read
    "__len__",
    "data_ptr",
    "get_device",
}


_MT, _T = Tensor.mT.__get__, Tensor.T.__get__  # type: ignore[attr-defined]


NO_SOFTMAX = "no softmax of a product of two tensors was seen"


class EagerAttention:
    """Follows the tensors of one forward of an attention module."""

    def __init__(
        self,
        module: nn.Module,
        site: AttentionSite,
        watch: Callable[..., None],
        leave_out: Callable[[], None],
        attend: Callable[[Plain], Tensor],
    ) -> None:
        self.module, self.site, self.where, self.watch = module, site, site.name, watch
        self.attend = attend  # runs dampen's attention instead, where that is requested
        self.leave_out = leave_out  # what to do where there is no attention over tokens
        self.ways: list[tuple[Way, Product]] = []
        self.ids: set[int] = (
            set()
        )  # of the tensors on a way, which `ways` keeps alive; compiled graphs know no ids
        self.call: Call  # that of this forward, as `start` sets it
        self.regularizers: Sequence[Regularizer] = ()  # those that are at work in it
        self.stages: set[str] = set()  # theirs
        self.reading: list[
            Regularizer
        ] = []  # those among them that need weights which no other has changed
        self.products = 0
        self.path: tuple[int, list[str]] | None = (
            None  # the way of the forwards before, where this one may take it
        )
        self.weights: list[
            tuple[Tensor, Tensor]
        ] = []  # the model's own, and those that took their place
        self.taken: list[Tensor] = []  # scores of an attention that dampen ran instead
        self.found: list[Any] = []  # shapes in which it may from now on
        self.done = 0
        self.why = NO_SOFTMAX
        self.told = False  # whether `why` names what stood in the way first
        # whether the softmax of its scores is over the queries: they compete for each key
        self.over_queries = False

    def start(self, regularizers: Sequence[Regularizer], call: Call) -> None:
        """The beginning of a forward. `qkv` needs the values too, which come after the softmax. A
        checkpoint counts the tensors that its recompute saves, so both must go the
        same way: the long one."""
        self.regularizers, self.call = regularizers, call
        self.stages = {stage for r in regularizers for stage in r.stages}
        self.reading = reads_apart(regularizers)
        if torch.compiler.is_compiling() or self.site.path is None or call.followed is not None:
            return
        if ("qkv" not in self.stages or self._may_replace()) and not saved_tensors_are_hooked():
            self.path = self.site.path

    def passes_by(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a function has nothing to do with a known way, in a forward that may take one."""
        if self.path is None or name in _JOINS:
            return False
        return self.ids.isdisjoint(map(id, args)) and self.ids.isdisjoint(map(id, kwargs.values()))

    def remember(self) -> None:
        """The end of a forward: the way that its one attention took, for those after it."""
        if torch.compiler.is_compiling():
            return
        met = list(
            {
                id(product): product for _, product in self.ways if product.softmax is not None
            }.values()
        )
        if self.done != 1 or len(met) != 1 or met[0].keys is not None or met[0].steps:
            self.site.path = None
        elif not met[0].early and met[0].scores is not None:
            self.site.path = met[0].number, met[0].scores.names()

    def meet(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Any:
        """Run a torch function of the module; `run` runs one as it is."""
        name = name_of(func)
        turns = bool(args) and turns_last(func, args, kwargs)
        if name in _LOOKS and not turns:
            return run(func, args, kwargs)
        if name == "einsum" and len(args) == 2 and isinstance(args[1], list | tuple):
            args = (args[0], *args[1])
        if name in _JOINS:
            return self._join(func, args, kwargs, run)
        found = self._known(args, kwargs)
        mixing = found is not None and mixes_by_matrix(name, args)
        equation = None if mixing else product_equation(name, args, kwargs)
        if equation is not None:
            if found is None:
                return self._product(equation, func, args, kwargs, run)
            way, product = found
            if product.keys_first and product.softmax is not None:
                return self._keys_first(equation, way, product, func, args, kwargs, run)
            turned = name != "einsum" and equation.right is way.tensor and product.turned is way
            if product.softmax is not None and turned:
                flipped = Flipped(equation.left, equation.right, None)
                return self._attend(flipped, way, product, func, args, kwargs)
            if (
                product.softmax is not None
                and equation.left is way.tensor
                and product.turned is None
            ):
                return self._attend(equation, way, product, func, args, kwargs)
        if found is None:
            return run(func, args, kwargs)
        way, product = found
        if name == "softmax" and product.softmax is None:
            return self._softmax(way, product, func, args, kwargs, run)
        if product.softmax is None:
            out = self._by_hand(name, way, product, func, args, kwargs, run)
            if out is not None:
                return out
            return self._follow(way, product, func, args, kwargs, run, _TO_SCORES)
        if (
            name == "__getitem__"
            and product.keys is not None
            and product.softmax is way
            and args[1] == _NO_SINK
        ):
            product.softmax = Way(run(func, args, kwargs), func, args, kwargs, way)
            self._put(product.softmax, product)
            return product.softmax.tensor
        if (
            name == "dropout" and not product.early and not product.keys_first
        ):  # it waits until the weights are those of the stages
            self._put(Way(way.tensor, func, args, kwargs, way), product)
            return way.tensor
        if turns and product.softmax is not None and product.turned is None and way.in_order:
            out = run(func, args, kwargs)
            product.turned = Way(out, func, args, kwargs, way)
            self._put(product.turned, product)
            return out
        return self._follow(way, product, func, args, kwargs, run, _TO_WEIGHTS)

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor is on its way from scores to the product with values."""
        if self.path is not None:
            return id(tensor) in self.ids
        return any(way.tensor is tensor for way, _ in self.ways)

    def _put(self, way: Way, product: Product) -> None:
        self.ways.append((way, product))
        if self.path is not None:
            self.ids.add(id(way.tensor))

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

    def _join(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Sinks beside the scores of one head and query, or something that is not followed."""
        out = run(func, args, kwargs)
        parts = args[0] if args else kwargs.get("tensors", ())
        found = self._known(tuple(parts), {})
        if found is None:
            return out
        way, product = found
        beside = (
            out.shape[:-1] == way.tensor.shape[:-1] and len(parts) == 2 and parts[1].shape[-1] == 1
        )
        if (
            product.softmax is None
            and product.keys is None
            and way.in_order
            and parts[0] is way.tensor
            and beside
        ):
            product.keys = way
            self._put(Way(out, func, args, kwargs, way), product)
        elif product.softmax is None:
            self._tell(f"its scores go through '{name_of(func)}' before the softmax")
        else:
            self._refuse(f"it also uses its attention weights in '{name_of(func)}'")
        return out

    def _product(
        self,
        equation: Equation,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Tensor:
        out: Tensor = run(func, args, kwargs)
        weights = isinstance(equation.left, nn.Parameter) or isinstance(
            equation.right, nn.Parameter
        )
        if not weights and out.ndim >= 2:  # a product with a bare parameter is a linear map
            start = Way(out, func, args, kwargs, None)
            self._put(start, Product(equation, self.products, start))
            self.products += 1
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
        name, numel = name_of(func), way.tensor.numel()
        if product.softmax is not None:
            product.touched = True
            if not product.early and self.path is not None and self._may_replace():
                raise RuntimeError(
                    f"{type(self.module).__name__} at '{self.where}' uses its attention weights in "
                    f"'{name}', which it did not in the forward that was compared. Leave "
                    "replace_attention out."
                )
        if name in _IN_PLACE and args[0] is not way.tensor:
            self._tell(f"its scores are written into another tensor by '{name}'")
            return run(func, args, kwargs)
        out = run(func, args, kwargs)
        axes = (
            moved_axes(name, way.axes, args, kwargs)
            if name in MOVES_AXES or not way.in_order
            else None
        )
        if (
            name in allowed | MOVES_AXES
            and isinstance(out, Tensor)
            and out.numel() == numel
            and axes != ()
        ):
            here = Way(out, func, args, kwargs, way)
            here.axes = here.axes if axes is None else axes
            self._put(here, product)
        elif product.softmax is None and name in ("max", "amax"):
            pass  # the largest of each row, to subtract it: the softmax does not see it
        elif product.keys_first:
            self._tell(f"its attention weights go through '{name}'")
        elif product.softmax is not None and (
            name in PRODUCTS or not self.stages.isdisjoint(_OF_WEIGHTS)
        ):
            self._refuse(f"it also uses its attention weights in '{name}'")
        elif (
            product.softmax is not None
        ):  # nobody acts on the weights, so they may become whatever the model makes
            if isinstance(out, Tensor) and out.shape == way.tensor.shape and way.in_order:
                self._put(Way(out, func, args, kwargs, way), product)
        else:
            self._tell(f"its scores go through '{name}' before the softmax")
        return out

    def _softmax(
        self,
        way: Way,
        product: Product,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Tensor:
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        keys = way if product.keys is None else product.keys
        scores = keys.tensor
        known = self.path == (product.number, keys.names()) and product.keys is None
        waiting = known and self._may_replace()
        known = known and (waiting or "qkv" not in self.stages)
        out: Tensor = way.tensor if known else run(func, args, kwargs)
        why = ""
        if not product.equation.scores_last(product.start.tensor, scores):
            why = f"its scores {tuple(scores.shape)} have no axes for queries and keys at their end"
        elif not way.in_order:
            why = f"its softmax sees the axes of its scores in the order {way.axes}"
        elif dim in (-2, scores.ndim - 2) and product.keys is None and not product.steps:
            return self._over_rows(way, product, dim, out)
        elif dim not in (-1, scores.ndim - 1):
            why = f"its softmax is over axis {dim} of {tuple(scores.shape)}, not over the keys at the end"
        if why:
            self._tell(why)
            return run(func, args, kwargs) if known else out
        product.scores, product.softmax = keys, Way(out, func, args, kwargs, way)
        if known and not waiting:
            product.early = True
            product.softmax.tensor = self._weigh(product, None)[0]
        self._put(product.softmax, product)
        self._tell("its attention weights were never multiplied with values")
        return product.softmax.tensor

    def _by_hand(
        self,
        name: str,
        way: Way,
        product: Product,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Tensor | None:
        """A softmax in steps: exp(s) / sum(exp(s)), exp(s - logsumexp(s)) or exp(log_softmax(s));
        None for any other function. Once its last step is met, the whole is one softmax of what the
        first step read."""
        steps = product.steps
        if name in ("exp", "log_softmax", "logsumexp", "sum"):
            step = steps.get("log_softmax" if name == "exp" else "exp" if name == "sum" else "")
            if name == "exp" and step is not None and step[1] is way.tensor:
                return self._one_softmax(step[0], product, run(func, args, kwargs))
            over_keys = name == "exp" or _reduces_last(name, args, kwargs, way.tensor.ndim)
            if not over_keys or (name == "sum" and (step is None or step[1] is not way.tensor)):
                return None
            out: Tensor = run(func, args, kwargs)
            steps[name] = (way, out)
            if name in ("exp", "log_softmax"):
                self._put(Way(out, func, args, kwargs, way), product)
            return out
        if len(args) != 2 or kwargs or args[0] is not way.tensor:
            return None
        of_sum, of_log = steps.get("sum"), steps.get("logsumexp")
        if name in _DIVIDES and of_sum and args[1] is of_sum[1]:
            return self._one_softmax(steps["exp"][0], product, run(func, args, kwargs))
        if name in ("sub", "__sub__") and of_log and args[1] is of_log[1] and of_log[0] is way:
            out = run(func, args, kwargs)
            steps["log_softmax"] = (way, out)
            self._put(Way(out, func, args, kwargs, way), product)
            return out
        return None

    def _over_rows(self, way: Way, product: Product, dim: int, out: Tensor) -> Tensor:
        """A softmax over the last axis but one: of keys, where the scores are k q^T and the weights
        meet the values with that axis; of queries, which compete for each
        key, in any other case."""
        self.over_queries = True
        scores = way.tensor
        self._tell(
            f"its softmax is over axis {dim} of {tuple(scores.shape)}, not over the keys at the end"
        )
        product.equation, product.keys_first = Turned.of(product.equation), True
        product.steps["softmax"] = way, out
        turned = Way(scores.transpose(-2, -1), torch.transpose, (scores, -2, -1), {}, way)
        weights = out.transpose(-2, -1)
        product.scores = turned
        product.softmax = Way(weights, torch.softmax, (turned.tensor, -1), {}, turned)
        back = Way(out, torch.transpose, (weights, -2, -1), {}, product.softmax)
        back.axes = (*back.axes[:-2], back.axes[-1], back.axes[-2])
        self._put(back, product)
        return out

    def _keys_first(
        self,
        equation: Equation,
        way: Way,
        product: Product,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any],
    ) -> Any:
        """The product of such weights with values, or with something else."""
        if equation.left is way.tensor and way.in_order and equation.contracts_last:
            met = equation
        elif equation.right is way.tensor and equation.letters is None and not way.in_order:
            met = Flipped(equation.left, equation.right, None)
        elif equation.left is way.tensor and not way.in_order and equation.contracts_rows:
            met = equation.with_rows_last()
        else:
            return run(func, args, kwargs)
        if not way.in_order:
            product.turned = way
        self.over_queries = False
        return self._attend(met, way, product, func, args, kwargs)

    def _one_softmax(self, start: Way, product: Product, out: Tensor) -> Tensor:
        """Weights that a softmax in steps has given, as those of one softmax over
        what the first step read."""
        return self._softmax(start, product, torch.softmax, (start.tensor, -1), {}, lambda *_: out)

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
    ) -> Tensor:
        """The product with the values: every stage has run when it is done."""
        if product.scores is None or product.softmax is None or way.tensor.ndim < 2:
            raise RuntimeError(
                "values met weights without a softmax"
            )  # cannot happen: the caller has looked
        keys = product.scores.tensor.shape[-1]
        if (
            not (way.in_order or product.turned is way)
            or not equation.contracts_last
            or equation.values.shape[equation.key_axis] != keys
        ):
            self._refuse("its attention weights are not multiplied with one value per key")
        call, a, values = self.call, way.tensor, equation.values
        if not product.early and self._is_over_channels(product.equation, call):
            a = way.again(product.softmax.tensor, product.softmax)  # as the model has it
            self.done += 1
            self.leave_out()
            return func(*(a if x is way.tensor else x for x in args), **kwargs)  # type: ignore[no-any-return]
        if self.site.replaced is not None and self.path is not None:
            plain = read_plain(product, way, equation)
            if plain is not None and self.site.replaced.get(plain.key()):
                self.taken += [product.softmax.tensor, way.tensor]
                self.done += 1
                return self.attend(plain)
        if product.early:
            call.value_size = equation.values_last().shape[-1]
        else:
            new, values = self._weigh(product, equation)
            a = way.again(new, product.softmax)
            self.weights.append((way.tensor, a))

        def multiply(a: Tensor, v: Tensor) -> Tensor:
            out: Tensor = func(
                *(a if x is way.tensor else v if x is equation.values else x for x in args),
                **kwargs,
            )
            return out

        o = multiply(a, values)
        readers = [
            r
            for r in self.regularizers
            if r.only_reads and not r.stages.isdisjoint(("probs", "heads"))
        ]
        if (
            readers and product.clean is not None
        ):  # weights and output as the model alone has them, without its dropout
            clean, clean_o = a, o if any("heads" in r.stages for r in readers) else None
            if product.clean is not product.used or way.drops(product.softmax):
                clean = way.again(product.clean, product.softmax, dropout=False)
                clean_o = None if clean_o is None else multiply(clean, equation.values)
            self._read(readers, clean, clean_o, equation, way, product)
        if "heads" in self.stages:
            acting = [r for r in self.regularizers if not r.only_reads]
            if any("heads" in r.stages for r in acting) and are_exponentials(equation.values):
                self._refuse("its values are exponentials, whose logarithm it takes afterwards")
            o = self._heads(o, equation, product, acting)
        if self.site.replaced is not None and not torch.compiler.is_compiling():
            self._compare(product, way, equation, multiply)
        call.scores = None
        self.done += 1
        self.watch(call, before=False)
        return o

    def _may_replace(self) -> bool:
        """Whether dampen's attention has been found equal in some shape of this module."""
        return self.site.replaced is not None and any(self.site.replaced.values())

    def _compare(
        self, product: Product, way: Way, equation: Equation, multiply: Callable[..., Tensor]
    ) -> None:
        """In the first forward of a shape: whether dampen's attention gives what this one gives."""
        replaced, plain = self.site.replaced, read_plain(product, way, equation)
        if plain is None or replaced is None or plain.key() in replaced:
            return
        if product.scores is None or product.softmax is None or product.layout is None:
            return
        replaced[plain.key()] = False
        if product.touched or not product.layout.plain:
            return
        with torch.no_grad():
            a = product.softmax.again(product.scores.tensor, product.scores)
            if plain.agrees(multiply(a, equation.values)):
                self.found.append(plain.key())

    def _weigh(self, product: Product, outputs: Equation | None) -> tuple[Tensor, Tensor]:
        """The weights as the stages make them of the scores, and the values; those wait where none
        needs them yet."""
        if product.scores is None or product.softmax is None:
            raise RuntimeError("weights without a softmax")  # cannot happen: the caller has looked
        call, scores = self.call, product.scores.tensor
        leading = scores.shape[:-2]
        companions = (
            [None] * 3
            if outputs is None
            else self._companions(product.equation, outputs, leading, call)
        )
        told = tell_heads(self.site, call, companions, leading)
        layout = product.layout = layout_of(
            leading, self.module, self.where, scores.shape[-2], call.given, told
        )
        q, k = (
            layout.fold(t.reshape(*fit(t, leading), *t.shape[-2:]))
            for t in product.equation.tokens_last()
        )
        call.shape, call.kv_heads, call.device = (*q.shape[:3], k.shape[2]), k.shape[1], q.device
        call.head_size, call.scale, call.is_causal = q.shape[3], 1.0, False
        if outputs is not None:
            v = outputs.values_last()
            v = layout.fold(v.reshape(*fit(v, leading), *v.shape[-2:]))
            call.value_size = v.shape[3]
            tell_rows(
                self.site,
                call,
                [None if c is None else layout.fold(c) for c in companions],
                (q, k, v),
            )
        s = layout.fold(scores)
        mask = read_model_mask(product, layout, self.site)
        call.bias, call.mask, call.blind, call.shows_all = None, None, None, False
        if mask is not None:
            call.mask, call.blind, call.shows_all = mask.keep, mask.blind, mask.shows_all
        call.scores = s
        values, new_q, new_k = scores, q, k
        if outputs is None:
            self.watch(call, before=True)
        else:
            values = outputs.values
            self.watch(call, before=True)
            new_v = v
            for r in self.regularizers:
                if "qkv" in r.stages:
                    new_q, new_k, new_v = r.qkv(new_q, new_k, new_v, call)
            if new_q is not q or new_k is not k:
                start = product.equation.remake(
                    layout.unfold(new_q), layout.unfold(new_k), product.start
                )
                s = layout.fold(product.scores.again(start, product.start))
                call.scores = s
            values = values if new_v is v else outputs.values_back(layout.unfold(new_v))
        inside = [r for r in self.regularizers if r not in self.reading]
        a = self._softmax_again(product, s, new_q, new_k, inside)
        product.clean = a
        if self.reading:
            product.clean = self._softmax_again(product, layout.fold(scores), q, k, self.reading)
        acting = [r for r in inside if "probs" in r.stages and not r.only_reads]
        if acting:
            folded = layout.fold(a)
            for r in acting:
                folded = r.probs(folded, call)
            a = layout.unfold(folded)
        product.used = a
        return a, values

    def _softmax_again(
        self, product: Product, s: Tensor, q: Tensor, k: Tensor, regularizers: Sequence[Regularizer]
    ) -> Tensor:
        """The weights of some scores, with the stages mask and logits."""
        layout: Any = product.layout
        if product.scores is None or product.softmax is None:
            raise RuntimeError("weights without a softmax")  # cannot happen: the caller has looked
        s = stages_of_scores(s, q, k, regularizers, self.call)
        return product.softmax.again(layout.unfold(s), product.scores)

    def _read(
        self,
        readers: Sequence[Regularizer],
        a: Tensor,
        o: Tensor | None,
        equation: Equation,
        way: Way,
        product: Product,
    ) -> None:
        """The stages probs and heads of those who only read: the weights `a` that meet the values,
        and their output."""
        layout: Any = product.layout
        a = a.mT if product.turned is not None else a
        weights = layout.fold(a.reshape(*layout.leading, *a.shape[-2:]))
        for r in readers:
            if "probs" in r.stages:
                check_only_reads(r, "probs", weights, r.probs(weights, self.call))
        odd = not _KEEPS_SUMS.issuperset(way.names(product.softmax))
        if self.call.mask is not None or product.keys is not None or odd:
            self.call.weights = weights
        if o is not None:
            self._heads(o, equation, product, readers)
        self.call.weights = None

    def _companions(
        self, scores: Equation, outputs: Equation, leading: Sequence[int], call: Call
    ) -> list[Tensor | None]:
        """Where the channels of queries, keys and values came from, in the shapes of these."""
        if call.followed is None:
            return [None, None, None]
        q, k = (call.followed.of(t) for t in (scores.left, scores.right))
        v = call.followed.of(outputs.values)
        like = scores.like(q, k).tokens_last()
        q, k = (k, q) if isinstance(scores, Turned) else (q, k)
        ordered = [None if q is None else like[0], None if k is None else like[1]]
        ordered.append(None if v is None else outputs.like(None, v).values_last())
        return [None if c is None else c.reshape(*fit(c, leading), *c.shape[-2:]) for c in ordered]

    def put_weights(self, out: Any) -> Any:
        """A module's output with the attention weights, where it gives them out, as
        the stages left them."""
        returned = [] if isinstance(out, Tensor) else list(tensors_in(out))
        if any(t is taken for t in returned for taken in self.taken):
            raise RuntimeError(
                f"{type(self.module).__name__} at '{self.where}' returns its attention weights, "
                "which replace_attention=True no longer makes. Leave replace_attention out, or the "
                "weights (output_attentions=False)."
            )
        kept = {id(t) for t in returned}
        if self.site.replaced is not None and not any(
            id(t) in kept for pair in self.weights for t in pair
        ):
            self.site.replaced.update(dict.fromkeys(self.found, True))
        if not self.weights or isinstance(out, Tensor):
            return out
        return with_tensors(out, lambda t: next((new for old, new in self.weights if old is t), t))

    def _heads(
        self, o: Tensor, equation: Equation, product: Product, regularizers: Sequence[Regularizer]
    ) -> Tensor:
        layout: Any = product.layout
        ordered = equation.outputs_last(o)
        folded = run_heads(
            layout.fold(ordered.reshape(*layout.leading, *ordered.shape[-2:])),
            regularizers,
            self.call,
        )
        return equation.outputs_back(layout.unfold(folded).reshape(ordered.shape))

    def _is_over_channels(self, scores: Equation, call: Call) -> bool:
        """Whether the scores are those of channels with channels, as the first attention of the
        module has shown."""
        if self.site.over_channels or self.site.knows_tokens():
            return self.site.over_channels
        q, _ = scores.tokens_last()
        found = [
            None if call.followed is None else call.followed.of(t)
            for t in (scores.left, scores.right)
        ]
        like = scores.like(*found).tokens_last()
        found = found[::-1] if isinstance(scores, Turned) else found
        companions = [None if t is None else c for t, c in zip(found, like, strict=True)]
        q = q if q.ndim > 2 else q.unsqueeze(0)
        return self.site.note_channels(attends_over_channels(companions, q, call.given))

    def _refuse(self, why: str) -> None:
        raise RuntimeError(
            f"{type(self.module).__name__} at '{self.where}' computes its "
            f"attention itself, but {why}, so regularizers "
            "cannot act inside it. Call "
            f"F.scaled_dot_product_attention there, or {leave_out(self.where)}."
        )


def _reduces_last(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], ndim: int) -> bool:
    """Whether a sum, logsumexp or log_softmax is over the last axis alone, which a sum keeps."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return dim in (-1, ndim - 1) and (name == "log_softmax" or keeps is True)


def turns_last(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function swaps the last two axes of its first argument and leaves the
    others where they are."""
    name, first = name_of(func), args[0]
    if name not in ("transpose", "swapaxes", "swapdims", "permute", "movedim", "__get__", "t"):
        return False
    ndim = first.ndim if isinstance(first, Tensor) else 0
    if name == "__get__":
        return func == _MT or (func == _T and ndim == 2)
    if ndim < 2:
        return False
    last_swapped = (*range(ndim - 2), ndim - 1, ndim - 2)
    return name == "t" or moved_axes(name, tuple(range(ndim)), args, kwargs) == last_swapped
