"""Whole runs of SFT, DPO and reward models under torchrun, with a tiny random model.

Losses fall, and equal those that transformers alone computes for the exported model. Killed runs
end with the same numbers. Layouts change nothing.
"""

import asyncio
import itertools
import json
import math
import re

import pytest
import torch
from common import ROOT, check_adapter, make_model, run, torchrun
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rl2.env.load import load_env

TIMED = ("time/", "memory/", "tokens/per_second")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(tmp_path, rows, worker, *more):
    write(tmp_path / "train.jsonl", rows)
    return [
        f"{worker}.model_name={make_model(tmp_path / 'tiny')}",
        f"data.path={tmp_path / 'train.jsonl'}",
        f"trainer.save_dir={tmp_path / 'run'}",
        f"{worker}.dtype=float32",
        "data.batch_size=4",
        "data.max_length=100",
        f"data.test_path={tmp_path / 'test.jsonl'}",
        "trainer.test_freq=6",
        "trainer.save_freq=2",
        "trainer.keep_checkpoints=null",
        "trainer.n_epochs=3",
        "trainer.disable_wandb=true",
        f"{worker}.max_length_per_device=200",
        f"{worker}.scheduler=linear",
        f"{worker}.warmup_ratio=0.2",
        *more,
    ]


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder):
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in metrics(folder)]


def several(world, runs):
    """Runs, each a list of words, one after the other in one launch."""
    return torchrun(world, "tests/several.py", *[word for run in runs for word in ["--", *run]][1:])


def check_killed_and_resumed_and_lora(trainer, worker, args, tmp_path):
    """Three runs in one launch.

    - One is killed in step 5, resumes from step 4 (the end of an epoch), is killed in step 7, and
      resumes from step 6 (inside an epoch). It must equal the run in `run` to the bit.
    - One resumes from a checkpoint folder. It must equal that run too.
    - One trains LoRA adapters, and must learn.
    """
    again = [trainer, *args, f"trainer.save_dir={tmp_path}/killed"]
    given = [
        trainer,
        *args,
        f"trainer.save_dir={tmp_path}/given",
        f"trainer.resume={tmp_path}/run/checkpoints/step_8",
    ]
    lora = [
        trainer,
        *args,
        f"trainer.save_dir={tmp_path}/lora",
        f"{worker}.lora_rank=4",
        f"{worker}.lr=0.03",
    ]
    done = several(2, [["kill=5", *again], ["kill=3", *again], again, given, lora])
    for step in (4, 6, 8):
        assert done.stdout.count(f"step_{step}: {step} of 12 steps are done") == 1, done.stdout
    whole, expected = untimed(tmp_path / "run"), weights(tmp_path / "run")
    assert untimed(tmp_path / "killed") == whole
    assert untimed(tmp_path / "given") == [line for line in whole if line["step"] > 8]
    for name in ("killed", "given"):
        found = weights(tmp_path / name)
        assert found.keys() == expected.keys() and all(
            (found[key] == expected[key]).all() for key in expected
        )
    lines = metrics(tmp_path / "lora")
    assert {key: lines[0][key] for key in whole[0]} == whole[0], (
        "untrained adapters change the model"
    )
    assert lines[-1]["test/loss"] < 0.7 * lines[0]["test/loss"]
    cls = AutoModelForSequenceClassification if trainer == "rm" else AutoModelForCausalLM
    check_adapter(cls, tmp_path / "tiny", tmp_path / "lora/model")


def weights(folder):
    return load_file(folder / "model/model.safetensors")


def conversation(i):
    letter = "abcd"[i % 4]
    return [
        {"role": "user", "content": f"say {letter}, {i}"},
        {"role": "assistant", "content": letter * (3 + i % 3)},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": letter * 5},
    ]


