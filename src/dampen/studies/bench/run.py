"""The bench itself: build a step for every row, time them together, count their
memory, write the record."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dampen.native.library import available as native_available
from dampen.studies.bench.budget import LEAST, SHORT, Budget, is_short, short_rows
from dampen.studies.bench.rows import PRESETS, Variant, find_variants, targets_of
from dampen.studies.bench.subject import (
    Formulation,
    Subject,
    attention_as,
    formulations,
    make_subject,
    peak_memory,
    unfused,
)
from dampen.studies.bench.timing import Timings, machine, time_rounds
from dampen.studies.errors import ConfigError
from dampen.studies.processes import describe_malloc
from dampen.studies.report.packs import BENCH

NOISY = 0.03
"""An interval wider than this, as a fraction of its median, cannot separate small costs."""
NO_TIME = "the time was over"
"""Why a row that could be built was not."""
FUSED, UNFUSED = "plain, fused attention", "plain, unfused attention"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Step = Callable[[], None]
Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Options:
    """What to bench, on what, for how long."""

    model: str = "vit"
    batch: int = 64
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    methods: str | None = None
    rounds: int = 25
    seconds: float = 600.0
    clock: str = "wall"
    long: bool = False
    size: str = ""

    @classmethod
    def preset(cls, size: str, **given: Any) -> Options:
        """The options of a size, one thread by processor time, but for those that are given.

        Args:
            size: one of `PRESETS`.
        """
        if size not in PRESETS:
            raise ConfigError("The bench", [f"--size: got {size!r}; use {', '.join(PRESETS)}"])
        usual = PRESETS[size]
        mine = {
            "model": usual.model or "vit",
            "batch": usual.batch,
            "methods": usual.methods,
            "threads": 1,
            "clock": "cpu",
        }
        return cls(**{**mine, **given}, size=size)

    def command(self) -> str:
        """The command line that repeats this."""
        parts = ["dampen", "bench"]
        usual = Options.preset(self.size) if self.size else Options()
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is True:
                parts.append(f"--{entry.name}")
            elif value != getattr(usual, entry.name) or (entry.name == "size" and value):
                parts += [
                    f"--{entry.name}",
                    f"{value:g}" if isinstance(value, float) else str(value),
                ]
        return shlex.join(parts)


def bench(
    options: Options,
    progress: Progress = lambda what, done, total: None,
    started: float | None = None,
) -> dict[str, Any]:
    """Measure and return the record: plain data, all of it.

    Args:
        options: what to measure, and for how long.
        progress: called with what is done.
        started: when the time began, by `time.perf_counter()`; now if omitted.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.size and PRESETS[options.size].lengths:
        return _long(options, progress)
    sized, short = bool(options.size), is_short(options.seconds)
    every = 8 if short else 5 if sized else 3
    budget = Budget(options.seconds, every, 0 if sized or short else 3, started=started)
    subject = make_subject(options.model, options.batch, options.dtype, options.device)
    variants = find_variants(options.methods)
    if sized:
        # the usual form of each method and what has a target: long steps leave no time for more
        with_target = PRESETS[options.size].targets
        variants = [v for v in variants if v.name in (v.method, v.text) or v.name in with_target]
    if short:
        variants = short_rows(variants)
    plain = {FUSED: plain_step(subject), UNFUSED: plain_step(subject, fused=False)}
    for step in plain.values():
        budget.reference(step)
    skipped: dict[str, str] = {}
    names = {v.name for v in variants}
    published: dict[str, Formulation] = {}
    instead: dict[str, Formulation] = {}
    if not sized and not short:
        published = {n: f for n, f in formulations("papers").items() if f.ours in names}
    plainly = {
        v.method: v.name for v in reversed(variants) if v.name in (v.method, v.text)
    }  # each method's first row
    if not short and (options.methods is None or sized):
        instead = {n: f for n, f in formulations("alternatives").items() if f.ours in plainly}
    groups = {
        "methods": {v.name: partial(regularized_step, subject, v) for v in variants},
        "papers": {n: partial(f.build, subject) for n, f in published.items()},
        "alternatives": {n: partial(f.build, subject) for n, f in instead.items()},
    }
    ours, papers, others = (
        _built(builders, skipped, what, progress, budget) for what, builders in groups.items()
    )
    steps = {**plain, **ours, **papers, **others}
    memory_time = budget.extra * (budget.references + sum(budget.steps))
    timings = time_rounds(
        steps,
        (FUSED, UNFUSED),
        rounds=options.rounds,
        seconds=budget.left() - memory_time,
        least=LEAST,
        every=every,
        warm=False,  # each has run
        enough=NOISY,
        clock=CLOCKS[options.clock],
        progress=lambda done: progress("rounds", done, options.rounds),
    )
    memory = _memory(steps, options.device, progress) if budget.extra else {}
    record = _record(
        options,
        subject,
        variants,
        timings,
        memory,
        {"ours": ours, "papers": papers, "others": others},
        {n: plainly[f.ours] for n, f in instead.items()},
    )
    record["short"] = short
    record["skipped"] = skipped
    if options.long:
        from dampen.studies.bench.scaling import scale_attention, scale_batch

        possible = [v for v in variants if v.name in ours]
        record["scaling"] = scale_attention(possible, options, progress)
        record["batches"] = scale_batch(possible, options, progress)
    return record


