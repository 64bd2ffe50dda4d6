"""Object detection through the lab: average precision, training, transformers' DETR, the drawn boxes, the record."""

import base64
import json

import msgspec
import pytest
import torch

from dampen.cli import main
from dampen.studies.checks import preset
from dampen.studies.data import load
from dampen.studies.errors import LabError
from dampen.studies.metric import describe
from dampen.studies.metrics import make_metrics
from dampen.studies.report import make_report
from dampen.studies.request import request_parts
from dampen.studies.result import Detected, parse_result
from dampen.studies.run import Run
from dampen.studies.trainer.state import TrialState
from dampen.studies.trainer.train import run_trial
from reproductions.figures.detections import drawn, matched, picture_size
from reproductions.metrics.objects import best_detections, constant_precision, mean_boxes
from reproductions.models.boxes import centers
from reproductions.models.detr import DETR
from tests.reproductions.data import writers

SMALL = {
    "name": "detr",
    "width": 16,
    "depth": 1,
    "decoder_depth": 2,
    "heads": 2,
    "mlp": 16,
    "queries": 8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return writers.voc(tmp_path_factory.mktemp("voc"), n=12)


@pytest.fixture(scope="module")
def data(folder):
    return load("voc", folder, size=[24, 24])


def trial(methods=(), seed=0, **train):
    return Run.from_dict(
        {
            "data": {"name": "voc", "size": [24, 24], "augment": ["flip", "vertical_flip"]},
            "model": SMALL,
            "methods": list(methods),
            "train": {"epochs": 2, "batch_size": 4, "lr": 2e-3, **train},
            "seed": seed,
        }
    )


def rows_of(found, classes=2):
    """Detections [(class, score, left, top, right, bottom)] as the model's numbers (Q, classes + 4)."""
    table = torch.full((len(found), classes + 4), -20.0)
    for row, (label, score, *box) in zip(table, found, strict=True):
        row[label] = torch.tensor(score).logit()
        row[classes:] = centers(torch.tensor(box))
    return table


def slow_average_precision(found, truth, threshold):
    """One class, [(image, score, box)] and [(image, box)]: COCO's 101 points of interpolated precision, by loops."""

    def iou(a, b):
        w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        common = max(w, 0) * max(h, 0)
        return common / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common)

    taken, hits = set(), []
    for image, _, box in sorted(found, key=lambda f: -f[1]):
        own = [
            (iou(box, b), i)
            for i, (where, b) in enumerate(truth)
            if where == image and i not in taken
        ]
        best, place = max(own, default=(0, None))
        hits.append(best >= threshold)
        taken |= {place} if best >= threshold else set()
    precision = [sum(hits[: i + 1]) / (i + 1) for i in range(len(hits))]
    recall = [sum(hits[: i + 1]) / len(truth) for i in range(len(hits))]
    points = [
        max([p for p, r in zip(precision, recall, strict=True) if r >= t / 100 - 1e-9], default=0)
        for t in range(101)
    ]
    return sum(points) / 101


