"""What the papers claim: each with its source, its published effect, its kind, and the record that can answer it.

Published numbers are read from `published/*.toml`, never typed here. The figures of DropKey, AttentionDrop and
Always Skip Attention come from secondary sources, as the heads of those files say; only Explicit Dropout's tables give
standard deviations (5 seeds).

Four kinds. *better*: the method beats its reference. *no worse*: "matches or outperforms", shown when our interval lies
above minus the margin. *equal*: shown when our interval lies within the margin. *contrast*: an effect of a stated size,
shown when our interval agrees in direction and overlaps half to twice the published effect.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dampen.studies import PAPER_SEEDS, describe_metric, t_quantile

FIGURES = Path(__file__).resolve().parent / "published"
RESULTS = Path(__file__).resolve().parents[1]
PAPERS = {
    "2604.20505": "Explicit Dropout",
    "2208.02646": "DropKey",
    "2504.12088": "AttentionDrop",
    "2505.01996": "Always Skip Attention",
    "2505.24788": "Dropout in a single epoch of text",
    "2509.14786": "Repeated text",
    "2606.06888": "Masked inputs of language models",
}
"""By arXiv id. The last three are the controls of PLAN.md's experiments on language; their findings come from there."""
Kind = Literal["better", "no worse", "equal", "contrast"]


@dataclass(frozen=True)
class Effect:
    """A published difference, row minus reference, in the unit of tables; its 95 % interval where sds are known."""

    difference: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Claim:
    """What a paper says of `row` and `reference` in `metric`, and the record of ours that answers; or why none does."""

    paper: str
    text: str
    source: str
    kind: Kind = "better"
    record: str = ""
    row: str = ""
    reference: str = ""
    metric: str = "accuracy"
    effect: Effect | None = None
    share: bool = False  # the published effect is a share of the reference's mean
    start: float = (
        math.nan
    )  # a trend: what accuracy loses per `step` of the value of `row`, from here on
    step: float = 1.0
    untestable: str = ""


def strongest(*sources: tuple[str, str, str]) -> tuple[str, str, str]:
    """The best evidence there is for a claim: the first source whose result file exists.

    Args:
        sources: result file, row and reference of each study that can answer, the planned and tuned one first.
    """
    return next((s for s in sources if (RESULTS / s[0]).is_file()), sources[0])


def figures(name: str) -> dict[str, Any]:
    """The published numbers of a paper."""
    return tomllib.loads((FIGURES / f"{name}.toml").read_text())


def effect(row: Any, reference: Any) -> Effect:
    """The difference of two published figures, numbers or [mean, sd] over five seeds (Welch).

    >>> effect([63.96, 0.46], [64.53, 0.47])
    Effect(difference=-0.57, low=-1.25, high=0.11)
    """
    if not isinstance(row, list):
        return Effect(round(row - reference, 4))
    a, b = (sd**2 / PAPER_SEEDS for _, sd in (row, reference))
    freedom = (a + b) ** 2 / ((a**2 + b**2) / (PAPER_SEEDS - 1))
    half = t_quantile(freedom) * math.sqrt(a + b)
    difference = row[0] - reference[0]
    return Effect(*(round(v, 2) for v in (difference, difference - half, difference + half)))


def table_kind(published: Effect, metric: str) -> Kind:
    """What a paper's own table says of a row: above its reference, below it by so much, or no worse.

    >>> [table_kind(e, "accuracy") for e in (Effect(1.0, 0.2, 1.8), Effect(-3.9, -5.4, -2.4), Effect(0.1, -0.5, 0.7))]
    ['better', 'contrast', 'no worse']
    """
    margin = describe_metric(metric).margin or 0.0
    if published.low > 0 and published.difference > margin:
        return "better"
    return "contrast" if published.difference < -margin else "no worse"


