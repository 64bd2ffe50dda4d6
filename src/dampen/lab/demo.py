"""The demo: every family of methods against the plain model on the embedded digits, a few minutes on two cores."""

from __future__ import annotations

from typing import Any

from dampen.lab.recipe import Recipe

FAMILIES: list[tuple[str, list[dict[str, Any]]]] = [
    ("keys", [{"name": "drop_key", "rate": {"linear": [0.3, 0.0]}}]),
    ("attention weights", [{"name": "drop_attention", "rate": 0.2, "normalized": False}]),
    ("feed-forward", [{"name": "feed_forward_dropout", "rate": 0.2}]),
    ("penalties", [{"name": "explicit_dropout", "value": 0.06, "ffn": 0.06, "rate": 0.2}]),
    ("penalties (Arora)", [{"name": "arora_dropout", "ffn": 0.001, "rate": 0.2}]),
    ("strongest scores", [{"name": "hard_masking", "rate": 0.2}]),
    ("blurred scores", [{"name": "blurred_attention", "width": 3}]),
    ("two passes", [{"name": "drop_key", "rate": 0.2}, {"name": "consistency", "weight": 0.5}]),
    ("heads", [{"name": "drop_head", "rate": 0.2}]),
    ("depth", [{"name": "drop_path", "rate": {"linear": [0.0, 0.2]}}]),
    ("weights", [{"name": "drop_connect", "rate": 0.1}]),
    ("tokens", [{"name": "patch_dropout", "rate": 0.25}]),
    ("attention penalties", [{"name": "head_diversity", "weight": 0.1}]),
    ("input", [{"name": "token_graying"}]),
]
"""One representative of each family, with settings near the papers'."""


def demo_recipe(known: list[str], seeds: int = 3) -> Recipe:
    """The demo as a recipe, with every family whose methods are `known`."""
    rows: list[dict[str, Any]] = [{"name": "plain", "methods": [], "baseline": True}]
    for family, methods in FAMILIES:
        if all(m["name"] in known for m in methods):
            names = " + ".join(m["name"] for m in methods)
            rows.append({"name": f"{names} ({family})", "methods": methods})
    return Recipe(
        name="demo",
        title=f"Which regularizer for a small ViT on 900 digits? {seeds} seeds each",
        paper="",
        table="",
        cost="about 3 minutes on two cores",
        command="dampen demo",
        departures=["handwritten digits (8 x 8) and a 3-layer ViT: a demonstration, not a table of any paper"],
        metric="accuracy",
        base={
            "data": {"name": "digits"},
            "model": {"name": "vit", "patch_size": 2, "width": 32, "depth": 3, "heads": 4, "mlp": 64},
            "train": {"epochs": 14, "batch_size": 32, "lr": 3e-3, "warmup": 1.0, "validate_every": 2},
            "seeds": list(range(seeds)),
        },
        rows=rows,
        scales={"laptop": {}},
    )
