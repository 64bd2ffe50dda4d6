"""The README's picture, light and dark, shows the numbers of the demo's committed record."""

import re

import pytest

from benchmarks.page_picture import IMAGES, RECORD, ROOT, draw
from dampen.studies.report import make_report


def labels(svg):
    """What a mark of the picture says: method, difference and bounds, without its place on the page."""
    return sorted(label for label in re.findall(r'aria-label="([^"]*)"', svg) if "verdict" in label)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_of_the_record(theme):
    committed = (IMAGES / f"demo_{theme}.svg").read_text()
    assert labels(committed) == labels(draw(theme)), "run `python -m benchmarks.page_picture`"
    compared = make_report([RECORD]).tables[0].compared()
    assert len(labels(committed)) == len(compared)
    for entry in compared:
        (label,) = [told for told in labels(committed) if f"row: {entry.name};" in told]
        shown = float(re.search(r"; difference: ([−-]?[\d.]+)", label).group(1).replace("−", "-"))
        assert shown == pytest.approx(entry.comparison.difference, abs=0.01)


def test_the_readme_shows_that_picture():
    readme = (ROOT / "README.md").read_text()
    assert all(f"docs/images/demo_{theme}.svg" in readme for theme in ("light", "dark"))
