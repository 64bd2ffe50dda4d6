"""Claims are judged by their kind, and what a study did not vary is read from its record."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from reproductions import campaign
from reproductions.pages import answers, claims, design, lambda_page
from reproductions.pages.claimed import CLAIMS, TABLES, Claim, Effect, figures
from reproductions.pages.claims import Found, compare, outcome
from reproductions.pages.publish import committed_report


def fate(kind, low, high, published=None, metric="accuracy"):
    """The outcome for an interval; the margin is 0.5."""
    claim = Claim("p", "text", "source", kind, "r", "a", "b", metric)
    found = Found((low + high) / 2, 8, low, high, detectable=1.2, margin=0.5, published=published)
    return outcome(claim, found)


OPEN = "inconclusive (could detect 1.20 points)"


@pytest.mark.parametrize(
    ("kind", "low", "high", "published", "expected"),
    [
        ("better", 0.1, 2.0, None, "shown"),
        ("better", -2.0, -0.1, None, "contradicted"),
        ("better", -0.4, 0.4, None, "equivalent"),
        ("better", -0.6, 2.0, None, OPEN),
        ("no worse", -0.4, 0.9, None, "shown"),
        ("no worse", 0.1, 0.9, None, "shown"),
        ("no worse", -0.4, -0.1, None, "shown"),  # below 0, but by less than the margin
        ("no worse", -1.9, -0.6, None, "contradicted"),
        ("no worse", -0.6, 0.9, None, OPEN),
        (
            "no worse",
            -0.9,
            -0.4,
            None,
            f"{OPEN[:-1]}; below the reference, perhaps by less than the margin)",
        ),
        ("equal", -0.4, 0.4, None, "shown"),
        ("equal", 0.6, 1.4, None, "contradicted"),
        ("equal", -1.4, -0.6, None, "contradicted"),
        ("equal", -0.4, 0.6, None, OPEN),
        ("contrast", -18.0, -9.0, -15.9, "shown"),
        ("contrast", -0.7, -0.4, -15.9, "same direction, much smaller"),
        ("contrast", -90.0, -40.0, -15.9, "same direction, much larger"),
        ("contrast", 0.2, 1.0, -15.9, "contradicted"),
        ("contrast", -2.0, 0.7, -15.9, "contradicted (half the published effect is excluded)"),
        ("contrast", -9.0, 0.7, -15.9, OPEN),
        ("contrast", -0.4, 0.4, -15.9, "equivalent"),
        ("contrast", 12.0, 25.0, 20.0, "shown"),
    ],
)
def test_a_claim_is_judged_by_its_kind(kind, low, high, published, expected):
    assert fate(kind, low, high, published) == expected


def test_less_is_better_where_the_metric_says_so():
    assert fate("better", -2.0, -0.1, metric="ece") == "shown"
    assert fate("better", 0.1, 2.0, metric="ece") == "contradicted"


def test_too_few_seeds_say_nothing():
    assert fate("better", math.nan, math.nan) == "inconclusive (too few seeds)"


def test_intervals_widen_with_the_family_and_shares_become_differences():
    values = {
        "a": {"accuracy": {str(s): 52.0 + s % 3 for s in range(8)}},
        "b": {"accuracy": {str(s): 50.0 + s % 2 for s in range(8)}},
    }
    claim = Claim("p", "t", "s", "contrast", "r", "a", "b", effect=Effect(0.1), share=True)
    one, many = compare(claim, values, 1), compare(claim, values, 60)
    assert many.low < one.low < one.difference == many.difference < one.high < many.high
    assert one.published == pytest.approx(0.1 * 50.5)


def test_a_claim_on_what_a_record_does_not_hold_is_an_error():
    claim = Claim("p", "t", "s", "better", "r", "a", "b", "ece")
    with pytest.raises(ValueError, match="holds no ece of a and b"):
        compare(claim, {"a": {}, "b": {}}, 1)


def test_what_a_table_says_is_not_what_was_put_into_its_mouth():
    """The kinds of Explicit Dropout's rows, against its own figures by hand."""
    kinds = {
        (c.source.partition(",")[0], c.row): c.kind
        for c in CLAIMS
        if c.row and c.source.startswith("Table")
    }
    v, av, ffn, q = (
        f"{a} + explicit ffn" for a in ("explicit v", "explicit av", "none", "arora q")
    )
    assert [kinds["Table 1", row] for row in (v, av, ffn)] == ["better"] * 3
    assert [kinds["Table 2", row] for row in (v, av, ffn, q)] == [
        "contrast"
    ] * 4  # weaker on CIFAR-100
    assert kinds["Table 3", ffn] == "contrast"  # 63.96 against 64.53
    assert [kinds["Table 3", row] for row in (v, av)] == ["no worse"] * 2
    assert [kinds["Table 4", row] for row in (v, av, ffn, q)] == [
        "no worse"
    ] * 4  # GTZAN ties, Arora gains
    (structure,) = {c.kind for c in CLAIMS if "structure is not needed" in c.text}
    assert structure == "equal"


def test_published_effects_are_those_of_the_figures():
    rows = {
        (r["attention"], r["ffn"]): r for r in figures("explicit_dropout")["tables_1_to_4"]["rows"]
    }
    column = {table: column for table, column, *_ in TABLES}
    found = [c for c in CLAIMS if c.row == "arora q + explicit ffn"]
    assert len(found) == len(TABLES)
    for claim in found:
        name = column[claim.source.partition(",")[0]]
        difference = rows["arora_q", "explicit"][name][0] - rows["none", "implicit"][name][0]
        assert claim.effect.difference == pytest.approx(difference, abs=0.006)


