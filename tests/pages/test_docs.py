"""What is generated is up to date."""

from benchmarks.method_cards import main, markdown, pages


def test_generated_pages_are_up_to_date(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_every_method_has_a_card():
    from dampen.registry import methods

    names = {path.stem for path in pages() if path.parent.parent.name == "docs"}
    assert names == {*methods(), "index"}


def test_markdown_closes_its_blocks():
    text = markdown("Do it.\n\nArgs:\n    rate: how much\n\n>>> 1 + 1\n2")
    assert text.count("```") == 2
    assert "- `rate`: how much" in text
