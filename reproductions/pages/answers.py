"""Three sentences for every question that has a result file, written by hand.

The numbers are filled in from the result file. `stated` fails the build where the result no longer bears a sentence
out: write it anew then. An experiment without sentences here gets those that `planned.py` holds for each outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dampen.studies import ResultTable, Verdict, smallest_difference
from reproductions.pages import design
from reproductions.pages import planned_statistics as own
from reproductions.pages.planned_statistics import Tables
from reproductions.pages.publish import stated

RECORDS = Path(__file__).resolve().parents[1]
FAILED = 20.0
"""A run on ten equally common classes has failed below this accuracy (twice that of guessing), or if it diverged."""


def effect(c: Verdict, table: ResultTable, sign: float = 1.0) -> str:
    """A difference with its corrected interval: `0.9 points (0.4 to 1.4)`.

    Args:
        c: the verdict.
        table: whose metric it is in.
        sign: -1 to state a loss as a positive number.
    """
    digits = 1 if table.metric.percent else 3
    low, high = sorted((sign * c.low, sign * c.high))
    unit = " points" if table.metric.percent else ""
    return f"{sign * c.difference:.{digits}f}{unit} ({low:.{digits}f} to {high:.{digits}f})"


def loss(c: Verdict, table: ResultTable) -> str:
    """What a configuration loses, as a positive number."""
    return effect(c, table, -1.0)


def verdicts(table: ResultTable) -> dict[str, Verdict]:
    """Every comparison of a table, in its one correction family."""
    return {e.name: e.comparison for e in table.compared() if e.comparison is not None}


def words(found: Iterable[Verdict]) -> set[str]:
    """The verdicts that occur."""
    return {c.verdict for c in found}


def span(found: Iterable[Verdict], sign: float = -1.0) -> str:
    """The smallest and the largest difference: `0.5 to 0.9`."""
    sizes = [sign * c.difference for c in found]
    return f"{min(sizes):.1f} to {max(sizes):.1f}"


def failed(table: ResultTable, name: str) -> int:
    """How many runs of a configuration ended near guessing or diverged."""
    entry = table.entry(name)
    return entry.diverged + sum(value < FAILED for value in entry.values.values())


# --- the experiments of PLAN.md --------------------------------------------------------------------------------------


def digits(tables: Tables) -> list[str]:
    """337 digits, everything tuned."""
    (table,) = tables.values()
    found = verdicts(table)
    usual, patch = found.pop("baseline, weight decay 0.05"), found.pop("PatchDropout")
    grids = [e.setting.grid for e in table.entries if e.name != "baseline, weight decay 0.05"]
    common = {(g["train.lr"], g["train.weight_decay"]) for g in grids}
    return [
        stated(
            f"On 337 images of digits, tuning the weight decay gains {loss(usual, table)} over the usual 0.05.",
            usual.verdict == "worse",
        ),
        stated(
            "Of eight methods tuned in the same way only PatchDropout is significantly better than the tuned "
            f"baseline, by {effect(patch, table)}; the other seven are inconclusive.",
            patch.verdict == "better",
            len(found) == 7 and words(found.values()) == {"inconclusive"},
        ),
        stated(
            "All of them selected the same learning rate and weight decay with the strength that stood beside them, so "
            "the strength of a method was hardly tuned.",
            len(common) == 1,
        ),
    ]


def spoken(tables: Tables) -> list[str]:
    """200 spoken digits, everything tuned."""
    (table,) = tables.values()
    found = verdicts(table)
    usual = found.pop("baseline, weight decay 0.05")
    most, least = found["hard masking"], found["DropKey"]
    best, equals = own.leading(table)
    return [
        stated(
            "On 200 spoken digits all seven methods are significantly better than a baseline that was tuned like "
            f"them, from hard masking by {effect(most, table)} to DropKey by {effect(least, table)}.",
            len(found) == 7 and words(found.values()) == {"better"},
            most is max(found.values(), key=lambda c: c.difference),
            least is min(found.values(), key=lambda c: c.difference),
        ),
        stated(
            "Hard masking, dropout, explicit dropout, R-Drop on dropout and attention dropout cannot be told apart.",
            best.name == "hard masking",
            {e.name for e in equals}
            == {"dropout", "explicit dropout", "R-Drop on dropout", "attention dropout"},
        ),
        stated(
            f"What tuning the weight decay is worth is inconclusive: {loss(usual, table)} over the usual 0.05.",
            usual.verdict == "inconclusive",
        ),
    ]


def strength(tables: Tables) -> list[str]:
    """337 digits, the strength alone."""
    (table,) = tables.values()
    found = verdicts(table)
    best, equals = own.leading(table)
    return [
        stated(
            "At the learning rate and weight decay of the panel no method is significantly better than the baseline, "
            "although eight values of each strength were tried.",
            words(found.values()) == {"inconclusive"},
        ),
        stated(
            f"The highest mean is that of {best.name}, by {effect(found[best.name], table)}, and every other "
            "configuration, the baseline included, cannot be told apart from it.",
            best.name == "DropKey",
            len(equals) == len(table.ranked()) - 1,
        ),
        stated(
            f"The {max(c.n for c in found.values())} seeds could detect {own.power(table)}, so a gain as small as that of "
            "PatchDropout on the panel stays open.",
            smallest_difference(table) > 0.9,
        ),
    ]


def skips(tables: Tables) -> list[str]:
    """Skips over depth, a learning rate for each network."""
    (table,) = tables.values()
    found, shares = own.judged_by_depth(table), own.shares(table)

    def of(depth: int, part: str) -> Verdict:
        return found[f"ViT, {depth} layers, no {part} skip"]

    attention, ffn = of(12, "attention"), of(12, "feed-forward")
    gap = own.gap(
        table, *(f"ViT, 12 layers, no {part} skip" for part in ("attention", "feed-forward"))
    )
    trained, n = sum(s.trained for s in shares.values()), sum(s.n for s in shares.values())
    convolutions = [c for name, c in found.items() if not name.startswith("ViT")]
    return [
        stated(
            f"A ViT of 12 layers on 337 digits loses {loss(attention, table)} without attention's skip and "
            f"{loss(ffn, table)} without the feed-forward's; which of them matters more is inconclusive.",
            attention.verdict == ffn.verdict == "worse",
            gap.outcome == "open",
        ),
        stated(
            f"At 2 layers it loses {loss(of(2, 'attention'), table)} without attention's skip, and what the "
            "feed-forward's is worth is inconclusive.",
            of(2, "attention").verdict == "worse",
            of(2, "feed-forward").verdict == "inconclusive",
        ),
        stated(
            f"With a learning rate for each network {trained} of {n} runs train, and neither a CNN nor a ConvMixer is "
            "significantly worse without its skips.",
            trained >= n - 1,
            "worse" not in words(convolutions),
        ),
    ]


def language_1(tables: Tables) -> list[str]:
    """A small language model over one epoch."""
    table = tables["language/epochs_1"]
    found = verdicts(table)
    explicit, usual = found["explicit dropout"], found["baseline, weight decay 0.1"]
    decay = table.entry("baseline").setting.grid["train.weight_decay"]
    return [
        stated(
            "In a single epoch of text a small language model is best left without dropout, as published: among the rates "
            "tried, validation selects 0.",
            table.entry("dropout").setting.grid["rate"] == 0,
        ),
        stated(
            f"Explicit dropout is significantly better than the tuned baseline, by {loss(explicit, table)} bits per "
            "character; DropPath and DropKey are inconclusive.",
            explicit.verdict == "better",
            found["DropPath"].verdict == found["DropKey"].verdict == "inconclusive",
        ),
        stated(
            f"The weight decay hardly matters yet: the tuned {decay:.2g} and the common 0.1 are equal within "
            f"{table.margin or 0:.3f} bits.",
            usual.verdict == "equal",
        ),
    ]


WRITTEN: Mapping[tuple[str, ...], Callable[[Tables], list[str]]] = {
    ("small_data/digits",): digits,
    ("small_data/spoken",): spoken,
    ("small_data/digits_strength",): strength,
    ("always_skip_attention/skips",): skips,
    ("language/epochs_1",): language_1,
}
"""By the experiments that have a result file."""


# --- earlier studies: an untuned baseline, most of them on one split --------------------------------------------------


def weight_decay(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    decay = "params(weight_decay=1.0)"
    patch, key = "patch_dropout(rate=0.3)", "drop_key(rate=0.2)"
    return [
        stated(
            f"On 337 digits weight decay 1.0 instead of 0.05 gains {effect(found[decay], table)} by itself.",
            found[decay].verdict == "better",
        ),
        stated(
            f"PatchDropout gains {effect(found[patch], table)} without that decay and "
            f"{effect(found[f'{patch} + {decay}'], table)} with it, DropKey {effect(found[key], table)} and "
            f"{effect(found[f'{key} + {decay}'], table)}.",
            words(found.values()) == {"better"},
            found[f"{patch} + {decay}"].difference > found[patch].difference,
            found[f"{key} + {decay}"].difference > found[key].difference,
        ),
        stated(
            "This was a pilot with two values and nothing else tuned; where every method is tuned, "
            "[60 seeds](digits_panel.md) confirm the weight decay and leave little of the methods' gain.",
            design.split_varies(table),
        ),
    ]


def thumos(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    explicit = {name: c for name, c in found.items() if "explicit ffn" in name or "arora" in name}
    beside = [found["dropattention + implicit ffn"], found["dropkey + implicit ffn"]]
    return [
        stated(
            f"For action detection, dropout on the feed-forward is better than no method by {loss(found['plain'], table)} "
            "of mAP.",
            found["plain"].verdict == "worse",
        ),
        stated(
            f"All {len(explicit)} variants with a penalty in its place are significantly worse than it, by "
            f"{span(explicit.values())} points.",
            words(explicit.values()) == {"worse"},
        ),
        stated(
            f"Attention dropout or DropKey beside it changes nothing within {table.margin:g} points.",
            words(beside) == {"equal"},
        ),
    ]


def cifar10(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    penalties = [c for name, c in found.items() if "explicit" in name or "arora" in name]
    attention = found["dropattention + implicit ffn"]
    wrong = dict(design.limits(table, path)).get("confounded", "")
    return [
        stated(
            f"On 4,500 images none of {len(penalties)} variants with a penalty can be told apart from dropout on the "
            "feed-forward, and neither can no method at all.",
            words([*penalties, found["plain"]]) == {"inconclusive"},
        ),
        stated(
            f"Attention dropout beside it is better by {effect(attention, table)}, but with a rate of 0.3 against "
            "0.05 in the feed-forward too, so the difference is that of both.",
            attention.verdict == "better",
            "dropattention + implicit ffn (rate 0.3 against 0.05)" in wrong,
        ),
        f"The {max(c.n for c in found.values())} seeds could detect {own.power(table)}; the published gains are about "
        "half of that.",
    ]


def finetuning(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    built_in = found["hidden_dropout(rate=0.1) + drop_attention(rate=0.1, normalized=False)"]
    return [
        stated(
            f"After 8 epochs of fine-tuning on five examples per class, all {len(found)} methods are significantly "
            f"worse than none, by {span(found.values())} points.",
            words(found.values()) == {"worse"},
        ),
        stated(
            f"The dropout of 0.1 that the model has built in costs the most, {loss(built_in, table)}.",
            built_in is min(found.values(), key=lambda c: c.difference),
        ),
        stated(
            "The baseline still underfits when training ends, so this says nothing about training to convergence.",
            "baseline underfits" in dict(design.limits(table, path)),
        ),
    ]


def attentiondrop(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    beside = [
        found[f"{name} on dropout"] for name in ("hard masking", "blur", "blur + consistency")
    ]
    return [
        stated(
            f"On 337 digits R-Drop on dropout is better than dropout by {effect(found['R-Drop on dropout'], table)}.",
            found["R-Drop on dropout"].verdict == "better",
        ),
        stated(
            f"In place of dropout, blur alone is worse by {loss(found['blur'], table)}, and hard masking and blur + "
            "consistency are inconclusive.",
            found["blur"].verdict == "worse",
            words([found["hard masking"], found["blur + consistency"]]) == {"inconclusive"},
        ),
        stated(
            "Beside dropout hard masking, blur and blur + consistency are inconclusive too.",
            words(beside) == {"inconclusive"},
        ),
    ]


def depth(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    parts = ("attention", "feed-forward")
    deep = [found[f"12 layers, no {part} skip"] for part in parts]
    lost = [failed(table, f"12 layers, no {part} skip") for part in parts]
    return [
        stated(
            f"With one learning rate for all depths, a ViT of 12 layers loses {loss(deep[0], table)} without "
            f"attention's skip and {loss(deep[1], table)} without the feed-forward's.",
            words(deep) == {"worse"},
        ),
        stated(
            "At 2 layers neither loss is significant.",
            words(found[f"2 layers, no {part} skip"] for part in parts) == {"inconclusive"},
        ),
        stated(
            f"At 12 layers {lost[0]} and {lost[1]} of {deep[0].n} runs fail; [with a learning rate for each "
            "network](skips.md) nearly every run trains.",
            min(lost) > 0,
        ),
    ]


def structures(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    last, averaged = (
        found["DropKey, last fifth without"],
        found["DropKey, Monte Carlo of 16 at test"],
    )
    return [
        stated(
            "No other unit (whole keys, blocks, crosses) is significantly better or worse than hiding single scores.",
            words(c for name, c in found.items() if name != "plain") <= {"inconclusive", "equal"},
        ),
        stated(
            f"Leaving DropKey out of the last fifth of training changes nothing within {table.margin:g} points, and "
            "Monte Carlo at test is inconclusive.",
            last.verdict == "equal",
            averaged.verdict == "inconclusive",
        ),
        stated(
            f"DropKey itself is better than no method by {loss(found['plain'], table)} on this split.",
            found["plain"].verdict == "worse",
        ),
    ]


def sweeps(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    wide = [found[f"blur, w {w}"] for w in (13, 15)]
    narrow = [found[f"blur, w {w}"] for w in (3, 5, 9, 11)]
    return [
        stated(
            f"Hard masking with p 0.9 is worse than with p 0.5 by {loss(found['hard masking, p 0.9'], table)}; p 0.6 and "
            "0.7 are inconclusive.",
            found["hard masking, p 0.9"].verdict == "worse",
            words(found[f"hard masking, p {p}"] for p in (0.6, 0.7)) == {"inconclusive"},
        ),
        stated(
            f"Blur over 13 and 15 keys is worse than hard masking with p 0.5 by {span(wide)} points, and over fewer keys "
            "it is inconclusive.",
            words(wide) == {"worse"},
            words(narrow) == {"inconclusive"},
        ),
        "Blur is not compared with blur over 9 keys here, so the paper's limit for w is left to "
        "[the trend over w](trends.md).",
    ]


def noise(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    theirs = [found[name] for name in ("hard masking", "blur", "blur + consistency")]
    ends = dict(design.limits(table, path)).get("values at an end of the range", "")
    return [
        stated(
            f"Where three labels in ten are wrong, PatchDropout is better than dropout by "
            f"{effect(found['patch dropout'], table)} and DropKey by {effect(found['DropKey'], table)}.",
            found["patch dropout"].verdict == found["DropKey"].verdict == "better",
        ),
        stated(
            f"Hard masking, blur and blur + consistency are worse than dropout, by {span(theirs)} points, against the "
            "paper.",
            words(theirs) == {"worse"},
        ),
        stated(
            "The rates of PatchDropout and DropKey lie at the end of the range, and the baseline was not tuned, so "
            "this holds for one split until [the tuned panel](noisy_panel.md) has run.",
            "patch dropout (0.5)" in ends and "DropKey (0.5)" in ends,
        ),
    ]


def robust(table: ResultTable, path: Path) -> list[str]:
    attacked = {
        e.name: e.secondary["pgd_accuracy"]
        for e in table.compared()
        if "pgd_accuracy" in e.secondary
    }
    clean = verdicts(table)
    return [
        stated(
            f"Under PGD at 16/255 hard masking is easier to attack than dropout, by "
            f"{loss(attacked['hard masking'], table)}, against the paper.",
            attacked["hard masking"].verdict == "worse",
        ),
        stated(
            "R-Drop on dropout and blur + consistency are inconclusive under attack.",
            words(attacked[name] for name in ("R-Drop on dropout", "blur + consistency"))
            == {"inconclusive"},
        ),
        stated(
            "Without an attack no method is significantly better or worse than dropout; no method at all is worse.",
            [name for name, c in clean.items() if c.verdict != "inconclusive"] == ["plain"],
            clean["plain"].verdict == "worse",
        ),
    ]


def graying(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    without = [c for name, c in found.items() if name.startswith("no attention skip")]
    return [
        stated(
            "No setting of Token Graying is significantly better or worse than the baseline on 337 digits.",
            words(found.values()) <= {"inconclusive", "equal"},
        ),
        stated(
            f"DCT with eps 0.99 changes nothing within {table.margin:g} points.",
            found["DCT, eps 0.99"].verdict == "equal",
        ),
        stated(
            "Without attention's skip the model of 2 layers is inconclusive with graying and without, so whether "
            "graying makes up for the skip is not answered.",
            words(without) == {"inconclusive"},
        ),
    ]


def cross_modal(table: ResultTable, path: Path) -> list[str]:
    found = verdicts(table)
    return [
        stated(
            f"None of {len(found)} methods in the attention from text to image is significantly better or worse than none.",
            words(found.values()) == {"inconclusive"},
        ),
        f"The differences run from {span(found.values(), 1.0)} points, and "
        f"{max(c.n for c in found.values())} seeds could detect {own.power(table)}.",
        stated(
            "The model hardly overfits there, so there is little to regularize.",
            (ends := design.losses(table.entries)) is not None and not design.overfits(*ends),
        ),
    ]


EARLIER: Mapping[str, Callable[[ResultTable, Path], list[str]]] = {
    "weight_decay": weight_decay,
    "thumos": thumos,
    "cifar10": cifar10,
    "finetuning": finetuning,
    "attentiondrop": attentiondrop,
    "depth": depth,
    "structures": structures,
    "sweeps": sweeps,
    "noise": noise,
    "robust": robust,
    "graying": graying,
    "cross_modal": cross_modal,
}
"""By the question of `questions.toml`."""
