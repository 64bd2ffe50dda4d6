"""The README's pictures show the demo's page, light and dark, whole and without overflow."""

import pytest

from benchmarks.page_picture import IMAGES, draw


@pytest.mark.slow
def test_the_pictures_are_drawn_again(tmp_path):
    shown = draw(tmp_path)
    for name in ("light", "dark"):
        assert (tmp_path / f"page_{name}.png").stat().st_size > 20_000
        assert (IMAGES / f"page_{name}.png").exists(), "run `python -m benchmarks.page_picture`"
        assert not shown[name]["overflow"]
        assert "plain" in shown[name]["text"]
    assert shown["light"]["background"] != shown["dark"]["background"]