EXPLICIT, KEY, DROP, ALWAYS, EPOCH, REPEATED, MASKED = PAPERS
T3, SKIP = (
    "explicit_dropout/results/table_3-study.json.xz",
    "always_skip_attention/results/skip_ablation.json",
)
AUGMENTED = "explicit_dropout/results/cifar10.json.xz"
SKIPS = "always_skip_attention/results/skips.json.xz"
DIGITS = "small_data/results/digits.json.xz"
SPOKEN = "small_data/results/spoken.json.xz"
NOISY = "small_data/results/noisy_digits.json.xz"
FORMS = "dropkey/results/structures.json.xz"
TRENDS = "attentiondrop/results/trends.json.xz"
GRADIENTS = "attentiondrop/results/variance.json.xz"
ATTENTION = "attentiondrop/results/digits-study.json.xz"
RATES, VARIANCE = (
    "dropkey/results/rates_digits-study.json.xz",
    "attentiondrop/results/variance_digits.json",
)
SVD, SCHEDULES = (
    "always_skip_attention/results/token_graying_svd.json",
    "dropkey/results/schedules_cifar10.json",
)
STRUCTURES = "dropkey/results/structures_digits-study.json.xz"
SWEEPS = "attentiondrop/results/sweeps_digits-study.json.xz"
NOISE = "attentiondrop/results/noise_digits-study.json.xz"
GRAYING = "always_skip_attention/results/graying_digits-study.json.xz"
ROBUST, MAE = (
    "attentiondrop/results/robust_digits-study.json.xz",
    "always_skip_attention/results/mae.json",
)
SCHEDULES_100 = "dropkey/results/schedules_cifar100-study.json.xz"
NOISE_CIFAR = "attentiondrop/results/noise_cifar10-study.json.xz"
ATTENTION_10 = "attentiondrop/results/cifar10-study.json.xz"
ATTENTION_100 = "attentiondrop/results/cifar100-study.json.xz"
FFN = "none + implicit ffn"
LARGE = "needs ImageNet and GPUs; the recipe runs at `--scale paper`"
TABLES = (  # where the rows of Explicit Dropout's Tables 1 to 4 were run: table, column, data, record, metric
    (
        "Table 1",
        "cifar10",
        "CIFAR-10",
        "explicit_dropout/results/table_1-study.json.xz",
        "accuracy",
    ),
    (
        "Table 2",
        "cifar100",
        "CIFAR-100",
        "explicit_dropout/results/table_2-study.json.xz",
        "accuracy",
    ),
    ("Table 3", "thumos14_kinetics", "THUMOS14", T3, "frame_map"),
    ("Table 4", "gtzan", "GTZAN", "explicit_dropout/results/table_4-study.json.xz", "accuracy"),
)
TABLE_ROWS = {  # our row: in words, attention and feed-forward in the paper's tables
    "none + explicit ffn": ("explicit feed-forward alone", "none", "explicit"),
    "explicit v + explicit ffn": ("explicit value + feed-forward", "explicit_v", "explicit"),
    "explicit av + explicit ffn": (
        "explicit attended value + feed-forward",
        "explicit_av",
        "explicit",
    ),
    "arora q + explicit ffn": ("Arora on the query + explicit feed-forward", "arora_q", "explicit"),
}
TABLE_WORDS = {"better": "beats", "no worse": "matches", "contrast": "is below"}


def explicit_dropout() -> list[Claim]:
    """Tables 1 to 4, row by row: what each says of a row against implicit feed-forward dropout."""
    content = figures("explicit_dropout")
    rows = {(r["attention"], r["ffn"]): r for r in content["tables_1_to_4"]["rows"]}
    found = []
    for table, column, data, record, metric in TABLES:
        for row, (name, *cells) in TABLE_ROWS.items():
            published = effect(rows[tuple(cells)][column], rows["none", "implicit"][column])
            kind = table_kind(published, metric)
            text = f"{name} {TABLE_WORDS[kind]} implicit feed-forward dropout ({data})"
            found.append(
                Claim(
                    EXPLICIT, text, f"{table}, row {row}", kind, record, row, FFN, metric, published
                )
            )
    for row, cells in (
        ("explicit ffn", ("none", "explicit")),
        ("explicit value + ffn", ("explicit_v", "explicit")),
    ):
        published = effect(rows[cells]["cifar10"], rows["none", "implicit"]["cifar10"])
        text = f"{row} beats dropout, each tuned (14,000 images of CIFAR-10, crop and flip)"
        found.append(
            Claim(EXPLICIT, text, "Table 1", "better", AUGMENTED, row, "dropout", effect=published)
        )
    for data, record in (("337 digits", DIGITS), ("200 spoken digits", SPOKEN)):
        text = f"explicit dropout matches or outperforms dropout, each tuned ({data})"
        found.append(
            Claim(EXPLICIT, text, "abstract", "no worse", record, "explicit dropout", "dropout")
        )
    v = content["table_5"]["v"]
    found.append(
        Claim(
            EXPLICIT,
            "a lambda of 0.005 ruins the value term (CIFAR-10, learning rate 0.001)",
            "Table 5, term V",
            "contrast",
            effect=effect(v["0.005"][0], v["0.0005"][0]),
            untestable="our grid has one seed",
        )
    )
    cost = "a cost, see [what each method costs](../costs.md)"
    return [
        *found,
        Claim(EXPLICIT, "the penalty costs little time and memory", "text", untestable=cost),
    ]