def plain_nll(folder, rows):
    """The mean negative log-likelihood of a token, computed by transformers alone.

    Its tokens are those of the assistant's turns, ends of turns included, and those of plain text.
    """
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        AutoModelForCausalLM.from_pretrained(folder),
    )
    found = []
    for row in rows:
        if "text" in row:
            text, spans = row["text"] + tokenizer.eos_token, [(0, len(row["text"]) + 10)]
        else:
            text = tokenizer.apply_chat_template(row["messages"], tokenize=False)
            spans = [
                m.span(1) for m in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text)
            ]
        inputs = tokenizer(
            text, return_offsets_mapping=True, add_special_tokens=False, return_tensors="pt"
        )
        logps = model(inputs["input_ids"]).logits[0].double().log_softmax(-1)
        for at, (start, _) in enumerate(inputs["offset_mapping"][0].tolist()):
            if at > 0 and any(a <= start < b for a, b in spans):
                found.append(-logps[at - 1, inputs["input_ids"][0, at]].item())
    return sum(found) / len(found)


def test_sft(tmp_path):
    rows = [{"messages": conversation(i)} for i in range(14)] + [
        {"text": "abcd" * 4},
        {"messages": "dcba" * 3},
    ]
    test = [{"messages": conversation(i)} for i in (20, 21, 22)] + [{"text": "abcdabcd"}]
    write(tmp_path / "test.jsonl", test)
    args = arguments(tmp_path, [*rows, {"text": "x" * 200}], "actor", "actor.lr=0.01")
    done = torchrun(2, "-m", "rl2.trainer.sft", *args)
    assert "1 training rows are longer than data.max_length=100 and dropped" in done.stdout
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(
        range(13)
    )  # 16 rows, 3 epochs, batches of 4; step 0 is the first test
    assert [line["step"] for line in lines if "test/loss" in line] == [0, 6, 12]
    assert lines[0]["test/loss"] == pytest.approx(plain_nll(tmp_path / "tiny", test), abs=1e-5)
    assert lines[-1]["test/loss"] == pytest.approx(
        plain_nll(tmp_path / "run/model", test), abs=1e-5
    )
    assert lines[-1]["test/perplexity"] == pytest.approx(math.exp(lines[-1]["test/loss"]))
    assert (
        lines[1]["actor/loss"] > 4
        and lines[-1]["actor/loss"] < 2.5
        and lines[-1]["test/loss"] < 2.5
    )
    rates = [line["actor/lr"] for line in lines[1:]]
    assert rates[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01]) and rates[-1] == pytest.approx(
        0.01 / 9
    )
    check_killed_and_resumed_and_lora("sft", "actor", args, tmp_path)


def preference(i, **more):
    prompt = [{"role": "user", "content": f"pick, {i}"}]
    return {"messages": prompt, "chosen": "a" * (2 + i % 3), "rejected": "z" * (1 + i % 4), **more}


def encoded(tokenizer, row):
    """(tokens, start, end) of both conversations: the reply is tokens[start:end]."""
    for reply in (row["chosen"], row["rejected"]):
        messages = [*row["messages"], {"role": "assistant", "content": reply}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        start = len(tokens) - len(reply) - 2  # a token for each letter, the end of turn, a newline
        yield tokens, start, len(tokens) - 1


def plain_logp(model, tokens, start, end):
    logps = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    return sum(logps[at - 1, tokens[at]].item() for at in range(start, end))


def test_dpo(tmp_path):
    test = write(tmp_path / "test.jsonl", [preference(i) for i in (30, 31, 32)])
    args = arguments(
        tmp_path, [preference(i) for i in range(16)], "actor", "actor.lr=0.003", "dpo.beta=0.2"
    )
    torchrun(2, "-m", "rl2.trainer.dpo", *args)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(13))
    assert lines[0]["test/loss"] == pytest.approx(math.log(2)) and lines[0][
        "test/margin"
    ] == pytest.approx(0, abs=1e-5)
    assert lines[1]["actor/loss"] == pytest.approx(math.log(2)) and lines[1][
        "actor/kl"
    ] == pytest.approx(0, abs=1e-6)
    last = lines[-1]
    assert last["actor/loss"] < 0.4 and last["actor/accuracy"] == 1 and last["actor/kl"] > 0
    names = (tmp_path / "run/model", tmp_path / "tiny")
    tokenizer, models = (
        AutoTokenizer.from_pretrained(names[1]),
        [AutoModelForCausalLM.from_pretrained(n) for n in names],
    )
    rewards = []
    for row in map(json.loads, test.read_text().splitlines()):
        for place in encoded(tokenizer, row):
            policy, reference = (plain_logp(model, *place) for model in models)
            rewards.append(0.2 * (policy - reference))
    chosen, rejected = rewards[::2], rewards[1::2]
    assert last["test/chosen_reward"] == pytest.approx(sum(chosen) / 3, abs=1e-4)
    assert last["test/rejected_reward"] == pytest.approx(sum(rejected) / 3, abs=1e-4)
    losses = [math.log1p(math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)]
    assert last["test/loss"] == pytest.approx(sum(losses) / 3, abs=1e-5)
    check_killed_and_resumed_and_lora("dpo", "actor", args, tmp_path)


