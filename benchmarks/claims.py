"""Every published claim beside what our records say of it: shown, contradicted, equal, not decided, or not testable.

A claim names a record, two of its rows and the direction; the verdict is computed from the record each time the page is
made (`python -m benchmarks.questions`). Claims of one record with one reference and one metric are one family (Holm).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.curves import read as read_curves
from dampen.lab.records.metric import describe
from dampen.lab.records.verdict import Comparison, judge, sentence
from dampen.lab.report import make_report

RECORDS = Path(__file__).resolve().parents[1] / "records"
PAPERS = {
    "2604.20505": "Explicit Dropout",
    "2208.02646": "DropKey",
    "2504.12088": "AttentionDrop",
    "2505.01996": "Always Skip Attention",
}


@dataclass(frozen=True)
class Claim:
    """What a paper says: `row` is better (or worse) than `reference` in `metric`, in a record of ours; or why not."""

    paper: str
    text: str
    record: str = ""
    row: str = ""
    reference: str = ""
    says: str = "better"  # or worse, or no worse
    metric: str = "accuracy"
    untestable: str = ""


T3, SKIP = "explicit_dropout/table_3-study.json.xz", "always_skip_attention/skip_ablation.json"
DEPTH, ATTENTION = "always_skip_attention/depth_digits-study.json.xz", "attentiondrop/digits-study.json.xz"
RATES, VARIANCE = "dropkey/rates_digits-study.json.xz", "attentiondrop/variance_digits.json"
SVD, SCHEDULES = "always_skip_attention/token_graying_svd.json", "dropkey/schedules_cifar10.json"
STRUCTURES, SWEEPS = "dropkey/structures_digits-study.json.xz", "attentiondrop/sweeps_digits-study.json.xz"
NOISE, GRAYING = "attentiondrop/noise_digits-study.json.xz", "always_skip_attention/graying_digits-study.json.xz"
ROBUST = "attentiondrop/robust_digits-study.json.xz"
CONVOLUTIONS = "always_skip_attention/convolutions_digits-study.json.xz"
TABLES = {  # where the rows of Explicit Dropout's Tables 1 to 4 were run
    "action detection": (T3, "frame_map"),
    "CIFAR-10": ("explicit_dropout/table_1-study.json.xz", "accuracy"),
    "CIFAR-100": ("explicit_dropout/table_2-study.json.xz", "accuracy"),
    "GTZAN": ("explicit_dropout/table_4-study.json.xz", "accuracy"),
    "200 spoken digits": ("explicit_dropout/spoken_digits-study.json.xz", "accuracy"),
}
FFN = "none + implicit ffn"
LARGE = "needs ImageNet and GPUs; the recipe runs at --scale paper"
EXPLICIT, KEY, DROP, ALWAYS = PAPERS
CLAIMS = (
    *(
        Claim(EXPLICIT, f"{text} ({where})", record, row, FFN, says, metric)
        for where, (record, metric) in TABLES.items()
        for text, row, says in (
            (
                "explicit value + feed-forward beats implicit feed-forward dropout",
                "explicit v + explicit ffn",
                "better",
            ),
            (
                "explicit attended value + feed-forward beats implicit feed-forward dropout",
                "explicit av + explicit ffn",
                "better",
            ),
            ("explicit feed-forward alone beats implicit feed-forward dropout", "none + explicit ffn", "better"),
            ("Arora's regularizer on the query ruins the model", "arora q + explicit ffn", "worse"),
        )
    ),
    Claim(
        EXPLICIT,
        "on speed and memory the penalty costs little",
        untestable="a cost, not an accuracy: see the page on costs",
    ),
    Claim(
        KEY, "a ratio that decreases with depth beats a constant one (digits)", RATES, "DropKey, decreasing", "DropKey"
    ),
    Claim(
        KEY,
        "a ratio that increases with depth is worse than a constant one (digits)",
        RATES,
        "DropKey, increasing",
        "DropKey",
        "worse",
    ),
    Claim(
        KEY, "DropKey beats attention dropout, each at its best ratio (digits)", RATES, "DropKey", "attention dropout"
    ),
    Claim(
        KEY, "a ratio that decreases with depth beats a constant one (CIFAR-10)", SCHEDULES, "decreasing", "constant"
    ),
    Claim(KEY, "DropKey beats attention dropout on ImageNet by 0.2 to 0.4 points", untestable=LARGE),
    Claim(
        KEY, "in DETR DropKey beats dropout (object detection)", "dropkey/detr.json", "DropKey", "dropout", metric="ap"
    ),
    Claim(
        KEY,
        "in DETR dropout beats plain training (object detection)",
        "dropkey/detr.json",
        "dropout",
        "plain",
        metric="ap",
    ),
    *(
        Claim(KEY, f"{text} (digits, each at its best ratio)", STRUCTURES, row, "DropKey")
        for text, row in (
            ("hiding whole keys beats hiding single scores", "whole keys"),
            ("blocks of 2 beat single scores at an equal realized ratio", "blocks of 2"),
            ("blocks of 3 beat single scores at an equal realized ratio", "blocks of 3"),
            ("crosses beat single scores at an equal realized ratio", "crosses of 3"),
            ("a last phase without DropKey closes the gap between training and test", "DropKey, last fifth without"),
            ("Monte Carlo at test closes the gap between training and test", "DropKey, Monte Carlo of 16 at test"),
        )
    ),
    Claim(DROP, "hard masking beats dropout", ATTENTION, "hard masking", "dropout"),
    Claim(DROP, "blur beats dropout", ATTENTION, "blur", "dropout"),
    Claim(DROP, "blur + consistency beats dropout", ATTENTION, "blur + consistency", "dropout"),
    Claim(
        DROP,
        "blur + consistency is better calibrated than dropout",
        ATTENTION,
        "blur + consistency",
        "dropout",
        metric="ece",
    ),
    Claim(DROP, "R-Drop beats dropout", ATTENTION, "R-Drop on dropout", "dropout"),
    *(
        Claim(
            DROP,
            f"the gradient's variance over training is lower with {name} than with dropout (by 10 %)",
            VARIANCE,
            row,
            "dropout",
            metric="training_variance",
        )
        for name, row in (
            ("hard masking", "hard attention masking"),
            ("blur", "blurred attention smoothing"),
            ("blur + consistency", "blur + consistency"),
        )
    ),
    *(
        Claim(
            DROP,
            f"hard masking at p {p} is worse than at 0.5",
            SWEEPS,
            f"hard masking, p {p}",
            "hard masking, p 0.5",
            "worse",
        )
        for p in (0.6, 0.7, 0.9)
    ),
    *(
        Claim(DROP, f"a blur over {w} keys is worse than over 9", SWEEPS, f"blur, w {w}", "blur, w 9", "worse")
        for w in (11, 13, 15)
    ),
    *(
        Claim(
            DROP, f"{row} is harder to attack than dropout (PGD, 16/255)", ROBUST, row, "dropout", metric="pgd_accuracy"
        )
        for row in ("R-Drop on dropout", "hard masking", "blur + consistency")
    ),
    *(
        Claim(DROP, f"{row} beats dropout where 30 % of the labels are wrong", NOISE, row, "dropout")
        for row in ("hard masking", "blur", "blur + consistency", "R-Drop on dropout")
    ),
    Claim(
        ALWAYS,
        "without the skip around attention a ViT loses much (6 layers, CIFAR-10)",
        SKIP,
        "ViT, no attention skip",
        "ViT, all skips",
        "worse",
    ),
    Claim(
        ALWAYS,
        "without the feed-forward skip it loses about 2 points",
        SKIP,
        "ViT, no feed-forward skip",
        "ViT, all skips",
        "worse",
    ),
    *(
        Claim(
            ALWAYS,
            f"without the skip around attention a ViT of {depth} layers loses (digits)",
            DEPTH,
            f"{depth} layers, no attention skip",
            f"{depth} layers",
            "worse",
        )
        for depth in (2, 4, 8, 12)
    ),
    *(
        Claim(
            ALWAYS,
            f"a {kind} of {depth} layers loses nothing without its skips (digits)",
            CONVOLUTIONS,
            f"{kind}, {depth} layers, no skips",
            f"{kind}, {depth} layers",
            "no worse",
        )
        for kind in ("ConvMixer", "CNN")
        for depth in (4, 8, 12)
    ),
    Claim(ALWAYS, "Token Graying by SVD at eps 0.7 helps", SVD, "SVD, eps 0.7", "plain (eps 1)"),
    Claim(ALWAYS, "Token Graying by SVD at eps 0.7 helps (digits)", GRAYING, "SVD, eps 0.7", "plain"),
    Claim(ALWAYS, "Token Graying by DCT at eps 0.95 helps (digits)", GRAYING, "DCT, eps 0.95", "plain"),
    *(
        Claim(
            ALWAYS,
            f"without the skip around attention, Token Graying by {how} helps (digits)",
            GRAYING,
            f"no attention skip, {how}, eps {eps}",
            "no attention skip",
        )
        for how, eps in (("DCT", 0.95), ("SVD", 0.7))
    ),
    Claim(ALWAYS, "Token Graying by DCT gains 0.1 to 0.3 points on ImageNet", untestable=LARGE),
)


Values = dict[str, dict[str, dict[str, float]]]
"""Of a record: row, metric, seed."""


def read(path: Path) -> Values:
    """A packed study, or one of the small records of `benchmarks.skip_story`."""
    if path.suffix == ".json" and "rows" in (content := json.loads(path.read_text())):
        return {
            row: {"accuracy": {str(t["seed"]): describe("accuracy").scale * t["accuracy"] for t in trials}}
            for row, trials in content["rows"].items()
        }
    table = make_report([path]).tables[0]
    if not table.study.show_all:
        return {e.name: e.by_seed for e in table.entries}
    curves = read_curves(path, path.name)  # every row at the value that validation chose on a tuning seed
    return {row: curves.entry(row).by_seed for row in dict.fromkeys(e.row.name for e in table.entries)}


def judged(values: Values, claims: list[Claim]) -> dict[Claim, Comparison]:
    """The comparisons of claims with one reference and one metric, corrected over them."""
    metric, reference = claims[0].metric, claims[0].reference
    rows = {name: values[name].get(metric, {}) for name in (reference, *(c.row for c in claims))}
    found = judge(rows, reference, metric)
    return {c: found[c.row] for c in claims}


def told(claim: Claim, found: Comparison | None) -> str:
    """The claim's fate in words."""
    if claim.untestable:
        return f"not testable here: {claim.untestable}"
    if found is None:
        return "not run yet"
    words = sentence(found, describe(claim.metric))
    if claim.says == "no worse" and found.verdict in ("better", "equal"):
        return f"shown: {words}"
    if found.verdict not in ("better", "worse"):
        return words
    return f"{'shown' if found.verdict == claim.says else 'contradicted'}: {words}"


