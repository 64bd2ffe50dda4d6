"""The metrics of the papers' tasks against slow, independent references."""

import math

import numpy as np
import pytest
import torch

from dampen.studies.data import load
from dampen.studies.data.dataset import Normalization
from dampen.studies.metrics import (
    TASKS,
    make_metrics,
    primary,
    selection,
)
from reproductions.data.corpus import TextSplit
from reproductions.data.thumos import DetectionSplit, Timeline
from reproductions.metrics.detection import DetectionMetrics, frame_map
from reproductions.metrics.intervals import Interval, interval_map, propose
from reproductions.metrics.translation import (
    TranslationMetrics,
    bleu_signature,
    corpus_scores,
    translate,
)
from tests.reproductions.data import writers


def reference_average_precision(found, truth, threshold):
    """One class, the slow way: every detection in turn, every cut of the ranking."""
    taken, outcome = set(), []
    for d in sorted(found, key=lambda d: -d.score):
        best, which = 0.0, None
        for i, t in enumerate(truth):
            if t.video != d.video or i in taken:
                continue
            overlap = max(min(d.end, t.end) - max(d.start, t.start), 0)
            union = (d.end - d.start) + (t.end - t.start) - overlap
            if overlap / union > best:
                best, which = overlap / union, i
        hit = which is not None and best >= threshold
        if hit:
            taken.add(which)
        outcome.append(hit)
    precisions = [sum(outcome[: k + 1]) / (k + 1) for k in range(len(outcome))]
    return sum(max(precisions[k:]) for k, hit in enumerate(outcome) if hit) / len(truth)


def test_interval_precision_against_a_slow_reference():
    rng = np.random.default_rng(0)
    for _ in range(20):
        truth, found = [], []
        for label in range(2):
            for video in ("a", "b", "c"):
                for _ in range(rng.integers(1, 4)):
                    start = rng.uniform(0, 50)
                    truth.append(Interval(video, label, start, start + rng.uniform(1, 9)))
            for t in [t for t in truth if t.label == label]:
                jitter = rng.normal(0, 2, 2)
                start, end = sorted((t.start + jitter[0], t.end + jitter[1] + 0.1))
                found.append(Interval(t.video, label, start, end, rng.uniform()))
            found.append(Interval("unknown", label, 0, 1, rng.uniform()))
        for threshold in (0.3, 0.5, 0.7):
            expected = np.mean(
                [
                    reference_average_precision(
                        [d for d in found if d.label == c],
                        [t for t in truth if t.label == c],
                        threshold,
                    )
                    for c in range(2)
                ]
            )
            assert interval_map(found, truth, threshold) == pytest.approx(expected)


def test_interval_precision_by_hand():
    truth = [Interval("a", 0, 0, 10), Interval("a", 0, 20, 30)]
    found = [
        Interval("a", 0, 0, 10, 0.9),
        Interval("a", 0, 50, 60, 0.8),
        Interval("a", 0, 20, 29, 0.7),
    ]
    assert interval_map(found, truth, 0.5) == pytest.approx((1 + 2 / 3) / 2)
    assert interval_map([*found, Interval("a", 0, 0, 10, 0.85)], truth, 0.5) == pytest.approx(
        (1 + 2 / 4) / 2
    )  # a double
    assert interval_map([], truth, 0.5) == 0
    assert interval_map(found, [*truth, Interval("a", 1, 0, 1)], 0.5) == pytest.approx(
        (1 + 2 / 3) / 4
    )
    with pytest.raises(RuntimeError, match="no action"):
        interval_map(found, [], 0.5)


def test_proposals_find_a_clear_action():
    scores = np.full((100, 2), 0.01)
    scores[40:50, 1] = 0.95
    (best,) = propose("v", scores, rate=2.0)
    assert (best.label, best.start, best.end) == (1, 20.0, 25.0)
    assert best.score == pytest.approx(0.94)


