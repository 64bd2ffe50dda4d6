"""The words that users read: technical English, without the private dialect of 0.2."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dampen"
COVERED = (
    "auditing",
    "cli",
    "studies/report",
    "studies/bench",
    "studies/diagnose",
    "studies/doctor.py",
)
"""Where every text is checked. A folder is moved here when its texts have been reworded."""
NOT_YET = (
    *("checking", "diagnostics", "explicit.py", "functional", "handle.py", "hooks", "integrations"),
    *("kernels", "lab", "methods", "models", "native", "studies (the other modules)", "two_pass"),
)
"""Where texts have not been reworded yet."""
DROPPED = re.compile(
    r"\b(told|tells?|telling|asked|asks|asking|heard?|hears|cured?|cures|stands|"
    r"goes on|go on|gives? out|not decided|undecided|shown (better|worse)|the lab|the lab's|"
    r"cut off|hopeless|when not said|is said)\b",
    re.IGNORECASE,
)
"""Words of 0.2 for which the field has its own."""
MAY_STAY = {
    "told",  # the name of a field of the progress bar, which no user reads
    "{task.fields[told]}",
}


def texts(path):
    """Every string that a user may read, with its line: all literals but docstrings and remarks."""
    tree = ast.parse(path.read_text())
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    remarks = {id(s.value) for body in bodies for s in body if isinstance(s, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in remarks
        ):
            yield node.lineno, node.value
        if isinstance(node, ast.FunctionDef) and is_command(node):
            yield node.lineno, ast.get_docstring(node) or ""  # the help of a subcommand


def is_command(function):
    return any(
        isinstance(d, ast.Call) and getattr(d.func, "id", "") == "command"
        for d in function.decorator_list
    )


def files(place):
    root = SOURCE / place
    return [root] if root.suffix == ".py" else sorted([*root.rglob("*.py"), *root.rglob("*.html")])


@pytest.mark.parametrize("place", COVERED)
def test_no_text_has_a_dropped_word(place):
    found = []
    for path in files(place):
        lines = (
            enumerate(path.read_text().splitlines(), 1) if path.suffix == ".html" else texts(path)
        )
        for line, text in lines:
            if text not in MAY_STAY and (word := DROPPED.search(text)):
                found.append(f"{path.relative_to(SOURCE)}:{line}: {word[0]!r} in {text[:80]!r}")
    assert files(place)
    assert found == []


def test_the_check_finds_a_dropped_word(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('"""told"""\n\ndef f():\n    """told"""\n    return f"{1} rows were told"\n')
    assert [text for _, text in texts(file) if DROPPED.search(text)] == [" rows were told"]
