"""A model of the user's own for the bench: `hf/FOLDER` or `file.py:build`, with a batch that fits.

Weights do not change what a step costs, so that a saved Hugging Face model is built from its
config alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.containers import tensors_in
from dampen.studies.errors import ConfigError

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


def _from_function(
    name: str, given: dict[str, Any], batch: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """What `file.py:build` returns: a model and its inputs, a tensor, several, or some by name."""
    from dampen.studies.trainer.user_function import function_in_file

    build: Callable[..., Any] = function_in_file(name, "--model").load()
    if "batch" in inspect.signature(build).parameters:
        given = {"batch": batch, **given}
    found = build(**given)
    if isinstance(found, nn.Module) and hasattr(found, "config"):
        found = found, _inputs(found, {}, batch)
    pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)
    if not pair:
        raise ConfigError(
            "The bench",
            [
                f"--model: {name} must return (model, inputs), got {type(found).__name__}. inputs "
                "is a tensor, a tuple of tensors, or a dict of them by argument: "
                "def build(batch): return model, torch.randn(batch, 3, 224, 224)"
            ],
        )
    model, inputs = found
    if isinstance(inputs, Mapping):
        return Named(model, tuple(inputs)), tuple(inputs.values())
    return model, (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def _from_folder(
    folder: Path, given: dict[str, Any], batch: int
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A saved Hugging Face model in the class that its config names."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "The bench", [f"--model: {folder} holds no config.json. Say --model hf/FOLDER"]
        )
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
    inputs = _inputs(model, sizes, batch)
    return Named(model, tuple(inputs)), tuple(inputs.values())


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
