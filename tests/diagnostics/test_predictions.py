"""Running models for measurement: batch forms, modes, errors, and a light import."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dampen.diagnostics.predictions import IGNORED, flat, in_mode, predict, split


class Wrapped(nn.Module):
    """Returns an object with `.logits`, as Hugging Face models do, and takes keywords."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, shift=0.0):
        return SimpleNamespace(logits=self.drop(self.inner(x + shift)))


def test_all_batch_forms_agree():
    torch.manual_seed(0)
    model, x, y = Wrapped(), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    expected = model.inner(x)
    for batch in [
        (x, y),
        [x, y],
        ((x,), y),
        ({"x": x}, y),
        {"x": x, "shift": torch.zeros(1), "labels": y},
    ]:
        logits, labels = predict(model, [batch])
        assert torch.equal(logits, expected)
        assert torch.equal(labels, y)
    assert not logits.requires_grad


def test_each_module_gets_its_own_mode_back():
    model = Wrapped()
    model.inner.eval()
    modes = [m.training for m in model.modules()]
    predict(model, [(torch.randn(2, 3), torch.tensor([0, 1]))])
    assert [m.training for m in model.modules()] == modes == [True, False, True]
    with in_mode(model, "train"):
        assert all(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError, match="shapes"):  # an error inside restores them as well
        predict(model, [(torch.randn(2, 4), torch.tensor([0, 1]))])
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(ValueError, match="Unknown mode"), in_mode(model, "test"):
        pass


def test_predictions_per_token_leave_out_the_ignored():
    logits, labels = torch.randn(2, 3, 4), torch.tensor([[1, IGNORED, 2], [3, 0, IGNORED]])
    rows, kept = flat(logits, labels)
    assert kept.tolist() == [1, 2, 3, 0]
    assert torch.equal(rows, logits[labels != IGNORED])


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(3, 2), torch.tensor([0, 1]), ValueError, r"logits \(3, 2\) and labels \(2,\)"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), ValueError, r"\[0, 2\).*got 0 to 2"),
        (torch.zeros(3, 2), torch.tensor([0, 1, -1]), ValueError, "got -1 to 1"),
        (torch.zeros(3, 2), torch.zeros(3), TypeError, "integer class indices"),
        (
            torch.tensor([[0.0, torch.nan], [0.0, 1.0]]),
            torch.tensor([0, 1]),
            ValueError,
            "1 of 2 predictions hold NaN",
        ),
    ],
)
def test_bad_predictions_are_refused(logits, labels, error, message):
    with pytest.raises(error, match=message):
        flat(logits, labels)


def test_bad_data_and_outputs_are_refused():
    with pytest.raises(ValueError, match="nothing to measure"):
        predict(Wrapped(), [])
    with pytest.raises(TypeError, match="got tuple of Tensor, Tensor, Tensor"):
        split((torch.zeros(1),) * 3)
    with pytest.raises(TypeError, match=r"dict with keys \['x', 'y'\]"):
        split({"x": 1, "y": 2})

    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match=r"`\.logits`: got tuple of Tensor, Tensor"):
        predict(Pair(), [(torch.zeros(1, 2), torch.tensor([0]))])


def test_import_brings_no_heavy_library():
    code = (
        "import sys, dampen.diagnostics;print(sorted({'torchmetrics', 'foolbox', 'scipy', 'sklearn', 'torchvision'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
