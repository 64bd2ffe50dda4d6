"""One trial: everything that decides its result, as plain data, under the
name of its content hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dampen.extensions import is_in_file
from dampen.studies.errors import ConfigError
from dampen.studies.methods_text import (
    CODE,
    check_fields,
    check_plain,
    code_of_method,
    coerce,
    compose,
    unknown_keys,
)

FORMAT = 2
"""Part of every hash: raise it when a default changes its meaning. Stored trials
without a format have format 1.

Format 1 drew one split for all seeds where it was not said; since format 2 each seed draws its own.
"""
FUNCTION_FORMAT = 1
"""The same for a user's own training, of which nothing has changed: what was recorded stays."""
PRETRAIN = ("data", "model", "train", "methods", "sites")
"""What a pretraining may have of its own."""
ENCODER = ("image_size", "patch_size", "channels", "width", "depth", "heads", "mlp")
"""The arguments that a ViT and the masked autoencoder around it share."""
FUNCTION = ("name", "code", "params")
"""What is known of a user's own training function: file and name, the hash of its code, the
parameters it gets."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train. Lengths are in epochs; `batch_size` counts the samples of one optimizer step,
    over all devices."""

    epochs: int = 20
    max_steps: int | None = None
    batch_size: int = 64
    eval_batch_size: int = 256
    accumulate: int = 1
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: tuple[float, ...] = (0.9, 0.999)
    schedule: Literal["cosine", "step", "constant"] = "cosine"
    warmup: float = 0.0
    final_lr: float = 0.0
    step_every: float = 30.0
    step_factor: float = 0.1
    label_smoothing: float = 0.0
    clip: float | None = None
    ema: float = 0.0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    devices: int = 1
    strategy: Literal["ddp", "fsdp"] = "ddp"
    validate_every: int = 1
    patience: int | None = None
    select: Literal["best", "last"] = "best"
    condition_every: int | None = (
        None  # steps between measurements of condition numbers, on 16 validation examples
    )
    variance_every: int | None = (
        None  # steps between measurements of the gradient's variance, on 8 training batches
    )
    test_samples: int | None = (
        None  # random forwards that the test averages (Monte Carlo); None: one without dropping
    )

    def steps_per_epoch(self, examples: int) -> int:
        """Whole batches in so many training examples; raises ConfigError, with what to say, where
        there is not one."""
        if examples >= self.batch_size:
            return examples // self.batch_size
        fitting = 2 ** max(0, examples.bit_length() - 2)  # two batches or more
        problem = (
            f"train.batch_size: {self.batch_size} is more than the {examples} training examples"
        )
        raise ConfigError(
            "The trial", [f"{problem}; say for example --set train.batch_size={fitting}"]
        )

    def problems(self, path: str = "train.") -> list[str]:
        """What is wrong with the values, beyond their types."""
        found = []
        for name in (
            "epochs",
            "max_steps",
            "batch_size",
            "eval_batch_size",
            "accumulate",
            "devices",
            "validate_every",
            "patience",
            "condition_every",
            "variance_every",
            "test_samples",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{path}{name}: must be 1 or more, got {value}")
        for name in ("weight_decay", "warmup", "final_lr"):
            if not getattr(self, name) >= 0:
                found.append(f"{path}{name}: must be 0 or more, got {getattr(self, name)}")
        for name in ("lr", "clip", "step_every", "step_factor"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                found.append(f"{path}{name}: must be positive, got {value}")
        for name in ("label_smoothing", "ema", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                found.append(f"{path}{name}: must lie in [0, 1), got {getattr(self, name)}")
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            found.append(f"{path}betas: must be two numbers in [0, 1), got {list(self.betas)}")
        if found:
            return found
        if self.batch_size % (self.accumulate * self.devices):
            found.append(
                f"{path}batch_size: {self.batch_size} samples "
                f"cannot be shared by {self.devices} devices in "
                f"{self.accumulate} equal parts; choose a "
                f"multiple of {self.accumulate * self.devices}"
            )
        if self.variance_every is not None and (self.devices > 1 or self.accumulate > 1):
            found.append(
                f"{path}variance_every: the gradient of a whole "
                "batch is measured on one device, accumulate 1"
            )
        if self.precision == "fp16" and self.strategy == "fsdp" and self.devices > 1:
            found.append(
                f"{path}precision: fp16 needs a gradient "
                "scaler, which fsdp does not have here; use bf16"
            )
        return found


@dataclass(frozen=True)
class Run:
    """A training run as plain data: same trial, same result.

    >>> parts = {"data": {"name": "digits"}, "model": {"name": "vit", "depth": 2}}
    >>> trial = Run.from_dict({**parts, "train": {"lr": 0.001}})
    >>> trial.id == Run.from_dict(parts).id  # 0.001 is the default
    True
    >>> Run.from_dict(trial.to_dict()) == trial
    True
    """

    data: dict[str, Any]
    model: dict[str, Any]
    methods: tuple[dict[str, Any], ...] = ()
    train: TrainOptions = field(default_factory=TrainOptions)
    seed: int = 0
    sites: str = "*"
    pretrain: dict[str, Any] | None = (
        None  # what differs in the pretraining that goes before; None: there is none
    )
    function: dict[str, Any] | None = (
        None  # a training of the user's own, in place of data, model and train: FUNCTION
    )
    format: int = FORMAT

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], what: str = "The trial") -> Run:
        """Read plain data; raise ConfigError with every problem.

        Args:
            mapping: plain data, as a recipe or a record has it.
            what: what it is, for the error message.
        """
        trial, problems = cls.parse(mapping)
        if trial is None or problems:
            raise ConfigError(what, problems)
        return trial

    @classmethod
    def from_stored(cls, mapping: Mapping[str, Any], what: str = "The trial") -> Run:
        """Read the trial of a plan or a record, which may be older than the
        format that is written today.

        Args:
            mapping: plain data, as a plan or a record has it.
            what: what it is, for the error message.
        """
        return cls.from_dict({"format": 1, **mapping}, what)

    @classmethod
    def parse(cls, mapping: Mapping[str, Any], path: str = "") -> tuple[Run | None, list[str]]:
        """The trial, if it could be read, and all problems of its shape; names are for
        `validate.check_trial`.

        Args:
            mapping: plain data.
            path: its place, as a prefix of each problem.
        """
        if mapping.get("function") is not None:
            return _parse_function(mapping, path)
        known = [f.name for f in fields(cls)]
        problems = [p for key, value in mapping.items() for p in check_plain(value, f"{path}{key}")]
        if not isinstance(mapping.get("train", {}), Mapping):
            problems.append(f"{path}train: expected a table, got {mapping['train']!r}")
        if problems:  # nothing below is made for such values
            return None, problems
        problems = unknown_keys(mapping, known, path)
        for key in ("data", "model"):
            section = mapping.get(key)
            if not isinstance(section, Mapping) or not isinstance(section.get("name"), str):
                problems.append(
                    f"{path}{key}.name: missing; say which "
                    f"{'data set' if key == 'data' else 'model'} to use"
                )
        methods, found = parse_methods(mapping.get("methods", []), f"{path}methods")
        problems += found
        values, found = check_fields(TrainOptions, mapping.get("train", {}), f"{path}train.")
        problems += found
        train = TrainOptions(**values)
        problems += train.problems(f"{path}train.")
        for key, hint in (("seed", int), ("sites", str), ("format", int)):
            try:
                coerce(mapping.get(key, hint()), hint)
            except TypeError as error:
                problems.append(f"{path}{key}: {error}")
        pretrain = mapping.get("pretrain") or None  # false in a row switches off what the base says
        if pretrain is not None:
            problems += _check_pretrain(pretrain, mapping.get("model"), f"{path}pretrain")
        if problems:
            return None, problems
        format = mapping.get("format", FORMAT)
        data = mapping["data"] if format < 2 else with_drawn_splits(mapping["data"])
        plain = json.loads(
            json.dumps({"data": data, "model": mapping["model"], "pretrain": pretrain})
        )
        names = {
            "seed": mapping.get("seed", 0),
            "sites": mapping.get("sites", "*"),
            "pretrain": plain["pretrain"],
        }
        trial = cls(plain["data"], plain["model"], methods, train, format=format, **names)
        if pretrain is not None:
            problems = cls.parse(_before(trial), f"{path}pretrain.")[1]
        return (None if problems else trial), problems

    def pretraining(self) -> Run | None:
        """The trial that goes before this one: a masked autoencoder around the same
        encoder, on the same images.

        What `pretrain` does not say is as in this trial, the methods too; condition numbers are
        measured only there.

        >>> trial = Run.from_dict({"data": {"name": "digits"}, "model": {"name": "vit", "depth": 2},
        ...                          "pretrain": {"train": {"epochs": 3}, "model": {"hide": 0.5}}})
        >>> first = trial.pretraining()
        >>> first.model, first.train.epochs, first.pretraining()
        ({'name': 'mae', 'depth': 2, 'hide': 0.5}, 3, None)
        """
        return None if self.pretrain is None else Run.from_dict(_before(self), "The pretraining")

    def to_dict(self) -> dict[str, Any]:
        """Plain data with every default written out; of one's own training only
        what is known about it."""
        plain = json.loads(json.dumps(asdict(self)))
        if self.function is not None:
            return {k: plain[k] for k in ("function", "methods", "seed")}
        del plain["function"]
        out: dict[str, Any] = plain
        return out

    def canonical(self) -> dict[str, Any]:
        """Plain data without what equals the default, so that a new option does
        not rename old trials."""
        if self.function is not None:
            return {
                "format": FUNCTION_FORMAT,
                **{k: _plain_numbers(v) for k, v in self.to_dict().items()},
            }
        default = asdict(TrainOptions())
        train = {k: v for k, v in asdict(self.train).items() if v != default[k]}
        data = {k: v for k, v in self.data.items() if v is not None and v is not False}
        if data.get("noise") == 0:  # no noise is the same as not saying it
            del data["noise"]
        if data.get(
            "folds"
        ):  # before, all folds were normalized by one draw: those are other trials
            data["folds"] = {"count": data["folds"], "learned": "in the fold"}
        parts = {
            "data": data,
            "model": self.model,
            "methods": self.methods,
            "train": train,
            "seed": self.seed,
            "sites": self.sites,
            **({"pretrain": self.pretrain} if self.pretrain else {}),
        }
        return {"format": self.format, **{k: _plain_numbers(v) for k, v in parts.items()}}

    @cached_property
    def id(self) -> str:
        """The content hash that names the trial's folder."""
        text = json.dumps(self.canonical(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def with_drawn_splits(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data section with what draws its splits: the trial's own seed where it is not said.

    A fixed `split_seed` fixes the test split too, where there is no official one. Folds are drawn
    by the seed anyway.

    >>> with_drawn_splits({"name": "digits"})
    {'name': 'digits', 'split_seed': 'seed', 'test_seed': 'seed'}
    >>> with_drawn_splits({"name": "digits", "split_seed": 3})
    {'name': 'digits', 'split_seed': 3, 'test_seed': 3}
    """
    if data.get("folds"):
        return dict(data)
    drawn = data.get("split_seed", "seed")
    return {**data, "split_seed": drawn, "test_seed": data.get("test_seed", drawn)}


def _parse_function(mapping: Mapping[str, Any], path: str) -> tuple[Run | None, list[str]]:
    """A trial that is a user's own function: it has methods and a seed, and no data,
    model or train of ours."""
    function = mapping["function"]
    problems = unknown_keys(mapping, ("function", "methods", "seed", "format"), path)
    if not isinstance(function, Mapping):
        return None, [
            *problems,
            f"{path}function: expected a table with {', '.join(FUNCTION)}, got {function!r}",
        ]
    problems += unknown_keys(function, FUNCTION, f"{path}function.")
    problems += [
        f"{path}function.{key}: expected a string, got {function.get(key)!r}"
        for key in ("name", "code")
        if not isinstance(function.get(key), str)
    ]
    params = function.get("params", {})
    if not isinstance(params, Mapping):
        problems.append(f"{path}function.params: expected a table of values, got {params!r}")
    methods, found = parse_methods(mapping.get("methods", []), f"{path}methods")
    problems += found
    try:
        seed = coerce(mapping.get("seed", 0), int)
        plain = json.loads(json.dumps({**function, "params": dict(params)}, allow_nan=False))
    except (TypeError, ValueError) as error:
        problems.append(
            f"{path}function.params and seed are plain data, such as numbers and strings: {error}"
        )
    if problems:
        return None, problems
    return Run({}, {}, methods, seed=seed, function=plain), []


def _check_pretrain(pretrain: Any, model: Any, path: str) -> list[str]:
    """Problems of the section's shape; its content is checked as the trial it makes."""
    if not isinstance(pretrain, Mapping):
        return [
            f"{path}: expected a table such as {{ train = {{ "
            f"epochs = 4 }} }}, or false, got {pretrain!r}"
        ]
    problems = unknown_keys(pretrain, PRETRAIN, f"{path}.")
    problems += [
        f"{path}.{key}: expected a table, got {pretrain[key]!r}"
        for key in ("data", "model", "train")
        if not isinstance(pretrain.get(key, {}), Mapping)
    ]
    if isinstance(model, Mapping) and model.get("name") != "vit":
        problems.append(
            f"{path}: a masked autoencoder pretrains model 'vit', not {model.get('name')!r}"
        )
    elif isinstance(model, Mapping) and model.get("stem", "patch") != "patch":
        problems.append(
            f"{path}: a masked autoencoder hides patches, so the model needs stem = 'patch'"
        )
    return problems


def _before(trial: Run) -> dict[str, Any]:
    """The plain data of the trial that goes before."""
    own, over = trial.to_dict(), trial.pretrain or {}
    encoder = {k: v for k, v in trial.model.items() if k in ENCODER}
    return {
        "data": own["data"] | over.get("data", {}),
        "model": {"name": "mae"} | encoder | over.get("model", {}),
        "methods": over.get("methods", own["methods"]),
        "train": own["train"]
        | {"condition_every": None, "variance_every": None, "test_samples": None}
        | over.get("train", {}),
        "seed": trial.seed,
        "sites": over.get("sites", trial.sites),
        "format": trial.format,
    }


def parse_methods(methods: Any, path: str) -> tuple[tuple[dict[str, Any], ...], list[str]]:
    """Methods in their one plain form, {"name": ..., argument: value}; a bare string is a method
    with its defaults."""
    if not isinstance(methods, Sequence) or isinstance(methods, str):
        return (), [f"{path}: expected a list of methods, got {methods!r}"]
    parsed, problems = [], []
    for i, method in enumerate(methods):
        if isinstance(method, str):
            method = {"name": method}
        if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
            problems.append(
                f"{path}[{i}]: expected a name or {{ name = "
                f'"drop_key", rate = 0.1 }}, got {method!r}'
            )
            continue
        plain = json.loads(json.dumps(dict(method)))
        if (
            is_in_file(plain["name"])
            and CODE not in plain
            and Path(plain["name"].rpartition(":")[0]).is_file()
        ):
            plain[CODE] = code_of_method(plain["name"])  # other code is another trial
        try:
            parsed += compose(plain)
        except ConfigError as error:
            problems += [f"{path}[{i}]: {problem}" for problem in error.problems]
    return tuple(parsed), problems


def _plain_numbers(value: Any) -> Any:
    """1.0 and 1 are the same value, tuples and lists the same sequence."""
    if isinstance(value, Mapping):
        return {k: _plain_numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_numbers(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
