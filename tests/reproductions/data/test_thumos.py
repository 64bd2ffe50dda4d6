"""THUMOS14: frame labels, windows, splits per video, missing videos, both forms of annotations."""

import json

import numpy as np
import pytest
import torch

from dampen.studies.data import DamagedData, IncompleteData, load
from reproductions.data.thumos import frame_labels
from reproductions.data.thumos_annotations import Video
from tests.reproductions.data import writers


def test_frame_labels_against_a_loop():
    rate, frames = 1.5625, 200
    rng = np.random.default_rng(0)
    actions = [
        (int(c), s, s + d)
        for c, s, d in zip(
            rng.integers(0, 3, 9), rng.uniform(0, 120, 9), rng.uniform(1, 9, 9), strict=True
        )
    ]
    shown, counted = frame_labels(
        frames, rate, Video("v", "train", 128, actions, [(10.0, 12.0)]), 3
    )
    for i in range(frames):
        time = (i + 0.5) / rate
        for label in range(3):
            assert shown[i, label] == any(c == label and s <= time <= e for c, s, e in actions)
        assert counted[i] == (not 10 <= time <= 12 or bool(shown[i].any()))


def test_short_and_late_actions():
    video = Video("v", "train", 10, [(0, 3.01, 3.02), (1, 500.0, 501.0)], [])
    shown, _ = frame_labels(10, 1.0, video, 2)
    assert shown[:, 0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]  # marks the nearest frame
    assert shown[:, 1].sum() == 0  # after the last feature


def test_windows_cover_every_frame_and_splits_share_no_video(tmp_path):
    writers.thumos(tmp_path / "thumos14")
    dataset = load("thumos14", tmp_path, partial=True, window=32, stride=16)
    names = {
        part: {line.name for line in split.timelines} for part, split in dataset.splits.items()
    }
    assert not names["train"] & names["valid"]
    assert {len(names["train"]), len(names["valid"])} == {4, 2}
    assert len(names["test"]) == 6
    for part, split in dataset.splits.items():
        seen = torch.zeros(len(split.frames), dtype=torch.int64)
        for i in range(len(split)):
            seen[split.starts[i] : split.starts[i] + split.lengths[i]] += 1
        own = torch.cat(
            [torch.arange(line.first, line.first + line.frames) for line in split.timelines]
        )
        assert (seen[own] >= 1).all()
        assert seen.sum() == seen[own].sum()
        if part != "train":
            assert (seen[own] == 1).all()
    assert dataset.model_args == {"features": 8, "classes": 3, "max_tokens": 32, "per_token": True}
    assert dataset.classes == ["Background", "Dive", "Throw"]


@pytest.mark.parametrize("labels", ["background", "multi"])
def test_targets_sit_on_the_right_frames(tmp_path, labels):
    writers.thumos(tmp_path / "thumos14")
    dataset = load("thumos14", tmp_path, partial=True, window=200, stride=200, labels=labels)
    split = dataset.test
    for i, line in enumerate(split.timelines):
        batch = split.batch([i])
        target, valid = batch["target"][0], batch["valid"][0]
        assert valid.sum() == line.frames
        on = torch.zeros(200)
        on[20:30] = 1
        (label, start, end) = line.actions[0]
        assert (start, end) == (10.0, 15.0)
        if labels == "background":
            assert torch.equal(target[valid, label + 1], on[valid])
            assert torch.equal(target[valid, 0], 1 - on[valid])
        else:
            assert torch.equal(target[valid, label], on[valid])
        x = batch["inputs"][0][0, valid] * dataset.normalization.std + dataset.normalization.mean
        assert (x[20:30, label] > 0.5).all()
    own = torch.cat(
        [dataset.train.frames[t.first : t.first + t.frames] for t in dataset.train.timelines]
    )
    torch.testing.assert_close(dataset.normalization.mean, own.mean(dim=0))
    scale = (own - own.mean(dim=0)).square().mean().sqrt()  # one for all features
    torch.testing.assert_close(dataset.normalization.std, scale.expand(8))
    assert dataset.loss == {"background": "cross_entropy", "multi": "binary_cross_entropy"}[labels]


