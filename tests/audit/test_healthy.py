"""No false alarm on two dozen models of the libraries that people use."""

import pytest
import torch

import dampen
from dampen.auditing.report import places
from tests.audit.healthy import HEALTHY

QUIET = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # transformers' names change
    "ignore:None of the inputs have requires_grad:UserWarning",  # a reentrant checkpoint's first block
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",  # x-transformers' einops
    "ignore:enable_nested_tensor is True:UserWarning",
)


@QUIET
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_raises_no_alarm(name):
    build, example = HEALTHY[name]
    torch.manual_seed(0)
    found = dampen.audit(build(), example)
    assert [str(f) for f in found.findings if f.level != "note"] == []
    assert any(d.in_training for d in found.dropouts) or name == "dampen, regularized"
    assert not any(d.in_eval for d in found.dropouts)
    assert all(found.facts[k] is True for k in ("eval repeatable", "two calls draw differently"))
    assert found.facts.get("recompute draws the same") is (True if "checkpoint" in name else None)
    assert found.facts["samples independent"] in (True, "along axis 1")


def test_there_are_twenty_models():
    assert len(HEALTHY) >= 20


def test_names_of_modules_are_short():
    assert places([f"blocks.{i}.drop" for i in range(12)]) == "blocks.*.drop (x12)"
