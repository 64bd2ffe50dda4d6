"""CITATION.cff names the committed result files by their hash."""

import hashlib

import pytest
import yaml

from reproductions.pages import citation

TEXT = f"title: x\n{citation.START}\nold\n{citation.END}\n"


def files(root, **content):
    for name, text in content.items():
        path = root / "reproductions" / name / "results" / "table.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_citation_is_up_to_date():
    assert citation.main(["--check"]) == 0, "run `python -m reproductions.pages.citation`"


def test_the_hash_is_that_of_sha256sum_over_the_sorted_files(tmp_path):
    files(tmp_path, b="two", a="one")
    (tmp_path / "reproductions" / "a" / "table.json").write_text("no result file")
    lines = [
        f"{sha('one')}  reproductions/a/results/table.json\n",
        f"{sha('two')}  reproductions/b/results/table.json\n",
    ]
    assert citation.digest(tmp_path) == (sha("".join(lines)), 2)


def test_a_new_result_and_a_changed_one_change_it_and_the_command_renews_it(tmp_path):
    files(tmp_path, a="one")
    first = citation.page(TEXT, tmp_path)
    files(tmp_path, b="two")
    second = citation.page(first, tmp_path)
    files(tmp_path, a="changed")
    third = citation.page(second, tmp_path)
    assert len({first, second, third}) == 3
    assert citation.page(third, tmp_path) == third
    (told,) = yaml.safe_load(third)["identifiers"]
    assert told["value"] == f"sha256:{citation.digest(tmp_path)[0]}"
    assert "2 result files" in told["description"]


def test_a_citation_without_a_place_for_the_hash_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="CITATION.cff has no place for what is generated"):
        citation.page("title: x\n", tmp_path)
