"""What the papers claim, and which of our records can say something of it: a record, two of its rows, a direction."""

from __future__ import annotations

from dataclasses import dataclass

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
SCHEDULES_100, NOISE_CIFAR = "dropkey/schedules_cifar100-study.json.xz", "attentiondrop/noise_cifar10-study.json.xz"
ATTENTION_10 = "attentiondrop/cifar10-study.json.xz"
MAIN = {  # where the rows of AttentionDrop's main table were run
    "CIFAR-10": (ATTENTION_10, "accuracy"),
    "CIFAR-100": ("attentiondrop/cifar100-study.json.xz", "accuracy"),
    "translation": ("attentiondrop/translation-study.json.xz", "bleu"),
}
PUBLISHED = ("hard attention masking", "blurred attention smoothing", "blur + consistency", "R-Drop")
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
    Claim(
        KEY,
        "a ratio that decreases with depth beats a constant one (CIFAR-100)",
        SCHEDULES_100,
        "decreasing",
        "constant",
    ),
    Claim(
        KEY,
        "a ratio that increases with depth is worse than a constant one (CIFAR-100)",
        SCHEDULES_100,
        "increasing",
        "constant",
        "worse",
    ),
    Claim(
        KEY,
        "DropKey beats attention dropout at the same ratio (CIFAR-100)",
        SCHEDULES_100,
        "constant",
        "attention dropout",
    ),
    *(
        Claim(
            KEY,
            f"a model trained with DropKey looks at more of the image than one {than} (figure 4, CIFAR-100; here: the "
            "entropy of its attention on 16 test images; better is higher)",
            SCHEDULES_100,
            "constant",
            reference,
            metric="attention_entropy",
        )
        for than, reference in (("without", "plain"), ("with attention dropout", "attention dropout"))
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
        Claim(DROP, f"{row} beats dropout ({where})", record, row, "dropout", metric=metric)
        for where, (record, metric) in MAIN.items()
        for row in PUBLISHED
    ),
    *(
        Claim(
            DROP,
            f"{row} is harder to attack than dropout (CIFAR-10, PGD, 2/255)",
            ATTENTION_10,
            row,
            "dropout",
            metric="pgd_accuracy",
        )
        for row in PUBLISHED
        if row != "blurred attention smoothing"  # not published
    ),
    *(
        Claim(DROP, f"{row} is better calibrated than dropout (CIFAR-10)", ATTENTION_10, row, "dropout", metric="ece")
        for row in PUBLISHED
    ),
    *(
        Claim(
            DROP,
            f"the gradient's variance over training is lower with {row} than with dropout (CIFAR-10)",
            ATTENTION_10,
            row,
            "dropout",
            metric="training_variance",
        )
        for row in PUBLISHED
        if row != "R-Drop"
    ),
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
        Claim(DROP, f"{row} beats dropout where 30 % of the labels are wrong (digits)", NOISE, row, "dropout")
        for row in ("hard masking", "blur", "blur + consistency", "R-Drop on dropout")
    ),
    *(
        Claim(DROP, f"{row} beats dropout where 30 % of the labels are wrong (CIFAR-10)", NOISE_CIFAR, row, "dropout")
        for row in ("hard masking", "blur + consistency", "R-Drop on dropout")
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
