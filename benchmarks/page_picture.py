"""The README's picture, light and dark: the demo's differences with their intervals, from its committed record.

    python -m benchmarks.page_picture

A test draws it again from the record and compares every label and number on it.
"""

from __future__ import annotations

import json
from pathlib import Path

from dampen.studies.report import make_report
from dampen.studies.report.charts import forest
from dampen.studies.report.figures import DARK, LIGHT, Palette
from reproductions.pages.publish import PADDING

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "reproductions" / "small_data" / "results" / "demo.json.xz"
IMAGES = ROOT / "docs" / "images"
GROUND = {"light": ("#ffffff", "#1c2733"), "dark": ("#0d1117", "#e6edf3")}
"""Background and text, as the README's page has them."""


def draw(theme: str) -> str:
    """The forest plot as SVG."""
    import vl_convert

    table = make_report([RECORD]).tables[0]
    reference = table.main_reference
    figure = forest(
        table, Palette([e.name for e in table.entries], [reference.name] if reference else [])
    )
    if figure is None:
        raise ValueError(f"{RECORD.name} has nothing to compare.")
    text = json.dumps(figure.panels[0].spec)
    if theme == "dark":
        for light, dark in zip(LIGHT, DARK, strict=True):
            text = text.replace(light, dark)
    ground, ink = GROUND[theme]
    axis = {"labelColor": ink, "titleColor": ink, "tickColor": ink, "gridOpacity": 0.25}
    config = {"axis": axis, "rule": {"color": ink}, "title": {"color": ink}}
    title = {
        "text": table.study.title,
        "subtitle": "All with a weight decay of 1.0, a new split for each seed",
        "subtitleColor": ink,
    }
    around = {
        "width": 560,
        "background": ground,
        "padding": PADDING,
        "config": config,
        "title": title,
    }
    return vl_convert.vegalite_to_svg(json.loads(text) | around)


if __name__ == "__main__":
    for name in GROUND:
        (IMAGES / f"demo_{name}.svg").write_text(draw(name))
