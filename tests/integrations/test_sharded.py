"""Two gloo processes with sharded weights train as one process without: FSDP1, FSDP2, and DeepSpeed where it is."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.sharded_worker import KINDS, by_hand
from tests.integrations.tiny import same

ROOT = Path(__file__).resolve().parents[2]
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"
)


def launched(way, folder, kinds):
    """What the two processes found, by kind of method."""
    out = folder / "out.pt"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0",
        "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(ROOT / "tests/integrations/sharded_worker.py"),
        way, str(out), *kinds,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        "fsdp1",
        "fsdp2",
        pytest.param("zero2", marks=DEEPSPEED),
        pytest.param("zero3", marks=DEEPSPEED),
    ],
)
def test_losses_and_weights_of_one_process(way, tmp_path):
    """Every kind of method; and Mixout's starting weights are held once over all ranks, as the weights are."""
    got = launched(way, tmp_path, KINDS)
    if way == "zero3":  # which cannot do both, and says so before it begins
        assert "or use ZeRO-2, which runs both" in got.pop("two_pass_penalty")["error"]
    failed = {kind: found["error"] for kind, found in got.items() if "error" in found}
    assert failed == {}
    for kind, found in got.items():
        expected = by_hand(kind)
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6), kind
        same(found["weights"], expected["weights"], tolerance=1e-6)
        if "mixout" in kind and way != "zero2":  # ZeRO-2 leaves weights whole
            assert len(found["shares"]) > 0
            assert all(held == whole for held, whole in found["shares"].values())


@pytest.mark.slow
@DEEPSPEED
def test_zero3_without_whole_blocks_says_what_to_do(tmp_path):
    """Weights that are read where the attention runs are gone by then; the feed-forward's are read in their own map."""
    got = launched("zero3_no_leaves", tmp_path, ["exact", "query_key", "explicit_mixout"])
    assert all(
        "set_z3_leaf_modules(model, [type(block)])" in found["error"] for found in got.values()
    )
