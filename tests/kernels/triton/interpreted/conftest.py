"""What the interpreted kernels need: a CPU that counts as a GPU, and products of bfloat16."""

import os

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


def _multiplies_bfloat16():
    """Triton's interpreter keeps bfloat16 as its bits and multiplies those: give it the numbers."""
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        numbers = [
            interpreter.TensorHandle(
                (t.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32
            )
            if t.dtype.scalar == interpreter.tl.bfloat16
            else t
            for t in (a, b)
        ]
        return plain(self, *numbers, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


if INTERPRETED:
    _multiplies_bfloat16()


@pytest.fixture
def as_gpu(monkeypatch):
    """The CPU is taken for a GPU with 1 GB of free memory."""
    from dampen.kernels import columns, kernel, long_sequences
    from dampen.methods import dropouts

    def on_gpu(t):
        return t.device.type == "cpu"

    for module in (kernel, dropouts):
        monkeypatch.setattr(module, "on_gpu", on_gpu)
    monkeypatch.setattr("dampen.masks.on_gpu", on_gpu)
    monkeypatch.setitem(long_sequences._free, 0, 2**30)
    assert columns.COLUMNS_FROM > 0
    torch.manual_seed(0)
