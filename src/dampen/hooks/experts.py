"""Mixtures of experts: the feed-forward is many, and each sees the tokens that are routed to it.

Experts are modules of a list, whose linear layers are seen as any other, or parameters with one
axis for the experts (transformers), whose products are found here by following the parameters:
`F.linear(x, w[e])`, `x @ w[e]`, or `torch.bmm(x, w)` for all at once. Around both the module that
routes is watched: it gets the tokens of the whole batch, by which a mean is divided, and which of
them are padding is followed through the routing to each expert."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dampen._torch import pytree
from dampen.hooks.block import apply_linear, layer_valid
from dampen.hooks.context import Frame, close_frame, frame_of, open_frame
from dampen.hooks.discover.layer import LISTS, Attentions, LinearPlan, closest, inside
from dampen.hooks.discover.roles import FFN_IN, FFN_OUT, is_linear
from dampen.hooks.discover.source import names_any
from dampen.hooks.residual import call_torch
from dampen.names import leave_out
from dampen.regularizer import LINEAR_STAGES, LinearCall, Regularizer, UnsupportedModel

if TYPE_CHECKING:
    from dampen.hooks.context import Layer

_IN = FFN_IN | {"w1", "v1", "w3", "input_linear"}
_OUT = FFN_OUT | {"w2", "output_linear"}
_SLICES = set(
    "__getitem__ select unbind view reshape t transpose permute __get__ "
    "squeeze contiguous to type_as float half "
    "bfloat16 double".split()
)
_MOVES = set(
    "__getitem__ index_select select unbind view reshape flatten unflatten "
    "squeeze unsqueeze expand expand_as repeat "
    "repeat_interleave contiguous clone split split_with_sizes chunk "
    "narrow transpose permute gather masked_select "
    "take_along_dim".split()
)
_MIXES = set(
    "sort flip roll index_add scatter scatter_add cumsum argsort baddbmm bmm einsum".split()
)
_ROUTES = {
    "topk",
    "argmax",
    "one_hot",
    "index_add_",
    "index_add",
    "index_select",
    "scatter",
    "scatter_",
    "nonzero",
}
_MATMULS = {"matmul", "__matmul__", "mm"}


@dataclass
class ExpertsPlan:
    """A mixture of experts in a layer, before anything is attached to it."""

    name: str  # of the module that routes
    router: nn.Module
    owners: dict[str, nn.Module] = field(
        default_factory=dict
    )  # the modules with experts as parameters
    parameters: dict[str, str] = field(
        default_factory=dict
    )  # those, by name -> role; "" where no name shows it


def find_experts(
    model: nn.Module,
    elements: Sequence[str],
    attentions: Attentions,
    linears: Mapping[str, LinearPlan],
) -> dict[str, ExpertsPlan]:
    """The mixtures of experts of a layer, which consists of the modules named `elements`, by the
    routing module."""
    found: dict[str, ExpertsPlan] = {}
    for element in elements:
        prefix = element + "." if element else ""
        for local, module in model.get_submodule(element).named_modules():
            name = prefix + local if local else element
            if closest(name, attentions) is not None:
                continue
            around = model.get_submodule(name.rpartition(".")[0])
            if _is_list_of_experts(name, module, around):
                _plan_of(model, element, name, attentions, found)
                for n, linear in linears.items():
                    linear.expert = linear.expert or inside(n, name)
            for parameter, role in _expert_parameters(name, module).items():
                plan = _plan_of(model, element, name, attentions, found)
                plan.owners[name] = module
                plan.parameters[f"{name}.{parameter}"] = role
    return found


def _is_list_of_experts(name: str, module: nn.Module, around: nn.Module) -> bool:
    """Whether a module holds experts side by side: by its name, or because all its elements are of
    one class and the code around it picks tokens."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    elements = [m for m in module.children() if m is not None]
    multiply = all(not is_linear(m) and any(is_linear(i) for i in m.modules()) for m in elements)
    alike = (
        len(elements) > 1 and len({type(m) for m in elements} - {nn.ModuleList, nn.ModuleDict}) == 1
    )
    said = "expert" in name.rpartition(".")[2].lower()
    return bool(elements) and multiply and (said or (alike and names_any(type(around), _ROUTES)))


