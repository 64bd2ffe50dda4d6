"""What each detector finds: true and found boxes drawn on a few test images, the same ones under every method."""

from __future__ import annotations

import base64
import io
import re
from html import escape
from typing import Any

from dampen.studies import ResultTable
from dampen.studies.plugins import ROW, Column, Detected, Figure, Palette

# Okabe and Ito's bright colors: they must stand out on a photograph, whatever the ground of the page.
COLORS = ("#e69f00", "#56b4e9", "#ff5ea8", "#f0e442", "#00e09a", "#ff7b39")
WIDTH = 208
"""Pixels that a picture is shown with."""
ADDRESS = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]+={0,2}")


MOST_ROWS = 6


def detections(table: ResultTable, palette: Palette) -> Figure | None:
    """The images of the first seed of each configuration; None where no run recorded any.

    Args:
        table: the runs of an object detection study.
        palette: not used; boxes are colored by class.
    """
    images: list[dict[str, str]] = []
    records: list[dict[str, Any]] = []
    colors: dict[str, str] = {}
    groups: dict[int, list[dict[str, str]]] = {}
    for entry in table.entries[:MOST_ROWS]:
        run = next(
            (
                r
                for _, r in sorted(entry.setting.finished().items())
                if r.final and r.final.detections
            ),
            None,
        )
        for i, seen in enumerate(run.final.detections if run and run.final else []):
            size = picture_size(seen.image)
            if size is None:
                continue
            for label in [*(t[0] for t in seen.truth), *(f[0] for f in seen.found)]:
                colors.setdefault(label, COLORS[len(colors) % len(COLORS)])
            hits = matched(seen)
            told = f"{hits} of {len(seen.truth)} objects, {len(seen.found) - hits} false"
            alt = f"Test image {i + 1} with the boxes of {entry.name}: {told}"
            shown = {"group": f"test image {i + 1}", "title": f"{entry.name}: {told}", "alt": alt}
            shown |= {
                "png": drawn(seen, size, colors),
                "width": str(WIDTH),
                "height": str(WIDTH * size[1] // size[0]),
            }
            groups.setdefault(i, []).append(shown)
            counts = {"objects": len(seen.truth), "hits": hits, "false": len(seen.found) - hits}
            records.append({"row": entry.name, "image": i + 1, **counts})
    images = [image for i in sorted(groups) for image in groups[i]]
    if not images:
        return None
    columns = [ROW, Column("image", "Image", 0), Column("objects", "True objects", 0)]
    columns += [Column("hits", "Found (IoU 0.5)", 0), Column("false", "False", 0)]
    names = {
        "#e69f00": "orange",
        "#56b4e9": "blue",
        "#ff5ea8": "pink",
        "#f0e442": "yellow",
        "#00e09a": "green",
    }
    told = ", ".join(
        f"{label} {names.get(color, 'red')}" for label, color in list(colors.items())[: len(COLORS)]
    )
    caption = "The same test images under each method, first seed. Solid: found with a score of 0.3 or more; "
    caption += f"dashed white: the truth. {told}."
    return Figure(
        "detections", "Detected objects", caption, [], columns, records, wide=True, images=images
    )


def matched(seen: Detected) -> int:
    """How many true objects were found, one to one: from the most certain detection down, each takes the free object
    of its class that it overlaps most, if by IoU 0.5 or more."""
    free = list(seen.truth)
    hits = 0
    for label, _, *box in sorted(seen.found, key=lambda f: -f[1]):
        own = [(overlap(box, list(t[1:])), t) for t in free if t[0] == label]
        best = max(own, key=lambda pair: pair[0], default=(0.0, None))
        if best[1] is not None and best[0] >= 0.5:
            free.remove(best[1])
            hits += 1
    return hits


def overlap(a: list[float], b: list[float]) -> float:
    """Intersection over union of (left, top, right, bottom).

    >>> overlap([0, 0, 2, 2], [1, 0, 3, 2])
    0.3333333333333333
    """
    w, h = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(w, 0.0) * max(h, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union > 0 else 0.0


def picture_size(address: str) -> tuple[int, int] | None:
    """Width and height of a recorded picture; None where it is none. Records may come from anywhere."""
    from PIL import Image

    if not ADDRESS.fullmatch(address):
        return None
    try:
        with Image.open(
            io.BytesIO(base64.b64decode(address.partition(",")[2])), formats=("JPEG",)
        ) as picture:
            return picture.size
    except (OSError, ValueError, Image.DecompressionBombError):
        return None


def drawn(seen: Detected, size: tuple[int, int], colors: dict[str, str]) -> str:
    """The picture with its boxes as the data address of an SVG file."""
    width, height = size
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        f'<image href="{seen.image}" width="{width}" height="{height}"/>',
    ]
    for label, *box in seen.truth:
        parts.append(
            _rectangle(box, size, "#fff", label, 'stroke-dasharray="2 1.5" stroke-width="1"')
        )
    for label, score, *box in seen.found:
        parts.append(
            _rectangle(box, size, colors[label], f"{label} {score:.2f}", 'stroke-width="1.3"')
        )
    content = "".join([*parts, "</svg>"])
    return "data:image/svg+xml;base64," + base64.b64encode(content.encode()).decode()


def _rectangle(box: list[float], size: tuple[int, int], color: str, title: str, more: str) -> str:
    left, top, right, bottom = (v * side for v, side in zip(box, size * 2, strict=True))
    place = f'x="{left:.1f}" y="{top:.1f}" width="{max(right - left, 0):.1f}" height="{max(bottom - top, 0):.1f}"'
    return (
        f'<rect {place} fill="none" stroke="{color}" {more}><title>{escape(title)}</title></rect>'
    )
