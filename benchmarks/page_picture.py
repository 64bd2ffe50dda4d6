"""The README's picture of the page, light and dark, from the demo's record: docs/images/page_{light,dark}.png.

    python -m benchmarks.page_picture

Drawn by a real Chromium; a test draws them again and looks at what is on them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from dampen.studies.report import write_report

ROOT = Path(__file__).resolve().parents[1]
RECORD, IMAGES = ROOT / "records" / "demo.json.xz", ROOT / "docs" / "images"
WIDTH, HEIGHT = 1180, 1040


def draw(folder: Path) -> dict[str, dict[str, object]]:
    """Both pictures into a folder, and what each shows."""
    from tests.browser import Browser

    shown: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as place:
        html = Path(place) / "report.html"
        write_report([RECORD], html, "html")
        browser = Browser()
        try:
            for name, dark in (("light", False), ("dark", True)):
                page = browser.page(WIDTH, HEIGHT, dark=dark)
                page.open(html)
                page.wait("document.querySelectorAll('svg').length > 0")
                page.picture(folder / f"page_{name}.png", full=False)
                shown[name] = {
                    "background": page.run("getComputedStyle(document.body).backgroundColor"),
                    "overflow": page.run("document.documentElement.scrollWidth > innerWidth + 1"),
                    "text": page.run("document.body.innerText.slice(0, 4000)"),
                }
        finally:
            browser.close()
    return shown


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    draw(IMAGES)