def _expert_parameters(name: str, module: nn.Module) -> dict[str, str]:
    """The parameters of a module that hold the weights of several experts, with their roles."""
    if is_linear(module) or isinstance(module, nn.modules.conv._ConvNd):
        return {}
    said = "expert" in type(module).__name__.lower() or "expert" in name.lower()
    found = {}
    for parameter, value in module.named_parameters(recurse=False):
        if (
            value.ndim not in ((2, 3) if said else (3,))
            or "bias" in parameter
            or "router" in name.rpartition(".")[2]
        ):
            continue
        word = parameter if parameter != "weight" else name.rpartition(".")[2]
        role = "ffn_in" if word in _IN else "ffn_out" if word in _OUT else ""
        if said or role:
            found[parameter] = role
    return found


def _plan_of(
    model: nn.Module, element: str, name: str, attentions: Attentions, found: dict[str, ExpertsPlan]
) -> ExpertsPlan:
    """The routing module: the largest one around the experts without attention; the block itself
    where none is."""
    parts, start = name.split("."), len(element.split(".")) if element else 0
    for end in range(start, len(parts) + 1):
        above = ".".join(parts[:end])
        module = model.get_submodule(above)
        if isinstance(module, LISTS) and "forward" not in vars(type(module)):
            continue
        if end < len(parts) and (above in attentions or above in attentions.below):
            continue
        if end == start and end < len(parts) and not _routes(module, name[len(above) + 1 :]):
            continue
        return found.setdefault(above, ExpertsPlan(above, module))
    return found.setdefault(element, ExpertsPlan(element, model.get_submodule(element)))


def _routes(block: nn.Module, experts: str) -> bool:
    """Whether a layer itself routes: its experts stand in a list of its own."""
    return experts.count(".") == 0


def check_experts(method: Regularizer, plans: Mapping[str, ExpertsPlan], layer: str) -> None:
    """Raise for a method on feed-forward layers where experts are parameters and no name shows
    which is which."""
    for plan in plans.values():
        if plan.parameters and method.needs_module:
            raise UnsupportedModel(
                f"{type(method).__name__} keeps something for each linear "
                f"layer, but the experts at '{plan.name}' are "
                "slices of parameters "
                f"({', '.join(plan.parameters)}). Leave the feed-forward out with "
                f"targets='attention', or {leave_out(layer)}."
            )
        strange = [name for name, role in plan.parameters.items() if not role]
        if strange:
            raise UnsupportedModel(
                f"{type(method).__name__} acts on feed-forward layers, "
                f"but the experts at '{plan.name}' are the "
                f"parameters {', '.join(strange)}, and their names do "
                "not show which layer of an expert each is. "
                f"Hold the experts as modules in an nn.ModuleList, or {leave_out(layer)}."
            )


class ExpertsSite:
    """What is kept on the module that routes tokens to experts."""

    def __init__(self, layer: Layer, plan: ExpertsPlan) -> None:
        self.layer, self.name = layer, plan.name
        self.parameters = [
            (module, name.rpartition(".")[2], plan.parameters[name])
            for owner, module in plan.owners.items()
            for name in plan.parameters
            if name.rpartition(".")[0] == owner
        ]