def detection_split(background):
    """Two videos of 7 and 5 frames in windows of 4 that overlap, one ambiguous frame, two classes."""
    torch.manual_seed(0)
    shown = torch.zeros(12, 2)
    shown[1:4, 0] = shown[8:10, 1] = 1
    target = torch.cat([1 - shown.sum(dim=1, keepdim=True), shown], dim=1) if background else shown
    counted = torch.ones(12, dtype=torch.bool)
    counted[5] = False
    unit = Normalization(torch.zeros(3), torch.ones(3))
    starts, lengths = torch.tensor([0, 2, 4, 7, 11]), torch.tensor([4, 4, 3, 4, 1])
    split = DetectionSplit(
        torch.randn(12, 3), starts, lengths, target, 4, unit, per_token=True, counted=counted
    )
    split.timelines = [
        Timeline("a", 0, 7, 1.0, [(0, 1.0, 4.0)]),
        Timeline("b", 7, 5, 1.0, [(1, 1.0, 3.0)]),
    ]
    return split, shown, counted


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("ordered", [True, False])
def test_frame_map_against_loops(background, ordered):
    from sklearn.metrics import average_precision_score

    split, shown, counted = detection_split(background)
    logits = torch.randn(5, 4, 2 + background)
    metrics = DetectionMetrics(split, 2 + background, background=background)
    order = [[0, 1, 2], [3, 4]] if ordered else [[4, 0], [3, 1, 2]]
    for rows in order:
        batch = split.batch(rows)
        index = None if ordered else batch["index"]
        metrics.update(logits[rows], batch["target"], batch["valid"], index)
    found = metrics.compute()

    scores = [[] for _ in range(12)]
    for i in range(5):
        p = (
            logits[i].double().softmax(dim=-1)[:, 1:]
            if background
            else logits[i].double().sigmoid()
        )
        for j in range(split.lengths[i]):
            scores[split.starts[i] + j].append(p[j])
    mean = torch.stack([torch.stack(s).mean(dim=0) for s in scores])
    rows = [i for i in range(12) if counted[i]]
    expected = np.mean([average_precision_score(shown[rows, c], mean[rows, c]) for c in range(2)])
    assert found["frame_map"] == pytest.approx(expected)
    assert set(found) == {
        "frame_map",
        "nll",
        "interval_map",
        *(f"interval_map@{t}" for t in (0.3, 0.4, 0.5, 0.6, 0.7)),
    }


def test_a_perfect_detector_is_perfect_and_a_blind_one_is_not():
    split, _, _ = detection_split(True)
    for sure, lowest in ((20.0, 1.0), (0.0, 0.0)):
        metrics = DetectionMetrics(split, 3, background=True)
        batch = split.batch(range(5))
        metrics.update(batch["target"] * sure, batch["target"])
        found = metrics.compute()
        assert found["frame_map"] >= lowest
        assert (found["interval_map"] == 1.0) == (sure > 0)
        assert found["nll"] == pytest.approx(0 if sure else math.log(3), abs=1e-6)
    assert frame_map(torch.zeros(10, 1), torch.arange(10)[:, None] < 3) == pytest.approx(
        0.3
    )  # chance is the base rate


def test_detection_guards():
    split, _, _ = detection_split(True)
    metrics = DetectionMetrics(split, 3, background=True)
    batch = split.batch([3, 4])
    with pytest.raises(ValueError, match="split's order"):
        metrics.update(torch.zeros(2, 4, 3), batch["target"], batch["valid"])
    metrics = DetectionMetrics(split, 3, background=True)
    metrics.update(torch.zeros(2, 4, 3), batch["target"], batch["valid"], batch["index"])
    with pytest.raises(RuntimeError, match="7 of 12 frames were not predicted"):
        metrics.compute()
    with pytest.raises(TypeError, match="DetectionSplit"):
        DetectionMetrics(TextSplit(torch.arange(9), 4, 4), 3, background=True)