def test_average_precision_against_loops(data):
    """Jittered truth with some wrong and some missing: AP50 and AP75 of each class, and AP over ten thresholds."""
    split, g = data.test, torch.Generator().manual_seed(0)
    metrics, kept = make_metrics(data, split), []
    for i, example in enumerate(split.examples):
        found = []
        for label, box in zip(example.labels, example.boxes, strict=True):
            near = [v / 44 + float(torch.randn((), generator=g)) * 0.03 for v in box]
            wrong = float(torch.rand((), generator=g)) < 0.2
            found.append(
                (
                    1 - label if wrong else label,
                    float(torch.rand((), generator=g)) * 0.9 + 0.05,
                    *near,
                )
            )
        found.append((0, 0.5 + 0.01 * i, 0.1, 0.1, 0.3, 0.3))
        found = found[: 1 + len(found) // 2] if i % 3 == 0 else found
        kept += [(label, (i, score, [44 * v for v in box])) for label, score, *box in found]
        kept += [
            (1 - label, (i, 2e-9, [44 * v for v in box])) for label, _, *box in found
        ]  # least certain, but there
        metrics.update(rows_of(found)[None], torch.empty(0), index=torch.tensor([i]))
    result = metrics.compute()

    def average(label, threshold):
        truth = [
            (i, b)
            for i, e in enumerate(split.examples)
            for c, b in zip(e.labels, e.boxes, strict=True)
            if c == label
        ]
        return slow_average_precision([f for c, f in kept if c == label], truth, threshold)

    assert result["ap50@blob"] == pytest.approx(average(0, 0.5), abs=1e-6)
    assert result["ap50@cell"] == pytest.approx(average(1, 0.5), abs=1e-6)
    assert result["ap50"] == pytest.approx((average(0, 0.5) + average(1, 0.5)) / 2, abs=1e-6)
    assert result["ap75"] == pytest.approx((average(0, 0.75) + average(1, 0.75)) / 2, abs=1e-6)
    steps = [0.5 + 0.05 * i for i in range(10)]
    assert result["ap"] == pytest.approx(
        sum(average(c, t) for c in (0, 1) for t in steps) / 20, abs=1e-6
    )
    assert 0.1 < result["ap"] < result["ap50"] < 1


def test_the_truth_itself_is_perfect_and_silence_is_nothing(data):
    metrics, silent = make_metrics(data, data.test), make_metrics(data, data.test)
    for i, example in enumerate(data.test.examples):
        found = [
            (c, 0.9, *(v / 44 for v in b))
            for c, b in zip(example.labels, example.boxes, strict=True)
        ]
        metrics.update(rows_of(found)[None], torch.empty(0))
        silent.update(
            rows_of([(0, 0.5, 0.9, 0.9, 0.91, 0.91)])[None], torch.empty(0), index=torch.tensor([i])
        )
    perfect, nothing = metrics.compute(), silent.compute()
    assert perfect["ap"] == pytest.approx(1)
    assert nothing["ap50"] == 0
    with pytest.raises(RuntimeError, match="No example has been counted"):
        make_metrics(data, data.test).compute()
    assert describe("ap50@cell").label == "AP50@cell"
    assert describe("ap").scale == 100


def test_boxes_at_the_mean_place_of_each_class(data):
    objects = torch.cat(data.train.objects)
    one = mean_boxes(data.train, 2)
    for label in (0, 1):
        expected = objects[objects[:, 0] == label, 1:].mean(0)
        torch.testing.assert_close(one[label, 2:], expected)
        share = (objects[:, 0] == label).float().mean()
        torch.testing.assert_close(one[label, label].sigmoid(), share)
    more = mean_boxes(data.train, 2, None)
    assert len(more) > len(one)
    assert constant_precision(one, data.test, data.classes)["ap50"] < 0.2


def test_a_query_may_be_counted_for_several_classes_and_a_hundred_count():
    rows = torch.randn(80, 3 + 4).sigmoid()
    best = best_detections(rows, 3, torch.ones(4))
    assert len(best["scores"]) == 100
    assert best["scores"].tolist() == sorted(best["scores"].tolist(), reverse=True)
    assert best["scores"][0] == rows[:, :3].sigmoid().max()


def test_a_trial_from_batch_to_record_and_the_same_again(tmp_path, folder, quick):
    execution = quick.__class__(**{**quick.__dict__, "data_dir": str(folder)})
    methods = [{"name": "drop_key", "rate": 0.3}, {"name": "r_drop", "weight": 0.1}]
    results = [run_trial(trial(methods), tmp_path / name, execution) for name in "ab"]
    assert results[0]["last_weights"] == results[1]["last_weights"]
    assert results[0]["primary"] == ["ap", "max"]
    assert {"ap", "ap50", "ap75"} <= set(results[0]["test"])
    assert "r_drop" in " ".join(results[0]["train"])
    final = parse_result(json.loads((tmp_path / "a" / "final.json").read_text()))
    assert len(final.detections) == 3
    assert picture_size(final.detections[0].image) == (24, 24)
    assert len(final.detections[0].truth) == len(load("voc", folder).test.examples[0].labels)
    plain = run_trial(trial(), tmp_path / "plain", execution)
    assert plain["last_weights"] != results[0]["last_weights"]


def test_splitting_a_batch_changes_nothing(folder, quick):
    """The loss is a mean over objects, of which parts have different numbers."""
    execution = quick.__class__(**{**quick.__dict__, "data_dir": str(folder)})
    gradients = []
    for accumulate in (1, 2):
        s = TrialState(trial(accumulate=accumulate), execution)
        for module in s.raw.modules():  # statistics of half a batch are others
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        s.augment = None
        for batch, share in next(s.batches()):
            loss, _ = s.losses(batch)
            (loss * share).backward()
        gradients.append([p.grad.clone() for p in s.raw.parameters() if p.grad is not None])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def tiny_detr(tmp_path_factory):
    """A folder of transformers' DETR, random, with a ResNet of its own: nothing is downloaded."""
    from transformers import DetrConfig, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage4"],
    )
    sides = {
        f"{side}_{what}": 2
        for side in ("encoder", "decoder")
        for what in ("layers", "attention_heads")
    }
    config = DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, d_model=16,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=6, **sides,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("detr")
    config.save_pretrained(place)
    return place


