"""The version stands in one place, and what repeats it says the same."""

import re
from importlib.metadata import version
from pathlib import Path

import dampen
from dampen import cli, deprecated, studies

ROOT = Path(__file__).resolve().parents[1]


def test_changelog_and_citation_name_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    numbered = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", changelog, re.M)
    assert numbered[0][0] == dampen.__version__
    cited = dict(
        re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    )
    assert (cited["version"], cited["date-released"]) == numbered[0]


def test_the_installed_package_is_this_version():
    assert version("dampen") == dampen.__version__, "install it again: make install"


def test_the_changelog_is_short_and_has_a_line_for_every_renamed_name():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert len(changelog.split()) <= 3000, "say what a user must know, in one line each"
    names = [deprecated.PUBLIC, deprecated.ARGUMENTS, deprecated.HANDLE, cli.RENAMED]
    names.append(studies._RENAMED)
    table = changelog.split("### Migration from 0.2")[1].split("\n### ")[0]
    for old, new in (pair for group in names for pair in group.items()):
        if old.startswith("--no-"):  # the other side of a flag
            continue
        assert re.search(rf"\b{old}\b" if old.isidentifier() else old, table), old
        assert re.search(rf"\b{new}\b" if new.isidentifier() else new, table), new
