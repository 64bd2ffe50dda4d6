"""Make torchvision importable beside a CPU build of torch.

torchvision's wheel on the Python package index is built for CUDA. Beside a CPU torch its compiled extension does not
load, and its import then dies with `operator torchvision::nms does not exist`, taking timm, torchmetrics and
Lightning with it. Declaring the two operators that the import mentions is enough; nothing here ever calls them."""

import importlib.machinery
import importlib.util
from pathlib import Path

import torch

_library: torch.library.Library | None = None  # the declarations live as long as this object


def cure_torchvision() -> bool:
    """Declare torchvision's operators if its extension cannot do so itself; return whether that was needed.

    Call it before the first import of torchvision, timm, torchmetrics, lightning or transformers' vision models.
    """
    global _library
    if _library is not None:
        return True
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _extension_loads(spec):
        return False
    _library = torch.library.Library("torchvision", "FRAGMENT")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return True


def _extension_loads(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether torchvision's own extension registers its operators, as torchvision.extension would make it."""
    extension = next((p for root in spec.submodule_search_locations or [] for p in _extensions(root)), None)
    if extension is None:
        return False
    try:
        torch.ops.load_library(extension)
    except OSError:  # a CUDA build without its CUDA libraries
        return False
    return hasattr(torch.ops.torchvision, "nms")


def _extensions(root: str) -> list[str]:
    return sorted(str(p) for p in Path(root).glob("_C*.so")) + sorted(str(p) for p in Path(root).glob("_C*.pyd"))