def _long(options: Options, progress: Progress) -> dict[str, Any]:
    """Attention alone at the lengths of a preset."""
    from dampen.studies.bench.scaling import scale_attention

    usual = PRESETS[options.size]
    scaling = scale_attention(find_variants(options.methods), options, progress, usual.lengths)
    goals = targets_of(options.size, native_available())
    worst: dict[str, float] = {}
    for point in scaling["points"]:
        worst[point["row"]] = max(worst.get(point["row"], 0.0), point["median"])
    return {
        "kind": BENCH,
        "command": options.command(),
        "size": options.size,
        "model": usual.what,
        "what": "attention alone, forward and backward, as a multiple of plain SDPA",
        "machine": {
            **machine(),
            "clock": options.clock,
            "device": options.device,
            "malloc": describe_malloc(),
        },
        "native": native_available(),
        "scaling": scaling,
        "targets": {n: {"target": t, "met": worst[n] <= t} for n, t in goals.items() if n in worst},
    }


def plain_step(subject: Subject, fused: bool = True) -> Step:
    """The model as it is, or with the matrix of scores instead of the fused kernel.

    Args:
        subject: the model with its batch.
        fused: use the fused attention kernel.
    """
    model = subject.copy()

    def losses() -> Tensor:
        return subject.loss(model(*subject.inputs))

    if fused:
        return subject.step(losses)
    function = unfused()

    def patched() -> Tensor:
        with attention_as(function):
            return losses()

    return subject.step(patched)


