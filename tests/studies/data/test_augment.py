"""Augmentations against what they promise, image by image."""

import importlib.util

import pytest
import torch

from dampen.studies.checks import check_data
from dampen.studies.data import AUGMENTATIONS, Dataset, DataSpec, augment
from dampen.studies.data.arrays import ArraySplit
from dampen.studies.data.images import image_dataset
from dampen.studies.doctor import _torchvision

IMAGE = [
    "crop",
    "flip",
    "vertical_flip",
    "randaugment",
    "autoaugment",
    "trivialaugment",
    "mixup",
    "cutmix",
]


@pytest.fixture(scope="module")
def images():
    """Random pixels of ten classes, split like any set of images."""
    draw = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (140, 3, 32, 32), generator=draw, dtype=torch.uint8)
    spec = DataSpec("noise", "image", "", "", "")
    cuts = {"seed": 0, "train_fraction": 0.7, "limit": None}
    names = [str(i) for i in range(10)]
    return image_dataset(spec, pixels, torch.arange(140) % 10, names, {}, test=None, **cuts)


@pytest.fixture(scope="module")
def spoken():
    """Sequences of 12 tokens with padding."""
    draw = torch.Generator().manual_seed(0)
    padding = torch.arange(12) >= torch.randint(4, 13, (30, 1), generator=draw)
    split = ArraySplit((torch.randn(30, 12, 5, generator=draw), padding), torch.arange(30) % 3)
    return Dataset("spoken", "audio", split, split, split, ["a", "b", "c"], {}, {})


def pixels(dataset, x):
    mean, std = (
        v.view(1, -1, 1, 1) for v in (dataset.normalization.mean, dataset.normalization.std)
    )
    return (x * std + mean) * 255


def test_crop_is_a_shift_with_black(images):
    torch.manual_seed(0)
    batch = images.train.batch(range(40))
    before = pixels(images, batch["inputs"][0]).round()
    after = pixels(images, augment("crop", images)(batch)["inputs"][0]).round()
    padded = torch.nn.functional.pad(before, [4] * 4)
    offsets = set()
    for one, wide in zip(after, padded, strict=True):
        hits = [
            (r, c)
            for r in range(9)
            for c in range(9)
            if torch.equal(wide[:, r : r + 32, c : c + 32], one)
        ]
        assert len(hits) == 1
        offsets |= set(hits)
    assert len(offsets) > 20  # each image has its own place


def test_crop_keeps_images_that_are_not_square_in_shape(images):
    batch = images.train.batch(range(6))
    wide = batch | {"inputs": (batch["inputs"][0][:, :, :20],)}
    after = augment({"name": "crop", "padding": 0}, images)(wide)["inputs"][0]
    torch.testing.assert_close(after, wide["inputs"][0], atol=1e-6, rtol=0)
    after = augment({"name": "crop", "padding": 2}, images)(wide)["inputs"][0]
    assert after.shape == wide["inputs"][0].shape


def test_flip_mirrors_about_half(images):
    batch = images.train.batch(range(70))
    after = augment({"name": "flip", "probability": 0.5}, images)(batch)["inputs"][0]
    x = batch["inputs"][0]
    same, mirrored = ((after == y).flatten(1).all(dim=1) for y in (x, x.flip(-1)))
    assert (same ^ mirrored).all()
    assert 15 < mirrored.sum() < 55
    always = augment({"name": "flip", "probability": 1.0}, images)(batch)["inputs"][0]
    assert torch.equal(always, x.flip(-1))


@pytest.mark.parametrize("name", ["randaugment", "autoaugment", "trivialaugment"])
def test_learned_policies_give_images(images, name):
    torch.manual_seed(0)
    batch = images.train.batch(range(16))
    after = augment(name, images)(batch)
    values = pixels(images, after["inputs"][0])
    torch.testing.assert_close(values, values.round(), atol=1e-3, rtol=0)  # still whole gray values
    assert values.min() >= -1e-3
    assert values.max() <= 255.001
    assert not torch.equal(after["inputs"][0], batch["inputs"][0])
    assert torch.equal(after["target"], batch["target"])


def test_a_policy_of_no_operations_is_exact(images):
    batch = images.train.batch(range(8))
    after = augment({"name": "randaugment", "operations": 0}, images)(batch)["inputs"][0]
    torch.testing.assert_close(after, batch["inputs"][0], atol=1e-6, rtol=0)


def test_mixup_mixes_images_and_targets_alike(images):
    torch.manual_seed(3)
    batch = images.train.batch(range(20))
    after = augment({"name": "mixup", "alpha": 1.0}, images)(batch)
    target = after["target"]
    torch.testing.assert_close(target.sum(dim=1), torch.ones(20))
    own = torch.nn.functional.one_hot(batch["target"], 10).float()
    x, mixed = batch["inputs"][0], after["inputs"][0]
    for i in range(20):
        weights = []
        for j in range(20):
            # The weight that explains image i as a mixture of i and j, by least squares; exact for the right j.
            difference = (x[i] - x[j]).flatten()
            if j == i:
                continue
            weight = torch.dot((mixed[i] - x[j]).flatten(), difference) / difference.square().sum()
            if torch.allclose(weight * x[i] + (1 - weight) * x[j], mixed[i], atol=1e-4):
                weights.append((weight, j))
        if not weights:  # i was its own partner
            torch.testing.assert_close(mixed[i], x[i])
            continue
        weight, j = weights[0]
        torch.testing.assert_close(
            target[i], weight * own[i] + (1 - weight) * own[j], atol=1e-3, rtol=0
        )


