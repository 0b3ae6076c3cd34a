"""`python -m rl2 prove` finds each fault in its row, and none where there is none."""

from datetime import date
from types import SimpleNamespace

import pytest
from chat_families import FAMILIES, make_template
from common import write_jsonl
from prove_faults import FAULTS, MODELS, SIZES, arguments, make, plant, prove_planted, read_table
from transformers import AutoModelForCausalLM, DogeConfig

from rl2.tools import outer_proofs, prove

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
    if fault.named and "not exact: kernels" in output:
        pytest.skip("the kernels of this CPU do not give equal bits")
    assert status == 1, output
    assert [row for row in ROWS if verdicts[row] == "DIFFERENT"] == [fault.row], output
    assert fault.named in output


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


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_found_in_templates_without_a_fault(family):
    template = make_template(family)
    template.date = date.today()  # as in a command that is run today
    conversations = [(prove.CONVERSATION, None)]
    subject = SimpleNamespace(template=template, conversations=conversations)
    differences = list(outer_proofs.prove_template(subject))
    assert len(differences) >= 3
    assert not [difference for difference in differences if not difference.is_ok]


def test_rows_of_the_data_are_tried_and_what_is_not_there_is_skipped(
    folder, prove_here, monkeypatch, tmp_path
):
    rows = [
        {"messages": "plain text"},
        {"messages": [{"role": "user", "content": "2 + 2?"}]},
        {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": "3+3?"}]},
    ]
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, rows)
    memory = SimpleNamespace(available=0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    tried = []
    monkeypatch.setitem(
        prove.ROWS, "packed", prove.Row(lambda subject: tried.append(subject) or [], "")
    )
    status, verdicts, output = prove_here(
        "--processes=2", f"actor.model_name={make(folder, 'llama')}", f"data.path={path}"
    )
    assert status == 0, output
    assert [row for row in ROWS if verdicts[row] == "skipped"] == [
        "real weights",
        "layout",
    ]
    assert "GiB of memory, and 0 are free" in output
    shown = [messages[: -len(prove.CONVERSATION) + 1] for messages, _ in tried[0].conversations]
    assert shown[1:] == [row["messages"] for row in rows[1:]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "actor.model_name is missing"),
        (["--processes=0", "actor.model_name=x"], "--processes 0: expected at least 1"),
        (["--processes=4", "actor.model_name=x", "actor.sp_size=3"], "actor.sp_size=3 does not"),
        (["actor.model_name=/no/such/folder"], "/no/such/folder"),
    ],
)
def test_a_wrong_command_has_status_2(prove_here, words, message):
    status, _, output = prove_here(*words)
    assert status == 2 and message in output


def test_a_model_that_rl2_refuses_is_named_with_the_reason(prove_here, tmp_path):
    """Each row says why, or names the row that does."""
    make(tmp_path, "llama")
    config = DogeConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "llama")
    status, verdicts, output = prove_here("--processes=1", f"actor.model_name={tmp_path / 'llama'}")
    assert status == 1 and "does not run: ValueError: DogeAttention asks for" in output
    assert [row for row in ROWS if verdicts[row] == "DIFFERENT"] == ["transformers"], output
