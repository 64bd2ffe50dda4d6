"""The version stands in one place, and what repeats it says the same."""

import re
from importlib.metadata import version
from pathlib import Path

import dampen

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