def test_every_claim_has_a_source_and_every_contrast_a_size():
    assert all(c.source for c in CLAIMS)
    assert all(c.effect is not None for c in CLAIMS if c.kind == "contrast")
    assert all(c.untestable or (c.record and c.row and c.reference) for c in CLAIMS)


def test_the_claims_page_agrees_with_the_tables_about_explicit_feed_forward():
    """THUMOS14: the table next to the paper and the claim say the same of the same row."""
    found = claims.judged()
    (claim,) = [c for c in found if c.row == "none + explicit ffn" and c.metric == "frame_map"]
    entry = committed_report(claims.RECORDS / claim.record).tables[0].entry(claim.row)
    assert outcome(claim, found[claim][0]) == "shown"
    assert entry.claim.endswith("same direction and size")


def test_a_trend_is_decided_by_the_slope_of_every_seed():
    """The loss per step of the value, from the limit on, against numpy."""
    drawn = {
        str(s): {w: 80.0 - 0.7 * max(0, w - 9) + (s * w) % 5 for w in (5, 9, 11, 13)}
        for s in range(6)
    }
    values = {
        f"blur, w {w}": {"accuracy": {s: row[w] for s, row in drawn.items()}}
        for w in (5, 9, 11, 13)
    }
    claim = Claim("p", "t", "s", "better", "r", "blur", "blur, w 9", start=9, step=2)
    found = compare(claim, values, 1)
    above = [9, 11, 13]
    lost = [-2 * np.polyfit(above, [row[w] for w in above], 1)[0] for row in drawn.values()]
    low, high = stats.t.interval(0.95, 5, np.mean(lost), stats.sem(lost))
    assert (found.difference, found.low, found.high) == pytest.approx((np.mean(lost), low, high))


def test_every_claim_has_a_line_and_what_has_not_run_a_command():
    text = (claims.RECORDS.parent / "docs" / "results" / "claims.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    missing = set()
    for claim in CLAIMS:
        (line,) = (line for line in lines if line.startswith(f"| {claim.text} | {claim.kind} |"))
        done = (claims.RECORDS / claim.record).is_file() and claim.record
        if not claim.untestable and not done:
            assert "| not run yet |" in line
            missing.add(claims.experiment(claim.record))
        elif not claim.untestable:
            assert re.search(r" seeds, (one split|new splits), ", line)
    named = re.findall(r"campaign --only (.*) --data-dir", text)
    assert {name for names in named for name in names.split()} == missing
    assert missing <= set(campaign.STUDIES)


def search(*values, row="a"):
    trials = [{"values": {"rate": rate, "train.lr": 0.1}, "valid": valid} for rate, valid in values]
    return {"mode": "max", "seeds": [1000], "rows": {row: {"trials": trials}}}


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        (((0.1, 0.5), (0.2, 0.9), (0.3, 0.6)), (0.2, False, False, False)),
        (((0.1, 0.9), (0.2, 0.9), (0.3, 0.6)), (0.1, True, False, True)),
        (((0.1, 0.5), (0.2, 0.6), (0.3, 0.9)), (0.3, False, True, False)),
    ],
)
def test_choices_at_an_end_and_ties_are_found(tried, expected):
    choice = design.choices(search(*tried))["a"]
    assert (choice.value, choice.lowest, choice.highest, choice.tied) == expected


def limits(record):
    path = claims.RECORDS / record
    return dict(design.limits(committed_report(path).tables[0], path))


def test_limits_are_read_from_the_records():
    spoken = limits("explicit_dropout/results/spoken_digits-study.json.xz")
    assert spoken["weakest settings"].startswith("10 of 11 methods ran at the weakest setting")
    assert {"one split", "one tuning seed", "baseline not tuned", "ties"} <= spoken.keys()
    assert (
        "rate 0.3 against 0.05"
        in limits("explicit_dropout/results/table_1-study.json.xz")["confounded"]
    )
    assert {"3 seeds", "loss still falls"} <= limits("dropkey/results/detr.json").keys()
    assert "baseline underfits" in limits("finetuning/results/banking77.json.xz")
    assert "one split" not in limits("small_data/results/weight_decay_digits.json.xz")


def test_failed_runs_are_those_near_guessing():
    table = committed_report(
        claims.RECORDS / "always_skip_attention/results/depth_digits-study.json.xz"
    ).tables[0]
    names = ("12 layers", "12 layers, no attention skip", "12 layers, no feed-forward skip")
    by_hand = [sum(value < 20 for value in table.entry(name).values.values()) for name in names]
    assert [answers.failed(table, name) for name in names] == by_hand == [0, 4, 7]


def test_the_nll_finding_is_chosen_on_validation():
    """An own search over the record for the lambda with the lowest validation NLL."""
    curves = next(c for c in lambda_page.studies() if c.name == "lambda_cifar10")
    best = {}
    for entry in (
        e
        for e in curves.table.entries
        if e.config.name in ("paper form", "exact", "implicit dropout")
    ):
        values = [run.final.valid["nll"] for run in entry.setting.logged.values()]
        score = sum(values) / len(values), entry.metrics["nll"].mean
        best[entry.config.name] = min(best.get(entry.config.name, score), score)
    told = lambda_page.by_nll()
    assert all(f"{test:.3f}" in told for _, test in best.values())
    assert f"{best['paper form'][1] - best['implicit dropout'][1]:.2f}" in told
