"""The README: short, narrow, its code runs, its links lead somewhere, and it lists every method."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen.registry import methods
from reproductions.pages import front_page

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
MOST_WORDS = 900
WIDEST = 80


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_it_is_short():
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"<!--.*?-->", "", prose, flags=re.DOTALL)
    words = re.sub(r"\]\([^)]*\)", "]", prose).split()
    assert len(words) <= MOST_WORDS


def test_no_line_of_code_scrolls():
    lines = [line for block in blocks(TEXT, r"\w*") for line in block.splitlines()]
    assert lines
    assert max(map(len, lines)) <= WIDEST


def test_its_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT) + re.findall(
        r'(?:src|srcset)="([^"]+)"', TEXT
    )
    local = [target for target in targets if not target.startswith("http")]
    assert len(local) > 30
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_it_lists_every_method_with_its_card():
    linked = set(re.findall(r"\[(\w+)\]\(docs/methods/(\w+)\.md\)", TEXT))
    assert linked == {(cls.__name__, name) for name, cls in methods().items()}


def test_its_findings_are_those_of_the_result_files():
    assert front_page.main(["--check"]) == 0, "run `python -m reproductions.pages.front_page`"


def test_its_first_example_regularizes_a_timm_model():
    scope = {}
    exec(compile(blocks(TEXT, "python")[0], "README.md", "exec"), scope)
    model, reg, x = scope["model"], scope["reg"], torch.randn(1, 3, 224, 224)
    assert str(reg).count("DropKey") >= 1
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    kept = model(x)
    reg.remove()
    assert torch.equal(model(x), kept)


@pytest.mark.parametrize(
    ("line", "made"),
    [(0, [dampen.ExplicitDropout(value=0.1)]), (1, [dampen.RDrop(1.0), dampen.DropHead(0.2)])],
    ids=["penalty", "two passes"],
)
def test_its_lines_for_the_loss_train(line, made):
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    scope = {"model": model, "reg": dampen.regularize(model, made), "criterion": F.mse_loss}
    scope |= {"x": torch.randn(2, 5, 16), "y": torch.randn(2, 5, 16)}
    exec(blocks(TEXT, "python")[1].splitlines()[line], scope)
    scope["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if line == 0:  # the penalty is on top of the task
        assert scope["loss"] > F.mse_loss(model(scope["x"]), scope["y"])
