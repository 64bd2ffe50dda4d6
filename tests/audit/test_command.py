"""`dampen audit`: a model in a file, a folder of runs, and what `dampen.audit` measures beside the dropouts."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dampen
from dampen.auditing import KINDS
from dampen.cli import main
from dampen.studies.store import RunStore
from tests.audit.healthy import HEALTHY
from tests.audit.zoo import ZOO
from tests.studies.synthetic_runs import write_study

FILE = """
import os
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, broken):
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(4, 32), nn.Dropout(0.3), nn.Linear(32, 2)
        self.broken = broken
    def forward(self, x):
        x = self.fc(x)
        return self.head(x if self.broken else self.drop(x))

def build(batch):
    return Model(False), torch.randn(batch, 4)

def broken():
    return Model(True), {"x": torch.randn(3, 4)}

def half(out):
    return out[:, 0].sum() * 0 + 1.0

def with_loss():
    return Model(False), torch.randn(3, 4), half

def alike():
    torch.manual_seed(0)
    return build(4)

def differing():
    torch.manual_seed(int(os.environ["RANK"]))
    return build(4)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FILE)
    return path


def run(capsys, *arguments):
    """Exit code, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main(["audit", *map(str, arguments)])
    out, err = capsys.readouterr()
    return left.value.code or 0, out, err


def test_a_model_in_a_file(capsys, script):
    code, out, _ = run(capsys, f"{script}:build")
    assert code == 0
    assert out.startswith("Model: 1 of 1 dropouts act in training; no problems\n")
    assert "tested" not in out
    assert "switched off" in run(capsys, f"{script}:build", "--full")[1]

    code, out, _ = run(capsys, f"{script}:broken")
    assert code == 1
    assert "problem: drop: dropout: never called" in out
    assert "-> call it in forward: x = self.dropout(x)" in out


def test_as_json_and_what_is_left_out(capsys, script):
    code, out, _ = run(capsys, f"{script}:broken", "--json")
    found = json.loads(out)
    assert code == found["exit_code"] == 1
    assert [f["kind"] for f in found["findings"]] == ["dropout_not_called"]
    assert found["findings"][0]["where"] == ["drop"]
    assert run(capsys, f"{script}:broken", "--ignore", "dropout_not_called")[0] == 0


def test_the_loss_decides_which_parameters_learn(capsys, script):
    assert run(capsys, f"{script}:build")[0] == 0
    for given in ([f"{script}:build", "--loss", f"{script}:half"], [f"{script}:with_loss"]):
        code, out, _ = run(capsys, *given, "--json")
        assert code == 0
        assert set(json.loads(out)["facts"]["parameters with gradient"].split(" of ")) == {"4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}:build", "--ignore", "dropout_not_caled"], "did you mean 'dropout_not_called'"),
        (["{}:nothing"], "has no function 'nothing'"),
        (["{}:half"], "missing a required argument: 'out'"),
        (["missing.csv"], "missing.csv cannot be used"),
    ],
)
def test_wrong_use_is_said(capsys, script, arguments, message):
    code, _, err = run(capsys, *(a.format(script) for a in arguments))
    assert code == 2
    assert message in err


@pytest.mark.slow
@pytest.mark.parametrize(("build", "alike"), [("alike", True), ("differing", False)])
def test_ranks_that_draw_alike_are_a_problem(capsys, script, build, alike):
    code, out, _ = run(capsys, f"{script}:{build}", "--ranks", 2, "--json")
    found = json.loads(out)
    assert code == int(alike)
    assert found["facts"]["ranks draw differently"] is not alike
    assert ("ranks_draw_alike" in [f["kind"] for f in found["findings"]]) == alike
    assert found["tested"]["ranks draw differently"].endswith("each of 2 processes")


def test_a_folder_of_runs_is_answered_by_configuration(capsys, tmp_path):
    methods = {"plain": ([], 0.0, 1.0, None), "DropKey": ([{"name": "drop_key"}], 0.0, 1.0, None)}
    plan = write_study(tmp_path / "runs", methods, seeds=3, epochs=12)
    for id, name in plan.config_of_run().items():
        rise = 0.1 if name == "plain" else 0.0
        lines = [
            {
                "epoch": t,
                "step": 10 * t,
                "train": {"task": math.exp(-t / 2)},
                "valid": {"nll": 1 + math.exp(-t / 2) + rise * t},
            }
            for t in range(1, 13)
        ]
        RunStore(tmp_path / "runs" / id).write_lines(lines)
    code, out, _ = run(capsys, tmp_path / "runs", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["answer"] == "overfits"
    answers = {c["name"]: (c["answer"], len(c["runs"])) for c in found["configurations"]}
    assert answers == {"plain": ("overfits", 3), "DropKey": ("memorizes", 3)}
    code, out, _ = run(capsys, tmp_path / "runs")
    assert "plain: Yes, it overfits (3 of 3 runs)." in out
    assert "The gap at the end is" in out
    assert "DropKey" in out
    assert "--tune 8 --seeds 8" in out


def test_condition_numbers_and_entropy_by_layer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = dampen.audit(model, torch.randn(2, 5, 16), layers=True)
    assert [layer["name"] for layer in found.layers] == ["layers.0", "layers.1"]
    entropies = [layer["attention_entropy"] for layer in found.layers]
    assert all(0 < entropy <= math.log(5) for entropy in entropies)
    assert "ln kappa" in str(found)
    assert found.facts["residual branches"] == 4
    assert found.facts["layers with attention"] == 2
    assert dampen.audit(model, torch.randn(2, 5, 16)).layers == []


class Masked(nn.Module):
    """Attention with one of several masks, in a block with two branches or none."""

    def __init__(self, mask=None):
        super().__init__()
        self.mask, self.qkv, self.fc = mask, nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.zeros(5, 5))

    def forward(self, x):
        masks = {
            "learned": self.bias,
            "causal": torch.ones(5, 5).tril().bool(),
            "empty": torch.ones(2, 1, 1, 5).bool(),
            "padding": (torch.arange(5) < 4).expand(2, 1, 1, 5),
        }
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, masks.get(self.mask))
        return self.fc(y.transpose(1, 2).flatten(2)) + 0 * self.bias.sum()


MASKS = {
    None: ("flash", None),
    "learned": ("math", "runs as math because of its mask"),
    "causal": ("flash", "gets a mask that is causal"),
    "empty": ("flash", "gets a mask that hides nothing"),
    "padding": ("flash", "gets a mask that hides some keys"),
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_kernel_and_what_its_mask_does(mask):
    kernel, what = MASKS[mask]
    found = dampen.audit(Masked(mask), torch.randn(2, 5, 16))
    assert found.facts["attention kernels"] == {kernel: 1}
    told = [f.what for f in found.findings if f.kind == "attention_kernel"]
    assert told == ([what] if what else [])


def test_dropout_takes_torchs_attention_off_its_fused_kernel():
    for rate, kernel in ((0.1, "math"), (0.0, "flash")):
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=rate, batch_first=True)
        found = dampen.audit(layer, torch.randn(2, 5, 16))
        assert found.facts["attention kernels"] == {kernel: 1}
        told = [f.what for f in found.findings if f.kind == "attention_kernel"]
        assert told == (["runs as math because of dropout"] if rate else [])


def test_the_page_lists_every_kind_of_finding():
    page = Path(dampen.__file__).parents[2] / "docs" / "audit.md"
    table = re.findall(r"^\| `(\w+)` \| (.*) \|$", page.read_text(), re.MULTILINE)
    assert dict(table) == KINDS
    counts = re.search(
        r"tried on (\d+) broken models .*?(\d+) healthy", page.read_text(), re.DOTALL
    )
    assert (int(counts[1]), int(counts[2])) == (len(ZOO), len(HEALTHY))
