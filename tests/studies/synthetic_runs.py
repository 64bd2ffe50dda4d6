"""Synthetic run folders for the tests of the report: the format is real, every number in them is invented."""

import itertools
import json
import math
import random
from pathlib import Path

from dampen.studies.comparison import make_comparison
from dampen.studies.recipe import Recipe
from dampen.studies.run import Run

MACHINE = {
    "time": "2026-01-01T00:00:00+00:00",
    "python": "3.11.2",
    "system": "Linux x86_64",
    "cpu": "Synthetic CPU",
    "cores": 2,
    "threads": 1,
    "device": "cpu",
    "packages": {"dampen": "0.1.0", "torch": "2.13.0"},
    "commit": "0123456789ab",
}

ROWS = {  # name: (methods, gain in accuracy, cost of a step, published)
    "plain": ([], 0.0, 1.0, [85.1, 0.6]),
    "DropKey": ([{"name": "drop_key", "rate": 0.3}], 0.004, 1.05, [85.5, 0.4]),
    "DropPath": ([{"name": "drop_path", "rate": 0.1}], 0.018, 1.01, None),
    "Explicit v": ([{"name": "explicit_dropout", "value": "$lambda"}], 0.021, 1.03, [86.4, 0.4]),
    "R-Drop": ([{"name": "r_drop"}], 0.022, 1.94, None),
    "Blur": ([{"name": "blurred_attention"}], -0.015, 1.02, None),
}


def recipe(
    rows=None,
    *,
    seeds=5,
    grid=None,
    report="best",
    departures=("2,000 images instead of 50,000",),
    title=None,
):
    """A recipe as plain data; `rows` as in ROWS."""
    listed = []
    for name, (methods, _, _, published) in (rows or ROWS).items():
        row = {"name": name, "methods": methods, "baseline": name == "plain"}
        if published:
            row["published"] = {"accuracy": published}
        listed.append(row)
    return {
        "title": title or "Synthetic table for tests",
        "paper": "Synthetic paper",
        "table": "Table 1",
        "cost": "none",
        "command": "dampen run synthetic",
        "departures": list(departures),
        "metric": "accuracy",
        "report": report,
        "base": {
            "data": {"name": "cifar10", "limit": 3000},
            "model": {"name": "vit", "depth": 4},
            "train": {"epochs": 12},
            "seeds": list(range(seeds)),
        },
        "grid": grid if grid is not None else {"lambda": [0.05]},
        "scales": {"laptop": {}},
        "rows": listed,
    }


def write_study(
    folder, rows=None, *, name="synthetic", diagnose=False, noise=0.004, epochs=12, **options
):
    """Write plan.json and a finished trial folder for each trial; returns the plan."""
    rows = rows or ROWS
    plan = make_comparison(Recipe(name, **recipe(rows, **options)), check_names=False)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder)
    for row in plan.configs:
        for point in row.settings:
            for seed, trial in point.ids.items():
                _, gain, cost, _ = rows[row.name]
                gain -= _distance(point.grid)
                write_trial(folder / trial, plan.runs[trial], gain, cost, int(seed), noise, epochs)
                if diagnose:
                    write(folder / trial / "diagnose.json", measurements(row.name, gain, int(seed)))
    return plan


def _distance(grid):
    """The further from (0.001, 0.0005), the worse."""
    best = {"lambda": 0.001, "train.lr": 0.0005}
    return (
        sum(0.02 * math.log10(v / best[k]) ** 2 for k, v in grid.items() if k in best)
        if len(grid) > 1
        else 0.0
    )


def drawn_by(trial):
    """The id that format 1 gave the trial: a newer format must not change the invented numbers."""
    plain = {k: v for k, v in trial.to_dict().items() if k != "format"}
    if "data" in plain:
        plain["data"] = {
            k: v for k, v in plain["data"].items() if k not in ("split_seed", "test_seed")
        }
    return Run.from_stored(plain).id


