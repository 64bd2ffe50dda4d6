"""The model that is benched, with a synthetic batch and its loss, and the peak memory of a call."""

from __future__ import annotations

import copy
import gc
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dampen._torch import declare_torchvision_operators
from dampen.containers import tensors_in
from dampen.extensions import from_plugins
from dampen.studies.errors import ConfigError
from dampen.studies.methods_text import parse_rows

# --- a model of the user's own
#
# A model of the user's own for the bench: `hf/FOLDER` or `file.py:build`, with a batch that
# fits.
#
# Weights do not change what a step costs, so that a saved Hugging Face model is built from its
# config alone.

METHODS = (
    "drop_key(rate=0.1), drop_path(rate=0.1), explicit_dropout(value=0.05, ffn=0.05), "
    "feed_forward_dropout(rate=0.1), drop_key(rate=0.1) + explicit_dropout(value=0.05, ffn=0.05), "
    "drop_key(rate=0.1) + explicit_dropout(value=0.05, ffn=0.05) + drop_path(rate=0.1)"
)
"""What is measured of a model of one's own, where no methods are given."""
SECONDS = 45.0
"""For all of it, where no time is given."""
TOKENS = 128
"""Tokens of a text, unless `tokens=` is given or the model takes fewer."""
Inputs = dict[str, Tensor]


class Named(nn.Module):
    """A model that gets its tensors in order and passes them on by name.

    Args:
        model: the user's.
        names: of its arguments.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> Any:
        return self.model(**dict(zip(self.names, values, strict=True)))


def is_own(name: str) -> bool:
    """Whether the name of a model means one of the user's own, or of timm.

    Args:
        name: as after `--model`.

    >>> is_own("hf/bert"), is_own("train.py:build"), is_own("timm/vit_tiny_patch16_224"), is_own("vit")
    (True, True, True, False)
    """
    return name.startswith(("hf/", "timm/")) or ".py:" in name


def own_model(spec: Mapping[str, Any], batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model, and the tensors that its forward gets.

    Args:
        spec: name and arguments.
        batch: examples per step.
    """
    model, inputs = built(spec, batch)[:2]
    if isinstance(inputs, Mapping):
        return Named(model, tuple(inputs)), tuple(inputs.values())
    return model, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def built(spec: Mapping[str, Any], batch: int) -> tuple[Any, ...]:
    """A model of the user's own and what it is called with, as it is: a tensor, several, or some by
    name. A function in a file may return a loss as well.

    Args:
        spec: name and arguments.
        batch: examples per step.
    """
    given = {name: value for name, value in spec.items() if name != "name"}
    if ".py:" in spec["name"]:
        return _from_function(spec["name"], given, batch)
    return _from_folder(Path(spec["name"].removeprefix("hf/")).expanduser(), given, batch)


def loss_of(output: Any) -> Tensor:
    """A loss of whatever a model returns: the mean square of its first tensor with a gradient.

    Args:
        output: what the model returned.
    """
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            return tensor.float().square().mean()
    raise ValueError(
        f"the model returned a {type(output).__name__} without a tensor that has a gradient"
    )


def _from_function(name: str, given: dict[str, Any], batch: int) -> tuple[Any, ...]:
    """What `file.py:build` returns: a model, its inputs, and perhaps a loss."""
    from dampen.studies.trainer.user_function import function_in_file

    build: Callable[..., Any] = function_in_file(name, "--model").load()
    if "batch" in inspect.signature(build).parameters:
        given = {"batch": batch, **given}
    try:
        inspect.signature(build).bind(**given)
    except TypeError as error:
        problem = f"{name}{inspect.signature(build)}: {error}. Write def build(batch): ..."
        raise ConfigError("The model", [problem]) from None
    found = build(**given)
    if isinstance(found, nn.Module) and hasattr(found, "config"):
        found = found, _inputs(found, {}, batch)
    if not (isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module)):
        raise ConfigError(
            "The model",
            [
                f"{name} must return (model, inputs), got {type(found).__name__}. inputs is a "
                "tensor, a tuple of tensors, or a dict of them by argument: "
                "def build(batch): return model, torch.randn(batch, 3, 224, 224)"
            ],
        )
    return found


