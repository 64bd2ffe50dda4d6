"""A detector from a folder that Hugging Face saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from reproductions.models.detr import Detections


def saved_detector(folder: str, own: dict[str, Any], from_data: dict[str, Any]) -> nn.Module:
    """The detector in `folder`: its weights where there are some, a fresh head. It takes images of
    any size.
    """
    from transformers import AutoConfig, AutoModelForObjectDetection
    from transformers.utils import logging

    logging.set_verbosity_error()  # that the head is new is what was asked for
    logging.disable_progress_bar()
    safe = {"local_files_only": True, "trust_remote_code": False}
    options = {"num_labels": from_data["classes"], **own, **safe}
    config = AutoConfig.from_pretrained(folder, **options)
    if any(
        next(Path(folder).glob(pattern), None)
        for pattern in ("*.safetensors", "pytorch_model*.bin")
    ):
        model = AutoModelForObjectDetection.from_pretrained(
            folder, config=config, ignore_mismatched_sizes=True, **safe
        )
    else:
        model = AutoModelForObjectDetection.from_config(config, trust_remote_code=False)
    return SavedDetector(model, from_data["classes"])


class SavedDetector(nn.Module):
    """A Hugging Face detector (DETR and its kin) whose output the loss and the metrics can read.

    DETR's own logits have one class more, 'no object'; here each class is a yes or no, so that one
    is left out. Only the last layer's detections are handed over: transformers keeps those of
    earlier layers to its own loss."""

    def __init__(self, model: nn.Module, classes: int):
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, x: Tensor) -> Detections:
        found = self.model(pixel_values=x)
        return Detections(found.logits[..., : self.classes], found.pred_boxes)
