"""Whole runs of SFT, DPO and reward models in two processes, and what docs and examples show."""

import asyncio
import importlib
import itertools
import math
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from common import (
    ROOT,
    check_adapter,
    conversation,
    launch,
    launch_runs,
    make_model,
    preference,
    read_jsonl,
    read_metrics,
    write_jsonl,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl2.env.load import load_env


def make_arguments(tmp_path, rows, worker, *extra):
    """The arguments of a run that trains on `rows`."""
    write_jsonl(tmp_path / "train.jsonl", rows)
    return [
        f"{worker}.model_name={make_model(tmp_path / 'tiny')}",
        f"data.path={tmp_path / 'train.jsonl'}",
        f"trainer.save_dir={tmp_path / 'run'}",
        f"{worker}.dtype=float32",
        "data.batch_size=4",
        "data.max_length=100",
        f"data.test_path={tmp_path / 'test.jsonl'}",
        "trainer.test_freq=6",
        "trainer.n_epochs=3",
        f"{worker}.max_length_per_device=200",
        f"{worker}.scheduler=linear",
        f"{worker}.warmup_ratio=0.2",
        *extra,
    ]


def transformers_nll(folder, rows):
    """The mean negative log-likelihood of a token, computed by transformers alone.

    Its tokens are those of the assistant's turns, ends of turns included, and those of plain text.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for row in rows:
        if "text" in row:
            text = row["text"] + tokenizer.eos_token
            spans = [(0, len(text))]
        else:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            turns = re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text)
            spans = [turn.span(1) for turn in turns]
        inputs = tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=False, return_tensors="pt"
        )
        tokens = inputs["input_ids"]
        logps = model(tokens).logits[0].double().log_softmax(-1)
        for i, (offset, _) in enumerate(inputs["offset_mapping"][0].tolist()):
            if i > 0 and any(start <= offset < end for start, end in spans):
                losses.append(-logps[i - 1, tokens[0, i]].item())
    return sum(losses) / len(losses)


def test_sft(tmp_path):
    test_rows = [{"messages": conversation(i)} for i in (20, 21, 22)] + [{"text": "abcdabcd"}]
    write_jsonl(tmp_path / "test.jsonl", test_rows)
    rows = [{"messages": conversation(i)} for i in range(14)]
    rows += [{"text": "abcd" * 4}, {"messages": "dcba" * 3}, {"text": "x" * 200}]
    arguments = make_arguments(tmp_path, rows, "actor", "actor.lr=0.01")
    done = launch(2, "-m", "rl2.trainer.sft", *arguments)
    assert (
        "1 of 17 training rows (6%) are longer than data.max_length=100 and dropped" in done.stdout
    )
    lines = read_metrics(tmp_path / "run")
    # 16 rows, 3 epochs, batches of 4. Step 0 is the first test.
    assert [line["step"] for line in lines] == list(range(13))
    assert [line["step"] for line in lines if "test/loss" in line] == [0, 6, 12]
    first_nll = transformers_nll(tmp_path / "tiny", test_rows)
    last_nll = transformers_nll(tmp_path / "run/model", test_rows)
    assert lines[0]["test/loss"] == pytest.approx(first_nll, abs=1e-5)
    assert lines[-1]["test/loss"] == pytest.approx(last_nll, abs=1e-5)
    assert lines[-1]["test/perplexity"] == pytest.approx(math.exp(lines[-1]["test/loss"]))
    assert lines[1]["actor/loss"] > 4
    assert lines[-1]["actor/loss"] < 2.5
    assert lines[-1]["test/loss"] < 2.5
    rates = [line["actor/lr"] for line in lines[1:]]
    assert rates[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01])
    assert rates[-1] == pytest.approx(0.01 / 9)


def labelled(i):
    """One of the replies of `preference(i)`, in TRL's columns, as a prompt with a label."""
    pair = preference(i)
    reply = pair["rejected" if i % 2 else "chosen"]
    return {"prompt": pair["messages"], "completion": reply, "label": i % 2 == 0}


def test_dpo(tmp_path):
    """Of adapters, whose base is the reference."""
    test_rows = [preference(i) for i in (30, 31, 32)]
    write_jsonl(tmp_path / "test.jsonl", test_rows)
    rows = [preference(i) for i in range(16)]
    keys = ["actor.lr=0.03", "dpo.beta=0.2"]
    keys += ["actor.lora_rank=4", "actor.lora_alpha=8"]  # logits as large as without adapters
    launch(2, "-m", "rl2.trainer.dpo", *make_arguments(tmp_path, rows, "actor", *keys))
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    assert lines[0]["test/loss"] == pytest.approx(math.log(2))
    assert lines[0]["test/margin"] == pytest.approx(0, abs=1e-5)
    assert lines[1]["actor/loss"] == pytest.approx(math.log(2))
    assert lines[1]["actor/kl"] == pytest.approx(0, abs=1e-6)
    last = lines[-1]
    assert last["actor/loss"] < 0.4 and last["actor/accuracy"] == 1 and last["actor/kl"] > 0
    assert last["test/loss"] < 0.6 and last["test/margin"] > 0 and last["test/accuracy"] == 1
    check_adapter(AutoModelForCausalLM, tmp_path / "tiny", tmp_path / "run/model")


@pytest.mark.nightly
def test_reward_model(tmp_path, monkeypatch):
    """When transformers runs a padded batch, the exported model gives the rewards of training."""
    test_rows = [preference(i, margin=0.1 * (i - 30)) for i in (30, 31, 32)]
    write_jsonl(tmp_path / "test.jsonl", test_rows)
    rows = [preference(i, margin=0.5) if i % 2 else preference(i) for i in range(16)]
    arguments = make_arguments(tmp_path, rows, "critic", "critic.lr=0.01")
    launch(2, "-m", "rl2.trainer.rm", *arguments)
    lines = read_metrics(tmp_path / "run")
    # A new value head gives 0 to all replies.
    assert lines[0]["test/margin"] == 0 and lines[0]["test/accuracy"] == 0
    last = lines[-1]
    assert last["critic/loss"] < 0.6 * lines[1]["critic/loss"] and last["critic/accuracy"] == 1
    assert last["test/accuracy"] == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert model.config.num_labels == 1
    chats = []
    for row in test_rows:
        for reply in (row["chosen"], row["rejected"]):
            chats.append([*row["messages"], {"role": "assistant", "content": reply}])
    texts = tokenizer.apply_chat_template(chats, tokenize=False)
    inputs = tokenizer(texts, add_special_tokens=False, padding=True, return_tensors="pt")
    rewards = model(**inputs).logits[:, 0].double()
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    assert last["test/chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert last["test/rejected_reward"] == pytest.approx(rejected.mean().item(), abs=1e-5)
    margins = torch.tensor([0, 0.1, 0.2])
    losses = -(chosen - rejected - margins).sigmoid().log() + 0.01 * (chosen + rejected) ** 2
    assert last["test/loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    # envs/reward_model.py, with the model in process, gives the rewards of training.
    monkeypatch.setenv("RL2_REWARD_MODEL", str(tmp_path / "run/model"))
    env = load_env(str(ROOT / "envs/reward_model.py"))
    for chat, expected in zip(chats[:2], rewards, strict=False):
        reward = pytest.approx(expected.item(), abs=1e-5)
        assert asyncio.run(env.score(chat, test_rows[0])) == {"reward": reward}


@pytest.fixture
def left_by_quickstart(tmp_path):
    """A folder with the environment and the model that the quickstart leaves.

    Returns what runs commands there, in a shell where no environment is active, and returns their
    output.
    """
    if not Path(sys.prefix, "bin/activate").exists():
        pytest.skip("Python is not in a virtual environment")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    make_model(tmp_path / "runs/quickstart-data/model")
    shell = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run_commands(commands):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=shell,
            capture_output=True,
            text=True,
            timeout=300,
        )
        output = done.stdout + done.stderr
        assert done.returncode == 0 and "PROBLEM" not in output, output
        return output

    return run_commands


def find_blocks(page):
    """The blocks of code in a text: (language, code) of each."""
    return re.findall(r"```(\w+)\n(.*?)```", page, re.DOTALL)


@pytest.fixture
def load_example(monkeypatch):
    """Imports a module of examples/."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module


def test_the_readmes_own_task_runs(tmp_path, left_by_quickstart):
    section = (ROOT / "README.md").read_text().partition("## Your own task")[2]
    blocks = dict(reversed(find_blocks(section)))  # the first one of each language
    (tmp_path / "rows.jsonl").write_text(blocks["json"])
    (tmp_path / "my_env.py").write_text(blocks["python"])
    left_by_quickstart(blocks["bash"].rstrip() + " data.max_length=100")
    assert (tmp_path / "runs/first/report.html").exists()


@pytest.mark.nightly
def test_the_tutorial_runs(tmp_path, left_by_quickstart):
    steps = (ROOT / "docs/tutorial.md").read_text().partition("## From Python")[0]
    blocks = find_blocks(steps)
    make_rows, environment = (text for language, text in blocks if language == "python")
    (tmp_path / "make_rows.py").write_text(make_rows)
    (tmp_path / "largest.py").write_text(environment)
    commands = "".join(text for language, text in blocks if language == "bash")
    # A random model of letters is slower to tokenise and has 512 positions; two steps show enough.
    commands = commands.replace("trainer.max_steps=20", "trainer.max_steps=2 data.max_length=200")
    commands = commands.replace("trainer.test_freq=5", "trainer.test_freq=1")
    output = left_by_quickstart(f"source .venv/bin/activate; python make_rows.py\n{commands}")
    assert '"finish_reason"' in output and "runs/rloo" in output
    for name in ("largest", "rloo"):
        assert (tmp_path / "runs" / name / "report.html").exists()
        assert (tmp_path / "runs" / name / "best_model/config.json").exists()


def test_the_quickstart_ends_with_answers_errors_the_report_and_the_next_command(
    tmp_path, capsys, monkeypatch, load_example
):
    """4% and 96% of 25 questions are 8 points (95%) from being known."""
    quickstart = load_example("quickstart")
    monkeypatch.setattr(quickstart, "draw_rewards", lambda *arguments: None)
    line = {"time/step": 1.0, "tokens/sampled": 9, "reward/mean": 0.5}
    lines = [{"step": i, "test/reward/mean": mean, **line} for i, mean in enumerate((0.04, 0.96))]
    write_jsonl(tmp_path / "metrics.jsonl", lines)
    (tmp_path / "rollouts/test").mkdir(parents=True)
    for step, reply in enumerate(("To find the\n\nlargest", "The largest is 63.")):
        messages = [{"role": role, "content": reply} for role in ("user", "assistant")]
        record = {"messages": messages, "finish_reason": "stop" if step else "length"}
        write_jsonl(tmp_path / f"rollouts/test/step_{step}.jsonl", [record] * 25)
    quickstart.report(tmp_path)
    printed = capsys.readouterr().out
    for text in (
        "before   To find the largest ...\n",
        "after    The largest is 63.\n",
        "4% ± 8% right before training, 96% ± 8% after (greedy, 25 questions)",
        f"{tmp_path}/report.html",
        "source .venv/bin/activate",
    ):
        assert text in printed
    assert "source .venv/bin/activate" in (ROOT / "README.md").read_text()


LAYOUTS = {"fsdp": "fsdp_size=2", "replicas": "fsdp_size=1", "sp": "sp_size=2", "tp": "tp_size=2"}


@pytest.mark.nightly
def test_each_trainer_in_each_layout_of_two_processes_equals_one_process(tmp_path):
    """Compares all metrics of three steps of gradient descent and their tests, and all weights."""
    rows_of = {
        "sft": [{"messages": conversation(i)} for i in range(9)] + [{"text": "abcd" * 4}],
        "dpo": [preference(i) for i in range(10)],
        "kto": [labelled(i) for i in range(9)] + [preference(9)],
        "rm": [preference(i, margin=0.1 * i) for i in range(10)],
    }
    runs = {1: [], 2: []}
    for trainer, rows in rows_of.items():
        folder = tmp_path / trainer
        worker = "critic" if trainer == "rm" else "actor"
        folder.mkdir()
        write_jsonl(folder / "test.jsonl", rows[:3])
        extra = ["trainer.max_steps=3", "trainer.test_freq=2", f"{worker}.lr=0.1"]
        if trainer == "kto":
            extra += ["dpo.loss=kto", "dpo.beta=0.5"]
        module = trainer.replace("kto", "dpo")
        command = ["sgd", module, *make_arguments(folder, rows, worker, *extra)]
        runs[1].append([*command, f"trainer.save_dir={folder}/one_process"])
        for layout, setting in LAYOUTS.items():
            save_dir = f"trainer.save_dir={folder}/{layout}"
            runs[2].append([*command, f"{worker}.{setting}", save_dir])
    for world in runs:
        launch_runs(world, runs[world])
    for trainer, layout in itertools.product(rows_of, LAYOUTS):
        expected_lines = read_metrics(tmp_path / trainer / "one_process")
        lines = read_metrics(tmp_path / trainer / layout)
        for expected, line in zip(expected_lines, lines, strict=True):
            for key, value in expected.items():
                if key.startswith(("actor/", "critic/", "test/")):
                    context = (trainer, layout, key, line["step"])
                    assert line[key] == pytest.approx(value, rel=1e-5, abs=1e-6), context
        initial = load_file(tmp_path / trainer / "tiny/model.safetensors")
        expected_weights = load_file(tmp_path / trainer / "one_process/model/model.safetensors")
        weights = load_file(tmp_path / trainer / layout / "model/model.safetensors")
        common_keys = expected_weights.keys() & initial.keys()
        changes = [(expected_weights[key] - initial[key]).abs().max() for key in common_keys]
        assert max(changes) > 0.01
        for key, weight in expected_weights.items():
            message = f"{trainer}, {layout}: {key}"
            torch.testing.assert_close(weights[key], weight, rtol=0, atol=1e-6, msg=message)


def test_the_quickstart_rewards_a_brief_reply_with_the_answer_alone():
    score = load_env(str(ROOT / "examples/quickstart_env.py")).spec.reward_fn
    right = ("The largest number is 63.", "63")
    wrong = ("59, 63", "63 beats 59", "636", "?", "The largest of the four numbers is 63.")
    for replies, reward in ((right, 1), (wrong, 0)):
        assert [score([{"content": reply}], "63") for reply in replies] == [reward] * len(replies)


def test_the_quickstart_holds_out_questions_with_right_answers(tmp_path, load_example):
    load_example("quickstart").make_task(tmp_path)
    rows = {name: read_jsonl(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    questions = {row["messages"][-1]["content"] for row in rows["train"] + rows["test"]}
    assert (len(rows["train"]), len(rows["test"]), len(questions)) == (2000, 100, 2100)
    for row in rows["test"]:
        numbers = row["messages"][-1]["content"].partition("? ")[2].split(", ")
        assert row["answer"] == max(numbers) and len(numbers) == 4


def test_the_pipelines_sums_hold_out_questions_that_no_prompt_shows(monkeypatch, load_example):
    """The stand-in for reasoning-gym draws all 200 questions, and some of them twice."""
    pipeline = load_example("pipeline")

    def create_dataset(name, size, seed, **options):
        items = []
        for a, sign, b in itertools.product(range(10), "+-", range(10)):
            question = pipeline.EXAMPLE[0].replace("10 - 12", f"{a} {sign} {b}")
            items.append({"question": question, "answer": str(a + b if sign == "+" else a - b)})
        return items + items[:seed]

    stand_in = types.SimpleNamespace(create_dataset=create_dataset)
    monkeypatch.setitem(sys.modules, "reasoning_gym", stand_in)
    rows = pipeline.make_sums()
    train, test = rows["sums_train"], rows["sums_test"]
    assert (len(train), len(test)) == (150, 50)
    assert len({row["messages"][-1]["content"] for row in train + test}) == 200
    shown = {row["messages"][1]["content"] for row in train + test}
    assert not shown & {row["messages"][-1]["content"] for row in test}
