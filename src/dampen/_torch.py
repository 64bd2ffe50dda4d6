"""Everything private of torch that dampen uses, and a workaround for a broken torchvision wheel.

Each name says since when torch has it and what happens without it. Tested with torch 2.13;
`docs/how_it_works.md` says what is known of older ones.

torchvision: its wheel on the Python package index is built for CUDA. Beside a CPU torch its
compiled extension does not load, and its import then dies with `operator torchvision::nms does not
exist`, taking timm, torchmetrics and Lightning with it. Declaring the two operators that the import
mentions is enough; nothing here ever calls them.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNorm",
    "DropoutModule",
    "TorchDispatchMode",
    "declare_torchvision_operators",
    "pytree",
]
"""`torch.utils._pytree` (torch 1.8 and newer) finds the tensors in nested outputs;
`TorchDispatchMode` (torch 1.13 and newer) sees every kernel, for the contracts. Without them dampen
cannot be imported."""

DropoutModule = torch.nn.modules.dropout._DropoutNd
"""What nn.Dropout and its kin have in common: torch 1.0 and newer."""

BatchNorm = torch.nn.modules.batchnorm._BatchNorm
"""What nn.BatchNorm1d and its kin have in common: torch 1.0 and newer."""


no_torch_function: Any = torch._C._disabled_torch_function_impl
"""As `__torch_function__` of a subclass of Tensor: torch treats it as a plain tensor; torch 1.7 and
newer."""


written_to: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""`version_of` of a tensor that a graph holds, without a frame of Python."""


def version_of(t: torch.Tensor) -> int:
    """How often a tensor was changed in place: `Tensor._version`, torch 0.4 and newer; 0 for one of
    `inference_mode`, where nothing is counted and no backward needs it."""
    if t.is_inference():
        return 0
    return t._version


def on_gpu(t: torch.Tensor) -> bool:
    """Whether a tensor is on a CUDA or ROCm device. MPS is not meant: there attention runs as on a
    CPU."""
    return t.is_cuda


def outside_tracing() -> AbstractContextManager[Any]:
    """Real tensors while a graph is traced with fake ones: `unset_fake_temporarily`, torch 2.1 and
    newer."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def own_parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    """A module's own parameter, past every `__getattr__` that a library puts before it
    (`Module._parameters`, torch 0.1 and newer); None where there is none of this name."""
    return module._parameters.get(name)


def has_forward_hooks(module: torch.nn.Module, before: bool = True, after: bool = True) -> bool:
    """Whether the user's hooks run around this module's forward (`Module._forward_hooks`, torch 0.1
    and newer)."""
    return (before and bool(module._forward_pre_hooks)) or (after and bool(module._forward_hooks))


def convolve(
    module: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d,
    x: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The convolution of a module, padded as it pads, with another weight and no bias:
    `_conv_forward`, which takes the bias as an argument in torch 1.8 and newer; without it
    convolutions have no penalty."""
    out: torch.Tensor = module._conv_forward(x, weight, None)
    return out


