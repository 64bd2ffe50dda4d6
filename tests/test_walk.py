"""The counting of calls and lines in benchmarks/walk.py, on code whose figures are known."""

import ast
import json
import sys

from benchmarks import walk


def test_calls_and_changes_of_file_are_counted_where_they_happen(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text(
        "import two\ndef f():\n    two.g()\n    two.g()\n    h()\ndef h():\n    pass\n"
    )
    (tmp_path / "two.py").write_text(
        "class C:\n    x = [i for i in range(3)]\ndef g():\n    return C()\n"
    )
    monkeypatch.setattr(walk, "PACKAGE", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import one  # type: ignore[import-not-found]

    found = walk.walked(one.f)
    # f, g, g, h: from one to two and back
    assert found == {"calls": 4, "files": 2, "functions": 3, "changes of file": 3}
    for name in ("one", "two"):
        sys.modules.pop(name)


KNOWN = '''"""Doc."""
# why
X = 1 if True else 2  # not a line of its own
def f(a):
    """F.

    Args:
        a: a.
    """
def _g(a):
    pass
class K:
    def m(self):
        pass
    def n(self, b):
        pass
'''


def test_sizes_of_a_file_with_known_contents(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(KNOWN + "#" * 101)
    found = walk.size([file])
    assert (found["files"], found["lines"], found["lines over 100 columns"]) == (1, 17, 1)
    assert found["files under 60 lines"] == 1
    assert found["lines of code"] == 9  # without comments, empty lines and what describes
    assert (found["public functions with arguments"], found["of them with an Args section"]) == (
        2,
        1,
    )  # f and n
    assert found["comment lines per 1,000 lines"] == round(2000 / 17, 1)
    assert found["conditional expressions per 1,000 lines"] == round(1000 / 17, 1)


def test_growth_beyond_ten_percent_is_a_problem():
    recorded = {
        "step": {"calls": 100},
        "compare": {"calls": 100},
        "sizes": {"library": {"files": 10, "lines": 100}},
    }
    found = {
        "step": {"calls": 110},
        "compare": {"calls": 111},
        "sizes": {"library": {"files": 10, "lines": 111}},
    }
    assert walk.grown(found, recorded) == [
        "compare, calls: 111, recorded 100",
        "library, lines: 111, recorded 100",
    ]


def test_every_place_of_the_house_has_files():
    assert all(walk.places().values())
    assert all(
        isinstance(ast.parse(p.read_text()), ast.Module) for p in walk.places()["benchmarks"]
    )


def test_a_training_step_walks_no_further_than_recorded():
    """The two targets of a step are met, and no figure has grown by more than 10 % since the record."""
    recorded = json.loads(walk.RESULT.read_text())
    for part in ("step", "step, native kernels"):
        assert recorded[part]["calls"] <= 1700
    found = walk.steps()
    assert walk.grown(found, {**recorded, "sizes": {}}) == []
