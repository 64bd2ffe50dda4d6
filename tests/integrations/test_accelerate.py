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
from tests.integrations.accelerate_worker import HALF, batches, run, vit
from tests.integrations.tiny import METHODS, same, weights

pytestmark = pytest.mark.filterwarnings("ignore:.*")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def by_hand(kind, accumulation, apart=False):
    """`apart`: two passes, as several processes run them, and not one doubled batch, which draws in another order."""
    model, methods = vit(), METHODS[kind]()
    reg = None if methods is None else dampen.regularize(model, methods)
    if reg is not None and apart:
        reg.prefix.doubled.why = "several processes do not double"
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
    return losses, weights(model)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("kind", METHODS)
def test_one_process_equals_a_loop_by_hand_also_when_resumed(kind, accumulation, tmp_path):
    whole, resumed = run(tmp_path, kind, accumulation)
    losses, expected = by_hand(kind, accumulation)
    assert whole["losses"] == losses
    assert resumed["losses"] == losses[HALF:]
    same(whole["weights"], expected)
    same(resumed["weights"], expected)


@pytest.mark.slow
def test_two_processes(tmp_path):
    """With the same batch and draws on both ranks they are one process, whatever the method, resumed or not.
    Deterministic penalties: two ranks with half a batch each are one process with the whole. Random methods draw
    differently on each rank, and the ranks still end with one model."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0", str(ROOT / "tests/integrations/accelerate_worker.py"), str(tmp_path),
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    got = torch.load(tmp_path / "out.pt", weights_only=True)
    for kind in METHODS:
        for accumulation in (1, 4):
            losses, expected = by_hand(kind, accumulation, apart=True)
            whole, resumed = got[f"{kind}-{accumulation}"]
            assert whole["losses"] == pytest.approx(losses, rel=1e-6)
            assert resumed["losses"] == pytest.approx(losses[HALF:], rel=1e-6)
            same(whole["weights"], expected, tolerance=1e-6)
            same(resumed["weights"], expected, tolerance=1e-6)
        halves = got[f"{kind}-halves"]
        assert halves["ranks"] == 2
        assert all(torch.isfinite(torch.tensor(v)) for v in halves["losses"])
        if kind in ("plain", "penalty"):
            losses, expected = by_hand(kind, 2)
            assert halves["losses"] == pytest.approx(losses, rel=1e-4)
            same(halves["weights"], expected, tolerance=1e-5)


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
            loss, _ = reg.loss(
                lambda x=x, m=wrapped: m(x), lambda out, y=y: F.cross_entropy(out, y)
            )
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
