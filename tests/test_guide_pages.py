"""Every Python snippet of the start page, the home page and the guides runs as it is printed."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [
    DOCS / "index.md",
    DOCS / "start.md",
    DOCS / "audit.md",
    *sorted((DOCS / "guides").glob("*.md")),
]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p)], ids=lambda p: p.stem)
def test_snippets_run(page, capsys):
    names: dict[str, object] = {"__name__": "page"}
    for code in snippets(page):
        exec(compile(code, str(page), "exec"), names)
    assert capsys.readouterr().out


def test_the_start_pages_function_can_be_compared(tmp_path):
    import dampen

    code = "\n".join(snippets(DOCS / "start.md")).replace("print(reg)", "")
    (tmp_path / "train.py").write_text(code)
    names: dict[str, object] = {}
    exec(compile(code, str(tmp_path / "train.py"), "exec"), names)
    rows = ["drop_key(rate=0.2)", "drop_path"]
    study = dampen.compare(
        names["train"], methods=rows, seeds=2, folder=tmp_path / "runs", workers=1, progress=False
    )
    assert [row.name for row in study.rows] == ["plain", *rows]


def test_commands_of_the_pages_name_options_that_exist():
    known = set(re.findall(r"`(--[a-z-]+)", (DOCS / "commands.md").read_text())) | {"--help"}
    for page in PAGES:
        for line in re.findall(r"^ *dampen [^#\n]*", page.read_text(), re.MULTILINE):
            assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known, line