def test_bleu_is_sacrebleus_and_finish_decodes(tmp_path):
    import sacrebleu

    hypotheses, references = (
        ["the cat sat on a mat .", "hello world"],
        ["the cat sat on the mat .", "hello there world"],
    )
    found = corpus_scores(hypotheses, references)
    assert found["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-6
    )
    assert found["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(hypotheses, [references]).score, abs=1e-6
    )
    assert "tok:13a" in bleu_signature()
    with pytest.raises(ValueError, match="One hypothesis per reference"):
        corpus_scores(["a"], [])

    dataset = load("multi30k", writers.parallel(tmp_path), partial=True, vocabulary=300)
    model = Oracle(dataset.test, len(dataset.extras["target_bpe"])).train()
    metrics = make_metrics(dataset, dataset.test)
    batch = dataset.test.batch(range(len(dataset.test)))
    metrics.update(model(*batch["inputs"]), batch["target"], batch["valid"], batch["index"])
    assert set(metrics.compute()) == {"nll", "perplexity", "accuracy"}
    metrics.finish(model)
    assert model.training  # the mode is restored
    assert metrics.hypotheses == [pair[1] for pair in writers.PAIRS]
    found = metrics.compute()
    assert found["bleu"] == pytest.approx(100)
    assert found["accuracy"] == 1.0
    with pytest.raises(TypeError, match="encode and decode"):
        translate(torch.nn.Linear(1, 1), dataset.test, dataset.extras["target_bpe"])
    with pytest.raises(TypeError, match="PairSplit"):
        TranslationMetrics(TextSplit(torch.arange(9), 4, 4), dataset.extras["target_bpe"])


class Oracle(torch.nn.Module):
    """Knows the right translation of each source of a split, and answers with it token by token."""

    def __init__(self, split, vocabulary):
        super().__init__()
        self.anchor = torch.nn.Parameter(torch.zeros(1))
        self.vocabulary = vocabulary
        self.answers = {}
        for source, target in zip(split.source.tolist(), split.target.tolist(), strict=True):
            self.answers[tuple(t for t in source if t)] = [t for t in target if t]

    def encode(self, source):
        return source[..., None].float(), source == 0

    def decode(self, target, memory, padding=None):
        logits = torch.zeros(*target.shape, self.vocabulary)
        for i, source in enumerate(memory[..., 0].long().tolist()):
            answer = self.answers[tuple(t for t in source if t)]
            for j in range(target.shape[1]):
                logits[i, j, answer[min(j + 1, len(answer) - 1)]] = 20.0
        return logits

    def forward(self, source, target):
        return self.decode(target, *self.encode(source))


def test_every_task_has_a_primary_metric_that_its_accumulator_gives(tmp_path):
    tasks = {
        "image",
        "audio",
        "detection",
        "objects",
        "translation",
        "language",
        "text",
        "classification",
    }
    assert set(TASKS) == tasks | {"reconstruction"}  # the last is a masked autoencoder's, of images
    for name, write, task in (
        ("folder", writers.image_folder, "image"),
        ("fsdd", writers.fsdd, "audio"),
        ("thumos14", writers.thumos, "detection"),
        ("text", writers.text, "language"),
    ):
        dataset = load(name, write(tmp_path / name), partial=True)
        assert dataset.task == task
        metrics = make_metrics(dataset, dataset.valid)
        batch = dataset.valid.batch(range(len(dataset.valid)))
        classes = dataset.model_args.get("classes") or dataset.model_args["vocab"]
        shape = batch["target"].shape[: 2 if task in ("detection", "language") else 1]
        metrics.update(
            torch.zeros(*shape, classes), batch["target"], batch.get("valid"), batch["index"]
        )
        metrics.finish(torch.nn.Linear(1, 1))  # nothing to add
        for name_of, direction in (primary(task), selection(task)):
            assert direction in ("max", "min")
            assert math.isfinite(metrics.compute()[name_of])