def norms_of_all(these: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Euclidean norm of each of many tensors: `torch._foreach_norm`."""
    return list(torch._foreach_norm(list(these)))


def scale_all(these: Sequence[torch.Tensor], numbers: Sequence[float]) -> list[torch.Tensor]:
    """Each of many tensors times its number: `torch._foreach_mul`."""
    return list(torch._foreach_mul(list(these), numbers))


def scale_in_place(these: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
    """Multiply each of many tensors by its number: `torch._foreach_mul_`."""
    torch._foreach_mul_(list(these), numbers)


def compile_counter(backend: str) -> Callable[..., Any]:
    """A back end for `torch.compile` that counts its graphs in `frame_count`
    (`torch._dynamo.testing`, torch 2.0 and newer); only the contract of compiled graphs needs it.
    """
    import torch._dynamo.testing as testing

    counter: Callable[..., Any] = testing.CompileCounterWithBackend(backend)
    return counter


def inductor_draws_as_eager() -> AbstractContextManager[Any]:
    """A context in which compiled graphs draw the random numbers that eager code draws
    (`torch._inductor.config`, torch 2.0 and newer); only the contract of compiled graphs needs it.
    """
    import torch._inductor.config as config

    patched: AbstractContextManager[Any] = config.patch(fallback_random=True)
    return patched


def forward_hooks(module: torch.nn.Module, not_of: str) -> bool:
    """Whether hooks run after this module's forward (`Module._forward_hooks`, torch 0.1 and newer),
    those of one package left out."""
    return any(
        not getattr(hook, "__module__", "").startswith(not_of)
        for hook in module._forward_hooks.values()
    )


def in_backward() -> bool:
    """Whether a backward pass is running in this thread: then a forward is a checkpoint's
    recompute.

    `torch._C._current_graph_task_id`, torch 1.11 and newer; -1 outside a backward.
    """
    return torch._C._current_graph_task_id() != -1


def half_in_hardware() -> bool:
    """Whether this CPU multiplies 16-bit numbers in hardware: `torch.cpu._is_*`, torch 2.4 and
    newer; else no."""
    checks = (
        getattr(torch.cpu, name, None)
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return any(bool(check()) for check in checks if check is not None)


def saved_tensors_are_hooked() -> bool:
    """Whether something (a checkpoint, offloading) replaces tensors that autograd saves.

    `torch._C._autograd._top_saved_tensors_default_hooks`, torch 2.7 and newer; without it the
    answer is yes, and nothing is shared between two passes, which is slower and never wrong.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


def checkpointing_now() -> bool:
    """Whether tensors that autograd saves are being replaced right now, by a checkpoint for one:
    torch 2.7 and newer; without it the answer is no."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


functorch_level: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
"""None where no transform of functorch is at work. Without a frame of Python, for what every
layer checks."""

graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""-1 outside a backward; see `in_backward`. Without a frame of Python, for what every layer
checks."""

count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many `TorchDispatchMode`s see every kernel now, as FlopCounterMode does."""

saved_tensor_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: "unknown"
)
"""`saved_tensor_hooks(True)` is None where autograd saves tensors as they are, without a checkpoint
or offloading; see `saved_tensors_are_hooked`."""


forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, "_current_level")
"""0 or more where derivatives are taken forward; see `in_forward_mode`."""


def in_functorch() -> bool:
    """Whether `vmap`, `grad` or another transform of functorch is at work: torch 2.0 and newer."""
    return functorch_level() is not None


def in_forward_mode() -> bool:
    """Whether derivatives are taken forward, by dual numbers
    (`torch.autograd.forward_ad._current_level`, torch 1.8 and newer)."""
    return forward_ad._current_level >= 0


def watched_by_a_mode() -> bool:
    """Whether a `TorchDispatchMode` sees every kernel now, as FlopCounterMode does:
    `torch._C._len_torch_dispatch_stack`, torch 2.1 and newer."""
    return torch._C._len_torch_dispatch_stack() > 0


def apply_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its half in Python, which looks for functorch and for
    `setup_context` on every call: for one that has none, where `in_functorch` was checked before.
    `torch._C._FunctionBase`, torch 0.4 and newer."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.compiler.assume_constant_result` does, without the import of dynamo that it
    brings (half a second, and more packages than torch needs). torch 2.1 and newer."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_modes() -> AbstractContextManager[None]:
    """Inside, no torch function mode sees what runs. torch 2.0 and newer; there is no other way to
    leave the modes that are active around the caller."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def function_mode() -> Any:
    """The innermost torch function mode that is open; None: there is none. torch 2.0 and newer, as
    the two below."""
    return torch.overrides._get_current_function_mode()


def leave_function_mode() -> None:
    """Close the innermost torch function mode. Who does it opens the mode again."""
    torch.overrides._pop_mode()


def enter_function_mode(mode: Any) -> None:
    """Open a torch function mode again that was left."""
    torch.overrides._push_mode(mode)


def has_parameters(module: torch.nn.Module) -> bool:
    """Whether a module has parameters of its own, those of its children left out; checked in every
    step, and `module.parameters()` walks through all of them. Any torch; a module without the
    private dict has none to call."""
    return bool(module._parameters)


def has_numbers(t: torch.Tensor) -> bool:
    """Whether Python may look at a tensor's values: not while tracing, for fake tensors or inside
    `vmap`."""
    return type(t) is torch.Tensor and not torch.compiler.is_compiling() and not in_functorch()


def refuse_nested(t: torch.Tensor, who: str) -> None:
    """Raise for a nested tensor, jagged or strided: its samples have no common shape to draw masks
    in, nor a mask that says what is padding. `torch.nested`: torch 1.13 and newer."""
    if t.is_nested:
        raise RuntimeError(
            f"{who} got a nested tensor (torch.nested, layout {t.layout}), which regularizers "
            "cannot take. Give "
            "padded batches with a mask: x.to_padded_tensor(0.0) and its lengths. "
            "torch.nn.TransformerEncoder makes "
            "nested tensors of padded batches in eval: set encoder.use_nested_tensor = False, or "
            "build it with "
            "enable_nested_tensor=False."
        )


def is_empty(t: torch.Tensor) -> bool:
    """Whether a tensor has no entries: a batch of no samples, or no tokens. A graph is of one size,
    which is not it."""
    return not torch.compiler.is_compiling() and t.numel() == 0


def is_static(size: int) -> bool:
    """Whether a size is a plain number, and not one that a compiled graph leaves open
    (`torch.compile(dynamic=True)`): `torch.fx.experimental.symbolic_shapes.has_static_value`, torch
    2.5 and newer; only called while tracing."""
    if not torch.compiler.is_compiling():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def run_by_the_tracer(function: Callable[[], bool]) -> Callable[[], bool]:
    """Mark a function that torch.compile runs while tracing, and whose result it keeps.

    What `torch.compiler.assume_constant_result` (torch 2.1 and newer) does, without importing
    torch._dynamo: that takes a second, and `import dampen` does not need it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def addresses_known() -> bool:
    """Whether Python may read the addresses of tensors: not while tracing, nor inside `torch.func`,
    where they are wrapped."""
    return not torch.compiler.is_compiling() and not in_functorch()


def whole_tensor(t: torch.Tensor) -> torch.Tensor:
    """A tensor that several processes hold together (a `DTensor`, FSDP2), gathered; any other as it
    is. Every process calls this together. `DTensor.full_tensor`, torch 2.1 and newer."""
    gather: Callable[[], torch.Tensor] | None = getattr(t, "full_tensor", None)
    return t if gather is None else gather()


def placed_like(whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A whole tensor, split over processes as another one is; as it is where that one is not split.

    Nothing is sent: each process cuts its share out of the whole that it has.
    `torch.distributed.tensor`, torch 2.5 and newer.
    """
    mesh = getattr(other, "device_mesh", None)
    if mesh is None:
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    here, on_all = whole.to(mesh.device_type), [Replicate()] * mesh.ndim
    everywhere = DTensor.from_local(here, mesh, on_all, run_check=False)
    return everywhere.redistribute(mesh, cast(Any, other).placements)


def memory_is_gone(t: torch.Tensor) -> bool:
    """Whether a tensor has entries but no memory behind them, as FSDP leaves a weight between two
    uses; reading it is an error or a crash. `untyped_storage`, torch 2.0 and newer; not called
    while tracing, nor of wrapped tensors."""
    if torch.compiler.is_compiling() or in_functorch() or t.is_meta or t.numel() == 0:
        return False
    return type(t) in (torch.Tensor, torch.nn.Parameter) and t.untyped_storage().nbytes() == 0


def shared_until_written(t: torch.Tensor) -> torch.Tensor:
    """A copy that takes no memory until one of the two is written to, in whatever way:
    `torch._lazy_clone`, torch 2.2 and newer; where torch, the device, the kind of tensor or its
    memory has none of it, a copy at once."""
    lazy = getattr(torch, "_lazy_clone", None)
    plain = type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type in ("cpu", "cuda")
    if lazy is None or not plain:
        return t.detach().clone()
    try:
        return cast(torch.Tensor, lazy(t.detach()))
    except (
        RuntimeError
    ):  # memory that torch did not take itself: a file of weights mapped by safetensors, an array
        return t.detach().clone()


def is_shared(t: torch.Tensor) -> bool:
    """Whether a tensor still shares its memory with what it was copied from by
    `shared_until_written`."""
    check = getattr(torch._C, "_is_cow_tensor", None)
    return check is not None and bool(check(t))


# The declarations live as long as this object.
_library: torch.library.Library | None = None


@functools.cache
def declare_torchvision_operators() -> bool:
    """Declare torchvision's operators if its extension cannot do so itself.

    Called where dampen itself imports timm, transformers, torchmetrics, Lightning or a user's
    training file. Does nothing where torchvision is missing or works.

    Returns:
        Whether that was needed.
    """
    global _library
    spec = importlib.util.find_spec("torchvision")
    if "torchvision" in sys.modules or spec is None or spec.origin is None:
        return False
    if _extension_loads(spec):
        return False
    # Another library may have declared them already, as the same workaround.
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return False
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _extension_loads(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether torchvision's own extension registers its operators, as torchvision.extension would
    make it."""
    extension = next(
        (p for root in spec.submodule_search_locations or [] for p in _extensions(root)), None
    )
    if extension is None:
        return False
    try:
        torch.ops.load_library(extension)
    except OSError:  # a CUDA build without its CUDA libraries
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _extensions(root: str) -> list[str]:
    return sorted(str(p) for p in Path(root).glob("_C*.so")) + sorted(
        str(p) for p in Path(root).glob("_C*.pyd")
    )


def keep_sizes(t: torch.Tensor, dims: tuple[int, ...]) -> None:
    """Declare sizes of a graph's input that never change, although others may.

    Args:
        t: the input.
        dims: the dimensions whose size stays.
    """
    torch._dynamo.mark_static(t, list(dims))


def compiler_is_loaded() -> bool:
    """Whether anything may be compiled: `torch._dynamo` is imported, torch 2.0 and newer."""
    return "torch._dynamo" in sys.modules


def take_hooks(p: torch.nn.Parameter) -> Any:
    """Take off what runs after a gradient is accumulated, as an optimizer in the backward does, and
    note the hooks on the gradient: `Tensor._post_accumulate_grad_hooks`, torch 2.1 and newer, and
    `Tensor._backward_hooks`, torch 0.1 and newer.

    Args:
        p: a parameter.
    """
    after = cast(Any, p._post_accumulate_grad_hooks)
    before = p._backward_hooks
    taken = None if after is None else dict(after), None if before is None else dict(before)
    if after is not None:
        after.clear()  # autograd reads this dict
    return before, *taken


def give_hooks(p: torch.nn.Parameter, hooks: Any) -> None:
    """Put back what `take_hooks` took, and take off what came since.

    Args:
        p: a parameter.
        hooks: of it.
    """
    before, after, content = hooks
    if after is not None:
        cast(Any, p._post_accumulate_grad_hooks).update(after)
    if p._backward_hooks is not before:
        p._backward_hooks = before
    if before is not None and list(before) != list(content):
        before.clear()
        before.update(content)


_SDP_CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}


def sdp_choice(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    rate: float = 0.0,
    causal: bool = False,
    **more: Any,
) -> str:
    """The kernel that `F.scaled_dot_product_attention` would take here: `torch._fused_sdp_choice`,
    torch 2.0 and newer.

    Args:
        q: queries.
        k: keys.
        v: values.
        mask: as for that function.
        rate: of dropout.
        causal: as for that function.
        more: `scale` and `enable_gqa`.
    """
    choice = int(torch._fused_sdp_choice(q, k, v, mask, rate, causal, **more))
    return _SDP_CHOICES.get(choice, str(choice))


class OperatorFacts(NamedTuple):
    """What is known of an operator that a `TorchDispatchMode` sees.

    Attributes:
        name: without namespace and overload.
        arguments: their names, in order.
        defaults: of those that have one.
        written: the names of those that it changes in place.
        draws: whether it may draw random numbers.
    """

    name: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    draws: bool


@functools.cache
def operator_facts(operator: Any) -> OperatorFacts:
    """Name, arguments and kind of an operator: `OpOverload._schema` and
    `torch.Tag.nondeterministic_seeded`, torch 1.13 and newer; of a higher-order operator the name.

    Args:
        operator: as `__torch_dispatch__` gets it.
    """
    name = str(getattr(operator, "__name__", operator)).partition(".")[0]
    schema = getattr(operator, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    if schema is None:
        return OperatorFacts(name, (), {}, (), draws)
    return OperatorFacts(
        name,
        tuple(a.name for a in schema.arguments),
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        tuple(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        ),
        draws,
    )
