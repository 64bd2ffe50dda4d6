"""The words that users read: technical English, without the private dialect of 0.2."""

import ast
import inspect
import io
import re
import tokenize
from pathlib import Path

import pytest

import dampen

SOURCE = Path(__file__).resolve().parents[1] / "src" / "dampen"
PLACES = sorted(
    path.relative_to(SOURCE).as_posix()
    for path in SOURCE.iterdir()
    if path.suffix == ".py" or (path.is_dir() and any(path.rglob("*.py")))
)
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
    "asked",  # the name that `Handle.in_loss` had in 0.2
}


def texts(path):
    """Every text with its line: all literals, docstrings among them, and comments."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def files(place):
    root = SOURCE / place
    return [root] if root.suffix == ".py" else sorted([*root.rglob("*.py"), *root.rglob("*.html")])


@pytest.mark.parametrize("place", PLACES)
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
    file.write_text(
        '"""was told"""\n\ndef told():  # cured\n    return f"{told} rows were asked"\n'
    )
    found = [text for _, text in texts(file) if DROPPED.search(text)]
    assert found == ["was told", " rows were asked", "# cured"]


def public():
    """The functions of `dampen`, and the methods of its handle, its trial and its study."""
    for name in dampen.__all__:
        thing = getattr(dampen, name)
        if inspect.isfunction(thing):
            yield f"dampen.{name}", thing
    for cls in (dampen.Handle, dampen.Trial, dampen.Study):
        for name, thing in vars(cls).items():
            if inspect.isfunction(thing) and not name.startswith("_"):
                yield f"{cls.__name__}.{name}", thing


@pytest.mark.parametrize(
    ("name", "function"), list(public()), ids=lambda value: getattr(value, "__name__", value)
)
def test_public_functions_say_what_they_take_and_return(name, function):
    text, signature = inspect.getdoc(function), inspect.signature(function)
    takes = set(signature.parameters) - {"self"}
    described = set(re.findall(r"^    (\w+):", text.partition("Args:")[2], re.MULTILINE))
    assert takes <= described, f"{name} does not describe {takes - described}"
    returned = str(signature.return_annotation)
    if returned not in ("None", "<class 'inspect._empty'>") and "Iterator" not in returned:
        assert "Returns" in text, name
