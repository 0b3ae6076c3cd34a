"""`python -m rl2 prove` finds each fault in its row, and none where there is none."""

import pytest
from prove_faults import FAULTS, MODELS, arguments, make, plant, prove_planted, read_table

from rl2.commands import prove

ONE_PROCESS = [name for name, fault in FAULTS.items() if fault.processes == 1]
ROWS = list(prove.ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def prove_here(monkeypatch, capsys):
    """Runs the command in this process: its status, the verdicts of its rows and its output."""

    def run_command(*words):
        monkeypatch.setenv("WORLD_SIZE", "1")
        monkeypatch.setattr("sys.argv", ["rl2 prove", *words])
        with pytest.raises(SystemExit) as stop:
            prove.main()
        output = capsys.readouterr()
        return stop.value.code, read_table(output.out), output.out + output.err

    return run_command


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_found_in_models_without_a_fault(folder, prove_here, model):
    status, verdicts, output = prove_here(
        "--processes=1", f"actor.model_name={make(folder, model)}"
    )
    assert status == 0, output
    assert verdicts == {row: "skipped" if row == "layout" else "ok" for row in ROWS}, output


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_a_fault_is_found_by_its_row(folder, prove_here, monkeypatch, name):
    fault = FAULTS[name]
    words = arguments(fault, make(folder, fault.model))
    plant(fault, monkeypatch.setattr)
    status, verdicts, output = prove_here(*words)
    assert status == 1, output
    assert [row for row in ROWS if verdicts[row] == "DIFFERENT"] == [fault.row], output


@pytest.mark.parametrize("name", [None, "world factor"])
def test_layouts_in_processes_of_their_own(folder, name):
    """A fault of the gradient's scale shows in several processes only; adapters are sharded too."""
    words = arguments(FAULTS["world factor"], make(folder, "llama"))
    words += [] if name else ["actor.lora_rank=2", "actor.fsdp_size=1"]
    done = prove_planted(name, words)
    verdicts = read_table(done.stdout)
    found = [row for row in ROWS if verdicts[row] == "DIFFERENT"]
    assert found == (["layout"] if name else []), done.stdout + done.stderr
    assert done.returncode == bool(name) and "2 of 2 processes" in done.stdout