def regularized_step(subject: Subject, variant: Variant) -> Step:
    """The model with a method in it.

    Args:
        subject: the model with its batch.
        variant: the method as it is measured.
    """
    import dampen
    from dampen.hooks.discover.sites import find_layers
    from dampen.studies.methods_text import build_methods

    model = subject.copy()
    sites: str | list[str] = "*"
    if variant.upper:
        layers = [layer.name for layer in find_layers(model)]
        sites = layers[len(layers) // 2 :]
    reg = dampen.regularize(model, build_methods(variant.specs), sites)
    reg.progress(0.5)

    def losses() -> Tensor:
        return reg.loss(lambda: model(*subject.inputs), subject.loss)[0]

    return subject.step(losses)


def _built(
    builders: Mapping[str, Callable[[], Step]],
    skipped: dict[str, str],
    what: str,
    progress: Progress,
    budget: Budget,
) -> dict[str, Step]:
    """The steps that can be built and run once in the time; of the others, why not."""
    steps: dict[str, Step] = {}
    for i, (name, build) in enumerate(builders.items()):
        progress(f"warming up {what}", i, len(builders))
        if not budget.has_room():
            skipped[name] = NO_TIME
            continue
        try:
            steps[name] = budget.row(build)
        except (ValueError, TypeError, RuntimeError, ImportError) as error:
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
    return steps


def _memory(steps: Mapping[str, Step], device: str, progress: Progress) -> dict[str, int]:
    found = {}
    for i, (name, step) in enumerate(steps.items()):
        progress("counting memory", i, len(steps))
        found[name] = peak_memory(step, device)
    return found


def _record(
    options: Options,
    subject: Subject,
    variants: list[Variant],
    timings: Timings,
    memory: Mapping[str, int],
    groups: Mapping[str, Mapping[str, Step]],
    instead: Mapping[str, str],
) -> dict[str, Any]:
    ratios = timings.ratios()
    best = next(
        n for n in (FUSED, UNFUSED) if ratios[n].low == ratios[n].high == 1.0
    )  # the one all others are over
    designed = (
        options.model == "vit" and options.dtype == "float32" and options.batch == Options.batch
    )  # the targets are for this model and batch alone

    def entry(name: str) -> dict[str, Any]:
        fastest = (
            ratios[name].seconds / ratios[best].seconds
        )  # of the least times seen: what noise disturbs least
        return {**asdict(ratios[name]), "fastest": fastest, "noisy": ratios[name].width > NOISY}

    def rival(name: str, ours: str) -> dict[str, Any]:
        """The other's cost against the plain step, and ours against the other's."""
        found = {"ours": ours, **entry(name)}
        return (
            found
            if ours not in groups["ours"]
            else {**found, "ours_over_it": asdict(timings.between(ours, name))}
        )

    targets = {
        v.name: v.target for v in variants if designed and v.target is not None and v.name in ratios
    }
    if options.size:
        targets = {
            n: t for n, t in targets_of(options.size, native_available()).items() if n in ratios
        }
    return {
        "kind": BENCH,
        "command": options.command(),
        "size": options.size,
        "native": native_available(),
        "model": subject.label,
        "what": "one training step without the optimizer (forward, "
        "backward) as a multiple of the best plain step",
        "machine": {
            **machine(),
            "clock": options.clock,
            "device": options.device,
            "malloc": describe_malloc(),
        },
        "plain": {"best": best, **{name: entry(name) for name in (FUSED, UNFUSED)}},
        "ratios": {name: entry(name) for name in groups["ours"]},
        "targets": {n: {"target": t, "met": ratios[n].median <= t} for n, t in targets.items()},
        "papers": {
            name: rival(name, formulations("papers")[name].ours) for name in groups["papers"]
        },
        "alternatives": {name: rival(name, instead[name]) for name in groups["others"]},
        "memory": {name: {"bytes": b, "ratio": b / memory[best]} for name, b in memory.items()},
        "variants": {
            v.name: v.text + (", upper half of the layers" if v.upper else "") for v in variants
        },
        "noisy": [name for name, ratio in ratios.items() if ratio.width > NOISY],
    }


# --- the record for people
#
# A record of the bench for people: a table and a chart.

Record = dict[str, Any]
CHARTS = (".svg", ".png", ".html", ".json")


def results_table(record: Record) -> Table:
    """Every method beside its target and its paper's formulation. `ours / it` is what ours takes of
    the formulation's time; in the row of an alternative, what our attention
    dropout takes of its time.

    Args:
        record: what `dampen bench` measured.
    """
    papers = {entry["ours"]: entry for entry in record["papers"].values()}
    groups = [(n, record["plain"][n]) for n in record["plain"] if n != "best"]
    rows = []
    for name, entry in [*groups, *record["ratios"].items(), *record["alternatives"].items()]:
        goal = record["targets"].get(name)
        target = f"{goal['target']:.2f} {'met' if goal['met'] else 'not met'}" if goal else ""
        published = papers.get(name)
        over = (published or entry).get("ours_over_it")
        rows.append(
            {
                "": name,
                "step": Text(f"{entry['median']:.3f}x", style="dim" if entry["noisy"] else ""),
                "95 % interval": f"{entry['low']:.3f} to {entry['high']:.3f}",
                "target": Text(target, style="red" if goal and not goal["met"] else ""),
                "memory": f"{record['memory'][name]['ratio']:.2f}x"
                if name in record.get("memory", {})
                else "",
                "as published": f"{published['median']:.2f}x" if published else "",
                "ours / it": f"{over['median']:.2f}" if over else "",
            }
        )
    title = f"{record['model']}; {record['what']}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    # a model of the user's own has neither targets nor published forms
    columns = [c for c in rows[0] if any(str(row[c]) for row in rows)]
    for column in columns:
        table.add_column(column, justify="left" if not column else "right", overflow="fold")
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    return table


def remarks(record: Record) -> list[str]:
    """What a reader of the table must know.

    Args:
        record: what `dampen bench` measured.
    """
    machine = record["machine"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    where = f"{machine['cpu']}, {threads}, torch {machine['torch']}, {machine['clock']} time"
    memory = (
        " Memory: what a step allocates at its peak, without weights; as a multiple of the "
        "baseline's."
    )
    said = [f"{where}.{memory if record.get('memory') else ''}"]
    if record.get("short"):
        said.append(
            "The time is short: one row per method, without the papers' formulations, alternatives "
            f"and memory, which need at least --seconds {SHORT:.0f}."
        )
    total = sum(len(record[group]) for group in ("ratios", "papers", "alternatives")) + 1
    if record["noisy"]:
        said.append(
            f"Too noisy: {len(record['noisy'])} of {total} intervals are wider than 3 %. "
            "Run on a quieter machine, with more --rounds and "
            "--seconds, or with --threads 1 --clock cpu."
        )
    late = [name for name, reason in record["skipped"].items() if reason == NO_TIME]
    if late:
        said.append(
            f"No time was left for {', '.join(late)}. Use more --seconds or name --methods."
        )
    said += [
        f"Not benched: {name}: {reason}"
        for name, reason in record["skipped"].items()
        if name not in late
    ]
    return said


def scaling_table(record: Record) -> Table:
    """Time and memory of attention alone, by length.

    Args:
        record: what `dampen bench` measured.
    """
    scaling = record["scaling"]
    lengths = sorted({p["n"] for p in scaling["points"]})
    table = Table(
        title=f"time, memory relative to the baseline: {scaling['what']}",
        title_justify="left",
        box=None,
    )
    table.add_column("")
    for n in lengths:
        table.add_column(f"n = {n}", justify="right")
    for row in dict.fromkeys(p["row"] for p in scaling["points"]):
        own = {
            p["n"]: f"{p['median']:.2f}x, {p['memory_ratio']:.2f}x"
            for p in scaling["points"]
            if p["row"] == row
        }
        table.add_row(row, *(own.get(n, "-") for n in lengths))
    return table


def save_chart(record: Record, path: Path) -> None:
    """Write the chart as SVG, PNG, HTML or JSON, by the name of the file.

    Args:
        record: what `dampen bench` measured.
        path: the file.
    """
    from dampen.studies.report.charts import bench_chart

    path.parent.mkdir(parents=True, exist_ok=True)
    bench_chart(record).properties(width=520, title=record["model"], background="white").save(
        str(path)
    )
