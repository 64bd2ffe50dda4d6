"""Parallel text and running text: files to tokens and back, nothing lost."""

import gzip

import pytest
import torch

from dampen.studies.data import DamagedData, IncompleteData, MissingData, load
from dampen.studies.text import BEGIN, END, PAD
from tests.reproductions.data import writers

SMALL = {"vocabulary": 300}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("joint", [False, True])
def test_pairs_come_back_as_text(tmp_path, compressed, joint):
    writers.parallel(tmp_path / "multi30k", compressed=compressed)
    with pytest.raises(
        IncompleteData, match="32 of 29000 train pairs; 4 of 1014 valid pairs; 4 of 1000 test pairs"
    ):
        load("multi30k", tmp_path, **SMALL)
    dataset = load("multi30k", tmp_path, partial=True, joint=joint, **SMALL)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (32, 4, 4)
    batch = dataset.test.batch(range(4))
    source, shifted = batch["inputs"]
    bpe = dataset.extras["source_bpe"], dataset.extras["target_bpe"]
    assert (bpe[0] is bpe[1]) == joint
    assert bpe[0].decode(source.tolist()) == [pair[0] for pair in writers.PAIRS]
    assert bpe[1].decode(batch["target"].tolist()) == [pair[1] for pair in writers.PAIRS]
    assert (shifted[:, 0] == BEGIN).all()
    assert torch.equal(
        shifted[:, 1:][batch["valid"][:, 1:]], batch["target"][:, :-1][batch["valid"][:, 1:]]
    )
    assert (batch["target"][batch["valid"]] == END).sum() == 4
    assert ((source == END).sum(dim=1) == 1).all()
    assert (batch["target"][~batch["valid"]] == PAD).all()
    assert dataset.model_args["source_vocab"] == len(bpe[0])
    assert dataset.test.target_text == [pair[1] for pair in writers.PAIRS]


def test_any_pair_of_languages_and_names(tmp_path):
    writers.parallel(tmp_path, test="newstest2014")
    for path in tmp_path.glob("*.de"):
        path.rename(path.with_suffix(".nl"))
    dataset = load("parallel", tmp_path, source="nl", target="en", lowercase=True, **SMALL)
    assert dataset.test.source_text[2] == "zwei männer laufen"
    assert dataset.info["languages"] == ["nl", "en"]
    with pytest.raises(DamagedData, match="no test part in nl and en"):
        load("parallel", tmp_path, source="nl", target="en", test="newstest2019", **SMALL)
    with pytest.raises(MissingData, match="WMT"):
        load("parallel", tmp_path)  # no .de any more


def test_long_and_empty_pairs(tmp_path):
    folder = writers.parallel(tmp_path)
    for language in ("en", "de"):
        for stem in ("train", "val"):
            with (folder / f"{stem}.{language}").open("a") as file:
                file.write("x " * 50 + "\n" + ("\n" if language == "en" else "leer\n"))
    dataset = load("multi30k", folder, partial=True, max_tokens=30, **SMALL)
    assert dataset.info["pairs"]["train"] == {"all": 34, "left_out": 2, "cut": 0}
    assert dataset.info["pairs"]["valid"] == {"all": 6, "left_out": 0, "cut": 1}
    assert len(dataset.valid) == 6
    assert dataset.valid.batch([4])["inputs"][0].shape[1] == 31  # 30 tokens and the end
    assert len(dataset.valid.target_text[4]) == 99  # the reference is not cut


def test_the_vocabulary_comes_from_the_training_part_alone(tmp_path):
    folder = writers.parallel(tmp_path)
    before = load("multi30k", folder, partial=True, **SMALL).extras["source_bpe"].tokenizer.to_str()
    (folder / "val.en").write_text("zzzz zzzz\n" * 4)
    (folder / "val.de").write_text("zzzz zzzz\n" * 4)
    assert (
        load("multi30k", folder, partial=True, **SMALL).extras["source_bpe"].tokenizer.to_str()
        == before
    )


def test_a_limit_cuts_the_training_part_alone(tmp_path):
    dataset = load("multi30k", writers.parallel(tmp_path), partial=True, limit=10, **SMALL)
    assert (len(dataset.train), len(dataset.valid)) == (10, 4)
    assert any("10 of 32" in words for words in dataset.info["departures"])


