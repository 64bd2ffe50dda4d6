"""docs/always_skip.md says what the committed records say."""

import json

from reproductions.pages import skip_story


def test_page_is_up_to_date():
    assert skip_story.main(["--check"]) == 0, "run `python -m reproductions.pages.skip_story`"


def test_records_say_where_they_come_from():
    records = [json.loads(path.read_text()) for path in skip_story.RECORDS.glob("*.json")]
    assert records
    for record in records:
        assert record["command"]
        assert record["machine"]
        assert record["data"]["name"] == "cifar10"


def test_accuracy_table_says_n_spread_and_difference():
    rows = {
        "plain": [
            {"seed": 0, "accuracy": 0.5},
            {"seed": 1, "accuracy": 0.6},
            {"seed": 2, "accuracy": 0.55},
        ],
        "other": [
            {"seed": 0, "accuracy": 0.4},
            {"seed": 1, "accuracy": 0.52},
            {"seed": 2, "accuracy": 0.46},
        ],
    }
    lines = skip_story.accuracy_table(
        {"rows": rows, "published": {"other": {"accuracy": 70.0}}}, "plain"
    )
    assert lines[2].startswith("| plain |  | 55.0 ± 5.0 (3) | reference |")
    assert lines[3].startswith("| other | 70.0 | 46.0 ± 6.0 (3) | -9.0 [")


def test_intervals_and_verdicts_are_corrected_for_the_number_of_rows():
    seeds = range(4)
    rows = {"plain": [{"seed": s, "accuracy": 0.5 + 0.01 * s} for s in seeds]}
    noise = (0.0, 0.011, -0.007, 0.004)
    other = [{"seed": s, "accuracy": 0.53 + 0.01 * s + noise[s]} for s in seeds]
    alone = skip_story.accuracy_table({"rows": rows | {"a": other}}, "plain")[-1]
    among = skip_story.accuracy_table(
        {"rows": rows | {"a": other, "b": other, "c": other}}, "plain"
    )[-3]
    assert alone.split(" | ")[4] == "better"
    lows = [float(line.split("[")[1].split(",")[0]) for line in (alone, among)]
    assert lows[0] > lows[1]


def test_autoencoder_table_says_what_was_not_pretrained():
    layers = {"0": [{"tokens": 9.0}, {"tokens": 9.0}], "12": [{"tokens": 3.0}, {"tokens": 4.0}]}
    one = {"seed": 0, "accuracy": 0.5, "ln_condition": layers}
    rows = {
        "plain": [one | {"reconstruction": 0.8}, one | {"seed": 1, "reconstruction": 0.7}],
        "bare": [one],
    }
    lines = skip_story.mae_table({"rows": rows})
    assert "| plain | 0.750 ± 0.071 | 3.0 | 4.0 |" in lines
    assert "| bare | not pretrained | 3.0 | 4.0 |" in lines
