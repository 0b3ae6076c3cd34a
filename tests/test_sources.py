"""Runs on several sources of rows, each with an environment of its own."""

import pytest
from common import launch_runs, make_model, make_tokenizer, read_jsonl, read_metrics, write_jsonl
from env_helpers import load_text, make_play
from scripted import PARAMS, make_row, process_group  # noqa: F401

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example
from rl2.ppo_inputs import make_prompts, make_templates, read_ppo_inputs
from rl2.ppo_setup import make_chat_template

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


@pytest.mark.parametrize(
    "key, starts, printed",
    [
        ((), {"a": "Be kind.", "b": None}, "system prompt of a: that of "),
        (("data.system_prompt=Short.",), {"a": "Short.", "b": "Short."}, "that of data."),
        (("data.system_prompt=",), {"a": None, "b": None}, "none, as it is turned off"),
    ],
)
def test_the_system_prompt_of_an_env_is_for_the_rows_of_its_source(
    words, tmp_path, capsys, key, starts, printed
):
    (tmp_path / "one.py").write_text(f"SYSTEM_PROMPT = 'Be kind.'\n{ONE}")
    limit = "rollout.train_sampling_params.max_new_tokens=8"
    config = parse(PPOConfig, [*words, limit, *key])
    rows, envs = read_ppo_inputs(config)
    tokenizer = make_tokenizer()
    template = make_chat_template(config.data, tokenizer, "2026-03-05")
    capsys.readouterr()
    templates = make_templates(config, envs, template)
    assert printed in capsys.readouterr().out
    prompts, _ = make_prompts(config, rows, templates)
    seen = {prompts.at(i).source: tokenizer.decode(prompts.at(i).tokens) for i in range(8)}
    for env in envs.values():
        env.close()
    for source, text in starts.items():
        start = f"<|im_start|>system\n{text}<|im_end|>" if text else "<|im_start|>user"
        assert seen[source].startswith(start)


WITH_OBJECT = """
class make_env:
    def step(self, message): return {"messages": [], "reward": 1.0}
"""
WITH_LOOP = """
async def play(row, generate):
    await generate(row["messages"])
    return 1.0
"""


@pytest.mark.parametrize("text", [WITH_OBJECT, WITH_LOOP])
def test_prompts_made_in_the_rollout_have_the_system_prompt_of_their_source(tmp_path, text):
    env = load_text(tmp_path, text)
    collector, _, player = make_play(env, ["one"], [])
    other = player.templates[""]
    own = ChatTemplate(other.tokenizer, system_prompt="Be kind.")
    player.envs, player.templates = {"a": env, "": env}, {"a": own, "": other}
    row = make_row(0)
    for source, template in (("a", own), ("b", other)):
        prompt = template.encode_prompt(row["messages"])
        example = Example(0, row, [(prompt, [])], source=source)
        [trajectory] = collector.play([example], PARAMS, 1, "train", 1)
        [sample] = trajectory.samples
        assert list(sample.tokens[: len(prompt)]) == prompt
    env.close()


def test_a_system_prompt_that_is_no_text_is_refused(words, tmp_path):
    (tmp_path / "one.py").write_text(f"SYSTEM_PROMPT = ('Be kind.',)\n{ONE}")
    with pytest.raises(ValueError, match=r"SYSTEM_PROMPT: expected a text, got \('Be kind.',\)"):
        read_ppo_inputs(parse(PPOConfig, words))