def test_damaged_text(tmp_path):
    folder = writers.parallel(tmp_path)
    whole = (folder / "train.de").read_bytes()
    (folder / "train.de").write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1])
    with pytest.raises(
        DamagedData, match=r"train.de is damaged or truncated: got 31 lines.*train.en has, 32"
    ):
        load("multi30k", folder, partial=True, **SMALL)
    (folder / "train.de").write_bytes(b"\xff\xfe" + whole)
    with pytest.raises(DamagedData, match=r"train.de"):
        load("multi30k", folder, partial=True, **SMALL)
    (folder / "train.de").unlink()
    (folder / "train.de.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(DamagedData, match=r"train.de.gz"):
        load("multi30k", folder, partial=True, **SMALL)


def test_line_separators_inside_a_line_do_not_shift_the_pairs(tmp_path):
    folder = writers.parallel(tmp_path)
    lines = (folder / "train.en").read_text().split("\n")
    lines[1] += "\u2028and on"
    (folder / "train.en").write_text("\n".join(lines))
    assert (
        load("multi30k", folder, partial=True, **SMALL).train.source_text[2] == writers.PAIRS[2][0]
    )


@pytest.mark.parametrize("tokens", ["character", "bpe"])
def test_running_text_comes_back(tmp_path, tokens):
    folder = writers.text(tmp_path / "tinyshakespeare")
    text = (folder / "input.txt").read_text(encoding="utf-8")
    with pytest.raises(IncompleteData, match="4000 of 1115394 characters"):
        load("tinyshakespeare", tmp_path)
    dataset = load(
        "tinyshakespeare", tmp_path, partial=True, tokens=tokens, context=16, vocabulary=280
    )
    parts = {"train": text[:2520], "valid": text[2520:3600], "test": text[3600:]}
    for part, split in dataset.splits.items():
        numbers = split.tokens.tolist()
        if tokens == "character":
            assert "".join(dataset.extras["alphabet"][n] for n in numbers) == parts[part]
        else:
            assert dataset.extras["bpe"].decode([numbers]) == [parts[part]]
        assert dataset.extras["characters"][split.tokens.long()].sum() == len(parts[part])
    assert dataset.model_args["context"] == 16
    assert dataset.model_args["vocab"] == len(dataset.extras["characters"])


def test_any_text_file_and_limits(tmp_path):
    file = writers.text(tmp_path) / "input.txt"
    dataset = load("text", file, context=8, limit=1000, train_fraction=0.9, stride=4)
    assert dataset.info["characters"] == {"train": 900, "valid": 100, "test": 400}
    assert any("1000 of 3600" in words for words in dataset.info["departures"])
    assert len(dataset.valid) == -(-99 // 8)
    assert len(dataset.train) == -(-(899 - 8) // 4) + 1
    (tmp_path / "latin.txt").write_bytes("Größe".encode("latin-1") * 10)
    with pytest.raises(DamagedData, match=r"latin.txt is not UTF-8 text: byte 2 of 50 is 0xf6"):
        load("text", tmp_path / "latin.txt")
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DamagedData, match="too short"):
        load("text", tmp_path / "short.txt")
    with pytest.raises(ValueError, match="'character' or 'bpe'"):
        load("text", file, tokens="words")


@pytest.mark.slow
def test_real_multi30k_and_tinyshakespeare(real_data):
    path, real = real_data("multi30k")
    pairs = load("multi30k", path, partial=not real, vocabulary=8000 if real else 300)
    assert (
        pairs.extras["target_bpe"].decode(pairs.test.batch([0])["target"].tolist())
        == pairs.test.target_text[:1]
    )
    path, _ = real_data("tinyshakespeare")
    plays = load("tinyshakespeare", path, partial=not real)
    if real:
        assert (len(pairs.train), len(pairs.valid), len(pairs.test)) == (29_000, 1_014, 1_000)
        assert pairs.info["pairs"]["test"] == {"all": 1000, "left_out": 0, "cut": 0}
        assert plays.model_args == {"vocab": 65, "context": 256}
        assert sum(plays.info["characters"].values()) == 1_115_394