def _from_folder(folder: Path, given: dict[str, Any], batch: int) -> tuple[Any, ...]:
    """A saved Hugging Face model in the class that its config names."""
    if not (folder / "config.json").is_file():
        raise ConfigError("The model", [f"{folder} holds no config.json. Pass hf/FOLDER"])
    declare_torchvision_operators()
    import transformers

    sizes: dict[str, int] = {k: given.pop(k) for k in ("tokens", "image_size") if k in given}
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, **given)
    names = getattr(config, "architectures", None) or ["AutoModel"]
    kind: Any = getattr(transformers, names[0], transformers.AutoModel)
    if kind is transformers.AutoModel:
        model = kind.from_config(config, trust_remote_code=False)
    else:
        model = kind(config)
    return model, _inputs(model, sizes, batch)


def _inputs(model: Any, sizes: dict[str, int], batch: int) -> Inputs:
    """Synthetic inputs of a Hugging Face model, by what it calls its main one."""
    config, main = model.config, model.main_input_name
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found: Inputs = {}
    if main == "pixel_values":
        size = sizes.get("image_size", getattr(config, "image_size", 224))
        height, width = (size, size) if isinstance(size, int) else size
        found[main] = torch.randn(batch, getattr(config, "num_channels", 3), height, width)
    elif main == "input_features":
        frames = 2 * config.max_source_positions
        found[main] = torch.randn(batch, config.num_mel_bins, frames)
    elif main == "input_ids":
        found[main] = _tokens(text, sizes, batch)
    else:
        raise ConfigError(
            "The bench",
            [
                f"--model: {type(model).__name__} takes {main!r}, for which no batch can be made. "
                "Write file.py:build, a function that returns (model, inputs)"
            ],
        )
    takes = inspect.signature(model.forward).parameters
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        found["decoder_input_ids"] = _tokens(text, sizes, batch)
    return found


def _tokens(config: Any, sizes: dict[str, int], batch: int) -> Tensor:
    names = ("max_position_embeddings", "max_target_positions", "n_positions")
    longest = [n for name in names if isinstance(n := getattr(config, name, None), int) and n > 0]
    tokens = sizes.get("tokens", min([TOKENS, *longest]))
    return torch.randint(config.vocab_size, (batch, tokens))


# --- the model and its batch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES: dict[str, dict[str, Any]] = {
    "encoder": {"features": 64, "classes": 10, "max_tokens": 128},
    "language": {"vocab": 1000, "context": 128},
}
"""Arguments of our models that a data set would decide; an image model has
defaults for all of its own."""
IMAGES = ("vit",)


@dataclass
class Subject:
    """A plain model in training mode and what to feed it. Copies share its weights: many of them
    cost little."""

    label: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor | None  # None: what the output means is not known
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def copy(self) -> nn.Module:
        """The model again, with the same parameters, to be changed at will."""
        shared: dict[int, Any] = {id(p): p for p in self.model.parameters()}
        return copy.deepcopy(self.model, shared)

    def loss(self, output: Any) -> Tensor:
        """Mean cross-entropy, whatever comes before the classes; without a target, the mean square.

        Args:
            output: what the model returned.
        """
        if self.target is None:
            return loss_of(output)
        logits = getattr(output, "logits", output).float()
        return F.cross_entropy(logits.flatten(0, -2), self.target.flatten())

    def precision(self) -> AbstractContextManager[Any]:
        """Autocast, for 16 bits."""
        return (
            nullcontext()
            if self.dtype == torch.float32
            else torch.autocast(self.device, self.dtype)
        )

    def step(self, losses: Callable[[], Tensor]) -> Callable[[], None]:
        """One training step without the optimizer, which is the same for all: forward, backward,
        gradients dropped.

        Args:
            losses: computes the loss of a step.
        """

        def run() -> None:
            with self.precision():
                loss = losses()
            loss.backward()
            for p in self.model.parameters():
                p.grad = None
            if self.device.startswith("cuda"):
                torch.cuda.synchronize(self.device)

        return run


