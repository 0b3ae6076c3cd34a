"""What CONTRIBUTING.md and docs/algorithms.md say how to do works.

The diffs are applied to a copy of the package, and runs of the copy use what they add. The
functions of the example are used from a file, without a change to the package.
"""

import json
import re
import shutil
import subprocess

import pytest
import torch
from common import ROOT, make_model, read_metrics, run

from rl2.algorithms import losses
from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl2.config.by_name import choose_function, find_function

# Heading -> the files that its diff touches: one, and for some the table that names it or the
# reader of the key.
TOUCHED = {
    "A policy loss": {"rl2/algorithms/losses.py"},
    "An advantage estimator": {"rl2/algorithms/advantages.py"},
    "A preference loss": {"rl2/algorithms/losses.py"},
    "A metric logger": {"rl2/report/loggers.py", "rl2/config/schema.py"},
    "A reward or an environment": {"envs/shouting.py"},
    "A config key": {"rl2/config/schema.py", "rl2/inputs.py"},
    "An engine": {"rl2/engine/echo.py", "rl2/engine/select.py"},
    "A trainer": {"rl2/trainer/unlike.py", "rl2/__main__.py"},
}


def read_diffs() -> dict[str, str]:
    """Heading -> the diff below it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sections = re.split(r"^### ", text, flags=re.M)[1:]
    diffs = {}
    for section in sections:
        heading = section.splitlines()[0]
        [diffs[heading]] = re.findall(r"```diff\n(.*?)```", section, re.S)
    return diffs


def test_each_addition_touches_one_file_and_the_table_that_names_it():
    for heading, diff in read_diffs().items():
        assert set(re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)) == TOUCHED[heading], heading
    assert read_diffs().keys() == TOUCHED.keys()


@pytest.fixture(scope="module")
def changed_copy(tmp_path_factory):
    """A copy of the package with all diffs applied, beside the ready-made envs."""
    if not shutil.which("git"):
        pytest.skip("git applies the diffs")
    copy = tmp_path_factory.mktemp("copy")
    for folder in ("rl2", "envs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for heading, diff in read_diffs().items():
        applied = subprocess.run(
            ["git", "apply", "-C1", "-"],
            input=diff,
            cwd=copy,
            text=True,
            capture_output=True,
            env={"GIT_CEILING_DIRECTORIES": str(copy.parent), "PATH": "/usr/bin:/bin"},
        )
        assert applied.returncode == 0, f"{heading}: {applied.stderr}"
    return copy


def start(copy, command, *overrides):
    """`python -m rl2 COMMAND` of the copy in one process, with one step and the tiny model."""
    settings = ["trainer.max_steps=1", "trainer.disable_wandb=true", "actor.dtype=float32"]
    arguments = ["-m", "rl2", command, *settings, *overrides]
    return run(*arguments, env={"PYTHONPATH": str(copy)}, cwd=copy, check=False)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_additions_work_in_a_run_of_grpo(changed_copy, tmp_path):
    """One step with the new engine, env, loss, estimator, logger and key."""
    texts = ["ab", "AB", "not used", "nor this"]
    rows = [{"messages": [{"role": "user", "content": text}], "answer": ""} for text in texts]
    arguments = [
        f"data.path={write_rows(tmp_path / 'rows.jsonl', rows)}",
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=2",
        f"actor.model_name={make_model(tmp_path / 'tiny')}",
        "rollout.train_sampling_params.max_new_tokens=8",
        "actor.loss=unclipped",
        "adv.estimator=batch_mean",
        "rollout.engine=echo",
        "rollout.env_path=shouting",
        "trainer.loggers=[table]",
        f"trainer.save_dir={tmp_path}/run",
    ]
    refused = start(changed_copy, "ppo", *arguments, "data.limit=0", "actor.clip=0.3")
    assert refused.returncode == 2
    assert "data.limit=0: it must be above 0" in refused.stderr
    assert "actor.clip=0.3 has no effect with actor.loss=unclipped" in refused.stderr
    done = start(changed_copy, "ppo", *arguments, "data.limit=2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "rollout engine: echo" in done.stdout
    [line] = read_metrics(tmp_path / "run")
    assert line["actor/ratio"] == pytest.approx(1)
    table = dict(
        row.split("\t")[1:] for row in (tmp_path / "run/metrics.tsv").read_text().splitlines()
    )
    assert float(table["reward/mean"]) == line["reward/mean"] > 0
    records = (tmp_path / "run/rollouts/train/step_1.jsonl").read_text().splitlines()
    prompts = {json.loads(record)["messages"][0]["content"] for record in records}
    assert prompts == {"ab", "AB"}


def test_the_added_trainer_works(changed_copy, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * i}]}
        for i in range(1, 5)
    ]
    assert "unlike " in start(changed_copy, "--help").stdout
    done = start(
        changed_copy,
        "unlike",
        f"data.path={write_rows(tmp_path / 'rows.jsonl', rows)}",
        "data.batch_size=4",
        f"actor.model_name={make_model(tmp_path / 'tiny')}",
        f"trainer.save_dir={tmp_path}/run",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    [line] = read_metrics(tmp_path / "run")
    assert line["actor/loss"] > 0 and line["actor/grad_norm"] > 0
    assert (tmp_path / "run/model/config.json").exists()


def test_the_added_preference_loss_works(changed_copy):
    code = (
        "import torch; from rl2.algorithms.losses import PREFERENCE_LOSSES, dpo_loss\n"
        "from rl2.config.by_name import choose_function\n"
        "pair_loss = choose_function('exponential', PREFERENCE_LOSSES, 'dpo.loss')\n"
        "logps, mask = torch.tensor([[-1.0], [-2.0]]), torch.ones(2, 1)\n"
        "zeros = torch.zeros(2, 1)\n"
        "print(dpo_loss(pair_loss, logps, zeros, mask, mask / 2, 0.5, 0.0)[0].item())"
    )
    printed = run("-c", code, env={"PYTHONPATH": str(changed_copy)}, cwd=changed_copy).stdout
    assert float(printed) == pytest.approx(torch.tensor(-0.5).exp().item())


def test_functions_of_a_users_file(tmp_path, monkeypatch):
    """The example of docs/algorithms.md, by its definition."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "my_algorithms.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    rewards = torch.tensor([[0.0, 1], [0, 3], [0, 5], [0, 100], [0, 7], [0, 8]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [0, 0], [0, 1], [1, 1]])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    name = "my_algorithms.py:length_weighted"
    estimator = find_function(name, ADVANTAGE_ESTIMATORS, "adv.estimator")
    advantages = estimator(rewards, mask, group, torch.arange(6))
    # Three answers of two tokens, then one of a token and one of two: (7 + 2 * 8) / 3.
    expected = [1 - 3, 3 - 3, 5 - 3, 0, 7 - 23 / 3, 8 - 23 / 3]
    assert advantages[:, 1].tolist() == pytest.approx(expected)
    assert advantages[4, 0] == 0

    logps = torch.tensor([[-1.0, -2]], requires_grad=True)
    inputs = losses.PolicyInputs(
        logps=logps,
        old_logps=torch.tensor([[-2.0, -2]]),
        advantages=torch.tensor([[1.0, -1]]),
        mask=torch.ones(1, 2),
        clip=0.2,
        clip_high=0.2,
    )
    weights = torch.full((1, 2), 0.5)
    token_loss = choose_function("my_algorithms.py:unclipped", {}, "actor.loss")
    loss, metrics = losses.policy_loss(token_loss, inputs, weights)
    loss.backward()
    e = torch.tensor(1.0).exp().item()
    assert loss.item() == pytest.approx((1 - e) / 2)
    assert logps.grad[0].tolist() == pytest.approx([-e / 2, 0.5])
    assert metrics["large_ratio"] == 0.5 and metrics["approx_kl"] > 0
