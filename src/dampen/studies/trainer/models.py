"""The model of a run: built-in, timm's, a saved one of Hugging Face, a user's function, or a
pretrained one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from dampen._torch import declare_torchvision_operators
from dampen.extensions import hint
from dampen.names import close_names
from dampen.studies.checks import brings_task
from dampen.studies.data.dataset import Dataset
from dampen.studies.errors import ConfigError, LabError
from dampen.studies.metrics import TASKS, judged_by
from dampen.studies.run import Run
from dampen.studies.store import PRETRAIN, RunStore
from dampen.studies.trainer.checkpoint import load_newest
from dampen.studies.trainer.user_function import Function, Parts
from dampen.studies.trust import require_no_remote_code


def make_model(
    model: dict[str, Any], from_data: dict[str, Any], parts: Parts | None = None
) -> nn.Module:
    """The model of a trial; what the data decides (classes, sizes, vocabulary) need not be said
    again.
    """
    from dampen.models import MODELS, build_model

    name, own = (
        model["name"],
        {k: v for k, v in model.items() if k not in ("name", "code", "fingerprint")},
    )
    if name.startswith("hf/"):
        return hub_model((parts or Parts()).model, model, own, from_data)
    if ".py:" in name:
        return built_model((parts or Parts()).build, name, own, from_data)
    if name.startswith("timm/"):
        return _timm_model(name.removeprefix("timm/"), own, from_data)
    if name not in MODELS:
        raise ConfigError(
            "The trial",
            [
                "model.name: unknown model "
                f"{name!r}{hint('dampen.models', name, [*MODELS, 'timm/<name>'])}"
            ],
        )
    takes = inspect.signature(MODELS[name]).parameters
    return build_model(name, **{**{k: v for k, v in from_data.items() if k in takes}, **own})


def _timm_model(name: str, own: dict[str, Any], from_data: dict[str, Any]) -> nn.Module:
    declare_torchvision_operators()
    import timm

    if not timm.is_model(name):
        raise ConfigError(
            "The trial",
            [f"model.name: timm has no model {name!r}. {close_names(name, timm.list_models())}"],
        )
    arguments = {"num_classes": from_data.get("classes"), "in_chans": from_data.get("channels")}
    given = {**{k: v for k, v in arguments.items() if v is not None}, **own}
    size = from_data.get("image_size")
    if size is None or "img_size" in given:
        return timm.create_model(name, **given)
    try:
        return timm.create_model(name, img_size=size, **given)
    except TypeError as error:
        if "img_size" not in str(error):  # a convolutional network takes images of any size
            raise
        return timm.create_model(name, **given)


def built_model(
    function: Function | None, name: str, own: dict[str, Any], from_data: dict[str, Any]
) -> nn.Module:
    """What `file.py:build` returns. It gets the arguments that it names, of those that the data
    decides and `own`.
    """
    if function is None:
        raise ConfigError(
            "The trial",
            [f"model.name: the function {name} is not at hand; start it with dampen compare"],
        )
    build: Any = function.load()
    takes = inspect.signature(build).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    unknown = [k for k in own if k not in takes and not any_name]
    if unknown:
        raise ConfigError(
            "The model",
            [f"{name} takes no argument {unknown[0]!r}; it takes {', '.join(takes) or 'none'}"],
        )
    missing = [
        p.name for p in takes.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    missing = [n for n in missing if n not in from_data and n not in own]
    if missing:
        known = ", ".join(f"{k}={v}" for k, v in from_data.items())
        raise ConfigError(
            "The model", [f"{name} needs {', '.join(missing)}; the data decides {known}"]
        )
    model = build(**{k: v for k, v in from_data.items() if k in takes}, **own)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "The model", [f"{name} must return a torch.nn.Module, got {type(model).__name__}"]
        )
    return model


def hub_model(
    folder: str | None, model: dict[str, Any], own: dict[str, Any], from_data: dict[str, Any]
) -> nn.Module:
    """A classifier, or a model of the task, from a saved folder: its weights where there are some,
    a fresh head.
    """
    if folder is None or not Path(folder).is_dir():
        raise ConfigError(
            "The trial",
            [f"model.name: {model['name']} is not at hand; start it with dampen compare"],
        )
    from dampen.studies.files import fingerprint

    if fingerprint(folder) != model["fingerprint"]:
        problem = f"the model in {folder} has changed since the trial was planned"
        problem += "; start the comparison again"
        raise ConfigError("The trial", [f"model.name: {problem}"])
    require_no_remote_code(folder)
    task = TASKS.get(from_data.get("task", ""))
    if task is not None and task.saved_model is not None:
        return task.saved_model(folder, own, from_data)
    kind, config = _kind_and_config(folder, own, from_data)
    if _has_weights(folder):
        built = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
        )
    else:
        built = kind.from_config(config, trust_remote_code=False)
    return _InOrder(built)


def _kind_and_config(
    folder: str, own: dict[str, Any], from_data: dict[str, Any]
) -> tuple[Any, Any]:
    declare_torchvision_operators()
    from transformers import (
        AutoConfig,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()  # a new head is intended
    logging.disable_progress_bar()
    sizes: dict[str, Any] = {"num_labels": from_data["classes"]}
    if "channels" in from_data:
        sizes |= {"image_size": from_data["image_size"], "num_channels": from_data["channels"]}
    options = {**sizes, **own, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(folder, **options)
    if (
        "vocab" in from_data
        and not _has_weights(folder)
        and getattr(config, "vocab_size", 0) < from_data["vocab"]
    ):
        config.vocab_size = from_data["vocab"]
    if "channels" in from_data:
        return AutoModelForImageClassification, config
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = from_data.get("pad", 0)
    return AutoModelForSequenceClassification, config


def _has_weights(folder: str) -> bool:
    return any(
        next(Path(folder).glob(pattern), None)
        for pattern in ("*.safetensors", "pytorch_model*.bin")
    )


class _InOrder(nn.Module):
    """A Hugging Face classifier that takes inputs in order and returns logits."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.takes = set(inspect.signature(model.forward).parameters)

    def forward(
        self, x: Tensor, padding: Tensor | None = None, types: Tensor | None = None
    ) -> Tensor:
        if x.is_floating_point():
            logits: Tensor = self.model(pixel_values=x).logits
            return logits
        given: dict[str, Any] = {"input_ids": x}
        if padding is not None:
            given["attention_mask"] = (~padding).long()
        if types is not None and "token_type_ids" in self.takes:
            given["token_type_ids"] = types
        logits = self.model(**given).logits
        return logits


