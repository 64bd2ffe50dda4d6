"""Where the models of a study look, as one picture: an image in every line, then its attention map under each row."""

from __future__ import annotations

from html import escape
from itertools import groupby

from dampen.studies import ResultTable
from reproductions.figures.attention_maps import maps_of

SIDE, GAP, TITLE = 96, 10, 18


def maps_picture(table: ResultTable) -> str | None:
    """The maps of a diagnosed study as SVG; None where none was recorded."""
    figure = maps_of(table.entries)
    if figure is None:
        return None
    lines = [list(images) for _, images in groupby(figure.images, key=lambda image: image["group"])]
    drawn = []
    for y, images in enumerate(lines):
        top = y * (SIDE + TITLE + GAP)
        label = images[0]["group"].partition(": ")[2]
        drawn.append(f'<text x="0" y="{top + 12}" font-weight="bold">{escape(label)}</text>')
        for x, image in enumerate(images):
            left = x * (SIDE + GAP)
            title = image["title"].partition(":")[0]  # the row, without what it predicted
            if x:
                drawn.append(f'<text x="{left}" y="{top + 12}">{escape(title)}</text>')
            drawn.append(
                f'<image x="{left}" y="{top + TITLE}" width="{SIDE}" height="{SIDE}" href="{image["png"]}" '
                f'preserveAspectRatio="none" style="image-rendering: pixelated">'
                f"<title>{escape(image['alt'])}</title></image>"
            )
    width, height = max(map(len, lines)) * (SIDE + GAP), len(lines) * (SIDE + TITLE + GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head += (
        ' font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([head, *drawn, "</svg>\n"])
