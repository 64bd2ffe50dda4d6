"""Each kind of split against slow, obvious references."""

import pytest
import torch

from dampen.studies.data.dataset import Normalization
from reproductions.data.corpus import TextSplit
from reproductions.data.parallel import PairSplit
from reproductions.data.sequences import SequenceSplit

FLAT = Normalization(torch.zeros(3), torch.ones(3))


def sequence_split(**options):
    frames = torch.arange(30.0).view(10, 3)
    starts, lengths = torch.tensor([0, 4, 9]), torch.tensor([4, 3, 1])
    return SequenceSplit(frames, starts, lengths, torch.tensor([5, 6, 7]), 4, FLAT, **options)


def test_sequences_are_cut_padded_and_masked():
    batch = sequence_split().batch([1, 2])
    x, padding = batch["inputs"]
    assert x.shape == (2, 4, 3)
    assert padding.tolist() == [[False, False, False, True], [False, True, True, True]]
    assert x[0, :3].flatten().tolist() == list(range(12, 21))
    assert x[0, 3].tolist() == x[1, 1].tolist() == [0, 0, 0]
    assert batch["target"].tolist() == [6, 7]
    assert batch["index"].tolist() == [1, 2]
    assert "valid" not in batch  # one target per sequence: all count


def test_frame_targets_follow_the_frames():
    target = torch.arange(10.0)[:, None].expand(10, 2)
    counted = torch.ones(10, dtype=torch.bool)
    counted[5] = False
    split = sequence_split(per_token=True, counted=counted)
    split.target = target
    batch = split.batch([1])
    assert batch["target"][0, :3, 0].tolist() == [4, 5, 6]
    assert batch["valid"].tolist() == [[True, False, True, False]]  # ambiguous frame, then padding
    assert batch["inputs"][1].tolist() == [
        [False, False, False, True]
    ]  # the model still sees the ambiguous frame


def test_normalization_leaves_padding_at_zero():
    split = sequence_split()
    split.normalization = Normalization(torch.full((3,), 100.0), torch.full((3,), 2.0))
    x, _ = split.batch([2])["inputs"]
    assert x[0, 0].tolist() == [(27 - 100) / 2, (28 - 100) / 2, (29 - 100) / 2]
    assert x[0, 1:].abs().sum() == 0


def test_windows_must_fit():
    with pytest.raises(ValueError, match="1 to 2 frames"):
        SequenceSplit(
            torch.zeros(9, 3), torch.tensor([0]), torch.tensor([3]), torch.tensor([0]), 2, FLAT
        )
    with pytest.raises(ValueError, match="every window must be full"):
        sequence_split(padded=False)


def test_pairs_are_shifted_and_trimmed():
    source = torch.tensor([[5, 2, 0, 0], [5, 6, 2, 0]], dtype=torch.int32)
    target = torch.tensor([[1, 7, 2, 0, 0], [1, 7, 8, 2, 0]], dtype=torch.int32)
    split = PairSplit(source, target, ["a", "b"], ["c", "d"], pad=0, multiple=1)
    batch = split.batch([0, 1])
    assert batch["inputs"][0].tolist() == [[5, 2, 0], [5, 6, 2]]
    assert batch["inputs"][1].tolist() == [[1, 7, 2], [1, 7, 8]]
    assert batch["target"].tolist() == [[7, 2, 0], [7, 8, 2]]
    assert batch["valid"].tolist() == [[True, True, False], [True, True, True]]
    assert batch["inputs"][0].dtype == torch.int64
    short = split.batch([0])
    assert short["inputs"][0].tolist() == [[5, 2]]
    assert short["target"].tolist() == [[7, 2]]


def test_trimming_rounds_up_to_a_multiple():
    tokens = torch.zeros(1, 40, dtype=torch.int32)
    tokens[0, :9] = 3
    split = PairSplit(tokens, tokens, ["a"], ["b"], pad=0)
    batch = split.batch([0])
    assert batch["inputs"][0].shape == (1, 16)
    assert batch["inputs"][1].shape == (1, 8)
    assert batch["target"].shape == (1, 8)


@pytest.mark.parametrize("length", [2, 3, 8, 9, 10, 33])
@pytest.mark.parametrize("stride", [1, 3, 4])
def test_text_windows_predict_every_token_once_or_more(length, stride):
    tokens, context = torch.arange(100, 100 + length), 4
    split = TextSplit(tokens, context, stride)
    seen = []
    for i in range(len(split)):
        batch = split.batch([i])
        valid = batch["valid"][0]
        assert valid.any()
        x, y = batch["inputs"][0][0][valid], batch["target"][0][valid]
        assert torch.equal(y, x + 1)
        seen += y.tolist()
    assert sorted(set(seen)) == list(range(101, 100 + length))
    if stride == context:
        assert len(seen) == len(set(seen))


def test_bad_indices_and_shapes():
    split = TextSplit(torch.arange(9), 4, 4)
    with pytest.raises(ValueError, match="list of indices"):
        split.batch(torch.zeros(2, 2))
    with pytest.raises(IndexError):
        split.batch([99])
    with pytest.raises(ValueError, match="count tokens from 1"):
        TextSplit(torch.arange(9), 0, 1)
    with pytest.raises(ValueError, match="match one to one"):
        PairSplit(torch.zeros(2, 3), torch.zeros(1, 3), ["a"], ["b"], 0)
