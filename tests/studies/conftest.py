"""Small trials that train in about a second: digits, a two-layer ViT, one thread."""

import pytest
import torch

from dampen.studies.report import make_report
from dampen.studies.run import Run
from dampen.studies.trainer.state import Execution
from tests.studies.synthetic_runs import write_study


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums depend on the number of threads; workers of these tests use one as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small():
    """A function that makes a small trial; keywords go into `train`."""

    def make(methods=(), seed=0, **train):
        return Run.from_dict(
            {
                "data": {"name": "digits", "limit": 300},
                "model": {
                    "name": "vit",
                    "patch_size": 4,
                    "width": 16,
                    "depth": 2,
                    "heads": 2,
                    "mlp": 32,
                },
                "methods": list(methods),
                "train": {"epochs": 2, "batch_size": 32, "lr": 2e-3, **train},
                "seed": seed,
            }
        )

    return make


@pytest.fixture
def quick():
    """Runs on one thread of the CPU, saves nothing between epochs unless asked, reports every step."""
    return Execution(threads=1, accelerator="cpu", progress_seconds=0.0, checkpoint_seconds=1e9)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A folder of synthetic runs, to be read only."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    write_study(folder)
    return folder


@pytest.fixture(scope="module")
def table(study):
    """The table of `study`."""
    return make_report([study]).tables[0]
