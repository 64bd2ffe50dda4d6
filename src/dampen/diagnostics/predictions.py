"""How every diagnostic runs a model: batches in, logits out, and the model left exactly as it
was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

# PyTorch's label for positions that count nowhere
IGNORED = -100

# batches: (inputs, labels), or a mapping with "labels" as Hugging Face's loaders give
Data = Iterable[Any]


@contextmanager
def in_mode(model: nn.Module, mode: str = "eval") -> Iterator[None]:
    """Run the body with the model in `mode`: "eval", "train", or "keep"; then restore each module's
    own mode.

    Args:
        model: any model that returns logits; left as it was.
        mode: "train", "eval" or "keep".

    >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    >>> with in_mode(model):
    ...     print([m.training for m in model])
    [False, False]
    >>> [m.training for m in model]
    [True, False]
    """
    if mode not in ("eval", "train", "keep"):
        raise ValueError(f"Unknown mode: got {mode!r}; use 'eval', 'train' or 'keep'.")
    before = [(module, module.training) for module in model.modules()]
    try:
        if mode != "keep":
            model.train(mode == "train")
        yield
    finally:
        for module, training in before:
            # not .train(): that would push the mode into the children
            module.training = training


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter or buffer lives; the CPU if it has none.

    Args:
        model: any model that returns logits; left as it was.
    """
    tensor = next(chain(model.parameters(), model.buffers()), None)
    if tensor is None:
        return torch.device("cpu")
    return tensor.device


def split(batch: Any) -> tuple[Any, Tensor]:
    """A batch as (inputs, labels).

    Args:
        batch: (inputs, labels), or a mapping with "labels".

    >>> split({"pixel_values": 1, "labels": torch.tensor([2])})
    ({'pixel_values': 1}, tensor([2]))
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    raise TypeError(
        f"A batch must be (inputs, labels) or a mapping with 'labels': got {_describe(batch)}. "
        "Wrap the loader so that it yields one of these."
    )


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: a tensor itself, or what lies under `.logits`.

    Args:
        output: what a model returned.
    """
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"The model must return logits, or an object with `.logits`: got {_describe(output)}. "
            "Wrap the model in a module that returns its logits."
        )
    return logits


def run(model: nn.Module, inputs: Any) -> Tensor:
    """Call the model on a tensor, a tuple (positional) or a mapping (keywords), and return its
    logits.

    Args:
        model: any model that returns logits; left as it was.
        inputs: one batch of inputs: a tensor, a tuple (positional) or a mapping (keywords).
    """
    if isinstance(inputs, Mapping):
        return logits_of(model(**inputs))
    if isinstance(inputs, (tuple, list)):
        return logits_of(model(*inputs))
    return logits_of(model(inputs))


def move(value: Any, device: torch.device) -> Any:
    """Tensors, and tuples, lists and mappings of them, on `device`.

    Args:
        value: tensors, or containers of them.
        device: where to.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {k: move(v, device) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(move(v, device) for v in value)
    return value


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (..., C) and labels (...) as (n, C) and (n,), without ignored positions; checked.

    Args:
        logits: (..., C).
        labels: (...), class indices, -100 where a position does not count.
    """
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"Labels must hold one class index per prediction: got logits "
            f"{tuple(logits.shape)} and labels {tuple(labels.shape)}; "
            f"expected labels {tuple(logits.shape[:-1])}."
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"Labels must be integer class indices: got dtype {labels.dtype}.")
    logits, labels = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    counted = labels != IGNORED
    logits, labels = logits[counted], labels[counted].long()
    classes = logits.shape[1]
    if labels.numel() and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        raise ValueError(
            f"Labels must lie in [0, {classes}), or be {IGNORED} to be ignored: "
            f"got {int(labels.min())} to {int(labels.max())}."
        )
    bad = int((~torch.isfinite(logits)).any(dim=1).sum())
    if bad:
        raise ValueError(
            f"{bad} of {len(logits)} predictions hold NaN or infinity: the model has diverged."
        )
    return logits, labels


@torch.no_grad()
def predict(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    """Logits (n, C) and labels (n,) of all predictions, on the CPU, from the model in eval mode.

    Args:
        model: any model that returns logits; left as it was.
        data: batches (inputs, labels), or mappings with "labels".
    """
    device = device_of(model)
    parts = []
    with in_mode(model):
        for batch in data:
            inputs, labels = split(batch)
            parts.append(flat(run(model, move(inputs, device)).cpu(), labels.cpu()))
    if not sum(len(labels) for _, labels in parts):
        raise ValueError(
            "There is nothing to measure: no labeled prediction in the data. Was it an exhausted "
            "loader?"
        )
    return torch.cat([logits for logits, _ in parts]), torch.cat([labels for _, labels in parts])


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return (
            f"{type(value).__name__} of {', '.join(type(v).__name__ for v in value) or 'nothing'}"
        )
    return type(value).__name__
