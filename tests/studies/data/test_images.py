"""Embedded digits and image folders."""

import numpy as np
import pytest
import torch
from PIL import Image

from dampen.studies.data import DamagedData, MissingData, load
from dampen.studies.data.dataset import Normalization
from dampen.studies.data.images import ImageSplit, channel_statistics
from tests.reproductions.data import writers


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    dataset = load("digits")
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (944, 404, 449)
    ours = torch.cat([split.images for split in dataset.splits.values()]).flatten(1).numpy() // 15
    theirs = load_digits().data.astype(np.uint8)
    assert sorted(row.tobytes() for row in ours) == sorted(row.tobytes() for row in theirs)
    counts = torch.bincount(dataset.test.labels)
    assert counts.min() >= 43  # a quarter of 174 to 183 of each
    assert torch.equal(load("digits", seed=5).test.images, dataset.test.images)
    assert not torch.equal(load("digits", seed=5).train.images, dataset.train.images)


def test_statistics_agree_with_numpy():
    images = torch.randint(0, 256, (7, 3, 5, 4), dtype=torch.uint8)
    images[:, 2] = 9  # no contrast at all
    found = channel_statistics(images)
    values = images.double().numpy() / 255
    np.testing.assert_allclose(found.mean, values.mean(axis=(0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(found.std[:2], values.std(axis=(0, 2, 3))[:2], rtol=1e-6)
    assert found.std[2] == 1


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG"])
def test_a_folder_of_classes(tmp_path, suffix):
    writers.image_folder(tmp_path, suffix=suffix)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    dataset = load("folder", tmp_path, size=16)
    assert dataset.classes == ["cat", "dog"]
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (8, 4, 4)
    for split in dataset.splits.values():
        assert split.images.shape[1:] == (3, 16, 16)
        assert torch.equal(
            split.images.float().mean(dim=(2, 3))[:, :2].argmax(dim=1), split.labels
        )  # red cats, green dogs
    assert any("no test split" in words for words in dataset.info["departures"])


def test_official_parts_of_a_folder_are_kept(tmp_path):
    for part, n in (("train", 6), ("val", 2), ("test", 3)):
        writers.image_folder(tmp_path / part, n=n)
    dataset = load("folder", tmp_path, size=8, channels=1)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (12, 4, 6)
    assert dataset.info["departures"] == []
    assert dataset.model_args == {"image_size": 8, "channels": 1, "classes": 2}
    writers.image_folder(tmp_path / "test", classes=("cat", "dog", "yak"), n=1)
    with pytest.raises(DamagedData, match=r"classes that the training split lacks: \['yak'\]"):
        load("folder", tmp_path)


def test_resizing_keeps_the_middle(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        pixels = np.zeros((10, 30, 3), np.uint8)
        pixels[:, 10:20] = 200
        for i in range(8):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    dataset = load("folder", tmp_path, size=10)
    assert (dataset.train.images == 200).all()


def test_a_broken_image_is_named(tmp_path):
    writers.image_folder(tmp_path)
    victim = tmp_path / "dog" / "3.png"
    victim.write_bytes(victim.read_bytes()[:60])
    with pytest.raises(DamagedData, match=r"3.png is damaged or truncated \(60 bytes\)"):
        load("folder", tmp_path)
    with pytest.raises(MissingData, match=r"CLASS/\*"):
        load("folder", tmp_path / "dog")
    with pytest.raises(ValueError, match=r"1 .gray. or 3"):
        load("folder", tmp_path, channels=4)


def test_a_split_refuses_other_types_and_statistics_that_are_not_finite():
    unit = Normalization(torch.zeros(1), torch.ones(1))
    with pytest.raises(ValueError, match=r"uint8 \(n, channels, height, width\)"):
        ImageSplit(torch.zeros(2, 1, 4, 4), torch.zeros(2), unit)
    with pytest.raises(ValueError, match="finite"):
        Normalization(torch.tensor([float("nan")]), torch.ones(1))
