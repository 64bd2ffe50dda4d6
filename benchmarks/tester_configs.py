"""Tiny configurations and batches of transformers' families and diffusers' models, from those projects' own tests.

    python -m benchmarks.tester_configs transformers CHECKOUT   # writes benchmarks/tiny_transformers.json
    python -m benchmarks.tester_configs diffusers CHECKOUT      # writes benchmarks/tiny_diffusers.json

CHECKOUT is a clone of the project (its tests are not in the package). `benchmarks.tiny_models` prefers an entry of
these tables, and builds what they lack from the names of sizes alone."""

from __future__ import annotations

import importlib
import inspect
import json
import signal
import sys
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

LARGEST_EXACT = 1024


def test_modules(checkout: Path, pattern: str) -> Iterator[tuple[str, ModuleType]]:
    """The modules of a library's model tests that can be imported here; the others are named."""
    for path in sorted((checkout / "tests/models").glob(pattern)):
        name = ".".join(path.relative_to(checkout).with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except BaseException as error:  # pytest's own skip is no Exception
            print(f"{name}: {type(error).__name__}: {str(error)[:100]}")
            continue
        yield name, module


def cases(checkout: Path) -> dict[str, Any]:
    """Every family's configuration and batch, and what hindered the others."""
    kinds = {config: kind for kind, config in CONFIG_MAPPING.items() if config in MODEL_MAPPING}
    found: dict[str, Any] = {}
    for name, module in test_modules(checkout, "*/test_modeling_*.py"):
        for test in vars(module).values():
            if not (inspect.isclass(test) and issubclass(test, unittest.TestCase)):
                continue
            signal.alarm(60)
            try:
                for kind, case in of_test(test, kinds):
                    found.setdefault(kind, case)
            except BaseException as error:
                print(f"{name}.{test.__name__}: {type(error).__name__}: {str(error)[:100]}")
            signal.alarm(0)
    return found


def diffusers_cases(checkout: Path) -> dict[str, Any]:
    """Every model's arguments and batch."""
    found: dict[str, Any] = {}
    for name, module in test_modules(checkout, "*/test_models_*.py"):
        for test in vars(module).values():
            if (
                not inspect.isclass(test)
                or test.__module__ != name
                or not hasattr(test, "model_class")
            ):
                continue
            signal.alarm(60)
            try:
                model, arguments, inputs = of_diffusers_test(test)
                case = {
                    "config": json.loads(json.dumps(arguments)),
                    "inputs": {k: spec(v) for k, v in inputs.items()},
                }
                found.setdefault(model, case)
            except BaseException as error:
                print(f"{name}.{test.__name__}: {type(error).__name__}: {str(error)[:100]}")
            signal.alarm(0)
    return found


def of_diffusers_test(test: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    torch.manual_seed(0)
    if hasattr(test, "get_init_dict"):
        one = test()
        return one.model_class.__name__, one.get_init_dict(), one.get_dummy_inputs()
    one = test(next(n for n in dir(test) if n.startswith("test_")))
    arguments, inputs = one.prepare_init_args_and_inputs_for_common()
    return one.model_class.__name__, arguments, inputs


def of_test(test: Any, kinds: dict[Any, str]) -> list[tuple[str, Any]]:
    """The cases of one test class: its tester's configuration, as the base model of its family takes it."""
    classes = getattr(test, "all_model_classes", ())
    if not classes:
        return []
    method = next((n for n in dir(test) if n.startswith("test_")), "setUp")
    one = test(method)
    one.setUp()
    tester = getattr(one, "model_tester", None)
    if tester is None:
        return []
    for size in ("batch_size",):
        if isinstance(getattr(tester, size, None), int):
            setattr(tester, size, 2)
    torch.manual_seed(0)
    config, inputs = tester.prepare_config_and_inputs_for_common()
    kind = kinds.get(type(config))
    if kind is None:
        return []
    inputs = {
        k: v for k, v in inputs.items() if k not in ("labels", "return_dict") and v is not None
    }
    base = MODEL_MAPPING[type(config)]
    base = base[0] if isinstance(base, tuple) else base
    model = base if base in classes else classes[0]
    accepted = inspect.signature(model.forward).parameters
    inputs = {k: spec(v) for k, v in inputs.items() if k in accepted or not isinstance(v, Tensor)}
    diff = json.loads(json.dumps(config.to_diff_dict(), default=str))
    diff.pop("transformers_version", None)
    return [(kind, {"model": model.__name__, "config": diff, "inputs": inputs})]


def spec(value: Any) -> Any:
    """A tensor as data: whole numbers as they are, random numbers by their shape."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.unique().numel() > 2:
            return {"shape": list(value.shape), "mean": round(float(value.mean()), 1)}
        if value.numel() <= LARGEST_EXACT:
            return {"dtype": str(value.dtype)[6:], "values": value.tolist()}
        return {
            "shape": list(value.shape),
            "dtype": str(value.dtype)[6:],
            "high": int(value.max()) + 1,
        }
    if isinstance(value, dict):
        return {"dict": {k: spec(v) for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [spec(v) for v in value]
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, nn.Module) or value is None:
        return None
    raise TypeError(f"an input of type {type(value).__name__}")


def main() -> None:
    warnings.simplefilter("ignore")
    library, checkout = sys.argv[1], Path(sys.argv[2])
    sys.path.insert(0, str(checkout))
    found = dict(
        sorted((cases if library == "transformers" else diffusers_cases)(checkout).items())
    )
    lines = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in found.items()
    )
    table = Path(__file__).parent / f"tiny_{library}.json"
    table.write_text("{\n" + lines + "\n}\n")
    print(len(found), "models,", table.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