def dropkey() -> list[Claim]:
    """Schedules, attention dropout, structures, maps and detection."""
    content = figures("dropkey")
    increasing, constant, decreasing = (
        content["schedules"][k] for k in ("increasing", "constant", "decreasing")
    )
    digits = strongest((FORMS, "{}", "constant"), (RATES, "DropKey, {}", "DropKey"))
    places = (
        ("digits for CIFAR-10", 0, *digits),
        ("CIFAR-10", 0, SCHEDULES, "{}", "constant"),
        ("CIFAR-100", 1, SCHEDULES_100, "{}", "constant"),
    )
    found = []
    for data, i, record, row, reference in places:
        for name, values, kind, word in (
            ("decreasing", decreasing, "better", "beats"),
            ("increasing", increasing, "contrast", "is below"),
        ):
            text, own = (
                f"a ratio {name} with depth {word} a constant one ({data})",
                row.format(name),
            )
            published = effect(values[i], constant[i])
            found.append(
                Claim(
                    KEY, text, "table of schedules", kind, record, own, reference, effect=published
                )
            )  # type: ignore[arg-type]
    beats = "DropKey beats attention dropout"
    for data, record in (("digits", DIGITS), ("spoken digits", SPOKEN)):
        text = f"{beats}, each tuned ({data})"
        found.append(Claim(KEY, text, "figure 3", "better", record, "DropKey", "attention dropout"))
    found.append(
        Claim(
            KEY,
            f"{beats} at the same ratio (CIFAR-100)",
            "figure 3",
            "better",
            SCHEDULES_100,
            "constant",
            "attention dropout",
        )
    )
    gains = [round(row[1] - row[0], 2) for row in content["imagenet"].values()]
    found.append(
        Claim(
            KEY,
            f"{beats} on ImageNet by {min(gains)} to {max(gains)} points",
            "table of ImageNet",
            untestable=LARGE,
        )
    )
    structured = [
        strongest((FORMS, "blocks of 2", "constant"), (STRUCTURES, "blocks of 2", "DropKey")),
        strongest((FORMS, "crosses of 1", "constant"), (STRUCTURES, "crosses of 3", "DropKey")),
    ]
    for record, row, reference in structured:
        text = f"structure is not needed: {row} equal single scores (digits)"
        found.append(Claim(KEY, text, "text and figure 5", "equal", record, row, reference))
    for text, row in (
        ("a last phase without DropKey helps (digits)", "DropKey, last fifth without"),
        ("Monte Carlo at test helps (digits)", "DropKey, Monte Carlo of 16 at test"),
    ):
        found.append(Claim(KEY, text, "text", "better", STRUCTURES, row, "DropKey"))
    for reference in ("plain", "attention dropout"):
        text = f"attention with DropKey spreads wider than with {reference} (CIFAR-100, entropy of the maps)"
        found.append(
            Claim(
                KEY,
                text,
                "figure 4",
                "better",
                SCHEDULES_100,
                "constant",
                reference,
                "attention_entropy",
            )
        )
    plain, dropout, key = content["coco_detr"]["ap"]
    for row, reference, published in (
        ("DropKey", "dropout", effect(key, dropout)),
        ("dropout", "plain", effect(dropout, plain)),
    ):
        text = f"in DETR {row} beats {reference} (BCCD for COCO)"
        record = "dropkey/results/detr.json"
        found.append(
            Claim(KEY, text, "table of COCO", "better", record, row, reference, "ap", published)
        )
    return found