class Routing:
    """One forward of a mixture of experts: how many tokens count, and which of
    them an expert has got."""

    def __init__(self, name: str, layer: str, tokens: int | Tensor) -> None:
        self.name, self.layer, self.tokens = name, layer, tokens
        self.valid: Tensor | None = None  # of the tokens of the batch; None where none is padding
        self.known: list[
            tuple[Tensor, Tensor]
        ] = []  # tensors made of them, and which of their rows are valid

    def of(self, tensor: Tensor) -> Tensor | None:
        """Which numbers of a tensor belong to tokens that are no padding, where it was followed."""
        return next((mask for t, mask in reversed(self.known) if t is tensor), None)

    def rows(self, x: Tensor) -> Tensor | None:
        """Which tokens of an expert's input are no padding; None where nothing is."""
        if self.valid is None:
            return None
        mask = self.of(x)
        if mask is None:
            raise RuntimeError(
                f"The experts at '{self.name}' get their tokens in a way that "
                "could not be followed, so which of them "
                "are padding is not known and a penalty would "
                "count them. Give batches without padding, or "
                f"{leave_out(self.layer)}."
            )
        return mask[..., 0]

    def put(self, tensor: Tensor, rows: Tensor | None) -> Tensor:
        """Know a tensor by which of its tokens are no padding."""
        if rows is not None:
            self.known.append((tensor, rows.unsqueeze(-1).expand(tensor.shape)))
        return tensor

    def follow(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """A torch function has run: where it moved or scaled tokens, its outputs are known."""
        if name in ("cat", "concat"):
            parts = [mask for part in args[0] if (mask := self.of(part)) is not None]
            if len(parts) == len(args[0]):
                self.known.append((out, torch.cat(parts, *args[1:], **kwargs)))
            return
        given = next((a for a in args if isinstance(a, Tensor) and self.of(a) is not None), None)
        mask = None if given is None else self.of(given)
        if given is None or mask is None:
            return
        if (
            name in ("linear", *_MATMULS)
            and isinstance(out, Tensor)
            and out.shape[:-1] == given.shape[:-1]
        ):
            self.put(out, mask[..., 0])
        elif name in _MOVES and args[0] is given:
            with torch.no_grad():
                name_of_move = Tensor.reshape if name == "view" else func
                moved = name_of_move(mask, *args[1:], **kwargs)
            pairs = (
                [(out, moved)] if isinstance(out, Tensor) else list(zip(out, moved, strict=True))
            )
            self.known.extend((t, m) for t, m in pairs if t.shape == m.shape)
        elif (
            isinstance(out, Tensor) and out.shape == given.shape and name not in _MIXES
        ):  # each number alone
            self.known.append((out, mask))


class ExpertSocket(TorchFunctionMode):
    """Inside a module that routes: the products of experts kept as parameters, and the way of
    padded tokens."""

    def __init__(
        self, site: ExpertsSite, frame: Frame, active: Sequence[Regularizer], routing: Routing
    ) -> None:
        super().__init__()
        self.site, self.frame, self.active, self.routing = site, frame, active, routing
        self.weights: list[tuple[Tensor, str]] = [
            (getattr(m, name), role) for m, name, role in site.parameters
        ]
        self.met: set[str] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        out = self._multiply(func, name, args, kwargs)
        if out is None:
            out = call_torch(func, args, kwargs)
        if name in _SLICES and args and (role := self._role(args[0])):
            made = (
                [out] if isinstance(out, Tensor) else out if isinstance(out, list | tuple) else []
            )
            self.weights.extend((t, role) for t in made if isinstance(t, Tensor) and t.ndim > 1)
        if self.routing.valid is not None and not self.frame.multiplying:
            self.routing.follow(func, name, args, kwargs, out)
        return out

    def _role(self, value: Any) -> str:
        return next((role for t, role in reversed(self.weights) if t is value), "")

    def _multiply(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """A product with the weight of an expert, or of all: with the stages operands and product.
        None: no such."""
        if self.frame.multiplying or len(args) < 2 or not (role := self._role(args[1])):
            return None
        x, weight = args[0], args[1]
        if name == "linear":
            return self._one(func, role, x, weight, *args[2:], **kwargs)
        if name in _MATMULS and weight.ndim == 2:
            return self._one(lambda x, w, b: func(x, w.t()), role, x, weight.t())
        if name in ("bmm", *_MATMULS) and weight.ndim == 3 and x.ndim == 3:
            rows = self.routing.rows(x)
            for x_e, known in zip(
                parts := x.unbind(0), [None] * len(x) if rows is None else rows, strict=True
            ):
                self.routing.put(x_e, known)
            run = [
                self._one(lambda x, w, b: x @ w.t(), role, a, w.t())
                for a, w in zip(parts, weight, strict=True)
            ]
            return self.routing.put(torch.stack(run), rows)
        return None

    def _one(
        self, run: Any, role: str, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        self.met.add(role)
        if not torch.compiler.is_compiling() and x.numel() == 0:
            empty: Tensor = run(x, weight, bias)  # an expert without tokens
            return empty

        def multiply(a: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            made: Tensor = run(a, w, b) if w is weight else F.linear(a, w, b)
            return made

        call = LinearCall(role, x, weight, bias, None, self.site.layer.site, self.routing.rows(x))
        call.tokens = self.routing.tokens
        y = apply_linear(self.frame, self.active, call, multiply, run is F.linear)
        return self.routing.put(y, call.valid)

    def check(self) -> None:
        """Raise where experts were kept as parameters and no product with one was seen."""
        missing = {role for _, _, role in self.site.parameters} - self.met
        if missing:
            names = ", ".join(name for _, name, role in self.site.parameters if role in missing)
            raise RuntimeError(
                f"The experts at '{self.site.name}' ran "
                f"without a product with a slice of {names}, so "
                f"{', '.join(sorted({type(r).__name__ for r in self.active}))} did nothing there. Multiply by one "
                "expert's weight, F.linear(x, self.weight[e]), "
                f"or {leave_out(self.site.layer.site.name)}."
            )


def experts_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a module that routes tokens to experts."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        site: ExpertsSite = self._dampen_experts
        layer = site.layer
        active = [r for r in layer.active(self) if not r.stages.isdisjoint(LINEAR_STAGES)]
        if not active:
            return base(self, *args, **kwargs)
        frame = frame_of(layer)
        if frame is not None:
            return _run(self, base, site, frame, active, args, kwargs)
        frame = open_frame(layer)
        try:
            return _run(self, base, site, frame, active, args, kwargs)
        finally:
            close_frame(layer, frame)

    return forward


def _run(
    self: Any,
    base: Callable[..., Any],
    site: ExpertsSite,
    frame: Frame,
    active: Sequence[Regularizer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    given = [
        t
        for t in pytree.tree_leaves((args, kwargs))
        if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if not given:
        raise RuntimeError(
            f"{type(self).__name__} at '{site.name}' routes tokens to "
            "experts, but was called without a tensor of "
            f"floating-point numbers, so how many tokens there are is not known. Pass it one, or "
            f"{leave_out(site.layer.site.name)}."
        )
    x = given[0]
    routing = Routing(site.name, site.layer.site.name, x.shape[:-1].numel())
    valid = layer_valid(site.layer, frame, x, "ffn_in", any(r.needs_valid for r in active))
    if valid is not None:
        routing.valid = valid.expand(x.shape[:-1])
        routing.tokens = routing.valid.sum().clamp(min=1)
        routing.put(x, routing.valid)
    before, frame.routing = frame.routing, routing
    socket = ExpertSocket(site, frame, active, routing)
    try:
        if valid is None and not site.parameters:
            return base(self, *args, **kwargs)  # nothing to follow: modules see their own products
        with socket:
            out = base(self, *args, **kwargs)
        socket.check()
        return out
    finally:
        frame.routing = before
        routing.known = []


def eager_experts_forward(base: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of transformers' experts as their own code has it, one by one, while methods act:
    the other implementations multiply by all weights in one call, where no expert can be
    distinguished from another."""
    own = inspect.unwrap(base)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        active = any(
            not r.stages.isdisjoint(LINEAR_STAGES) for r in self._dampen_eager_experts.active(self)
        )
        return (own if active else base)(self, *args, **kwargs)

    return forward


def is_dispatched(module: nn.Module) -> bool:
    """Whether a module's forward picks one of transformers' implementations of experts."""
    forward = inspect.getattr_static(type(module), "forward", None)
    home = getattr(forward, "__globals__", {}).get("__name__")
    return home == "transformers.integrations.moe" and hasattr(forward, "__wrapped__")
