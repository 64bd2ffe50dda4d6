"""scikit-learn's digits with captions, true or false: real images, captions made here by a small
grammar (synthetic).

Each image stands in two pairs, with a caption that is true of it (class 1) and one that is not
(class 0). Images are split before captions are drawn, so that no test image was seen; the captions
of an image are the same in every run."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from dampen.studies.plugins import (
    ArraySplit,
    Dataset,
    DataSource,
    DataSpec,
    Normalization,
    Request,
    sha256,
    split_rows,
)

DIGIT_CAPTIONS = DataSpec(
    "digit_captions",
    "classification",
    "handwritten digits with captions that are true or not: 1,797 real images, synthetic captions; "
    "works offline",
    "comes with scikit-learn (`pip install 'dampen[studies]'`)",
    "none: part of scikit-learn",
    no_folds="each image makes two pairs, one of which would be trained on and the other tested",
)
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTION_SEED = 77003


def grammar() -> dict[str, frozenset[int]]:
    """Every caption, with the digits it is true of; none is true of all or of no digit.

    >>> sorted(grammar()["an odd digit above six"])
    [7, 9]
    """
    found = {f"the digit {name}": frozenset({i}) for i, name in enumerate(NUMBERS)}
    parity = {"an even digit": range(0, 10, 2), "an odd digit": range(1, 10, 2)}
    for words, digits in parity.items():
        found[words] = frozenset(digits)
        for i, name in enumerate(NUMBERS):
            found[f"{words} above {name}"] = frozenset(d for d in digits if d > i)
            found[f"{words} below {name}"] = frozenset(d for d in digits if d < i)
    for i, first in enumerate(NUMBERS):
        for j, second in enumerate(NUMBERS[: 10 - i]):
            found[f"{first} plus {second}"] = frozenset({i + j})
    return {words: digits for words, digits in found.items() if 0 < len(digits) < 10}


def vocabulary() -> list[str]:
    """Padding, then every word of the grammar in alphabetical order."""
    return ["", *sorted({word for words in grammar() for word in words.split()})]


def captions_of(digits: list[int]) -> tuple[list[str], list[str]]:
    """A true and a false caption for each digit, drawn with a fixed seed."""
    known, draw = grammar(), random.Random(CAPTION_SEED)
    true = {d: [words for words, fits in known.items() if d in fits] for d in range(10)}
    false = {d: [words for words, fits in known.items() if d not in fits] for d in range(10)}
    return [draw.choice(true[d]) for d in digits], [draw.choice(false[d]) for d in digits]


def encode(captions: list[str], length: int) -> Tensor:
    """Words as their numbers, padded with 0 on the right."""
    place = {word: i for i, word in enumerate(vocabulary())}
    rows = [[place[word] for word in words.split()] for words in captions]
    return torch.tensor([row + [0] * (length - len(row)) for row in rows])


def load_digit_captions(
    ask: Request,
    *,
    test_fraction: float = 0.25,
    test_limit: int | None = None,
) -> Dataset:
    """Pairs of an image and a caption; `limit` and `test_limit` count images, each of which makes
    two pairs.
    """
    from sklearn.datasets import load_digits as embedded

    bunch = embedded()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    digits = torch.from_numpy(bunch.target).long()
    cuts: dict[str, Any] = {**ask.cuts, "test_fraction": test_fraction}
    rows = split_rows({"train": digits}, test_limit=test_limit, **cuts)
    true, false = captions_of(digits.tolist())
    length = max(len(words.split()) for words in grammar())
    texts = torch.stack([encode(false, length), encode(true, length)])  # by class
    change = Normalization(images[rows.train].mean().view(1), images[rows.train].std().view(1))
    normal = (images - change.mean) / change.std

    def pairs(index: Tensor) -> ArraySplit:
        both = index.repeat(2)
        labels = torch.arange(2).repeat_interleave(len(index))
        return ArraySplit((normal[both], texts[labels, both]), labels)

    info = {
        "layout": "embedded",
        "source": "scikit-learn; captions are synthetic",
        "sha256": {
            "images": sha256(images.numpy().tobytes()),
            "captions": sha256("\n".join(true + false).encode()),
        },
        "departures": [
            *rows.notes,
            "captions are synthetic: a true and a false one for each real image",
        ],
        "drawn": rows.drawn,
        "partial": False,
        **cuts,
        "normalization": change.facts(),
    }
    model = {
        "image_size": 8,
        "channels": 1,
        "classes": 2,
        "vocab": len(vocabulary()),
        "max_tokens": length,
    }
    splits = {name: pairs(index) for name, (_, index) in rows.rows.items()}
    return Dataset(
        ask.spec.name,
        ask.spec.task,
        splits["train"],
        splits["valid"],
        splits["test"],
        ["false", "true"],
        info,
        model,
        normalization=change,
    )


DIGIT_CAPTIONS_SOURCE = DataSource(
    DIGIT_CAPTIONS, load_digit_captions, steps=("nothing to fetch: made from the digits",)
)
