"""Parallel text for translation: Multi30k, WMT, or your own `train.en` and `train.de`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dampen.studies.plugins import (
    BEGIN,
    BROKEN,
    END,
    PAD,
    Batch,
    Bpe,
    DamagedData,
    Dataset,
    DataSource,
    DataSpec,
    Request,
    Split,
    damaged,
    file_sha256,
    find,
    limited,
    pad_tokens,
    read_file,
    require_complete,
    require_within,
)
from reproductions.data.archives import open_limited

MULTI30K = DataSpec(
    "multi30k",
    "translation",
    "Multi30k: 29,000 image captions in English and German, with 1,014 to validate and 1,000 to "
    "test",
    "the repository 'multi30k/dataset' on GitHub, data/task1/raw (non-commercial use)",
    "multi30k/{train,val,test_2016_flickr}.{en,de}, plain or .gz",
)
PARALLEL = DataSpec(
    "parallel",
    "translation",
    "any parallel text: one sentence per line, the same line number in both languages (WMT style)",
    "your own text, or the translation tasks of WMT (newstest files)",
    "{train,valid,test}.{en,de} (also val, dev, newstest2013; test_2016_flickr, newstest2014), "
    "plain or .gz",
)
PARTS = {
    "train": ["train"],
    "valid": ["val", "valid", "dev", "newstest2013"],
    "test": ["test_2016_flickr", "test", "newstest2014"],
}
OFFICIAL_COUNTS = {"multi30k": {"train": 29_000, "valid": 1_014, "test": 1_000}}


def text_file(root: Path, stem: str, language: str) -> Path | None:
    """The file of one part in one language, plain or compressed."""
    return next(
        (p for p in (root / f"{stem}.{language}", root / f"{stem}.{language}.gz") if p.is_file()),
        None,
    )


def holds(path: Path, source: str = "en", target: str = "de") -> bool:
    return all(text_file(path, "train", language) for language in (source, target))


def is_multi30k(path: Path) -> bool:
    """Whether parallel text is Multi30k, by its name or the name of its test part."""
    return path.name == "multi30k" or any(path.glob("test_2016_flickr.*"))


def load_parallel(
    ask: Request,
    *,
    source: str = "en",
    target: str = "de",
    vocabulary: int = 8000,
    joint: bool = True,
    max_tokens: int = 64,
    lowercase: bool = False,
    test: str | None = None,
) -> Dataset:
    """Sentence pairs in byte-level BPE, learned from the training part alone; the official parts
    are kept.

    `joint=True` learns one vocabulary for both languages. Training pairs longer than `max_tokens`
    or with an empty side are left out; validation and test sentences are cut to it (the references
    for BLEU are not). `test` names the test file where there are several."""
    root = find(ask.spec, ask.data_dir, [ask.spec.name], lambda path: holds(path, source, target))
    stems = PARTS | ({"test": [test]} if test else {})
    text: dict[str, tuple[list[str], list[str]]] = {}
    hashes: dict[str, str] = {}
    problems = []
    for part, names in stems.items():
        stem = next(
            (n for n in names if text_file(root, n, source) and text_file(root, n, target)), None
        )
        if stem is None:
            raise DamagedData(
                f"{root} has no {part} part in {source} and {target}: expected one of {names}."
            )
        files = [f for f in (text_file(root, stem, language) for language in (source, target)) if f]
        text[part] = _pairs(files[0], files[1], lowercase)
        hashes |= {f.name: file_sha256(f) for f in files}
        official = OFFICIAL_COUNTS.get(ask.spec.name, {}).get(part)
        if official and len(text[part][0]) < official:
            problems.append(f"{len(text[part][0])} of {official} {part} pairs")
    departures = require_complete(problems, ask.partial, ask.spec.name)

    import numpy as np

    rows, cut = limited(np.zeros(len(text["train"][0]), dtype=int), ask.limit, ask.seed)
    text["train"] = tuple([side[i] for i in rows.tolist()] for side in text["train"])  # type: ignore[assignment]
    if joint:
        bpe = {"source": Bpe.train((line for side in text["train"] for line in side), vocabulary)}
        bpe["target"] = bpe["source"]
    else:
        bpe = {
            side: Bpe.train(text["train"][i], vocabulary)
            for i, side in enumerate(("source", "target"))
        }
    splits, counts = {}, {}
    for part, (left, right) in text.items():
        splits[part], counts[part] = _split(
            left, right, bpe["source"], bpe["target"], max_tokens, part == "train"
        )
    info = {
        "layout": "parallel text",
        "source": root.name,
        "sha256": hashes,
        "languages": [source, target],
        "pairs": counts,
        "partial": bool(problems),
        "departures": departures
        + [note.replace("outside the test set", "of the training part") for note in cut],
        "seed": ask.seed,
        "limit": ask.limit,
        "options": {
            "vocabulary": vocabulary,
            "joint": joint,
            "max_tokens": max_tokens,
            "lowercase": lowercase,
            "test": test,
        },
    }
    return Dataset(
        ask.spec.name,
        ask.spec.task,
        splits["train"],
        splits["valid"],
        splits["test"],
        [],
        info,
        {"source_vocab": len(bpe["source"]), "target_vocab": len(bpe["target"]), "pad": PAD},
        root=root,
        extras={"source_bpe": bpe["source"], "target_bpe": bpe["target"], "max_tokens": max_tokens},
    )


class PairSplit(Split):
    """Sentence pairs as token numbers, padded on the right; the model sees the target up to each
    token.

    Targets begin with the token `begin` and end with `end`: `inputs = (source, target[:-1])`,
    `target = target[1:]`. A batch is cut to its longest sentence, rounded up to a multiple of 8 so
    that few different shapes occur. `source_text` and `target_text` keep the sentences as they
    were, for BLEU."""

    def __init__(
        self,
        source: Tensor,
        target: Tensor,
        source_text: list[str],
        target_text: list[str],
        pad: int,
        multiple: int = 8,
    ):
        if not len(source) == len(target) == len(source_text) == len(target_text):
            raise ValueError(
                f"Sentence pairs must match one to one: got {len(source)} and {len(target)}."
            )
        self.source, self.target, self.pad, self.multiple = source, target, pad, multiple
        self.source_text, self.target_text = source_text, target_text

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Tensor) -> Batch:
        source = self._trim(self.source[indices], 0)
        target = self._trim(self.target[indices], 1).long()
        return {
            "inputs": (source.long(), target[:, :-1]),
            "target": target[:, 1:],
            "valid": target[:, 1:] != self.pad,
        }

    def _trim(self, tokens: Tensor, extra: int) -> Tensor:
        """Drop columns that hold padding alone; `extra` columns come on top of the multiple."""
        longest = int((tokens != self.pad).sum(dim=1).max()) if len(tokens) else 1
        steps = -(-max(longest - extra, 1) // self.multiple)
        return tokens[:, : steps * self.multiple + extra]


def _pairs(left: Path, right: Path, lowercase: bool) -> tuple[list[str], list[str]]:
    sides = [_lines(path) for path in (left, right)]
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise damaged(
            right,
            "lines",
            len(sides[1]),
            f"as many as {left.name} has, {len(sides[0])}, more than none",
        )
    return tuple([line.lower() for line in side] if lowercase else side for side in sides)  # type: ignore[return-value]


def _lines(path: Path) -> list[str]:
    try:
        content = open_limited(path).read() if path.suffix == ".gz" else read_file(path)
        text = content.decode("utf-8")
    except DamagedData:
        raise
    except BROKEN as error:
        raise DamagedData(
            f"{path} ({path.stat().st_size} bytes) is damaged: {error}. Fetch the file again."
        ) from error
    require_within(
        "DAMPEN_MAX_LINE", max(map(len, text.split("\n"))), path, "characters in one line"
    )
    return [
        line.strip() for line in text.removesuffix("\n").split("\n")
    ]  # splitlines would cut at U+2028 too


def _split(
    left: list[str], right: list[str], source: Bpe, target: Bpe, longest: int, train: bool
) -> tuple[PairSplit, dict[str, int]]:
    """Tokens of both sides: source ends with the end token, target begins and ends."""
    tokens = list(zip(source.encode(left), target.encode(right), strict=True))
    fits = [max(len(a), len(b)) <= longest for a, b in tokens]
    kept = [i for i, (a, b) in enumerate(tokens) if not train or (fits[i] and a and b)]
    counts = {
        "all": len(tokens),
        "left_out": len(tokens) - len(kept),
        "cut": 0 if train else fits.count(False),
    }
    sources = [[*tokens[i][0][:longest], END] for i in kept]
    targets = [[BEGIN, *tokens[i][1][:longest], END] for i in kept]
    texts = [left[i] for i in kept], [right[i] for i in kept]
    return PairSplit(pad_tokens(sources), pad_tokens(targets), *texts, PAD), counts


PRESET: dict[str, Any] = {
    "data": {"limit": 8000},
    "model": {"name": "seq2seq", "width": 128, "depth": 2, "heads": 4, "mlp": 256},
    "train": {
        "epochs": 8,
        "batch_size": 64,
        "lr": 2e-3,
        "warmup": 1.0,
        "label_smoothing": 0.1,
        "clip": 1.0,
    },
}
MULTI30K_SOURCE = DataSource(
    MULTI30K,
    load_parallel,
    lambda path: holds(path) and is_multi30k(path),
    ["multi30k"],
    steps=(
        "git clone https://github.com/multi30k/dataset",
        "mkdir multi30k && cp dataset/data/task1/raw/{train,val,test_2016_flickr}.{en,de}.gz "
        "multi30k/",
    ),
    preset=PRESET,
    check={"vocabulary": 259},  # no merges: nothing is trained
)
PARALLEL_SOURCE = DataSource(
    PARALLEL,
    load_parallel,
    holds,
    ["parallel"],
    general=True,
    steps=("nothing to fetch: put {train,valid,test}.{en,de} into a folder and say --data-dir",),
    check={"vocabulary": 259},
)