def attentiondrop() -> list[Claim]:
    """The main table against dropout, the limits of p and w, noise, attacks and the gradient's variance."""
    content = figures("attentiondrop")
    results, columns = content["results"], content["results"]["columns"]
    names = {
        "r_drop": ("R-Drop", "R-Drop on dropout"),
        "hard_masking": ("hard attention masking", "hard masking"),
        "blur": ("blurred attention smoothing", "blur"),
        "blur_consistency": ("blur + consistency", "blur + consistency"),
    }
    places = (  # column, data, metric, record, whether the record uses the short names
        ("cifar10", "digits for CIFAR-10", "accuracy", DIGITS, True),
        ("cifar10", "spoken digits for CIFAR-10", "accuracy", SPOKEN, True),
        ("cifar10", "CIFAR-10", "accuracy", ATTENTION_10, False),
        ("cifar100", "CIFAR-100", "accuracy", ATTENTION_100, False),
        ("bleu", "translation", "bleu", "attentiondrop/results/translation-study.json.xz", False),
        ("ece", "digits for CIFAR-10", "ece", DIGITS, True),
        ("ece", "CIFAR-10", "ece", ATTENTION_10, False),
        ("pgd_accuracy", "digits for CIFAR-10, PGD 16/255", "pgd_accuracy", ROBUST, True),
        ("pgd_accuracy", "CIFAR-10, PGD 2/255", "pgd_accuracy", ATTENTION_10, False),
    )
    words = {"ece": "is better calibrated than", "pgd_accuracy": "is harder to attack than"}
    found = []
    for column, data, metric, record, short in places:
        i = columns.index(column)
        for key, both in names.items():
            published_here = results[key][i] != -1
            if published_here and (key, record) != ("blur", SPOKEN):  # blur alone is not in it
                row = both[1] if short else both[0]
                source = ATTENTION if (key, record) == ("blur", DIGITS) else record
                text = f"{both[0]} {words.get(metric, 'beats')} dropout ({data})"
                published = effect(results[key][i], results["dropout"][i])
                found.append(
                    Claim(
                        DROP,
                        text,
                        f"main table, {column}",
                        "better",
                        source,
                        row,
                        "dropout",
                        metric,
                        published,
                    )
                )
    reduction = Effect(-content["claims"]["gradient_variance_reduction"])
    for key in ("hard_masking", "blur", "blur_consistency"):
        long, short_name = names[key]
        digits = strongest((GRADIENTS, short_name, "dropout"), (VARIANCE, long, "dropout"))
        for (record, row, _), data in (
            (digits, "digits"),
            ((ATTENTION_10, long, "dropout"), "CIFAR-10"),
        ):
            text = f"the gradient's variance is lower with {long} than with dropout ({data})"
            found.append(
                Claim(
                    DROP,
                    text,
                    "text",
                    "contrast",
                    record,
                    row,
                    "dropout",
                    "training_variance",
                    reduction,
                    share=True,
                )
            )
    trend = strongest((TRENDS, "", ""), (SWEEPS, "", ""))[0]
    for name, method, limit, step in (("p", "hard masking", 0.5, 0.1), ("w", "blur", 9, 2)):
        claim = Claim(
            DROP,
            f"accuracy falls as the {name} of {method} grows above {limit} (digits, loss per {step:g})",
            f"text: {name} > {limit} degrades",
            "better",
            trend,
            method,
            f"{method}, {name} {limit}",
            start=limit,
            step=step,
        )
        found.append(claim)
    tuned = ("r_drop", "hard_masking", "blur_consistency")  # the tuned study is without blur alone
    for data, keys in (("digits", names), ("CIFAR-10", tuned)):
        for key in keys:
            noisy = strongest((NOISY, "", ""), (NOISE, "", ""))[0] if key in tuned else NOISE
            record = noisy if data == "digits" else NOISE_CIFAR
            text = f"{names[key][0]} beats dropout where 30 % of the labels are wrong ({data})"
            found.append(
                Claim(
                    DROP,
                    text,
                    "abstract: limited or noisy data",
                    "better",
                    record,
                    names[key][1],
                    "dropout",
                )
            )
    return found


