"""The examples run: each is compared with at least three methods, and the notebook shows its study."""

import importlib.util
from pathlib import Path

import pytest

import dampen
from dampen.checking import check_regularizer

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
    options = {
        "seeds": 1,
        "params": {"epochs": 1},
        "folder": tmp_path / "study",
        "workers": 1,
        "threads": 1,
    }
    study = dampen.compare(
        f"{EXAMPLES / name}:train", methods=ROWS[name], progress=False, **options
    )
    assert not study.failures
    assert [row.summary.n for row in study.rows] == [1, 1, 1, 1]
    ends = {row.name: row.by_seed["nll"]["0"] for row in study.rows}
    assert len(set(ends.values())) == 4, ends  # every row trained something else
    assert all(row.cost.step_seconds for row in study.rows)


def test_every_example_is_tested():
    own = {"timm_image_folder.py", "my_method.py"}  # below
    elsewhere = {"finetune_minilm_rdrop.py"}  # in tests/integrations/test_guides.py
    recognized = {"lora_trl.py", "speech_whisper.py", "modernbert.py", "ft_transformer.py"}
    recognized |= {"patchtst.py", "diffusion.py"}  # in test_recognized_examples.py
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(ROWS) | own | elsewhere | recognized
    assert {p.name for p in EXAMPLES.glob("*.ipynb")} == {
        "compare.ipynb",
        "finetune_bert.ipynb",
        "gpu_check.ipynb",  # needs a GPU
        "reading_a_study.ipynb",
        "timm_vit.ipynb",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_timm_model_is_compared_on_an_image_folder(tmp_path):
    example = load(EXAMPLES / "timm_image_folder.py")
    data = example.write_digits(tmp_path / "digits", count=120)
    study = example.compare(data, seeds=1, epochs=1, folder=str(tmp_path / "runs"))
    assert not study.failures
    assert [row.summary.n for row in study.rows] == [1, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_method_of_ones_own_is_compared_and_keeps_contracts(tmp_path):
    rows = f"{EXAMPLES / 'my_method.py'}:QueryNoise(scale=0.5)"
    options = {
        "seeds": 1,
        "params": {"epochs": 1},
        "folder": tmp_path / "study",
        "workers": 1,
        "threads": 1,
    }
    study = dampen.compare(
        f"{EXAMPLES / 'plain_loop.py'}:train", methods=rows, progress=False, **options
    )
    assert not study.failures
    plain, noise = (row.by_seed["nll"]["0"] for row in study.rows)
    assert plain != noise
    method = load(EXAMPLES / "my_method.py").QueryNoise
    check_regularizer(
        method, ["vit", "llama"], ["eval_exact", "identity", "gradients_finite", "no_leak"]
    )


def load(path):
    """A file of the examples as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def executed(name, folder, monkeypatch):
    """A notebook after it has run in a folder of its own; it must have been committed without outputs."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(Path(dampen.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def shown(outputs, kind):
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs_and_shows_its_study_inline(tmp_path, monkeypatch):
    outputs = executed("compare.ipynb", tmp_path, monkeypatch)
    assert any("<svg" in html and "drop_key" in html for html in shown(outputs, "text/html"))
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_that_reads_a_study_runs(tmp_path, monkeypatch):
    outputs = executed("reading_a_study.ipynb", tmp_path, monkeypatch)
    texts = shown(outputs, "text/html")
    assert any("<svg" in html for html in texts)  # the study
    assert any(
        "dataframe" in html and "explicit_dropout" in html for html in texts
    )  # differences seed by seed
    assert (tmp_path / "toy.html").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "method"),
    [("finetune_bert.ipynb", "hidden_dropout"), ("timm_vit.ipynb", "patch_dropout")],
)
def test_a_notebook_compares_and_shows_its_study(name, method, tmp_path, monkeypatch):
    outputs = executed(name, tmp_path, monkeypatch)
    assert any("<svg" in html and method in html for html in shown(outputs, "text/html"))


def test_every_example_is_listed_on_the_site():
    page = (EXAMPLES.parent / "docs" / "start.md").read_text()
    assert [p.name for p in EXAMPLES.glob("*.*") if f"`{p.name}`" not in page] == []