def write_trial(folder, trial, gain, cost, seed, noise=0.004, epochs=12):
    """One finished trial with invented numbers: a learning curve, a result, a machine."""
    draw = random.Random(drawn_by(trial))
    shared = random.Random(seed).gauss(
        0, 0.008
    )  # seeds shift all rows alike, as shared initial weights do
    final = 0.85 + gain + shared + draw.gauss(0, noise)
    curve = [final - 0.5 * math.exp(-0.45 * (e + 1)) + draw.gauss(0, 0.004) for e in range(epochs)]
    lines = []
    for e, value in enumerate(curve):
        step = 40 * (e + 1)
        valid = {"accuracy": value, "nll": 2.3 * (1 - value) + 0.1, "ece": 0.05, "brier": 0.2}
        terms = {"task": 2.3 * math.exp(-0.3 * (e + 1))}
        line = {
            "epoch": e + 1,
            "step": step,
            "train": terms,
            "lr": 1e-3,
            "valid": valid,
            "seconds": 0.5 * step,
        }
        lines.append(json.dumps(line))
    result = {
        "id": trial.id,
        "status": "finished",
        "task": "image",
        "primary": ["accuracy", "max"],
        "selection": ["accuracy", "max"],
        "test": {
            "accuracy": final - 0.002,
            "nll": 0.5 - gain,
            "ece": 0.04 - 0.5 * gain,
            "brier": 0.2 - gain,
        },
        "valid": {"accuracy": final, "nll": 0.5 - gain, "ece": 0.04, "brier": 0.2},
        "train": {"task": 0.1},
        "selected_epoch": epochs,
        "epochs": epochs,
        "steps": 40 * epochs,
        "batch_size": 64,
        "parameters": 1_000_000,
        "seconds": {"train": 20 * cost, "evaluate": 1.0, "cpu": 20 * cost},
        "step_seconds": 0.05 * cost * (1 + abs(draw.gauss(0, 0.2))),
        "step_cpu_seconds": 0.04 * cost * (1 + draw.gauss(0, 0.01)),
        "device": "cpu",
        "resumed": 0,
        "last_weights": f"synthetic {trial.id}",
        "selected_weights": "synthetic",
        "data": {
            "name": "cifar10",
            "task": "image",
            "examples": {"train": 2100, "valid": 900, "test": 1000},
            "drawn": ["valid"],
        },
        "synthetic": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "config.json", {"id": trial.id, **trial.to_dict()})
    write(folder / "environment.json", {"sessions": [MACHINE]})
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n")
    write(folder / "final.json", result)