def _asked(record: str, start: str = "") -> dict[Claim, Comparison] | None:
    """The claims of a record on rows whose names begin so, each judged by itself; None where there is no record."""
    if not (RECORDS / record).is_file():
        return None
    values = read(RECORDS / record)
    return {c: judged(values, [c])[c] for c in CLAIMS if c.record == record and c.row.startswith(start)}


def _differences(found: dict[Claim, Comparison]) -> str:
    return ", ".join(f"{c.difference:+.1f}" for c in found.values())


def _worse(found: dict[Claim, Comparison]) -> str:
    return f"{sum(c.verdict == 'worse' for c in found.values())} of {len(found)}"


def depth() -> str | None:
    """What attention loses without its skip, over the number of layers."""
    if (found := _asked(DEPTH)) is None:
        return None
    depths = ", ".join(c.reference.split()[0] for c in found)
    told = f"**Without its skip, attention fails with depth**: {_differences(found)} points at {depths} layers, shown "
    return f"{told}for {_worse(found)} depths (digits, {max(c.n for c in found.values())} seeds)"


def convolutions() -> str | None:
    """What convolutions lose without their skips, over the number of layers."""
    kinds = {kind: _asked(CONVOLUTIONS, kind) for kind in ("ConvMixer", "CNN")}
    parts = [
        f"{kind} {_differences(found)} points, shown worse at {_worse(found)}" for kind, found in kinds.items() if found
    ]
    return f"**Without skips**, at 4, 8 and 12 layers: {'; '.join(parts)} (digits)" if parts else None


