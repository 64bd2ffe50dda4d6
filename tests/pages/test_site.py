"""The site: a menu and a length that a reader can take in, and the six tasks in two clicks."""

import re
from pathlib import Path

import pytest
import yaml

from benchmarks.site_hook import on_config, on_page_markdown

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
MOST_IN_MENU = 60
MOST_WORDS = 45_000


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose `!ENV` stands for a variable and its default."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])
SITE = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)
LEFT_OUT = set(SITE["exclude_docs"].split())


def menu(entries, path=()):
    """The pages of the menu, each with the titles above it and its own."""
    for entry in entries:
        for title, below in entry.items():
            if isinstance(below, str):
                yield below, (*path, title)
            else:
                yield from menu(below, (*path, title))


MENU = dict(menu(SITE["nav"]))
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if p.relative_to(DOCS).as_posix() not in LEFT_OUT]


def words(text):
    """How many words a page has: tokens with two letters, without comments, tags and targets of links."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", re.sub(r"\]\([^)]*\)", "]", text))
    return sum(1 for token in text.split() if re.search(r"[A-Za-z]{2}", token))


def links(page):
    """The pages that a page leads to, by their paths below docs/."""
    found = re.findall(r"\]\(([^)#\s]+\.md)", (DOCS / page).read_text())
    base = (DOCS / page).parent
    return {(base / target).resolve().relative_to(DOCS).as_posix() for target in found}


def test_the_menu_has_five_tabs_and_few_pages():
    tabs = [title for entry in SITE["nav"] for title in entry]
    assert tabs == ["Get started", "Guides", "Methods", "Evidence", "Reference"]
    assert len(MENU) <= MOST_IN_MENU
    assert [page for page in MENU if not (DOCS / page).exists()] == []


def test_every_card_is_in_the_menu():
    cards = {f"methods/{path.name}" for path in (DOCS / "methods").glob("*.md")}
    assert cards <= set(MENU)


def test_the_site_is_short():
    assert sum(words(page.read_text()) for page in PAGES) <= MOST_WORDS


def test_words_are_counted():
    assert words("Two <!-- no --> words, [a link](x.md) and 1,234 | 0.5 |") == 4


def test_no_page_of_the_site_shows_how_it_was_generated():
    shown = [
        page.name
        for page in PAGES
        if re.search(
            r"[Gg]enerated by|do not edit", re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.S)
        )
    ]
    assert shown == []


def test_every_page_of_the_site_is_reached_from_the_menu():
    reached, todo = set(), list(MENU)
    while todo:
        page = todo.pop()
        if page not in reached and (DOCS / page).exists():
            reached.add(page)
            todo += links(page)
    assert {p.relative_to(DOCS).as_posix() for p in PAGES} - reached == set()


TASKS = {
    "install": ("start.md", 'pip install "dampen[studies]"'),
    "DropKey in my Hugging Face model": ("trainers/hf.md", "DropKey"),
    "compare on my script": ("own_training.md", "dampen compare train.py:train"),
    "which method for my case": ("which_method.md", "significantly better"),
    "cost on my GPU": ("guides/cost.md", "--device cuda"),
    "write my own method": ("writing_a_method.md", "class HeadDropout(dampen.Regularizer)"),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_two_clicks_away(task):
    page, answer = TASKS[task]
    near = links("index.md")
    assert page in near | {far for hop in near if (DOCS / hop).exists() for far in links(hop)}
    assert answer in (DOCS / page).read_text()
    readme = re.findall(r"\]\(docs/([^)#\s]+\.md)", (ROOT / "README.md").read_text())
    assert page in {*readme, *(far for hop in readme for far in links(hop))}


class Config(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class LeftOut:
    def match_file(self, path):
        return path == "x/far.md"


@pytest.mark.parametrize(
    ("repository", "said"),
    [
        (
            "https://code.example/dampen",
            "[all](https://code.example/dampen/blob/main/docs/x/far.md#a)",
        ),
        ("", "all (`docs/x/far.md` in the repository)"),
    ],
)
def test_links_to_pages_that_the_site_leaves_out_lead_to_the_repository(repository, said):
    config = Config(repo_url=repository, exclude_docs=LeftOut())
    page = type("Page", (), {"file": type("File", (), {"src_uri": "guides/here.md"})})
    text = "See [all](../x/far.md#a), [near](near.md).\n\n```\n[all](../x/far.md)\n```\n"
    expected = text.replace("[all](../x/far.md#a)", said)
    assert on_page_markdown(text, page, config, None) == expected
    assert ("edit_uri" in on_config(config)) == bool(repository)