def test_cutmix_weights_targets_by_area(images):
    checked = 0
    for seed in range(5):
        torch.manual_seed(seed)
        batch = images.train.batch(range(20))
        after = augment("cutmix", images)(batch)
        x, mixed = batch["inputs"][0], after["inputs"][0]
        changed = (x != mixed).any(dim=1)  # (B, 32, 32)
        moved = changed.any(dim=2).any(dim=1)
        area = (
            changed[moved].float().mean(dim=(1, 2)).median()
        )  # random pixels hardly ever agree by chance
        own = torch.nn.functional.one_hot(batch["target"], 10).float()
        kept = (after["target"] * own).sum(dim=1)
        others = kept[(after["target"] > 0).sum(dim=1) == 2]
        if len(others) and moved.any():
            torch.testing.assert_close(others, (1 - area).expand_as(others), atol=0.01, rtol=0)
            checked += 1
    assert checked >= 3


def test_cutmix_takes_rectangles_from_one_other_image_and_mixed_targets_too(images):
    """Each pixel is the image's own or its partner's; soft targets mix by the same share."""
    torch.manual_seed(4)
    batch = images.train.batch(range(12))
    soft = torch.rand(12, 10).softmax(dim=1)
    after = augment({"name": "cutmix", "alpha": 1.0}, images)(batch | {"target": soft})
    x, mixed = batch["inputs"][0], after["inputs"][0]
    for i in range(12):
        partners = []
        for j in range(12):
            own, other = ((mixed[i] == x[k]).all(dim=0) for k in (i, j))
            if j != i and (own | other).all():
                pasted = ~own
                rows, columns = pasted.any(dim=1).sum(), pasted.any(dim=0).sum()
                assert pasted.sum() == rows * columns > 0
                partners.append((j, pasted.float().mean()))
        assert len(partners) == 1
        j, area = partners[0]
        torch.testing.assert_close(after["target"][i], (1 - area) * soft[i] + area * soft[j])


def test_probability_zero_leaves_the_batch(images):
    batch = images.train.batch(range(8))
    for name in ("mixup", "cutmix"):
        after = augment({"name": name, "probability": 0.0}, images)(batch)
        assert torch.equal(after["inputs"][0], batch["inputs"][0])
        assert torch.equal(after["target"].argmax(dim=1), batch["target"])
        assert after["target"].max(dim=1).values.min() == 1


def test_mixed_clips_keep_what_either_has(spoken):
    batch = spoken.train.batch(range(10))
    x, padding = augment("mixup", spoken)(batch)["inputs"]
    assert (padding <= batch["inputs"][1]).all()  # never more padding than before
    assert x.shape == batch["inputs"][0].shape


@pytest.mark.parametrize("name", IMAGE)
def test_the_seed_decides_and_a_generator_leaves_the_global_one_alone(images, name):
    batch, change = images.train.batch(range(8)), augment(name, images)

    def run(seed):
        torch.manual_seed(seed)
        return change(batch)["inputs"][0]

    assert torch.equal(run(1), run(1))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one = change(batch, torch.Generator().manual_seed(7))
    assert torch.equal(torch.get_rng_state(), state)
    two = change(batch, torch.Generator().manual_seed(7))
    assert torch.equal(one["inputs"][0], two["inputs"][0])
    weight = torch.arange(batch["inputs"][0][0].numel()).view_as(
        batch["inputs"][0][0]
    )  # a sum alone does not see flips
    changed = (change(batch, torch.Generator().manual_seed(seed))["inputs"][0] for seed in range(8))
    seen = {(x * weight).sum().item() for x in changed}
    assert len(seen) > 1


def test_the_order_is_the_one_given_and_batches_are_not_changed_in_place(images):
    batch = images.train.batch(range(8))
    x, y = batch["inputs"][0].clone(), batch["target"].clone()
    both = augment([{"name": "flip", "probability": 1.0}, {"name": "mixup"}], images)
    assert repr(both) == "Augment(Flip(probability=1.0), Mixup(alpha=0.2, probability=1.0))"
    both(batch)
    for name in IMAGE:
        augment(name, images)(batch)
    assert torch.equal(batch["inputs"][0], x)
    assert torch.equal(batch["target"], y)
    assert augment([], images)(batch)["inputs"][0] is batch["inputs"][0]


def test_mistakes_are_named(images, spoken):
    with pytest.raises(ValueError, match="'mixups'; did you mean 'mixup'"):
        augment("mixups", images)
    with pytest.raises(ValueError, match="no option 'alfa'; did you mean 'alpha'"):
        augment([{"name": "mixup", "alfa": 1}], images)
    with pytest.raises(ValueError, match="'crop' is for image tasks: spoken"):
        augment("crop", spoken)
    with pytest.raises(ValueError, match="must be positive"):
        augment({"name": "mixup", "alpha": 0}, images)(images.train.batch([0, 1]))
    assert set(AUGMENTATIONS) >= set(IMAGE)


@pytest.fixture
def bare(monkeypatch):
    """As after `pip install dampen[studies]`: neither torchvision nor faster-coco-eval."""
    found = importlib.util.find_spec
    absent = ("torchvision", "faster_coco_eval")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in absent else found(name, *more),
    )


@pytest.mark.parametrize("name", ["crop", "randaugment", "autoaugment", "trivialaugment", "cutmix"])
def test_a_missing_torchvision_is_told_before_anything_runs(images, bare, name):
    (problem,) = check_data({"name": "digits", "augment": [{"name": name}]}, "data.")
    assert (
        f"{name!r} needs torchvision, not installed here; run: pip install 'dampen[augment]'"
        in problem
    )
    with pytest.raises(ValueError, match=r"needs torchvision.*dampen\[augment\]"):
        augment(name, images)
    assert not check_data({"name": "digits", "augment": ["flip", "mixup"]}, "data.")
    assert _torchvision().ok