def sweeps() -> str | None:
    """What larger rates and windows than the paper's limits cost."""
    rates, widths = _asked(SWEEPS, "hard masking"), _asked(SWEEPS, "blur")
    if rates is None or widths is None:
        return None
    told = f"**Beyond p 0.5**, at 0.6, 0.7 and 0.9: {_differences(rates)} points against 0.5, shown worse at "
    told += f"{_worse(rates)}. **Beyond w 9**, at 11, 13 and 15: {_differences(widths)} points against 9, shown worse "
    return f"{told}at {_worse(widths)} (digits)"


def attacked() -> str | None:
    """Which rows stand an attack better than dropout."""
    if (found := _asked(ROBUST)) is None:
        return None
    told = "; ".join(f"{c.row} {sentence(v, describe(c.metric))}" for c, v in found.items())
    return f"**PGD at 16/255, against dropout**: {told} (digits)"


def page() -> str:
    """A table for each paper."""
    found: dict[Claim, Comparison] = {}
    for record in dict.fromkeys(c.record for c in CLAIMS if c.record and (RECORDS / c.record).is_file()):
        values = read(RECORDS / record)
        families: dict[tuple[str, str], list[Claim]] = {}
        for claim in (c for c in CLAIMS if c.record == record):
            families.setdefault((claim.reference, claim.metric), []).append(claim)
        for claims in families.values():
            found |= judged(values, claims)
    lines = ["# The papers' claims, one by one", ""]
    lines += ["Generated by `python -m benchmarks.questions` from the records in `records/`; do not edit.", ""]
    lines += ["Small models and little data: a claim that is contradicted here is contradicted in this regime.", ""]
    for paper, name in PAPERS.items():
        lines += [f"## {name} ({paper})", "", "| claim | here | record |", "|---|---|---|"]
        for claim in (c for c in CLAIMS if c.paper == paper):
            record = f"`{claim.record}`" if claim.record else ""
            lines.append(f"| {claim.text} | {told(claim, found.get(claim))} | {record} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"
