"""The import contract: reproductions uses public names, and nothing installed uses reproductions."""

import ast
from pathlib import Path

import pytest

import dampen
import dampen.diagnostics
import dampen.explicit
import dampen.models
import dampen.studies
import dampen.studies.plugins

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "dampen",
    "dampen.models",
    "dampen.diagnostics",
    "dampen.diagnostics.predictions",
    "dampen.diagnostics.probing",
    "dampen.explicit",
    "dampen.studies",
    "dampen.studies.plugins",
)
"""The modules that `reproductions` may import from."""
CLIENT = sorted((ROOT / "reproductions").rglob("*.py"))
INSTALLED = sorted((ROOT / "src").rglob("*.py"))


def imports(path: Path):
    """Every module that a file imports, with the names that it takes from there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def broken(path: Path) -> list[str]:
    found = []
    for module, name in imports(path):
        top = module.partition(".")[0]
        if top in ("benchmarks", "tests"):
            found.append(f"{path.name} imports {module}")
        if top == "dampen" and (module not in PUBLIC or (name or "").startswith("_")):
            found.append(f"{path.name} takes {name} from {module}")
    return found


def test_reproductions_use_public_names_alone():
    assert [problem for path in CLIENT for problem in broken(path)] == []
    assert len(CLIENT) > 40


def test_nothing_installed_uses_reproductions():
    for path in INSTALLED:
        used = {module.partition(".")[0] for module, _ in imports(path)}
        assert not used & {"reproductions", "benchmarks", "tests"}, path


def test_the_contract_can_be_broken(tmp_path):
    for text in (
        "from dampen.studies.data.files import find",
        "from benchmarks import costs",
        "import dampen.handle",
        "from dampen.models import _MOVED",
    ):
        (tmp_path / "x.py").write_text(text)
        assert broken(tmp_path / "x.py"), text


@pytest.mark.parametrize("module", [dampen.studies, dampen.studies.plugins, dampen.models])
def test_every_public_name_is_there(module):
    assert all(getattr(module, name) is not None for name in module.__all__)


MOVED = [
    *((dampen.models, name) for name in dampen.models._MOVED),
    *((dampen.diagnostics, name) for name in dampen.diagnostics._MOVED),
    *((dampen.explicit, name) for name in dampen.explicit._MOVED),
]


@pytest.mark.parametrize(("module", "name"), MOVED)
def test_what_moved_names_its_new_place(module, name):
    with pytest.raises(ImportError, match=rf"from reproductions\.\w+\.\w+ import {name}") as error:
        getattr(module, name)
    line = str(error.value).rpartition(": ")[2]
    space: dict = {}
    exec(line, space)  # the line that the error proposes
    assert callable(space[name]) or name == "CORRUPTIONS"
    with pytest.raises(ImportError, match="moved out of the installed package"):
        exec(f"from {module.__name__} import {name}", {})
