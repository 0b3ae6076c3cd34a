"""examples/notebook.ipynb in a real kernel, with a tiny random model."""

import shutil

import nbformat
import pytest
from common import ROOT, make_environment, make_model
from jupyter_client.manager import start_new_kernel

import rl2

NOTEBOOK = ROOT / "examples/notebook.ipynb"
SECONDS = 240
pytestmark = pytest.mark.usefixtures("hears_ctrl_c")


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells and not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.fixture
def kernel(tmp_path):
    """(manager, client) of a kernel that finds examples/quickstart.py, as beside the notebook."""
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/quickstart.py", tmp_path / "examples")
    environment = make_environment({"MODEL": make_model(tmp_path / "tiny"), "STEPS": "2"})
    manager, client = start_new_kernel(
        startup_timeout=SECONDS, cwd=str(tmp_path / "examples"), env=environment
    )
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(client, source, note=lambda printed: None):
    """(what a cell prints, the types of what it shows); calls note(printed so far) in between."""
    printed, kinds = "", set()

    def read(message):
        nonlocal printed
        printed += message["content"].get("text", "")
        kinds.update(message["content"].get("data", ()))
        note(printed)

    reply = client.execute_interactive(source, timeout=SECONDS, output_hook=read)
    assert reply["content"]["status"] == "ok", printed + str(reply["content"])
    return printed, kinds


@pytest.mark.nightly
def test_the_notebook_trains_and_draws_and_its_stop_button_ends_a_run_after_its_step(
    tmp_path, kernel
):
    """And the kernel goes on: the next cell reads the run that was stopped."""
    manager, client = kernel
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [execute(client, source) for source in code]
    printed = "".join(text for text, _ in outputs)
    assert any("image/png" in kinds for _, kinds in outputs)
    assert "step 2/2" in printed and printed.count("before: ") == 10
    run = rl2.Run(tmp_path / "runs/notebook")
    assert [line["step"] for line in run.metrics] == [0, 1, 2]
    assert len(run.rollouts(2, "test")) == 50 and run.model_path.exists()

    stopped = []

    def stop(printed):
        if "step 1/30 " in printed and not stopped:
            stopped.append(True)
            manager.interrupt_kernel()

    execute(client, "os.environ['STEPS'] = '30'")
    [training] = [source for source in code if "rl2.train(" in source]
    printed, _ = execute(client, training, stop)
    assert "stopping: this step will be finished" in printed
    assert "Run(path=" in execute(client, "print(run)")[0]
    assert 1 <= run.metrics[-1]["step"] < 30 and run.model_path.exists()
