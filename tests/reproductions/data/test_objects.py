"""Images with boxes: Pascal VOC and COCO, what they refuse and where, batches, flips, and the real BCCD."""

import importlib.util
import json
import math

import pytest
import torch
from PIL import Image

from dampen.studies.checks import check_data
from dampen.studies.data import DamagedData, IncompleteData, augment, load
from dampen.studies.data.sets import recognize
from reproductions.data.markup import parse_xml
from reproductions.data.objects import ObjectSplit, checked_box
from tests.reproductions.data import writers

WRITERS = {"voc": writers.voc, "coco": writers.coco}


@pytest.mark.parametrize("name", WRITERS)
def test_boxes_are_where_they_were_drawn(tmp_path, name):
    """The pixels inside a box have its class's color: reading, resizing and fractions agree."""
    WRITERS[name](tmp_path)
    assert recognize(tmp_path) == name
    data = load(name, tmp_path, size=[44, 44])
    assert data.classes == ["blob", "cell"]
    assert (data.task, data.loss) == ("objects", "task")
    assert data.model_args == {"image_size": 44, "channels": 3, "classes": 2, "task": "objects"}
    for split in data.splits.values():
        for i in range(len(split)):
            target, pixels = split.batch([i])["target"][0], split.pixels([i])[0].float()
            last = target[-1]  # drawn on top of the others
            x, y = int(last[1] * 44), int(last[2] * 44)
            assert int(pixels[:, y, x].argmax()) == (0 if last[0] == 0 else 2)


def test_both_layouts_tell_the_same(tmp_path):
    writers.voc(tmp_path / "voc", parts=("train", "val"))
    writers.coco(tmp_path / "coco")
    voc, coco = (load(name, tmp_path / name, size=[24, 32]) for name in ("voc", "coco"))
    for part in ("train", "valid", "test"):
        a, b = (d.splits[part].batch(range(len(d.splits[part]))) for d in (voc, coco))
        torch.testing.assert_close(a["inputs"][0], b["inputs"][0])
        torch.testing.assert_close(a["target"], b["target"])
    assert any("serve as test" in d for d in voc.info["departures"])
    assert any("serves as test" in d for d in coco.info["departures"])


def test_a_batch_is_filled_up_to_its_fullest_image(tmp_path):
    writers.voc(tmp_path)
    split = load("voc", tmp_path).train
    counts = [len(t) for t in split.objects]
    assert len(set(counts)) > 1
    target = split.batch(range(len(split)))["target"]
    assert target.shape == (len(split), max(counts), 5)
    assert (target[..., 0] >= 0).sum(1).tolist() == counts
    assert split.batch([0])["target"].shape[1] == counts[0]
    assert (target[target[..., 0] < 0] == -1).all()


def test_sets_too_large_for_memory_are_decoded_batch_by_batch(tmp_path):
    writers.voc(tmp_path)
    held = load("voc", tmp_path).train
    lazy = ObjectSplit(held.examples, held.size, held.channels, memory=0)
    lazy.normalization = held.normalization
    assert lazy.images is None
    torch.testing.assert_close(lazy.batch([2, 0])["inputs"][0], held.batch([2, 0])["inputs"][0])


@pytest.mark.parametrize(("name", "axis"), [("flip", -1), ("vertical_flip", -2)])
def test_boxes_move_with_the_image(tmp_path, name, axis):
    writers.voc(tmp_path)
    data = load("voc", tmp_path, size=[44, 44])
    batch = data.train.batch(range(6))
    kept = batch["target"].clone()
    always = augment([{"name": name, "probability": 1.0}], data)(batch)
    torch.testing.assert_close(always["inputs"][0], batch["inputs"][0].flip(axis))
    column = 1 if axis == -1 else 2
    there = kept[..., 0] >= 0
    torch.testing.assert_close(always["target"][there][:, column], 1 - kept[there][:, column])
    others = [c for c in range(5) if c != column]
    assert torch.equal(always["target"][..., others], kept[..., others])
    assert torch.equal(batch["target"], kept)  # the split's own boxes stay
    twice = augment([{"name": name, "probability": 1.0}] * 2, data)(batch)
    torch.testing.assert_close(twice["target"], kept)
    some = augment([name], data)(batch, torch.Generator().manual_seed(3))
    moved = (some["inputs"][0] != batch["inputs"][0]).flatten(1).any(1)
    assert 0 < moved.sum() < 6
    assert torch.equal((some["target"] != kept).flatten(1).any(1), moved)