def test_the_detr_of_transformers_is_trained_as_well(tmp_path, folder, quick, tiny_detr):
    settings = ["train.epochs=1", "train.batch_size=4", "data.size=[32, 32]"]
    asked = request_parts(
        f"hf/{tiny_detr}", str(folder), "drop_key(rate=0.2)", 1, settings=settings
    )
    execution = quick.__class__(**{**quick.__dict__, "parts": asked.parts})
    for name, spec in asked.plan.runs.items():
        result = run_trial(spec, tmp_path / name, execution)
        assert result["status"] == "finished"
        assert 0 <= result["test"]["ap50"] <= 1
        assert len(result["detections"]) == 3


def test_compare_on_boxes_of_ones_own(tmp_path, folder, capsys):
    model = "detr(width=16, depth=1, decoder_depth=1, heads=2, mlp=16, queries=4)"
    command = [
        "compare",
        "--data",
        str(folder),
        "--model",
        model,
        "--methods",
        "drop_key(rate=0.2)",
        "--seeds",
        "1",
    ]
    settings = [
        "train.epochs=1",
        "data.size=[24, 24]",
        "train.validate_every=1",
        "train.batch_size=4",
    ]
    sets = [word for s in settings for word in ("--set", s)]
    with pytest.raises(SystemExit, match="0"):
        main([*command, *sets, "--out", str(tmp_path), "--json"])
    told = json.loads(capsys.readouterr().out)
    page = make_report([told["folder"]]).render("html")
    assert "Detected objects" in page
    assert page.count("data:image/svg+xml;base64,") == 6  # three images of two rows
    assert "AP50" in page
    assert preset("voc")["model"]["name"] == "detr"


def test_what_is_drawn_and_counted(data):
    picture = drawn_picture()
    truth = [("blob", 0.0, 0.0, 0.5, 0.5), ("cell", 0.5, 0.5, 1.0, 1.0)]
    found = [
        ("blob", 0.9, 0.0, 0.0, 0.5, 0.45),
        ("blob", 0.8, 0.0, 0.0, 0.5, 0.5),
        ("cell", 0.7, 0.1, 0.5, 0.6, 1.0),
    ]
    seen = Detected(picture, truth, found)
    assert matched(seen) == 1  # the second blob is one too many, the cell is elsewhere
    address = drawn(seen, (24, 16), {"blob": "#e69f00", "cell": "#56b4e9"})
    svg = base64.b64decode(address.partition(",")[2]).decode()
    assert svg.count("<rect") == 5
    assert svg.count('stroke="#e69f00"') == 2
    assert svg.count("stroke-dasharray") == 2
    assert '<rect x="0.0" y="0.0" width="12.0" height="7.2"' in svg


def drawn_picture():
    from reproductions.metrics.detected import jpeg

    return jpeg(torch.zeros(3, 16, 24, dtype=torch.uint8))


def test_records_from_elsewhere_cannot_put_anything_but_pictures_into_the_page():
    assert picture_size(drawn_picture()) == (24, 16)
    for bad in (
        'data:image/jpeg;base64,AAAA"/><script>',
        "https://example.org/x.jpg",
        "data:image/jpeg;base64,AAAA",
    ):
        assert picture_size(bad) is None
    escaped = drawn(Detected(drawn_picture(), [("<b>", 0, 0, 1, 1)]), (24, 16), {})
    assert b"<title>&lt;b&gt;" in base64.b64decode(escaped.partition(",")[2])
    good = {
        "id": "x",
        "status": "finished",
        "test": {},
        "valid": {},
        "selection": ["ap", "max"],
        "primary": ["ap", "max"],
    }
    assert parse_result(good).detections == []
    with pytest.raises(LabError, match="detections"):
        parse_result({**good, "detections": [{"image": "x", "truth": [["cell", "0", 0, 0, 0]]}]})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"truth": []}, Detected)


def test_a_detector_says_what_it_needs():
    with pytest.raises(TypeError, match="image_size"):
        DETR(classes=3)
