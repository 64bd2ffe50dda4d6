"""The six examples of models that people recognize: each is audited, and compared by the command it prints."""

import ast
import re
import shlex

import pytest

import dampen
from dampen.auditing.overfitting import curve_of
from dampen.studies.store import RunStore
from tests.pages.test_examples import EXAMPLES, load

RECOGNIZED = ("lora_trl", "speech_whisper", "modernbert", "ft_transformer", "patchtst", "diffusion")
LONGEST = 95


def commands(name):
    """The commands in the text at the top of an example, as words."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{name}.py").read_text()))
    assert "For real:" in text
    return [shlex.split(line) for line in re.findall(r"^ *(dampen .*)", text, re.MULTILINE)]


@pytest.mark.parametrize("name", RECOGNIZED)
def test_it_is_short_and_prints_both_commands(name):
    path = EXAMPLES / f"{name}.py"
    assert len(path.read_text().splitlines()) <= LONGEST
    audit, compare = commands(name)
    assert audit == ["dampen", "audit", f"examples/{name}.py:build"]
    assert compare[:4] == ["dampen", "compare", f"examples/{name}.py:train", "--methods"]
    assert name in (EXAMPLES.parent / "docs" / "audit.md").read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECOGNIZED)
def test_it_is_audited_and_compared_with_three_methods(name, tmp_path):
    model, inputs = load(EXAMPLES / f"{name}.py").build()
    found = dampen.audit(model.train(), inputs)
    assert found.ok, str(found)
    assert found.facts["layers with attention"] >= 2

    words = commands(name)[1]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    metric = options.get("--metric")
    study = dampen.compare(
        f"{EXAMPLES / name}.py:train",
        methods=options["--methods"],
        metric=metric,
        seeds=1,
        params={"epochs": 2, "steps": 3},
        folder=tmp_path / "study",
        workers=1,
        threads=1,
        progress=False,
    )
    assert not study.failures
    assert [row.summary.n for row in study.rows] == [1, 1, 1, 1]
    loss = "nll" if "nll" in study.rows[0].by_seed else study.metric  # accuracies may tie
    ends = {row.name: row.by_seed[loss]["0"] for row in study.rows}
    assert len(set(ends.values())) == 4, ends  # every method trained something else
    if name != "lora_trl":  # its curves are the trainer's
        (run, *_) = (p.parent for p in sorted((tmp_path / "study").rglob("log.jsonl")))
        curve = curve_of(RunStore(run).lines(), name)
        assert len(curve.train) == len(curve.valid) == 2
        assert not curve.score
