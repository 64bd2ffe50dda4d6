"""Tables of texts: quotes in tab-separated files are letters where they cannot be quotes."""

import pytest
import torch

from dampen.studies.data.dataset import DamagedData
from dampen.studies.data.texts import read_table


def test_quotes_that_do_not_pair_are_letters(tmp_path):
    """As in GLUE's MRPC: a row that begins with a quote and never closes it would swallow the rows after it."""
    file = tmp_path / "train.tsv"
    file.write_text('label\ttext\n1\t"we won , he said .\n0\tno " here\n1\ta "b" c\n')
    assert read_table(file) == {
        "label": ["1", "0", "1"],
        "text": ['"we won , he said .', 'no " here', 'a "b" c'],
    }


def test_quotes_that_hold_a_tab_or_a_line_stay_quotes(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text('label\ttext\n1\t"one\ttwo"\n0\t"three\nfour"\n')
    assert read_table(file) == {"label": ["1", "0"], "text": ["one\ttwo", "three\nfour"]}


def test_uneven_rows_are_refused_with_their_number(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("label\ttext\n1\ta\n0\n")
    with pytest.raises(
        DamagedData, match=r"row 2 does not have the columns of the first.*see 'text'"
    ):
        read_table(file)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (1, "1 examples at train_fraction=0.7 leave 1 to train and 0 to validate on: give more"),
        (2, r"got 2 in train, and none is left for test .*Give more"),
    ],
)
def test_too_few_rows_for_three_parts_are_refused(rows, told):
    from dampen.studies.data.splits import split_rows

    cuts = {
        "seed": 0,
        "train_fraction": 0.7,
        "limit": None,
        "test_fraction": 0.25,
        "test_limit": None,
    }
    with pytest.raises(DamagedData, match=told):
        split_rows({"train": torch.arange(rows)}, **cuts)
