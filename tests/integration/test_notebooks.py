"""The notebooks: stored with their outputs, what to notice and exercises; they run from the first cell to the last.

Each checks what it says by assertions of its own.
"""

import os
import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import notebooks as script  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_outputs_what_to_notice_and_exercises(path):
    """Run in order, without errors; nothing of the machine, such as its folders, is in the outputs."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs and not [output for output in outputs if output.output_type == "error"]
    assert not re.search(r"site-packages|/(?:home|root|tmp|opt|work)/", str(outputs))
    headings = re.findall(r"^## .*", "\n".join(cell.source for cell in notebook.cells), re.M)
    assert headings[-2:] == ["## What to notice", "## Exercises"]
    if "matplotlib" in "".join(cell.source for cell in code):
        assert "pip install '.[report]'" in notebook.cells[0].source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_a_badge_where_the_repository_has_an_address_and_none_where_not(path):
    stored, url = nbformat.read(path, as_version=4), script.repo_url()
    notebook = nbformat.read(path, as_version=4)
    script.with_address(notebook, path.name, url)
    assert notebook == stored, "python scripts/notebooks.py --no_run"
    assert (script.BADGE in stored.cells[0].source) == url.startswith("https://github.com/")
    script.with_address(notebook, path.name, "https://github.com/someone/rlhf_jax")
    assert f"github/someone/rlhf_jax/blob/main/notebooks/{path.name})" in notebook.cells[0].source
    if path.stem in ("06_accelerator", "07_real_model"):
        assert 'REPO_URL = "https://github.com/someone/rlhf_jax"' in notebook.cells[1].source
        assert "Compiled, not run" in notebook.cells[-2].source
    script.with_address(notebook, path.name, url)
    assert notebook == stored


@pytest.mark.runs
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
    monkeypatch.delenv("RUN", raising=False)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip())