def measurements(name, gain, seed):
    """What `dampen diagnose` would leave, invented."""
    draw = random.Random(f"{name}{seed}")
    edges = [i / 15 for i in range(16)]
    over = 0.12 - 3 * gain
    middle = [(a + b) / 2 for a, b in itertools.pairwise(edges)]
    count = [int(1000 * m**3) for m in middle]
    accuracy = [
        max(0.0, m - over * m * (1.4 - m) + draw.gauss(0, 0.02)) if c else None
        for m, c in zip(middle, count, strict=True)
    ]
    reliability = {
        "low": edges[:-1],
        "high": edges[1:],
        "count": count,
        "confidence": [m if c else None for m, c in zip(middle, count, strict=True)],
        "accuracy": accuracy,
    }
    attacks = [
        {
            "attack": "pgd",
            "norm": "linf",
            "eps": e / 255,
            "step": e / 4 / 255,
            "steps": 10,
            "n": 1000,
        }
        | {
            "accuracy": max(
                0.0, (0.85 + gain) * math.exp(-0.25 * e * (1 - 5 * gain)) + draw.gauss(0, 0.005)
            )
        }
        for e in (0, 1, 2, 4, 8)
    ]
    kappa = {
        "tokens": (40, 1.2),
        "attention": (40, 6),
        "attention+skip": (45, 1.3),
        "ffn": (300, 1.1),
        "ffn+skip": (50, 1.3),
    }
    conditioning = [
        {"name": f"blocks.{i}"}
        | {
            k: {"n": 8, "log_mean": math.log(a * b**i) + draw.gauss(0, 0.1)}
            for k, (a, b) in kappa.items()
        }
        for i in range(4)
    ]
    clean = 0.85 + gain
    falls = {"noise": 0.12, "blur": 0.08, "contrast": 0.05}
    corrupted = {
        k: [clean * math.exp(-fall * s) + draw.gauss(0, 0.004) for s in range(1, 6)]
        for k, fall in falls.items()
    }
    side = 8
    peak = (draw.uniform(2, 5), draw.uniform(2, 5))
    width = 1.5 + 30 * max(0.0, gain)
    values = [
        [math.exp(-((y - peak[0]) ** 2 + (x - peak[1]) ** 2) / width) for x in range(side)]
        for y in range(side)
    ]
    image = [[[int(255 * x / 7), int(255 * y / 7), 128] for x in range(side)] for y in range(side)]
    maps = {
        "examples": [
            {"label": "synthetic gradient", "image": image, "map": values, "predicted": "synthetic"}
        ]
    }
    return {
        "synthetic": True,
        "calibration": {
            "bins": 15,
            "ece": 0.04,
            "adaptive_ece": 0.05 - gain,
            "reliability": reliability,
        },
        "gradient_variance": {"normalized": 2.0 - 5 * gain + draw.gauss(0, 0.02)},
        "generalization": {"accuracy_gap": 0.1 - gain},
        "attention": {
            "layers": [
                {"entropy_share": 0.9 - 0.1 * i, "head_similarity": 0.2 + 0.05 * i}
                for i in range(4)
            ]
        },
        "robustness": attacks,
        "corruptions": {
            "n": 1000,
            "clean_accuracy": clean,
            "accuracy": corrupted,
            "mean_accuracy": 0.6 + gain,
        },
        "conditioning": conditioning,
        "attention_maps": maps,
    }


def write(path, value):
    path.write_text(json.dumps(value))


def loose(folder, count=3, limit=3000, methods=(), gain=0.0, **train):
    """Trials without a plan."""
    for seed in range(count):
        content = {
            "data": {"name": "cifar10", "limit": limit},
            "model": {"name": "vit"},
            "methods": list(methods),
            "train": train,
            "seed": seed,
        }
        trial = Run.from_dict(content)
        write_trial(folder / trial.id, trial, gain, 1.0, seed)


def edit(path, **changes):
    """Change entries of a JSON file."""
    write(path, json.loads(path.read_text()) | changes)


def big_study(rows, seeds=3):
    """A study of many rows in memory, without folders: every number is invented."""
    from dampen.studies.comparison import Config, Setting
    from dampen.studies.result import Result
    from dampen.studies.store import LoggedRun
    from dampen.studies.table import LoggedComparison

    draw, made = random.Random(0), []
    base = [draw.gauss(0.85, 0.01) for _ in range(seeds)]
    for i in range(rows):
        name, runs = f"row {i}" if i else "plain", {}
        methods = [{"name": "drop_key", "rate": i / (2 * rows)}] if i else []
        for s in range(seeds):
            accuracy = base[s] + (i / rows) * 0.02 + draw.gauss(0, 0.004)
            final = Result(
                id=f"{i}-{s}",
                status="finished",
                primary=("accuracy", "max"),
                selection=("accuracy", "max"),
                test={"accuracy": accuracy, "nll": 1 - accuracy + draw.gauss(0, 0.01)},
                valid={"accuracy": accuracy},
                step_cpu_seconds=0.04 * (1 + i / rows),
                device="cpu",
                last_weights=f"synthetic {i} {s}",
            )
            config = {"id": final.id, "model": {"name": "vit"}, "methods": methods, "seed": s}
            runs[str(s)] = LoggedRun(Path("synthetic"), final.id, config, final, [MACHINE])
        ids = {seed: run.id for seed, run in runs.items()}
        made.append(Config(name, methods, [Setting({}, ids, logged=runs)], baseline=not i))
    return LoggedComparison("big", "Synthetic table of many rows", "accuracy", "max", made)
