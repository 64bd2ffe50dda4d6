"""Byte-level BPE and beam search."""

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dampen.studies.text import BEGIN, END, PAD, Bpe, pad_tokens
from reproductions.metrics.beam_search import beam_search

LINES = ["a man sees a dog", "ein Mann läuft", "zwei Hunde laufen", "☃ snow — is white"] * 5
BPE = Bpe.train(LINES, 320)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back_with_its_characters_counted(text):
    tokens = BPE.encode([text])
    assert BPE.decode(tokens) == [text]
    assert min(tokens[0], default=3) > END  # text never makes a special token
    assert BPE.characters()[tokens[0]].sum() == len(text)


def test_special_tokens_in_the_text_are_plain_text():
    for text in ("<s>", "</s> <pad>", "a<pad>b"):
        tokens = BPE.encode([text])[0]
        assert not {PAD, BEGIN, END} & set(tokens)
        assert BPE.decode([[BEGIN, *tokens, END, PAD]]) == [text]


def test_merges_are_learned_and_repeatable():
    assert len(BPE.encode(["a man sees a dog"])[0]) < 16
    assert 259 < len(BPE) <= 320  # fewer where nothing is left to merge
    assert Bpe.train(LINES, 320).tokenizer.to_str() == BPE.tokenizer.to_str()
    with pytest.raises(ValueError, match="at least 259 tokens: got 100"):
        Bpe.train(LINES, 100)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_merges_do_not_depend_on_the_process(threads):
    """Another process hashes differently and may count in other threads: trials there must see the same tokens."""
    code = (
        f"import hashlib; from dampen.studies.text import Bpe; import sys; print(hashlib.sha256(Bpe.train({LINES!r}, "
        "320).tokenizer.to_str().encode()).hexdigest())"
    )
    import hashlib
    import os

    environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == hashlib.sha256(BPE.tokenizer.to_str().encode()).hexdigest()


def test_padding():
    assert pad_tokens([[5, 6, 8], [], [7]]).tolist() == [[5, 6, 8], [0, 0, 0], [7, 0, 0]]
    assert pad_tokens([]).shape == (0, 0)


class Table:
    """A toy translator: the next token's scores depend on the source's first token, the position and the last token."""

    def __init__(self, vocabulary=5, length=6, seed=0):
        self.scores = 2 * torch.randn(
            8, length + 1, vocabulary, vocabulary, generator=torch.Generator().manual_seed(seed)
        )
        self.calls = []

    def encode(self, source):
        return source.float()[..., None], source == PAD

    def decode(self, target, memory, padding=None):
        assert len(target) == len(memory) == len(padding)
        self.calls.append(tuple(target.shape))
        first = memory[:, 0, 0].long()
        position = torch.arange(target.shape[1])
        return self.scores[first[:, None], position[None], target]


def log_probability(model, source, tokens):
    """Of a whole translation, end token included."""
    memory, padding = model.encode(source[None])
    total = 0.0
    prefix = [BEGIN]
    for token in [*tokens, END]:
        logits = model.decode(torch.tensor([prefix]), memory, padding)[0, -1]
        total += logits.log_softmax(dim=-1)[token].item()
        prefix.append(token)
    return total


def normalized(model, source, tokens, alpha):
    return log_probability(model, source, tokens) / ((5 + len(tokens) + 1) / 6) ** alpha


SOURCES = torch.tensor([[1, 2, 0], [2, 2, 2], [3, 0, 0], [4, 1, 0], [5, 5, 5]])


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_the_best_of_all_translations(alpha, seed):
    model = Table(seed=seed)
    words = [3, 4]  # of 5 tokens three are special
    every = [t for n in range(4) for t in itertools.product(words, repeat=n)]
    found = beam_search(model, SOURCES, beam=40, max_tokens=4, alpha=alpha)
    for source, tokens in zip(SOURCES, found, strict=True):
        best = max(normalized(model, source, t, alpha) for t in every)
        assert normalized(model, source, tokens, alpha) == pytest.approx(best, abs=1e-5)


def test_a_beam_of_one_is_greedy():
    model = Table(vocabulary=9, length=12, seed=4)
    found = beam_search(model, SOURCES, beam=1, max_tokens=12)
    for source, tokens in zip(SOURCES, found, strict=True):
        memory, padding = model.encode(source[None])
        prefix = [BEGIN]
        while len(prefix) < 12:
            logits = model.decode(torch.tensor([prefix]), memory, padding)[0, -1].clone()
            logits[[PAD, BEGIN]] = -torch.inf
            token = int(logits.argmax())
            if token == END:
                break
            prefix.append(token)
        assert tokens == prefix[1:]


def test_a_batch_gives_what_single_sentences_give():
    model = Table(vocabulary=12, length=10, seed=5)
    together = beam_search(model, SOURCES, beam=3, max_tokens=10)
    alone = [beam_search(model, row[None], beam=3, max_tokens=10)[0] for row in SOURCES]
    assert together == alone
    assert all(not {PAD, BEGIN, END} & set(tokens) for tokens in together)
    assert max(map(len, together)) <= 9


def test_wider_beams_score_no_worse_here():
    model = Table(vocabulary=12, length=10, seed=6)
    narrow, wide = (beam_search(model, SOURCES, beam=b, max_tokens=10) for b in (1, 64))
    for source, a, b in zip(SOURCES, narrow, wide, strict=True):
        assert normalized(model, source, b, 0.6) >= normalized(model, source, a, 0.6) - 1e-6


def test_finished_sentences_leave_the_batch():
    model = Table(vocabulary=6, length=30, seed=0)
    model.scores[1, :, :, END] += 20  # the first sentence ends at once, the others hardly ever
    model.scores[2:, :, :, END] -= 20
    beam_search(model, SOURCES, beam=2, max_tokens=20)
    rows = [shape[0] for shape in model.calls]
    assert rows[0] == 10
    assert min(rows) == 8
    assert rows == sorted(rows, reverse=True)


def test_beam_search_on_the_real_model_and_bad_arguments():
    from reproductions.models.seq2seq import Seq2Seq

    torch.manual_seed(0)
    model = Seq2Seq(source_vocab=20, target_vocab=30, width=16, depth=1, heads=2, mlp=32).eval()
    source = torch.tensor([[5, 6, 7, END], [5, END, PAD, PAD]])
    together = beam_search(model, source, beam=3, max_tokens=8)
    assert (
        together[1] == beam_search(model, source[1:, :2], beam=3, max_tokens=8)[0]
    )  # padding changes nothing
    with pytest.raises(ValueError, match="count from 1"):
        beam_search(model, source, beam=0)
