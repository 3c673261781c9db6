"""The notebook among the examples: every cell runs in a kernel, and shows what its reader is told to see."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", name="cells")
def _cells(tmp_path_factory: pytest.TempPathFactory) -> list[nbformat.NotebookNode]:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        client = NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": folder}})
        return [cell for cell in client.execute().cells if cell.cell_type == "code"]


def shown(cell: nbformat.NotebookNode, kind: str) -> str:
    return "".join(str(output.data.get(kind, "")) for output in cell.outputs if "data" in output)


def test_the_cell_that_trains_shows_its_progress_and_the_result(cells: list[nbformat.NotebookNode]) -> None:
    (trains,) = [cell for cell in cells if "covey.train(" in cell.source]
    html = shown(trains, "text/html")
    assert "step 40/40" in html
    assert "step 40 evaluated: " in html  # accuracy, where every reward is 0 or 1
    assert "completed after 40 steps: <code>outputs/notebook</code>" in html
    assert html.count("<svg") == 2


def test_the_policy_learns_the_curve_is_drawn_and_samples_are_words(cells: list[nbformat.NotebookNode]) -> None:
    (plots,) = [cell for cell in cells if ".plot(" in cell.source]
    assert shown(plots, "image/png")
    (samples,) = [cell for cell in cells if "result.sample(" in cell.source]
    letters = shown(samples, "text/plain")
    assert sum("a" <= letter <= "z" for letter in letters) >= 20, letters
