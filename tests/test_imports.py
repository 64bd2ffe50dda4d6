"""What dampen imports: `import dampen` needs torch alone, whatever is broken beside it; a torchvision built for another
torch is worked around where dampen imports it; names of torch that are private may be missing."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dampen
from dampen import _torch

SOURCES = Path(dampen.__file__).parent
BROKEN = ("timm", "transformers", "torchvision", "torchmetrics", "lightning", "peft", "accelerate")


def test_import_dampen_does_not_break_on_what_is_broken(tmp_path):
    for name in BROKEN:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('broken')\n")
    code = (
        "import torch, dampen\n"
        "model = dampen.models.ViT(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp=8)\n"
        "reg = dampen.regularize(model, [dampen.DropKey(0.1), dampen.DropPath(0.1), dampen.FeedForwardDropout(0.1)])\n"
        "loss, _ = reg.loss(lambda: model(torch.randn(2, 3, 8, 8)), lambda out: out.mean())\n"
        "loss.backward(); print(reg); dampen.remove(model)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(SOURCES.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


NAMED = "from dampen.integrations import declare_torchvision_operators as declare; declare(); "
"""What a script writes where torchvision was built for another torch."""


@pytest.mark.parametrize(
    "code",
    [
        NAMED + "import timm",
        NAMED + "import transformers; transformers.ViTModel",
        "from dampen.integrations import hf; import torchvision",
        "from dampen.studies.metrics import ClassificationMetrics as C; C(3); import torchvision",
    ],
)
def test_where_dampen_imports_other_libraries_torchvision_can_be_imported(code):
    """Also where torchvision's extension does not load beside this torch."""
    assert_runs(f"{code}; import torchvision; torchvision.ops.nms")


def test_import_dampen_leaves_the_import_system_alone():
    assert_runs(
        "import sys; before = list(sys.meta_path); import dampen; dampen.DropKey; "
        "assert sys.meta_path == before; assert 'torchvision' not in sys.modules"
    )


@pytest.mark.parametrize("declared", ["nms", "nms qnms"])
def test_operators_of_torchvision_that_somebody_else_has_declared(declared):
    """Another library may work around the same wheel: what is there is not declared again."""
    assert_runs(
        "import torch; theirs = torch.library.Library('torchvision', 'FRAGMENT')\n"
        f"for name in {declared!r}.split():\n"
        "    theirs.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        f"{NAMED}\n"
        "import torchvision\n"
        "torchvision.ops.nms\n"
    )


def assert_runs(code: str) -> None:
    """The code runs in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_two_passes_without_the_private_name(monkeypatch):
    """torch 2.6 has no `_top_saved_tensors_default_hooks`: less is shared between the passes, and all is right."""
    losses = []
    for missing in (False, True):
        if missing:
            monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
        torch.manual_seed(0)
        model = dampen.models.ViT(
            image_size=8, patch_size=4, width=8, depth=3, heads=2, mlp=12
        ).train()
        reg = dampen.regularize(model, [dampen.DropKey([0.0, 0.3, 0.3]), dampen.RDrop(1.0)])
        x = torch.randn(2, 3, 8, 8)
        torch.manual_seed(1)
        loss, _ = reg.loss(lambda model=model, x=x: model(x), lambda out: out.square().mean())
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])
    assert _torch.saved_tensors_are_hooked()
    assert not _torch.checkpointing_now()
    with dampen.deterministic(model):
        model(x)


@pytest.mark.parametrize("name", ["_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_without_the_questions_to_the_processor(name, monkeypatch):
    monkeypatch.delattr(torch.cpu, name, raising=False)
    assert _torch.half_in_hardware() in (True, False)


PRIVATE = re.compile(
    r"\btorch\._(?!_)|torch\.\w+\._[a-z]|from torch[\w.]* import _|from torch[\w.]*\._\w+ import"
    r"|\._version\b|\._parameters\b|\._modules\b|\._buffers\b|\._forward_(pre_)?hooks|\._qkv_same_embed_dim|\._reversed_padding"
)


def test_what_is_private_of_torch_stands_in_one_file():
    found = [
        f"{path.relative_to(SOURCES)}: {line.strip()}"
        for path in sorted(SOURCES.rglob("*.py"))
        if path.name != "_torch.py"
        for line in path.read_text().splitlines()
        if PRIVATE.search(line) and "self._version" not in line
    ]
    assert found == []
    assert PRIVATE.search((SOURCES / "_torch.py").read_text())  # seeing works


EXPORTED_TWICE = {
    "Outcome",
    "Subject",
}  # of the contracts and of the lab's engines and bench, by names that are public


def test_no_two_unrelated_classes_share_a_name():
    places = {}
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCES)))
    assert {
        name: found
        for name, found in places.items()
        if len(found) > 1 and name not in EXPORTED_TWICE
    } == {}
    assert {
        name for name, found in places.items() if len(found) > 1
    } == EXPORTED_TWICE  # and no more is excused
