"""Where each model looks: attention maps of the same image under every method, as small pictures."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from dampen.studies import Entry, ResultTable
from dampen.studies.plugins import ROW, Column, Figure, Palette, diagnosed

# Five points of viridis: dark blue, blue, green, light green, yellow.
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))


def attention_maps(table: ResultTable, palette: Palette) -> Figure | None:
    """The attention maps of the configurations that `dampen diagnose` measured.

    Args:
        table: the runs of a study.
        palette: not used; each map has the colors of its own values.
    """
    shown, remark = diagnosed(table)
    figure = maps_of(shown)
    if figure is not None:
        figure.caption += remark
    return figure


def maps_of(entries: list[Entry], most_examples: int = 4) -> Figure | None:
    """The maps of the first seed of each configuration, next to the image; None without any.

    Args:
        entries: the configurations, in the order to be shown.
        most_examples: images at most.
    """
    images: list[dict[str, str]] = []
    records: list[dict[str, Any]] = []
    seen: set[str] = set()
    examples: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for entry in entries:
        run = next(
            (r for _, r in sorted(entry.setting.finished().items()) if r.measured.attention_maps),
            None,
        )
        for i, example in enumerate(run.measured.attention_maps.get("examples", []) if run else []):
            examples.setdefault(f"image {i + 1}: {example['label']}", []).append(
                (entry.name, example)
            )
    for title, found in list(examples.items())[:most_examples]:
        for name, example in found:
            if title not in seen and example.get("image"):
                seen.add(title)
                alt = f"The {title}"
                images.append(
                    {"group": title, "title": "image", "alt": alt, "png": png(example["image"])}
                )
            said = f"{name}: predicted {example['predicted']}" if example.get("predicted") else name
            alt = f"Attention map of {name} on {title}"
            images.append(
                {"group": title, "title": said, "alt": alt, "png": png(colored(example["map"]))}
            )
            flat = [(v, y, x) for y, line in enumerate(example["map"]) for x, v in enumerate(line)]
            peak, y, x = max(flat)
            total = sum(v for v, _, _ in flat) or 1.0
            entropy = {"share": peak / total, "place": f"row {y + 1}, column {x + 1}"}
            records.append({"row": name, "image": title, **entropy})
    if not images:
        return None
    columns = [
        ROW,
        Column("image", "Image"),
        Column("share", "Share of the strongest patch", 4),
        Column("place", "Where"),
    ]
    caption = (
        "The same image under each method, first seed; bright patches receive much attention. "
    )
    caption += "Each map is scaled to its own range."
    return Figure(
        "attention", "Attention maps", caption, [], columns, records, wide=True, images=images
    )


def colored(values: Sequence[Sequence[float]]) -> list[list[list[int]]]:
    """Numbers as colors from dark blue (smallest) to yellow (largest).

    >>> colored([[0.0, 1.0]])
    [[[68, 1, 84], [253, 231, 37]]]
    """
    flat = [v for line in values for v in line]
    low, span = min(flat), (max(flat) - min(flat)) or 1.0

    def color(v: float) -> list[int]:
        at = (v - low) / span * (len(RAMP) - 1)
        i = min(int(at), len(RAMP) - 2)
        return [round(a + (b - a) * (at - i)) for a, b in zip(RAMP[i], RAMP[i + 1], strict=True)]

    return [[color(v) for v in line] for line in values]


def png(pixels: Sequence[Sequence[Sequence[int]]]) -> str:
    """Rows of RGB pixels as the data address of a PNG file.

    >>> png([[[255, 0, 0]]])[:30]
    'data:image/png;base64,iVBORw0K'
    """
    height, width = len(pixels), len(pixels[0])
    raw = b"".join(
        b"\0" + bytes(min(255, max(0, int(c))) for pixel in line for c in pixel) for line in pixels
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + parts).decode()