def spoil_voc(folder, old, new):
    path = folder / "Annotations" / "p0000.xml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "line", "why"),
    [
        ("<xmax>", "<xmax>9", 6, "passes the border of its image of 44 x 44"),
        ("<xmin>", "<xmin>-9", 6, "passes the border"),
        ("<xmin>", "<xmin>nan</xmin><x>", 6, "is not finite"),
        ("<ymin>", "<ymin>inf</ymin><x>", 6, "is not finite"),
        ("<ymax>", "<ymax>x", 6, "expected a number"),
        ("<ymax>", "<ymax>0</ymax><x>", 6, "has no area"),
        ("<name>", "<name>un", 5, "unknown class 'un"),
        ("<bndbox>", "<bndbox></bndbox><bndbox>", 4, "2 elements <bndbox>"),
        ("<width>44", "<width>0", 3, "the image is 0 x 44"),
        ("<width>44", "<width>1e3", 3, "expected a number"),
    ],
)
def test_voc_refuses_with_file_and_line(tmp_path, monkeypatch, old, new, line, why):
    writers.voc(tmp_path)
    new = new.replace("<x>", "<skipped>") if "<x>" in new else new
    if "<skipped>" in new:
        tag = old[1:-1]
        spoil_voc(tmp_path, f"</{tag}>", "</skipped>")
    spoil_voc(tmp_path, old, new)
    # the class list comes from the training part: keep the unknown one out of it
    monkeypatch.setattr("reproductions.data.voc.CLASSES", {"voc": ["blob", "cell"]})
    with pytest.raises(DamagedData, match=rf"p0000\.xml, line {line}: .*{why}"):
        load("voc", tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            '<!DOCTYPE a [<!ENTITY x "y">]><annotation>&x;</annotation>',
            "a document type is not read",
        ),
        ("<a>" * 100_000, "nest deeper than"),
        ("<annotation>", "is not XML"),
        ('<?xml version="1.0" encoding="utf-7"?><annotation></annotation>', "is not XML"),
        ("", "is not XML"),
        ("<html></html>", "expected <annotation>"),
        ("\xff\xfe\x00", "is not XML"),
    ],
)
def test_hostile_markup(tmp_path, content, why):
    writers.voc(tmp_path)
    (tmp_path / "Annotations" / "p0000.xml").write_text(content, encoding="latin-1")
    with pytest.raises(DamagedData, match=rf"p0000\.xml.*{why}"):
        load("voc", tmp_path)


def test_elements_know_their_lines(tmp_path):
    outer = parse_xml(b"<a>\n<b>1</b>\n\n<b>2</b></a>", tmp_path)
    assert [(e.text, e.line) for e in outer.all("b")] == [("1", 2), ("2", 4)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda root: (root / "Annotations" / "p0000.xml").unlink(), r"p0000\.xml is missing"),
        (lambda root: (root / "JPEGImages" / "p0000.jpg").unlink(), r"p0000\.jpg is missing"),
        (
            lambda root: Image.new("RGB", (40, 44)).save(root / "JPEGImages" / "p0000.jpg"),
            r"p0000\.jpg.*\(40, 44\)",
        ),
        (
            lambda root: (root / "ImageSets/Main/train.txt").write_text("../../x\n"),
            r"train\.txt, line 1",
        ),
        (
            lambda root: (root / "ImageSets/Main/train.txt").write_text(""),
            r"train\.txt lists no image",
        ),
        (
            lambda root: (root / "ImageSets/Main/train.txt").write_text("p1000\n"),
            "p1000 is listed in train and in",
        ),
    ],
)
def test_voc_folders_that_do_not_fit_together(tmp_path, change, why):
    writers.voc(tmp_path)
    change(tmp_path)
    with pytest.raises(DamagedData, match=why):
        load("voc", tmp_path)


