"""The sizes of `dampen bench`: tiny, small, mid and long, with the targets that stand beside them.

A target is what a training step may take, as a multiple of the plain one, by the torch path and with native kernels; at
`long` it is attention alone, forward and backward. One thread and processor time, so that a busy neighbor disturbs
little: absolute times are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Targets = dict[str, tuple[float | None, float]]
"""Row -> the target of the torch path (None: it has none), and with native kernels."""


@dataclass(frozen=True)
class Preset:
    """One size."""

    what: str
    model: str
    batch: int
    methods: str
    targets: Targets = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    """Attention alone at these numbers of tokens, instead of a step."""


_ROWS = (
    "drop_key(rate=0.2), drop_attention(rate=0.2), hard_masking, explicit_dropout(value=0.06, ffn=0.06), "
    "feed_forward_dropout(rate=0.2), drop_path(rate=0.1), drop_head(rate=0.2), layer_drop, "
    "blurred_attention(width=3), drop_head(rate=0.2) + r_drop"
)
PRESETS = {
    "tiny": Preset(
        "ViT 4 x 48, 17 tokens: the demo's order of size",
        "vit(image_size=8, patch_size=2, channels=1, width=48, depth=4, heads=4, mlp=96)", 32, _ROWS,
        {
            "drop_key(rate=0.2)": (1.15, 1.05), "hard_masking": (1.25, 1.15),
            "explicit_dropout(value=0.06, ffn=0.06)": (1.18, 1.08), "feed_forward_dropout(rate=0.2)": (1.15, 1.04),
            "drop_path(rate=0.1)": (1.04, 1.04), "drop_head(rate=0.2)": (1.05, 1.05),
            "blurred_attention(width=3)": (1.06, 1.06), "drop_head(rate=0.2) + r_drop": (1.75, 1.75),
        },
    ),
    "small": Preset(
        "ViT 4 x 96, 65 tokens: the lab's order of size", "vit(width=96, depth=4, heads=4, mlp=192)", 32, _ROWS
    ),
    "mid": Preset(
        "ViT 7 x 384, 65 tokens: the papers' order of size", "vit", 64,
        "drop_key, hard_masking, explicit_dropout, r_drop, feed_forward_dropout, drop_path, drop_head, "
        "blurred_attention",
        {
            "drop_key": (1.04, 1.00), "drop_key block": (1.05, 1.02), "drop_key cross": (1.05, 1.02),
            "hard_masking": (1.10, 1.04), "explicit_dropout": (1.02, 1.02), "explicit_dropout exact": (1.05, 1.05),
            "explicit_dropout all terms": (1.08, 1.08), "r_drop": (2.05, 2.05), "r_drop upper half": (1.55, 1.55),
        },
    ),
    "long": Preset(
        "attention alone, 8 heads of 64, batch 1", "", 1, "drop_key(rate=0.1), hard_masking",
        {"drop_key(rate=0.1)": (1.6, 1.05), "hard_masking": (None, 1.15)}, (2048, 4096),
    ),
}  # fmt: skip


def targets_of(size: str, native: bool) -> dict[str, float]:
    """The targets of a size on the path that runs; none for a size without.

    >>> targets_of("tiny", native=True)["hard_masking"]
    1.15
    """
    found = {row: pair[native] for row, pair in PRESETS[size].targets.items()}
    return {row: target for row, target in found.items() if target is not None}
