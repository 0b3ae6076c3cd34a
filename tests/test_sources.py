"""Runs on several sources of rows, each with an environment of its own."""

import pytest
from common import launch_runs, make_model, read_jsonl, read_metrics, write_jsonl

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.ppo_inputs import read_ppo_inputs

# The rewards tell which environment gave them.
ONE = "def reward_fn(messages, answer): return {'one': 1.0}\n"
TWO = "def reward_fn(messages, label): return {'two': 2.0 + len(messages[-1]['content']) % 2}\n"
AGENT = "async def run(row, base_url, model): return 1.0\n"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The keys of a run on the sources a and b."""
    monkeypatch.chdir(tmp_path)
    make_model("model", max_position_embeddings=512)
    for name, column in (("a", "answer"), ("b", "label")):
        rows = [{"prompt": [{"role": "user", "content": str(i)}], column: "x"} for i in range(4)]
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    for name, text in (("one", ONE), ("two", TWO), ("agent", AGENT)):
        (tmp_path / f"{name}.py").write_text(text)
    return [
        "actor.model_name=model",
        "data.path={a:a.jsonl,b:b.jsonl}",
        "rollout.env_path={a:one.py,b:two.py}",
    ]


def test_each_source_has_its_env_in_training_and_evaluation(words, tmp_path):
    sizes = ["data.prompts_per_rollout=4", "data.responses_per_prompt=2", "data.test_ratio=0.3"]
    limits = ["rollout.train_sampling_params.max_new_tokens=4", "trainer.max_steps=2"]
    launch_runs(2, [["ppo", *words, *sizes, *limits, "trainer.save_dir=run"]])
    start, *steps = read_metrics(tmp_path / "run")
    assert start["test/a/reward/mean"] == 1 and start["test/b/reward/mean"] >= 2
    for number, metrics in enumerate(steps, 1):
        assert metrics["sources/a/reward/one"] == 1 and metrics["sources/b/reward/two"] >= 2
        records = read_jsonl(tmp_path / f"run/rollouts/train/step_{number}.jsonl")
        assert {r["source"]: set(r["rewards"]) for r in records} == {"a": {"one"}, "b": {"two"}}


def test_rows_and_envs_of_sources_that_do_not_fit(words):
    """Each env is tried on the rows of its own source; their names are those of the sources."""
    rows, envs = read_ppo_inputs(parse(PPOConfig, words))
    assert rows.keys() == {"data.path.a", "data.path.b"} and envs.keys() == {"a", "b"}
    for env in envs.values():
        env.close()
    swapped = parse(PPOConfig, [*words[:2], "rollout.env_path={a:two.py,b:two.py}"])
    with pytest.raises(ValueError, match=r"(?s)env_path.a: .*reward_fn needs column 'label'"):
        read_ppo_inputs(swapped)
    with pytest.raises(ValueError, match="the envs of b have run"):
        read_ppo_inputs(parse(PPOConfig, [*words[:2], "rollout.env_path={a:one.py,b:agent.py}"]))
    lost = [words[0], "data.path={a:a.jsonl,b:c.jsonl}", words[2]]
    with pytest.raises(ValueError, match="data.path.b: c.jsonl: no such file"):
        read_ppo_inputs(parse(PPOConfig, lost))