def make_subject(
    model: str = "vit", batch: int = 64, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> Subject:
    """Build a model by its name on the command line and draw a synthetic batch that fits it.

    Args:
        model: a name with arguments, as on the command line.
        batch: examples per step.
        dtype: float32, bfloat16 or float16.
        device: where to run.
        seed: of the weights and the batch.

    >>> subject = make_subject("vit(image_size=8, width=16, depth=2, heads=2, mlp=16)", batch=3)
    >>> subject.label
    'vit(image_size=8, width=16, depth=2, heads=2, mlp=16), batch 3, float32, synthetic data'
    >>> subject.model(*subject.inputs).shape
    torch.Size([3, 10])
    """
    if dtype not in DTYPES:
        raise ConfigError("The bench", [f"--dtype: got {dtype!r}; use {', '.join(DTYPES)}"])
    if batch < 1:
        raise ConfigError("The bench", [f"--batch: must be 1 or more, got {batch}"])
    _check_device(device)
    spec = parse_model(model)
    torch.manual_seed(seed)
    try:
        if spec["name"].startswith("hf/") or ".py:" in spec["name"]:
            built, inputs = own_model(spec, batch)
            target = None
            built = built.train().to(device)
        else:
            built = _build(spec).train().to(device)
            inputs, target = _batch(built, spec, batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("The bench", [f"--model {model}: {error}"]) from error
    precision = dtype if dtype == "float32" else f"{dtype} autocast"
    shape = "ViT 7 x 384, 12 heads, 65 tokens" if model == "vit" else model
    label = f"{shape}, batch {batch}, {precision}, synthetic data"
    target = None if target is None else target.to(device)
    placed = tuple(x.to(device) for x in inputs)
    return Subject(label, built, placed, target, device, DTYPES[dtype])


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        why = str(error).splitlines()[0]
        raise ConfigError(
            "The bench", [f"--device: cannot use {device!r} here: {why}; use cpu"]
        ) from error


def parse_model(text: str) -> dict[str, Any]:
    """`vit`, `vit(width=64)` or `timm/vit_tiny_patch16_224(img_size=64)` as plain data.

    Args:
        text: the text.

    >>> parse_model("timm/vit_tiny_patch16_224(img_size=64)")
    {'name': 'timm/vit_tiny_patch16_224', 'img_size': 64}
    """
    name, bracket, arguments = text.partition("(")
    rows = list(parse_rows(f"model{bracket}{arguments}", "--model").values())
    if len(rows) != 1 or len(rows[0]) != 1:
        raise ConfigError("--model", [f"cannot read {text!r}: write name or name(argument=value)"])
    return {**rows[0][0], "name": name.strip()}


def _build(spec: dict[str, Any]) -> nn.Module:
    from dampen.studies.trainer.models import make_model

    name = spec["name"]
    if not name.startswith("timm/") and name not in (*IMAGES, *SHAPES):
        raise ValueError(
            f"only {', '.join((*IMAGES, *SHAPES))}, timm/NAME, hf/FOLDER and file.py:build can be "
            "benched"
        )
    return make_model({**SHAPES.get(name, {}), **spec}, {})


def _batch(model: Any, spec: dict[str, Any], batch: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Synthetic inputs and targets."""
    name = spec["name"]
    arguments = {**SHAPES.get(name, {}), **spec}
    if name == "encoder":
        tokens = arguments["max_tokens"]
        labels = (batch, tokens) if arguments.get("per_token") else (batch,)
        return (torch.randn(batch, tokens, arguments["features"]),), torch.randint(
            arguments["classes"], labels
        )
    if name == "language":
        tokens = torch.randint(arguments["vocab"], (batch, arguments["context"] + 1))
        return (tokens[:, :-1],), tokens[:, 1:]
    channels, size = _image_shape(model, arguments)
    images = torch.randn(batch, channels, *size)
    with torch.no_grad():
        classes = model.eval()(images[:1].to(next(model.parameters()).device)).shape[-1]
    model.train()
    return (images,), torch.randint(classes, (batch,))


def _image_shape(model: Any, arguments: dict[str, Any]) -> tuple[int, tuple[int, int]]:
    if arguments["name"].startswith("timm/"):
        channels, height, width = (getattr(model, "pretrained_cfg", None) or {}).get(
            "input_size", (3, 224, 224)
        )
        size = arguments.get("img_size", (height, width))
        channels = arguments.get("in_chans", channels)
    else:
        size, channels = arguments.get("image_size", 32), arguments.get("channels", 3)
    return channels, (size, size) if isinstance(size, int) else tuple(size)


def peak_memory(run: Callable[[], Any], device: str = "cpu") -> int:
    """The most bytes that tensors allocated inside `run` occupy at once; what
    existed before counts nothing.

    Args:
        run: one run.
        device: where to run.

    >>> peak_memory(lambda: torch.zeros(1000, dtype=torch.uint8)) >= 1000
    True
    """
    if torch.device(device).type == "cuda":
        return _cuda_peak(run, device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints each start and stop
    from torch.profiler import ProfilerActivity, profile

    # what earlier work left in cycles would otherwise be given back inside, and count as less
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    inner: Any = profiler.profiler
    now = peak = 0
    for event in inner.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()  # negative where memory is given back
            peak = max(peak, now)
    return peak


def _cuda_peak(run: Callable[[], Any], device: str) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def available_memory() -> int:
    """Bytes that this machine can still give; half of what it has where that is not known."""
    try:
        with open("/proc/meminfo") as lines:
            return next(
                1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")
            )
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


Attention = Callable[..., Tensor]
"""A function with the arguments of F.scaled_dot_product_attention."""
Stage = Callable[[Tensor], Tensor]


@contextmanager
def attention_as(function: Attention) -> Iterator[None]:
    """Inside, every model that calls F.scaled_dot_product_attention calls `function` instead.

    Args:
        function: what to call instead.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def unfused(scores: Stage | None = None, weights: Stage | None = None) -> Attention:
    """softmax(q k^T / sqrt(D)) v on the matrix of scores, with something done to the
    scores or to the weights.

    Args:
        scores: changes the scores.
        weights: changes the attention weights.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key, value = (
                t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value)
            )
        s = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
        s = s if scores is None else scores(s)
        if is_causal:
            attn_mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        if attn_mask is not None:
            s = (
                s.masked_fill(~attn_mask, float("-inf"))
                if attn_mask.dtype == torch.bool
                else s + attn_mask
            )
        a = s.softmax(-1)
        a = a if weights is None else weights(a)
        return F.dropout(a, dropout_p) @ value

    return attention


@dataclass(frozen=True)
class Formulation:
    """Another way to compute a method, which `dampen bench` times beside ours.

    A plug-in registers a table of them under "papers", for what papers published, or under
    "alternatives", for what one would write without dampen.

    Args:
        ours: the variant of ours that does the same.
        build: makes a training step of a subject.
        attention: the same as a function like F.scaled_dot_product_attention, if it is one.
    """

    ours: str
    build: Callable[[Subject], Callable[[], None]]
    attention: Attention | None = None


def formulations(group: str) -> dict[str, Formulation]:
    """What plug-ins registered in one group, by name.

    Args:
        group: "papers" or "alternatives".
    """
    return dict(from_plugins("dampen.formulations").get(group, {}))
