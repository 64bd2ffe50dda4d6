"""docs/models.md is what the result file of the sweep says, and counts what it should."""

import json

from benchmarks.model_sweep import PAGE, RECORD, main
from benchmarks.models_page import METHODS, page, state


def test_the_page_is_what_the_result_file_says() -> None:
    main(["--check"])
    assert PAGE.read_text() == page(json.loads(RECORD.read_text()))


def test_a_model_counts_once() -> None:
    cases = {
        "good": {"verdict": "works", "methods": {"DropKey": "works", "DropHead": "not applicable"}},
        "part": {
            "verdict": "refused",
            "methods": {
                "DropKey": "works",
                "DropHead": ["refused", "ValueError: one head in '__getitem__'. x"],
            },
        },
        "bad": {
            "verdict": "WRONG",
            "methods": {"DropKey": ["WRONG", "leak"], "DropHead": ["refused", "one head"]},
        },
        "loose": {"verdict": "works", "methods": {"DropKey": ["unchecked", "values unknown"]}},
        "convolutions": {"verdict": "no attention", "methods": {}},
        "large": {"not built": "too large"},
    }
    assert [state(c) for c in cases.values()] == [
        "works",
        "refused",
        "fault",
        "works",
        "no attention",
        "not built",
    ]
    cases = {name: {**case, "code": f"abc-{9 + (name == 'good')}"} for name, case in cases.items()}
    text = page({"versions": {"lib": "1.2"}, "libraries": {"lib": cases}, "code": "abc-10"})
    assert "| lib 1.2 | 6 | 5 (1 without softmax attention) | 2 | 1 | 1 | 3 of 6 (50.0 %) |" in text
    assert r"| part | DropHead | one head in '\_\_getitem\_\_' | `abc-9` |" in text  # not bold
    assert "All methods that apply work: good." in text
    assert "an older version of the probe judged: loose." in text
    assert "In 1 of them the method acts, and the probe does not know the value" in text
    assert "`abc-9` 5, `abc-10` 1." in text
    assert "- lib `bad`: DropKey (wrong: leak)" in text
    assert len(METHODS) == 7
