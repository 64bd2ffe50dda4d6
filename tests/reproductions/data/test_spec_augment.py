"""SpecAugment, which this plug-in adds to the augmentations."""

import pytest
import torch

from dampen.studies.checks import check_data
from dampen.studies.data import augment, load
from tests.reproductions.data import writers


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    return load("fsdd", writers.fsdd(tmp_path_factory.mktemp("fsdd")), partial=True)


def test_specaugment_masks_bands_and_times(spoken):
    torch.manual_seed(0)
    batch = spoken.train.batch(range(30))
    x, padding = batch["inputs"]
    after, same = augment({"name": "specaugment", "times": 0}, spoken)(batch)["inputs"]
    assert torch.equal(same, padding)
    masked = (after == 0) & (x != 0)
    by_band = masked.view(30, 32, 4, 40)[~padding]  # 4 frames of 40 bands make a token
    assert (by_band.any(dim=1) == by_band.all(dim=1)).all()
    widths = masked[:, 0, :40].sum(dim=1)
    assert 0 < widths.max() <= 16
    after = augment({"name": "specaugment", "bands": 0, "times": 1, "time_width": 5}, spoken)(
        batch
    )["inputs"][0]
    rows = ((after == 0) & (x != 0)).any(dim=2).sum(dim=1)
    assert rows.max() <= 5
    assert torch.equal(after[after != 0], x[after != 0])


def test_it_is_for_spectrograms_alone():
    assert not check_data({"name": "fsdd", "augment": ["specaugment"]}, "data.")
    (problem,) = check_data({"name": "digits", "augment": ["specaugment"]}, "data.")
    assert "'specaugment' is for audio and detection tasks, this set is image" in problem
