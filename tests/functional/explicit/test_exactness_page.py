"""docs/exactness.md says what the methods compute; training differs in the last digits between machines."""

import re

import pytest

from benchmarks import exactness_table


def numbers(rows):
    return [float(n) for n in re.findall(r"([\d.]+) %", rows)]


def test_the_table_is_up_to_date():
    text = exactness_table.PAGE.read_text()
    written = text.split(exactness_table.START)[1].split(exactness_table.END)[0]
    found = exactness_table.table()
    assert len(numbers(found)) == 3 * (len(exactness_table.TERMS) + 1)
    assert numbers(written) == pytest.approx(numbers(found), abs=1.0), (
        "run `python -m benchmarks.exactness_table`"
    )
