"""Digits with captions: the grammar tells the truth, test images are unseen, captions read images."""

import pytest
import torch

from dampen import DropKey, regularize
from dampen.studies.checks import check_data
from dampen.studies.data import load
from dampen.studies.trainer.data import load_data, places
from reproductions.data.digit_captions import captions_of, encode, grammar, vocabulary
from reproductions.models.caption import CaptionMatcher


def test_the_grammar_tells_the_truth():
    """Sums and comparisons, worked out from the words alone."""
    names = "zero one two three four five six seven eight nine".split()
    for words, digits in grammar().items():
        said = words.split()
        for d in range(10):
            if "plus" in said:
                true = names.index(said[0]) + names.index(said[2]) == d
            elif said[0] == "the":
                true = said[2] == names[d]
            else:
                true = (said[1] == "even") == (d % 2 == 0)
                true = true and ("above" not in said or d > names.index(said[-1]))
                true = true and ("below" not in said or d < names.index(said[-1]))
            assert (d in digits) == true, (words, d)


def test_captions_are_fixed_and_encoded():
    digits = [3, 1, 4, 1, 5]
    assert captions_of(digits) == captions_of(digits)
    true, false = captions_of(digits)
    assert all(
        d in grammar()[t] and d not in grammar()[f]
        for d, t, f in zip(digits, true, false, strict=True)
    )
    row = encode(["an odd digit"], 5)[0].tolist()
    assert [vocabulary()[i] for i in row] == ["an", "odd", "digit", "", ""]


def test_pairs_are_balanced_and_images_are_split_before_captions():
    data = load("digit_captions", train_fraction=0.5)
    for split in data.splits.values():
        labels = split.batch(torch.arange(len(split)))["target"]
        assert labels.double().mean() == 0.5
    train, test = (
        s.batch(torch.arange(len(s)))["inputs"][0].flatten(1) for s in (data.train, data.test)
    )
    seen = {tuple(row) for row in train.round(decimals=3).tolist()}
    assert not any(tuple(row) in seen for row in test.round(decimals=3).tolist())
    assert "synthetic" in data.info["departures"][-1]
    assert data.model_args["vocab"] == len(vocabulary())


def model():
    torch.manual_seed(0)
    return CaptionMatcher(vocab=20, width=16, depth=2, heads=2, mlp=16).train()


def test_methods_can_sit_in_the_cross_attention_alone():
    matcher = model()
    images, caption = torch.randn(3, 1, 8, 8), torch.randint(1, 20, (3, 5))
    reg = regularize(matcher, DropKey(0.5), **places("cross:*"))
    text, image = matcher.text_blocks[0], matcher.image_blocks[0]
    x, memory, keep = (
        torch.randn(3, 5, 16),
        torch.randn(3, 16, 16),
        torch.ones(3, 1, 1, 5, dtype=torch.bool),
    )
    assert torch.equal(image(memory), image(memory))
    assert torch.equal(text.self_attn(x, keep=keep), text.self_attn(x, keep=keep))
    assert not torch.equal(text.cross_attn(x, memory), text.cross_attn(x, memory))
    reg.remove()
    assert torch.equal(matcher(images, caption), matcher(images, caption))


def test_padding_changes_nothing_and_long_captions_are_told():
    matcher = model().eval()
    images, caption = torch.randn(2, 1, 8, 8), torch.randint(1, 20, (2, 4))
    padded = torch.cat([caption, torch.zeros(2, 2, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(matcher(images, caption), matcher(images, padded))
    with pytest.raises(ValueError, match="max_tokens=9"):
        matcher(images, torch.ones(2, 9, dtype=torch.int64))


def test_no_folds_where_one_image_would_be_in_two_parts():
    (problem,) = check_data({"name": "digit_captions", "folds": 3}, "data.")
    assert "each image makes two pairs" in problem
    with pytest.raises(
        ValueError, match="digit_captions cannot be cross-validated: each image makes two pairs"
    ):
        load_data({"name": "digit_captions", "folds": 3}, None, None, 0)