def test_frames_of_several_actions_share(tmp_path):
    root = writers.thumos(tmp_path)
    table = json.loads((root / "annotations.json").read_text())
    for entry in table["annotations"].values():
        entry["annotations"].append({"label": "Throw", "segment": [12.5, 15]})
        entry["annotations"].append({"label": "Ambiguous", "segment": [1, 2]})
    (root / "annotations.json").write_text(json.dumps(table))
    dataset = load("thumos14", root, partial=True, window=200, stride=200)
    batch = dataset.test.batch([0])  # shows Dive, number 0
    assert batch["target"][0, 22].tolist() == [0, 1, 0]
    assert batch["target"][0, 27].tolist() == [0, 0.5, 0.5]
    assert batch["valid"][0, :6].tolist() == [True, True, False, False, True, True]
    assert not batch["inputs"][1][0, 2]  # ambiguous frames are not hidden from the model


def test_activitynet_form_and_rate(tmp_path):
    root = writers.thumos(tmp_path)
    table = json.loads((root / "annotations.json").read_text())
    (root / "annotations.json").unlink()
    for entry in table["annotations"].values():
        entry["subset"] = {"train": "Validation", "test": "Test"}[entry["subset"]]
    (root / "thumos14.json").write_text(json.dumps({"database": table["annotations"]}))
    with pytest.raises(DamagedData, match=r"feature_rate_hz.*rate="):
        load("thumos14", root, partial=True)
    dataset = load("thumos14", root, partial=True, rate=2.0)
    assert dataset.classes == ["Background", "Dive", "Throw"]
    assert len(dataset.test.timelines) == 6


def test_missing_videos_are_said(tmp_path):
    root = writers.thumos(tmp_path)
    (root / "features" / "video_test_0000003.npy").unlink()
    with pytest.raises(
        IncompleteData, match=r"1 of 6 test videos have no feature file \(video_test_0000003\)"
    ):
        load("thumos14", root)
    info = load("thumos14", root, partial=True).info
    assert info["partial"]
    assert info["videos"]["test"] == 5
    assert any("video_test_0000003" in words for words in info["departures"])


def test_damaged_features_and_annotations(tmp_path):
    root = writers.thumos(tmp_path)
    path = root / "features" / "video_test_0000003.npy"
    content = path.read_bytes()
    for bad in (content[:-10], b"", b"not numpy"):
        path.write_bytes(bad)
        with pytest.raises(DamagedData, match=r"video_test_0000003.npy"):
            load("thumos14", root, partial=True)
    np.save(path, np.zeros((5, 9), np.float32))
    with pytest.raises(DamagedData, match=r"\(5, 9\) as shape, expected frames x 8"):
        load("thumos14", root, partial=True)
    np.save(path, np.full((5, 8), np.nan, np.float32))
    with pytest.raises(DamagedData, match="infinite or undefined"):
        load("thumos14", root, partial=True)
    notes = root / "annotations.json"
    for bad, words in (
        ("{", "not JSON"),
        ("[1]", "neither 'annotations'"),
        ('{"annotations": {"v": {}}, "feature_rate_hz": 1}', "breaks the form"),
        (
            '{"annotations": {"v": {"subset": "test", "duration": 1, '
            '"annotations": [{"label": "A", "segment": [2, 1]}]}}, "feature_rate_hz": 1}',
            "segment",
        ),
    ):
        notes.write_text(bad)
        with pytest.raises(DamagedData, match=words):
            load("thumos14", root, partial=True)


def test_options_are_checked(tmp_path):
    writers.thumos(tmp_path)
    with pytest.raises(ValueError, match="'background'"):
        load("thumos14", tmp_path, partial=True, labels="foreground")
    with pytest.raises(ValueError, match="stride <= window"):
        load("thumos14", tmp_path, partial=True, window=8, stride=9)


@pytest.mark.slow
def test_real_thumos(real_data):
    path, real = real_data("thumos14")
    dataset = load("thumos14", path, partial=True)
    batch = dataset.test.batch([0, 1])
    torch.testing.assert_close(batch["target"].sum(dim=-1), torch.ones(batch["target"].shape[:2]))
    if real:
        assert dataset.info["videos"] == {"train": 132, "valid": 56, "test": 200}
        assert dataset.model_args == {
            "features": 512,
            "classes": 21,
            "max_tokens": 64,
            "per_token": True,
        }
        assert any("12 of 212 test videos" in words for words in dataset.info["departures"])
        shown = dataset.test.target[:, 1:] > 0
        assert shown.any(dim=0).all()
        diving, cliff = (dataset.classes.index(name) - 1 for name in ("Diving", "CliffDiving"))
        assert (shown[:, diving] & shown[:, cliff]).any()  # every cliff dive is a dive too
