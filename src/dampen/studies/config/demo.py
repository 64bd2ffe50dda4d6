"""The demo: one method per idea against the plain model on few digits, where regularizers have something to do.

337 images to train on and 60 epochs: long enough that the plain model overfits. With 25 epochs the stochastic methods
only slow training down and look harmful. Rates and length were chosen on validation, with other seeds than these.
"""

from __future__ import annotations

from typing import Any

from dampen.studies.config.recipe import Recipe

SEEDS = 8

FAMILIES: list[tuple[str, list[dict[str, Any]]]] = [
    ("tokens", [{"name": "patch_dropout", "rate": 0.3}]),
    ("two passes", [{"name": "drop_key", "rate": 0.2}, {"name": "consistency"}]),
    ("keys", [{"name": "drop_key", "rate": 0.3}]),
    ("attention weights", [{"name": "drop_attention", "rate": 0.2, "normalized": False}]),
    ("strongest scores", [{"name": "hard_masking", "rate": 0.3}]),
    ("heads", [{"name": "drop_head", "rate": 0.2}]),
    ("penalties", [{"name": "explicit_dropout", "value": 1.0, "ffn": 1.0}]),
    ("feed-forward", [{"name": "feed_forward_dropout", "rate": 0.2}]),
    ("input", [{"name": "token_graying"}]),  # does nothing here: a table in which everything helps teaches little
]
"""One representative of each idea."""


def demo_recipe(known: list[str], seeds: int = SEEDS) -> Recipe:
    """The demo as a recipe, with every family whose methods are `known`."""
    rows: list[dict[str, Any]] = [{"name": "plain", "methods": [], "baseline": True}]
    for family, methods in FAMILIES:
        if all(m["name"] in known for m in methods):
            names = " + ".join(m["name"] for m in methods)
            rows.append({"name": f"{names} ({family})", "methods": methods})
    return Recipe(
        name="demo",
        title=f"Which regularizer for a small ViT that has seen 337 digits? {seeds} seeds each",
        paper="",
        table="",
        cost="about 3 minutes on two quiet cores",
        command="dampen demo",
        departures=[
            "handwritten digits (8 x 8) and a 2-layer ViT: a demonstration, not a table of any paper",
            "rates, weights and the number of epochs were chosen before, on validation, with other seeds than these",
        ],
        metric="accuracy",
        base={
            "data": {"name": "digits", "train_fraction": 0.25},
            "model": {"name": "vit", "patch_size": 2, "width": 32, "depth": 2, "heads": 4, "mlp": 64},
            "train": {
                "epochs": 60,
                "batch_size": 32,
                "lr": 3e-3,
                "warmup": 1.0,
                "validate_every": 60,
                "select": "last",
            },
            "seeds": list(range(seeds)),
        },
        rows=rows,
        scales={"laptop": {}},
    )