# --- what a run takes over from its pretraining
#
# What a run takes over from its pretraining: weights, facts for the record, the prepared data.

FACTS = ("valid", "train", "selected_epoch", "epochs", "steps", "seconds", "parameters")


@dataclass(frozen=True)
class Pretrained:
    """What a classifier starts from: the autoencoder's weights, and what its training gave for the
    record.
    """

    model: str
    weights: dict[str, Tensor]
    facts: dict[str, Any]

    def enter(self, model: nn.Module) -> None:
        """Put the encoder into a classifier; its head stays as it was initialized."""
        brings_task(self.model).load_encoder(model, self.weights)


def load_pretrained(folder: Path) -> Pretrained:
    """The selected state of the pretraining in a trial's folder."""
    final = RunStore(folder / PRETRAIN).final()
    state, damage = load_newest(folder / PRETRAIN, "weights")
    if state is None or final is None:
        why = damage[0] if damage else "there are none"
        raise LabError(
            f"{folder / PRETRAIN} has no pretrained weights: {why}. Delete {folder} to run the "
            "trial again."
        )
    return Pretrained(
        RunStore(folder / PRETRAIN).trial().model["name"],
        state["model"],
        {key: final[key] for key in FACTS if key in final},
    )


def close_with_pretraining(trial: Run, folder: Path) -> dict[str, Any]:
    """Write the result of a trial whose pretraining diverged: it diverged before its first step."""
    record, first = RunStore(folder), RunStore(folder / PRETRAIN)
    result = {**(first.final() or {}), "id": trial.id, **judged_by("image")}
    result["reason"] = f"In the pretraining ({PRETRAIN}/): {result['reason']}"
    record.start(trial, first.sessions()[-1])
    record.finish(result)
    return result


def report_as_pretraining(
    report: Callable[[dict[str, Any]], None],
) -> Callable[[dict[str, Any]], None]:
    """The events of a pretraining that its trial reports: progress, not results of epochs."""

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "progress", "warning"):
            report({**event, "phase": "pretraining"})

    return tell


def prepared_by(model: nn.Module, name: str, data: Dataset) -> Dataset:
    """The data as the model wants it: unchanged, but for a model that brings its own task."""
    kind = brings_task(name)
    if kind is None:
        return data
    if data.task not in kind.takes:
        needs = " or ".join(kind.takes)
        raise ConfigError(
            "The trial",
            [f"model.name: {name!r} needs {needs} data; {data.name} is a data set for {data.task}"],
        )
    prepared: Dataset = cast(Any, model).prepare(data)
    return prepared
