"""The examples run: each is compared with at least three methods, and the notebook shows its study."""

from pathlib import Path

import pytest

import dampen

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS = {
    "plain_loop.py": "drop_key(rate=0.3), drop_path, r_drop + drop_head",
    "lightning_module.py": "drop_key(rate=0.3), drop_head, explicit_dropout(ffn=1)",
    "hf_trainer.py": "drop_key(rate=0.1), drop_head, r_drop + drop_key(rate=0.1)",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_an_example_is_compared_with_three_methods(name, tmp_path):
    options = {"seeds": 1, "params": {"epochs": 1}, "folder": tmp_path / "study", "workers": 1, "threads": 1}
    study = dampen.compare(f"{EXAMPLES / name}:train", methods=ROWS[name], progress=False, **options)
    assert not study.failures
    assert [row.summary.n for row in study.rows] == [1, 1, 1, 1]
    ends = {row.name: row.by_seed["nll"]["0"] for row in study.rows}
    assert len(set(ends.values())) == 4, ends  # every row trained something else
    assert all(row.cost.step_seconds for row in study.rows)


def test_every_example_is_tested():
    elsewhere = {"finetune_minilm_rdrop.py"}  # in tests/integrations/test_guides.py
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(ROWS) | elsewhere


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_shows_its_study_inline(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(Path(dampen.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / "compare.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # committed without outputs
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    shown = [
        o["data"]["text/html"] for c in notebook.cells for o in c.get("outputs", []) if "text/html" in o.get("data", {})
    ]
    assert any("<svg" in html and "drop_key" in html for html in shown)
    assert (tmp_path / "report.html").exists()
