"""The seeds of a configuration as one model, against numpy."""

import numpy as np
import pytest

from dampen.studies.ensembles import ensembles, ensembles_in_words, take_predictions
from dampen.studies.errors import Refused
from dampen.studies.report.page import make_page
from dampen.studies.request import request_own
from dampen.studies.study import Study
from dampen.studies.trainer.user_function import function_in_file

BODY = """
import numpy as np, torch, dampen


def train(trial):
    trial.regularize(dampen.models.ViT(image_size=8, patch_size=4, channels=1, width=8, depth=1, heads=2, mlp=8, classes=2))
    rng = np.random.default_rng(trial.seed)
    p = rng.dirichlet(np.ones(3), 50)
    y = np.arange(50) % 3
    return {"accuracy": (p.argmax(1) == y).mean(), "predictions": torch.tensor(p), "targets": y}
"""


def test_the_seeds_of_a_configuration_are_an_ensemble(tmp_path, run):
    file = tmp_path / "train.py"
    file.write_text(BODY)
    asked = request_own(function_in_file(f"{file}:train"), "drop_key", 4, folder=tmp_path / "runs")
    run(asked)
    found = {(e.name, e.metric): e for e in ensembles(asked.plan, asked.folder)}
    draws = [np.random.default_rng(seed).dirichlet(np.ones(3), 50) for seed in range(4)]
    y = np.arange(50) % 3
    one = found["drop_key", "accuracy"]
    assert one.members == 4
    assert one.alone == pytest.approx(np.mean([(p.argmax(1) == y).mean() for p in draws]))
    assert one.together == pytest.approx((np.mean(draws, axis=0).argmax(1) == y).mean())
    nll = -np.log(np.mean(draws, axis=0)[np.arange(50), y]).mean()
    assert found["plain", "nll"].together == pytest.approx(nll)
    assert "drop_key, ensemble of 4 seeds: accuracy" in str(Study(asked.folder, asked.plan))
    table = Study(asked.folder, asked.plan).results
    told = ensembles_in_words(table)  # in the terminal and on the page
    assert found["plain", "accuracy"].in_words() in told
    assert "nll" not in told  # the metric that judges
    assert told in make_page([table], [])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ({"predictions": [[0.5, 0.5]]}, "no 'targets'"),
        ({"predictions": [[0.5, 0.5]], "targets": [0, 1]}, r"shape \(1, 2\) for targets of shape"),
        ({"predictions": [[2.0, 0.5]], "targets": [0]}, "apply softmax"),
    ],
)
def test_predictions_that_make_no_ensemble_are_refused(returned, told):
    with pytest.raises(Refused, match=told):
        take_predictions({"accuracy": 0.5} | returned, "train")
