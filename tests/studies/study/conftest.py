"""A training script of a user's, small enough to run in a second, and ways to run it."""

import pytest

from dampen.studies.request import request_own
from dampen.studies.trainer.state import Execution
from dampen.studies.trainer.train import run_trial
from dampen.studies.trainer.user_function import function_in_file

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dampen


def train(trial):
    model = dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=16, depth=2, heads=2, mlp=32, classes=4)
    start = model.head.weight.detach().clone()
    reg = trial.regularize(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.params.get("lr", 1e-3))
    draw = torch.Generator().manual_seed(7)
    x, y = torch.randn(48, 1, 8, 8, generator=draw), torch.randint(0, 4, (48,), generator=draw)
    loader = DataLoader(TensorDataset(x, y, torch.arange(48)), batch_size=16, shuffle=True)
    epochs, first, seen = trial.params.get("epochs", 4), 0, []
    state = trial.resume()
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, seen = state["epoch"], state["seen"]
    for epoch in range(first, epochs):
        for i, (xb, yb, index) in enumerate(loader):
            reg.progress((3 * epoch + i) / (3 * epochs))
            loss, terms = reg.loss(lambda: model(xb), lambda out: F.cross_entropy(out, yb))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(index.tolist())
        with torch.no_grad():
            model.eval()
            accuracy = (model(x).argmax(-1) == y).float().mean()
            model.train()
        trial.log(epoch=epoch + 1, train=terms, valid={"accuracy": accuracy})
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1, "seen": seen}
        trial.checkpoint(state)
    torch.save({"start": start, "order": torch.tensor(seen), "end": model.state_dict()}, trial.folder / "seen.pt")
    return {"accuracy": accuracy, "nll": loss.item()}
"""


@pytest.fixture
def script(tmp_path):
    """The path of the script."""
    path = tmp_path / "project" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def ask(script, tmp_path):
    """What a comparison of the script consists of; keywords as of `request_own`."""

    def asked(methods="drop_key(rate=0.2)", seeds=2, name="train", **options):
        options.setdefault("folder", tmp_path / "runs")
        return request_own(function_in_file(f"{script}:{name}"), methods, seeds, **options)

    return asked


@pytest.fixture
def run():
    """Runs every trial of what was asked in this process; returns the results by row and seed."""

    def runs(asked, **execution):
        options = Execution(
            threads=1,
            progress_seconds=0.0,
            checkpoint_seconds=1e9,
            function=asked.function,
            **execution,
        )
        asked.plan.save(asked.folder)
        found = {}
        for row in asked.plan.configs:
            for seed, trial in row.settings[0].ids.items():
                found[row.name, int(seed)] = run_trial(
                    asked.plan.runs[trial], asked.folder / trial, options
                )
        return found

    return runs
