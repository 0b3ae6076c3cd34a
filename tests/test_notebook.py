"""examples/notebook.ipynb in a real kernel, with a tiny random model."""

import shutil
import time

import nbformat
import pytest
from common import ROOT, make_environment, make_model
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

import rl2

NOTEBOOK = ROOT / "examples/notebook.ipynb"
SECONDS = 240
pytestmark = pytest.mark.usefixtures("hears_ctrl_c")


@pytest.fixture
def environment(tmp_path):
    """The variables of a kernel that finds examples/quickstart.py, as beside the notebook."""
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.py", tmp_path / "examples")
    return make_environment({"MODEL": make_model(tmp_path / "tiny"), "STEPS": "2"})


def test_the_notebook_trains_and_draws(tmp_path, environment):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path / "examples")}}
    NotebookClient(notebook, timeout=SECONDS, resources=place).execute(env=environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    printed = "".join(output.get("text", "") for output in outputs)
    assert "step 2/2" in printed and printed.count("before: ") == 10
    run = rl2.Run(tmp_path / "runs/notebook")
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert len(run.rollouts(2, "test")) == 50 and run.model_path.exists()


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


def test_the_stop_button_ends_the_run_after_its_step(tmp_path, environment):
    """And the kernel goes on: the next cell reads the run."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    environment["STEPS"] = "30"
    manager, client = start_new_kernel(
        startup_timeout=SECONDS, cwd=str(tmp_path / "examples"), env=environment
    )
    printed = ""

    def note(message):
        nonlocal printed
        printed += message["content"].get("text", "")
        if "step 1/30 " in printed and not stopped:
            stopped.append(time.monotonic())
            manager.interrupt_kernel()

    stopped: list[float] = []
    try:
        for source in code[:4]:
            reply = client.execute_interactive(source, timeout=SECONDS, output_hook=note)
            assert reply["content"]["status"] == "ok", printed
        client.execute_interactive("print(run)", timeout=SECONDS, output_hook=note)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "stopping: this step will be finished" in printed and "Run(path=" in printed
    run = rl2.Run(tmp_path / "runs/notebook")
    assert 1 <= run.metrics[-1]["step"] < 30 and run.model_path.exists()
