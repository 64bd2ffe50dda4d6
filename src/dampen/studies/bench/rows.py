"""What is benched: for each method the variants worth knowing, the sizes of
`dampen bench`, and their targets.

The first variant of a method is its default and bears its registry name. A method without an entry
is benched as its constructor makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dampen.names import nearest
from dampen.studies.errors import ConfigError
from dampen.studies.methods_text import check_methods, parse_rows


@dataclass(frozen=True)
class Variant:
    """One row: its name, the method it belongs to, the regularizers as plain
    data, and where they sit."""

    name: str
    method: str
    specs: list[dict[str, Any]] = field(hash=False)
    text: str = ""  # the same as on the command line
    upper: bool = False  # only in the upper half of the layers
    target: float | None = (
        None  # a training step, as a multiple of the best plain step (DESIGN section 6)
    )


_ALL_TERMS = "query=0.05, key=0.05, value=0.05, attended_value=0.05, query_key=0.05, ffn=0.05"
_TABLE: dict[
    str, list[tuple[str, str, float | None]]
] = {  # method -> (what is special, written out, target)
    "arora_dropout": [("", "arora_dropout(value=0.05, ffn=0.05)", None)],
    "blurred_attention": [
        ("", "blurred_attention", 1.03),
        ("grid", "blurred_attention(grid=(8, 8))", None),
    ],
    "consistency": [
        ("", "drop_key(rate=0.1) + consistency", 1.95),
        ("upper half", "drop_key(rate=0.1) + consistency", 1.60),
    ],
    "drop_attention": [
        ("", "drop_attention(rate=0.1)", 1.10),
        ("column", "drop_attention(rate=0.1, unit='column')", None),
        ("unnormalized", "drop_attention(rate=0.1, normalized=False)", 1.10),
    ],
    "drop_connect": [("", "drop_connect(rate=0.1)", None)],
    "drop_head": [("", "drop_head(rate=0.1)", 1.02)],
    "drop_key": [
        ("", "drop_key(rate=0.1)", 1.06),
        ("column", "drop_key(rate=0.1, unit='column')", 1.02),
        ("block", "drop_key(rate=0.1, unit='block', window=2)", 1.10),
        ("cross", "drop_key(rate=0.1, unit='cross')", 1.10),
    ],
    "drop_path": [("", "drop_path(rate=0.1)", 1.02)],
    "embedding_dropout": [("", "embedding_dropout(rate=0.1)", None)],
    "explicit_dropout": [
        ("", "explicit_dropout(value=0.05, ffn=0.05)", 1.03),
        ("all terms", f"explicit_dropout({_ALL_TERMS})", 1.12),
        ("exact", "explicit_dropout(value=0.05, ffn=0.05, form='exact')", 1.06),
        ("all terms, exact", f"explicit_dropout({_ALL_TERMS}, form='exact')", 1.60),
    ],
    "explicit_mixout": [
        ("", "explicit_mixout", None),
        ("ffn", "explicit_mixout(targets='ffn')", None),
    ],
    "hard_masking": [
        ("", "hard_masking", 1.15),
        ("zero", "hard_masking(fill='zero')", None),
    ],
    "hidden_dropout": [("", "hidden_dropout(rate=0.1)", None)],
    "layer_drop": [("", "layer_drop(rate=0.2)", 1.02)],
    "mixout": [
        ("", "mixout", None),
        ("ffn", "mixout(targets='ffn')", None),
    ],
    "nef_tune": [("", "nef_tune", None)],
    "r_drop": [
        ("", "drop_key(rate=0.1) + r_drop", 1.95),
        ("upper half", "drop_key(rate=0.1) + r_drop", 1.60),
        (
            "HiddenKey",
            "drop_key(rate=0.1, unit='column') + hidden_dropout(rate=0.1) + r_drop",
            None,
        ),
    ],
    "skip_ablation": [("", "skip_ablation(attention=True, ffn=True)", None)],
    "token_graying": [
        ("", "token_graying", 1.02),
        ("svd", "token_graying(kind='svd')", 1.15),
    ],
}


def find_variants(methods: str | None = None) -> list[Variant]:
    """The variants of every method, or of those in `methods`; `drop_key(rate=0.3)` there is a
    variant of its own.

    Args:
        methods: as on the command line; None: all.

    >>> [v.name for v in find_variants("drop_path, token_graying, drop_key(rate=0.3)")]
    ['drop_path', 'token_graying', 'token_graying svd', 'drop_key(rate=0.3)']
    """
    from dampen.registry import methods as registered

    known, found = registered(), []
    rows = {name: [{"name": name}] for name in known} if methods is None else parse_rows(methods)
    problems = []
    for text, specs in rows.items():
        bare = len(specs) == 1 and list(specs[0]) == ["name"]
        unknown = [s["name"] for s in specs if s["name"] not in known]
        if unknown or not specs:
            asked = unknown[0] if unknown else text
            problems.append(f"--methods: there is no method {asked!r}{nearest(asked, known)}")
        elif bare:
            found += _variants_of(text)
        else:
            problems += check_methods(specs, "--methods")
            found.append(Variant(text, specs[-1]["name"], specs, text))
    if problems:
        raise ConfigError("The bench", problems)
    return found


def _variants_of(method: str) -> list[Variant]:
    rows = _TABLE.get(method, [("", method, None)])
    variants = []
    for special, text, target in rows:
        name = f"{method} {special}".strip()
        variants.append(Variant(name, method, _specs(text), text, special == "upper half", target))
    return variants


def _specs(text: str) -> list[dict[str, Any]]:
    (specs,) = parse_rows(text).values()
    return specs


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
    "drop_key(rate=0.2), drop_attention(rate=0.2), hard_masking, "
    "explicit_dropout(value=0.06, ffn=0.06), "
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
        "ViT 4 x 96, 65 tokens: as in a small study", "vit(width=96, depth=4, heads=4, mlp=192)", 32, _ROWS
    ),
    "mid": Preset(
        "ViT 7 x 384, 65 tokens: the papers' order of size", "vit", 64,
        "drop_key, hard_masking, explicit_dropout, r_drop, "
        "feed_forward_dropout, drop_path, drop_head, "
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

    Args:
        size: one of `PRESETS`.
        native: whether native kernels run.

    >>> targets_of("tiny", native=True)["hard_masking"]
    1.15
    """
    found = {row: pair[native] for row, pair in PRESETS[size].targets.items()}
    return {row: target for row, target in found.items() if target is not None}
