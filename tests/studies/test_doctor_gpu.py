"""`dampen doctor --gpu` where there is no GPU, and with one that is mocked."""

import json
import warnings

import pytest
import torch

from dampen.kernels.triton import trial
from dampen.studies.doctor import try_gpu


def test_without_a_gpu(tmp_path, monkeypatch):
    path = tmp_path / "gpu.json"
    (found,) = try_gpu(path)
    assert found.ok
    assert "torch finds no GPU" in found.found
    monkeypatch.setenv("DAMPEN_TRITON", "0")
    assert "DAMPEN_TRITON=0" in try_gpu(path)[0].found
    assert not path.exists()


@pytest.mark.parametrize("wrong", ["", "full dq is off by 0.1, torch's attention by 1e-06"])
def test_report_is_written(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(trial, "card", lambda device: "Mock sm_90")
    monkeypatch.setattr(trial, "verdict", lambda device, form: wrong)
    path = tmp_path / "gpu.json"
    with warnings.catch_warnings():
        # a module of numpy 1 inside Triton's runtime
        warnings.simplefilter("ignore", DeprecationWarning)
        (found,) = try_gpu(path)
    assert found.ok == (not wrong)
    report = json.loads(path.read_text())
    assert report["card"] == "Mock sm_90"
    # three dtypes by three head sizes by four kinds of draws, and eleven more
    assert len(report["forms"]) == 3 * 3 * 4 + 11
    assert {"bfloat16 D64 hide top causal", "float16 D64 plain bits"} <= set(report["forms"])
    assert set(report["forms"].values()) == {wrong or "ok"}