def test_reward_model(tmp_path, monkeypatch):
    """The exported model gives the rewards of training, when transformers runs a padded batch."""
    test = write(
        tmp_path / "test.jsonl", [preference(i, margin=0.1 * (i - 30)) for i in (30, 31, 32)]
    )
    rows = [preference(i, margin=0.5) if i % 2 else preference(i) for i in range(16)]
    args = arguments(tmp_path, rows, "critic", "critic.lr=0.01", "rm.center=0.01")
    torchrun(2, "-m", "rl2.trainer.rm", *args)
    lines = metrics(tmp_path / "run")
    assert (
        lines[0]["test/margin"] == 0 and lines[0]["test/accuracy"] == 0
    )  # a new head gives 0 to all
    last = lines[-1]
    assert last["critic/loss"] < 0.6 * lines[1]["critic/loss"] and last["critic/accuracy"] == 1
    assert last["test/accuracy"] == 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/model")
    assert model.config.num_labels == 1
    tokens = [
        t
        for row in map(json.loads, test.read_text().splitlines())
        for t, *_ in encoded(tokenizer, row)
    ]
    rewards = (
        model(**tokenizer.pad({"input_ids": tokens}, return_tensors="pt")).logits[:, 0].double()
    )
    chosen, rejected = rewards.view(-1, 2).unbind(1)
    assert last["test/chosen_reward"] == pytest.approx(chosen.mean().item(), abs=1e-5)
    assert last["test/rejected_reward"] == pytest.approx(rejected.mean().item(), abs=1e-5)
    losses = (
        -(chosen - rejected - torch.tensor([0, 0.1, 0.2])).sigmoid().log()
        + 0.01 * (chosen + rejected) ** 2
    )
    assert last["test/loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
    check_killed_and_resumed_and_lora("rm", "critic", args, tmp_path)
    check_rewards_of_a_policy(
        tmp_path,
        monkeypatch,
        dict(zip(["chosen", "rejected"], rewards.view(-1, 2)[0].tolist(), strict=True)),
    )


def check_rewards_of_a_policy(tmp_path, monkeypatch, expected):
    """envs/reward_model.py, with the model in process, gives GRPO the rewards of training."""
    monkeypatch.setenv("RL2_REWARD_MODEL", str(tmp_path / "run/model"))
    env, row = load_env(str(ROOT / "envs/reward_model.py")), preference(30)
    for reply in ("chosen", "rejected"):
        messages = [*row["messages"], {"role": "assistant", "content": row[reply]}]
        assert asyncio.run(env.score(messages, row)) == {
            "reward": pytest.approx(expected[reply], abs=1e-5)
        }
    write(tmp_path / "prompts.jsonl", [{**preference(i), "answer": ""} for i in range(8)])
    args = [
        f"actor.model_name={tmp_path}/tiny",
        "actor.lr=0.001",
        "actor.dtype=float32",
        "data.prompts_per_rollout=4",
        f"data.path={tmp_path}/prompts.jsonl",
        "data.max_length=100",
        "rollout.env_path=envs/reward_model.py",
        "rollout.train_sampling_params.max_new_tokens=4",
        f"trainer.save_dir={tmp_path}/grpo",
        "trainer.disable_wandb=true",
    ]
    run("-m", "rl2.trainer.ppo", *args)
    assert metrics(tmp_path / "grpo")[-1]["actor/grad_norm"] > 0
    lines = (tmp_path / "grpo/rollouts/train/step_2.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert asyncio.run(env.score(record["messages"], row)) == {
            "reward": pytest.approx(record["reward"], abs=1e-5)
        }
    assert len(lines) == 32


LAYOUTS = {"fsdp": "fsdp_size=2", "replicas": "fsdp_size=1", "sp": "sp_size=2", "tp": "tp_size=2"}


def test_each_trainer_in_each_layout_of_two_processes_equals_one_process(tmp_path):
    """Compares all metrics of three steps of gradient descent and their tests, and all weights."""
    rows = {"sft": [{"messages": conversation(i)} for i in range(9)] + [{"text": "abcd" * 4}]}
    rows["dpo"] = [preference(i) for i in range(10)]
    rows["rm"] = [preference(i, margin=0.1 * i) for i in range(10)]
    runs = {1: [], 2: []}
    for trainer, part in rows.items():
        folder, worker = tmp_path / trainer, "critic" if trainer == "rm" else "actor"
        folder.mkdir()
        write(folder / "test.jsonl", part[:3])
        more = [
            "trainer.max_steps=3",
            "trainer.save_freq=null",
            "trainer.test_freq=2",
            f"{worker}.lr=0.1",
        ]
        args = ["sgd", trainer, *arguments(folder, part, worker, *more)]
        runs[1].append([*args, f"trainer.save_dir={folder}/one"])
        runs[2] += [
            [*args, f"{worker}.{key}", f"trainer.save_dir={folder}/{name}"]
            for name, key in LAYOUTS.items()
        ]
    for world in runs:
        several(world, runs[world])
    for trainer, name in itertools.product(rows, LAYOUTS):
        one, other = tmp_path / trainer / "one", tmp_path / trainer / name
        for expected, found in zip(metrics(one), metrics(other), strict=True):
            for key, value in expected.items():
                if key.startswith(("actor/", "critic/", "test/")):
                    assert found[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (
                        trainer,
                        name,
                        key,
                        found["step"],
                    )
        start, expected, found = (
            load_file(tmp_path / trainer / "tiny/model.safetensors"),
            weights(one),
            weights(other),
        )
        assert (
            max((expected[key] - start[key]).abs().max() for key in expected.keys() & start.keys())
            > 0.01
        )
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, rtol=0, atol=1e-6, msg=f"{trainer}, {name}: {key}"
            )


def test_the_rows_of_the_pipeline_are_right_and_in_one_set_only(tmp_path):
    """examples/pipeline.py: no problem is in two sets, and by envs/arithmetic.py the chosen answer
    is right and the rejected one wrong. A slip has the same length as the right answer.
    """
    pytest.importorskip("reasoning_gym", reason="comes with rl2[quickstart]")
    run("examples/pipeline.py", "prepare", tmp_path)
    rows = {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()]
        for path in tmp_path.iterdir()
    }
    questions = {
        name: [row["messages"][0]["content"] for row in part] for name, part in rows.items()
    }
    assert questions["sft_test"] == questions["pairs_test"]
    apart = [
        question
        for name in ("sft_train", "pairs_train", "pairs_test")
        for question in questions[name]
    ]
    assert len(set(apart)) == len(apart) == 820
    score = load_env(str(ROOT / "envs/arithmetic.py")).reward_fn
    for sft, pair in zip(rows["sft_test"], rows["pairs_test"], strict=True):
        assert sft["messages"][-1]["content"] == pair["chosen"]
        answer = pair["chosen"].rpartition("#### ")[2]
        assert score([{"content": pair["chosen"]}], answer) == 1
        assert score([{"content": pair["rejected"]}], answer) == 0
    slips = [len(pair["chosen"]) == len(pair["rejected"]) for pair in rows["pairs_train"][::2]]
    assert all(slips) and len(slips) == 160
