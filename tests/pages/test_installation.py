"""What the start page says of installing comes from its record."""

from benchmarks import installation


def test_the_start_page_says_what_installing_took():
    assert installation.main(["--check"]) == 0, "run `python -m benchmarks.installation`"