def always_skip() -> list[Claim]:
    """Skips, depth, networks of convolutions, Token Graying."""
    content = figures("always_skip_attention")
    skips, dct, svd = (
        content["skip_ablation"],
        content["token_graying_dct"],
        content["token_graying_svd"]["rows"],
    )
    attention, ffn, both = (
        effect(skips["no_attention_skip"], skips["all_skips"]),
        effect(skips["no_ffn_skip"], skips["all_skips"]),
        effect(skips["no_ffn_skip"], skips["no_attention_skip"]),
    )
    places = [
        (
            "6 layers, CIFAR-10",
            SKIP,
            "ViT, all skips",
            "ViT, no attention skip",
            "ViT, no feed-forward skip",
        )
    ]
    for n in (2, 4, 8, 12):
        deep = f"ViT, {n} layers"
        rows = (deep, f"{deep}, no attention skip", f"{deep}, no feed-forward skip")
        places.append((f"{n} layers, digits", SKIPS, *rows))
    found = []
    for data, record, whole, no_attention, no_ffn in places:
        for text, row, reference, published in (
            ("without the skip around attention a ViT collapses", no_attention, whole, attention),
            ("without the feed-forward skip a ViT loses little", no_ffn, whole, ffn),
            (
                "the skip around attention matters more than the feed-forward's",
                no_ffn,
                no_attention,
                both,
            ),
        ):
            source = "table of skips (approximate)"
            found.append(
                Claim(
                    ALWAYS,
                    f"{text} ({data})",
                    source,
                    "contrast",
                    record,
                    row,
                    reference,
                    effect=published,
                )
            )
    unchanged = Effect(skips["convmixer_change_without_skips"])
    places = [("ConvMixer, CIFAR-10", SKIP, "ConvMixer, skips", "ConvMixer, no skips")]
    for kind in ("ConvMixer", "CNN"):
        for n in (4, 12):
            row = f"{kind}, {n} layers"
            places.append((f"{row}, digits", SKIPS, row, f"{row}, no skips"))
    for data, record, reference, row in places:
        text = f"a network of convolutions loses nothing without its skips ({data})"
        found.append(
            Claim(
                ALWAYS, text, "table of skips", "no worse", record, row, reference, effect=unchanged
            )
        )
    svd_gain = effect(
        next(r[1] for r in svd if r[0] == 0.7), next(r[1] for r in svd if r[0] == 1.0)
    )
    dct_gain = effect(dct["vit_b"][1], dct["vit_b"][0])
    for record, data, plain in ((SVD, "CIFAR-10", "plain (eps 1)"), (GRAYING, "digits", "plain")):
        for how, published in (("SVD, eps 0.7", svd_gain), ("DCT, eps 0.95", dct_gain)):
            text = f"Token Graying by {how} helps ({data} for ImageNet)"
            found.append(
                Claim(
                    ALWAYS,
                    text,
                    "table of Token Graying, ViT-B",
                    "better",
                    record,
                    how,
                    plain,
                    effect=published,
                )
            )
    text = "Token Graying by DCT helps a masked autoencoder (CIFAR-10 for ImageNet)"
    gain = effect(dct["mae_finetune"][1], dct["mae_finetune"][0])
    found.append(
        Claim(
            ALWAYS,
            text,
            "table of Token Graying, MAE",
            "better",
            MAE,
            "DCT, eps 0.95",
            "plain",
            effect=gain,
        )
    )
    gains = [round(b - a, 1) for a, b in dct.values()]
    text = f"Token Graying by DCT gains {min(gains)} to {max(gains)} points on ImageNet"
    return [*found, Claim(ALWAYS, text, "table of Token Graying", untestable=LARGE)]


def language() -> list[Claim]:
    """What others found on language models that see their text once, or many times."""
    usual = "baseline, weight decay 0.1"
    repeated = [
        Claim(
            REPEATED,
            f"with repeated text a tuned weight decay beats the usual 0.1 ({n} epochs of 180,000 characters)",
            "PLAN.md, X6: the best is about 30 times the usual",
            "better",
            f"language/results/epochs_{n}.json.xz",
            "baseline",
            usual,
            "bpc",
        )
        for n in (4, 16)
    ]
    rate_0 = "tuning selected a rate of 0, so no dropout was tested ([page](language.md))"
    once = "dropout hurts in a single epoch (180,000 characters)"
    masked = "its experiment with `InputMasking` is not planned yet"
    return [
        Claim(EPOCH, once, "PLAN.md, X6", untestable=rate_0),
        *repeated,
        Claim(MASKED, "masking is worth 1.3 times the data", "PLAN.md, X6", untestable=masked),
    ]


CLAIMS = (*explicit_dropout(), *dropkey(), *attentiondrop(), *always_skip(), *language())