def first_box(value):
    return lambda table: table["annotations"][0].update(bbox=value)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (first_box([0, 0, 60, 5]), r"annotations\[0\]: the box .* passes the border"),
        (first_box([-5, 0, 6, 5]), r"annotations\[0\].*passes the border"),
        (first_box([math.nan, 0, 6, 5]), r"annotations\[0\].*not finite"),
        (first_box([0, 0, math.inf, 5]), r"annotations\[0\].*not finite"),
        (first_box([5, 5, -3, 2]), r"annotations\[0\].*has no area"),
        (first_box([1, 2, 3]), r"annotations\[0\].*expected four numbers"),
        (first_box("box"), r"annotations\[0\].*expected four numbers"),
        (
            lambda t: t["annotations"][0].update(category_id=99),
            r"annotations\[0\]: unknown class.*99",
        ),
        (
            lambda t: t["annotations"][0].update(image_id=99),
            r"annotations\[0\]: there is no image of id 99",
        ),
        (lambda t: t["annotations"][0].pop("image_id"), r"annotations\[0\]: image_id is None"),
        (lambda t: t["images"][1].update(id=10), r"images\[1\]: the id 10 is there twice"),
        (lambda t: t["images"][1].update(file_name="../p.jpg"), r"images\[1\]: file_name"),
        (
            lambda t: t["images"][1].update(file_name="none.jpg"),
            r"images\[1\]: none.jpg is neither in train2017/",
        ),
        (lambda t: t["images"][1].update(width=0), r"images\[1\]: the image is 0 x 44"),
        (lambda t: t.update(images={}), "no list of entries under 'images'"),
        (lambda t: t["categories"][1].update(id=7), "categories must have different ids"),
    ],
)
def test_coco_refuses_with_file_and_entry(tmp_path, change, why):
    writers.coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train2017.json"
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(DamagedData, match=rf"instances_train2017\.json.*{why}"):
        load("coco", tmp_path)


def test_crowds_and_boxes_without_area_are_not_learned(tmp_path):
    writers.coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train2017.json"
    table = json.loads(path.read_text())
    before = load("coco", tmp_path).info["objects"]
    table["annotations"][0]["iscrowd"] = 1
    table["annotations"][1]["bbox"][2] = 0
    path.write_text(json.dumps(table))
    data = load("coco", tmp_path)
    after = data.info["objects"]
    assert sum(before.values()) - sum(after.values()) == 2
    assert "1 boxes without area were left out" in data.info["departures"]
    held = [e for split in data.splits.values() for e in split.examples]
    assert sum(sum(e.ignored) for e in held) == 1


def test_boxes_are_cut_at_the_border_by_a_pixel_at_most():
    assert checked_box([-0.5, 0, 10.9, 5], 10, 5, "x") == (0.0, 0.0, 10.0, 5.0)
    with pytest.raises(DamagedData, match="x: the box"):
        checked_box([-1.5, 0, 10, 5], 10, 5, "x")


def test_options_that_make_no_sense(tmp_path):
    writers.voc(tmp_path)
    with pytest.raises(ValueError, match="channels must be 1"):
        load("voc", tmp_path, channels=2)
    with pytest.raises(ValueError, match="height and the width"):
        load("voc", tmp_path, size=[3])
    assert load("voc", tmp_path, channels=1).train.batch([0])["inputs"][0].shape[1] == 1


def test_bccd(real_data):
    found = real_data("bccd")
    if not found.real:
        with pytest.raises(
            (IncompleteData, DamagedData)
        ):  # a handful of synthetic images is not BCCD
            load("bccd", found.path)
        return
    data = load("bccd", found.path)
    assert data.classes == ["Platelets", "RBC", "WBC"]
    assert {k: len(s) for k, s in data.splits.items()} == {"train": 205, "valid": 87, "test": 72}
    assert sum(data.info["objects"].values()) == 4888
    assert not data.info["partial"]
    assert max(len(t) for s in data.splits.values() for t in s.objects) == 30
    everything = torch.cat([t for s in data.splits.values() for t in s.objects])
    assert torch.bincount(everything[:, 0].long()).tolist() == [361, 4155, 372]
    assert (everything[:, 1:] > 0).all()
    assert (everything[:, 1:] <= 1).all()
    assert (
        data.info["sha256"]["images"]
        == "4ee43cbc652934bcdb711870cd9ec225ae733e89a785b2c248a044c7c468c2e0"
    )


def test_missing_packages_are_reported_before_anything_runs(monkeypatch):
    found = importlib.util.find_spec
    absent = ("torchvision", "faster_coco_eval")
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name in absent else found(name, *more),
    )
    (problem,) = check_data({"name": "bccd"}, "data.")
    assert "needs faster_coco_eval and torchvision, not installed here" in problem
    assert "pip install faster-coco-eval torchvision" in problem
