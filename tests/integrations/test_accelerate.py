"""Accelerate: one process against a loop by hand, two against one, checkpoints, and the order of things."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

import dampen
from dampen import DropKey, ExplicitDropout, HardMasking
from dampen.integrations import accelerate as integration
from tests.integrations.accelerate_worker import batches, methods, train, vit
from tests.integrations.tiny import METHODS, same, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def by_hand(model, reg, accumulation):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, (x, y) in enumerate(batches()):
        torch.manual_seed(10 * step)
        if reg is None:
            loss = F.cross_entropy(model(x), y)
        else:
            reg.progress(step // accumulation / (8 // accumulation))
            loss, _ = reg.loss(lambda x=x: model(x), lambda out, y=y: F.cross_entropy(out, y))
        (loss / accumulation).backward()
        losses.append(loss.item())
        if (step + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", ["stochastic", "penalty", "two_pass"])
def test_one_process_equals_a_loop_by_hand(kind, accumulation):
    model, twin = vit(), vit()
    reg = dampen.regularize(model, METHODS[kind]())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    integration.install(accelerator, reg)
    losses = train(wrapped, reg, accelerator, optimizer, accumulation)
    assert losses == by_hand(twin, dampen.regularize(twin, METHODS[kind]()), accumulation)
    same(weights(model), weights(twin))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["penalty", "two_pass", "stochastic"])
def test_two_processes(kind, tmp_path):
    """Deterministic penalties: two ranks with half a batch each are one process with the whole. Random methods draw
    differently on each rank, and the ranks still end with one model."""
    out = tmp_path / "out.pt"
    port = str(29500 + os.getpid() % 400 + len(kind))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}",
        str(ROOT / "tests/integrations/accelerate_worker.py"), kind, str(out),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    got = torch.load(out, weights_only=True)
    assert got["ranks"] == 2
    assert all(torch.isfinite(torch.tensor(v)) for v in got["losses"])
    if kind == "penalty":
        model = vit()
        losses = by_hand(model, dampen.regularize(model, methods(kind)), 2)
        assert got["losses"] == pytest.approx(losses, rel=1e-4)
        same(got["weights"], weights(model), tolerance=1e-5)


def test_save_state_and_load_state_carry_schedules_and_learned_rates(tmp_path):
    results = []
    for resume in (False, True):
        model = vit()
        reg = dampen.regularize(model, HardMasking(0.3, learn="rate"))
        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        integration.install(accelerator, reg)
        if resume:
            accelerator.load_state(str(tmp_path / "half"))
        for step, (x, y) in enumerate(batches()):
            if resume and step < 4:
                continue
            if step == 4 and not resume:
                accelerator.save_state(str(tmp_path / "half"))
            torch.manual_seed(step)
            reg.progress(step / 8)
            loss, _ = reg.loss(lambda x=x, m=wrapped: m(x), lambda out, y=y: F.cross_entropy(out, y))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        results.append((weights(model), reg.state_dict()["parameters"]))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


def test_the_order_is_said():
    model = vit()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    with pytest.raises(ValueError, match="was prepared already.*Regularize first"):
        integration.regularize(accelerator, model, DropKey(0.1))
    with pytest.raises(ValueError, match="none of the prepared models"):
        integration.install(accelerator, dampen.regularize(vit(), DropKey(0.1)))


def test_mixed_precision_goes_around():
    """bf16: prepare puts its own forward on the model, outside ours."""
    model = vit()
    reg = dampen.regularize(model, ExplicitDropout(value=3.0))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    wrapped = accelerator.prepare(model)
    x, y = batches()[0]
    loss, terms = reg.loss(lambda: wrapped(x), lambda out: F.cross_entropy(out, y))
    accelerator.backward(loss)
    assert terms["explicit_dropout.value"] > 0
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
