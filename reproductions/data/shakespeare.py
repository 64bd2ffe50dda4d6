"""tinyshakespeare: one text file of plays."""

from __future__ import annotations

from pathlib import Path

from dampen.studies.plugins import DataSource, DataSpec, load_corpus, text_file

CHARACTERS = 1_115_394


def holds(path: Path) -> bool:
    """Whether a text is tinyshakespeare, by the name of its folder or its size."""
    file = text_file(path)
    return file is not None and (file.parent.name == "tinyshakespeare" or file.stat().st_size == CHARACTERS)


SHAKESPEARE = DataSource(
    DataSpec(
        "tinyshakespeare",
        "language",
        "tinyshakespeare: 1,115,394 characters of plays",
        "the repository 'karpathy/char-rnn' on GitHub, data/tinyshakespeare/input.txt",
        "tinyshakespeare/input.txt",
        characters=CHARACTERS,
    ),
    load_corpus,
    holds,
    ["tinyshakespeare"],
    steps=(
        "mkdir tinyshakespeare && cd tinyshakespeare",
        "curl -LO https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    ),
)
