"""Trajectories with a scripted engine: masks token by token, rewards, several turns, failures."""

import asyncio
import textwrap
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import make_tokenizer

from rl2.batch import Batch
from rl2.data import chat
from rl2.data.examples import Prompts
from rl2.engine.base import SamplingParams
from rl2.env.contract import EnvFailures
from rl2.env.load import load_env
from rl2.parallel.mesh import init_distributed
from rl2.rollout.collect import Collector
from rl2.rollout.stats import summarise, to_records, training_samples
from rl2.rollout.trajectory import Player, Trajectory

PARAMS = SamplingParams(max_new_tokens=16)


@pytest.fixture(scope="module", autouse=True)
def process_group():
    init_distributed()
    yield
    dist.destroy_process_group()


class ScriptedEngine:
    """Says `script(turn, seed)`; a reply is (text, finish reason)."""

    max_running_requests, index, count, version = 4, 0, 1, 0

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script, self.loop = tokenizer, script, asyncio.new_event_loop()
        self.prompts, self.in_flight, self.most_in_flight = [], 0, 0

    async def generate(self, prompt, params, seed):
        self.prompts.append((seed, list(prompt)))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        text, reason = self.script(seed[-1], seed)
        tokens = chat.tokenize(self.tokenizer, text) + (
            [self.tokenizer.eos_token_id] if reason == "stop" else []
        )
        logps = [-0.1 * (i + 1) for i in range(len(tokens))]
        return SimpleNamespace(tokens=tokens, logps=logps, finish_reason=reason, version=0)


def make(tmp_path, script, env, max_turns=1, num_prompts=1, deterministic=True, max_length=400):
    (tmp_path / "env.py").write_text(textwrap.dedent(env))
    tokenizer = make_tokenizer()
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}], "answer": str(i)}
        for i in range(num_prompts)
    ]
    engine = ScriptedEngine(tokenizer, script)
    failures = EnvFailures(0.5)
    env = load_env(tmp_path / "env.py", 5)
    player = Player(engine, env, tokenizer, failures, max_turns, max_length)
    collector = Collector(player, params=PARAMS, seed=0, deterministic=deterministic)
    return collector, make_prompts(rows, tokenizer), tokenizer


def make_prompts(rows, tokenizer):
    order = {"shuffle": False, "seed": 0, "batch_size": 1}
    return list(Prompts(rows, tokenizer, max_length=100, **order))


TOOL_ENV = """
    def interact(messages):
        call = messages[-1]["content"]
        return [{"role": "tool", "content": call[1:] + "!"}] if call.startswith("=") else []
    def reward_fn(messages, answer):
        return {"right": 1.0, "turns": 0.25 * sum(m["role"] == "assistant" for m in messages)}
"""


def test_two_turns_are_masked_token_by_token(tmp_path):
    collector, prompts, tokenizer = make(
        tmp_path, lambda turn, _: [("=7", "stop"), ("ok", "stop")][turn], TOOL_ENV, 3
    )
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    (sample,) = trajectory.samples
    text = [tokenizer.decode([token]) for token in sample.tokens]
    told = "".join(
        "#" if m and t in ("<|im_end|>",) else t if m else "."
        for t, m in zip(text, sample.mask, strict=True)
    )
    assert "".join(text) == (
        "<|im_start|>user\nq0<|im_end|>\n<|im_start|>assistant\n=7<|im_end|>\n"
        "<|im_start|>tool\n7!<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
    )
    assert told.replace(".", "") == "=7#ok#"
    assert told.index("=") == text.index("=") and told.endswith("ok#")
    assert [round(x, 1) for x in sample.logps if x] == [-0.1, -0.2, -0.3, -0.1, -0.2, -0.3]
    assert all((logp != 0) == bool(m) for logp, m in zip(sample.logps, sample.mask, strict=True))
    assert sample.rewards == [0.0] * (len(text) - 1) + [1.5]
    assert trajectory.rewards == {"right": 1.0, "turns": 0.5} and trajectory.num_turns == 2
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


def test_the_second_prompt_is_the_sampled_tokens_themselves(tmp_path):
    collector, prompts, _ = make(
        tmp_path, lambda turn, _: [("=7", "stop"), ("ok", "stop")][turn], TOOL_ENV, 2
    )
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    (_, first), (_, second) = collector.player.engine.prompts
    assert second[: len(first)] == first and trajectory.samples[0].tokens[: len(second)] == second


def test_a_template_that_rewrites_history_starts_a_new_sequence(tmp_path):
    collector, prompts, tokenizer = make(
        tmp_path, lambda turn, _: [("=abc", "stop"), ("ok", "stop")][turn], TOOL_ENV, 2
    )
    tokenizer.chat_template = (  # earlier assistant turns lose their text
        "{% for m in messages %}"
        "{{ m['role'] + ':' + (m['content'] if m['role'] != 'assistant' else '') + '<|im_end|>' }}"
        "{% endfor %}{{ 'assistant:' }}"
    )
    prompts = make_prompts([prompts[0].row], tokenizer)
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    first, second = trajectory.samples
    assert tokenizer.decode(first.tokens) == "user:q0<|im_end|>assistant:=abc<|im_end|>"
    assert tokenizer.decode(second.tokens) == (
        "user:q0<|im_end|>assistant:<|im_end|>tool:abc!<|im_end|>assistant:ok<|im_end|>"
    )
    assert sum(first.mask) == 5 and sum(second.mask) == 3
    assert sum(first.rewards) == 0 and second.rewards[-1] == 1.5
    assert first.trajectory == second.trajectory == trajectory.id


def test_length_limits_end_a_trajectory(tmp_path):
    collector, prompts, _ = make(tmp_path, lambda turn, _: ("=1", "length"), TOOL_ENV, 4)
    assert collector.play(prompts, PARAMS, 1, "train", 1)[0].num_turns == 1
    collector, prompts, _ = make(
        tmp_path, lambda turn, _: ("=1", "stop"), TOOL_ENV, 9, max_length=90
    )
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    assert 1 < trajectory.num_turns < 9 and trajectory.finish_reason == "length"
    assert len(trajectory.samples[0].tokens) <= 90 and sum(trajectory.samples[0].rewards) > 0


def test_a_failed_environment_costs_its_trajectory_only(tmp_path):
    env = """
        def reward_fn(messages, answer):
            if answer == "1":
                raise RuntimeError("boom")
            return 1.0
    """
    collector, prompts, _ = make(tmp_path, lambda turn, _: ("hi", "stop"), env, num_prompts=3)
    trajectories = collector.play(prompts, PARAMS, 2, "train", 1)
    assert [t.finish_reason for t in trajectories] == [
        "stop",
        "stop",
        "failed",
        "failed",
        "stop",
        "stop",
    ]
    samples = training_samples(trajectories)
    assert [sum(s.mask) for s in samples] == [3, 3, 0, 0, 3, 3]
    told = summarise(trajectories, 0)
    assert told["reward/mean"] == 1.0 and told["rollout/failed"] == pytest.approx(1 / 3)
    assert collector.player.failures.count == 2 and "boom" in str(collector.player.failures.last)


@pytest.mark.parametrize("deterministic", [True, False])
def test_groups_are_complete_ordered_and_differently_seeded(tmp_path, deterministic):
    env = "def reward_fn(messages, answer): return float(answer)"
    collector, prompts, _ = make(
        tmp_path, lambda *_: ("x", "stop"), env, num_prompts=9, deterministic=deterministic
    )
    trajectories = collector.play(prompts, PARAMS, 3, "train", 5)
    assert [t.id for t in trajectories] == list(range(27))
    assert [t.group for t in trajectories] == [i // 3 for i in range(27)]
    assert [t.reward for t in trajectories] == [float(i // 3) for i in range(27)]
    seeds = [seed for seed, _ in collector.player.engine.prompts]
    assert len(set(seeds)) == 27 and collector.player.engine.most_in_flight >= 6
    again = collector.play(prompts, PARAMS, 3, "test", 5)
    assert len(again) == 27 and not {
        seed for seed, _ in collector.player.engine.prompts[27:]
    } & set(seeds)


def test_too_many_failures_stop_the_run_with_the_reason(tmp_path):
    env = "def reward_fn(messages, answer): return 1 / 0"
    collector, prompts, _ = make(tmp_path, lambda *_: ("x", "stop"), env, num_prompts=2)
    with pytest.raises(
        RuntimeError, match=r"4 of 4 .*max_env_failures=0.5(.|\n)*ZeroDivisionError"
    ):
        collector.play(prompts, PARAMS, 2, "train", 1)


def test_messages_the_template_refuses_are_the_environments_failure(tmp_path):
    collector, prompts, tokenizer = make(tmp_path, lambda turn, _: ("=7", "stop"), TOOL_ENV, 3)
    tokenizer.chat_template = "{{ raise_exception('no tools here') if messages|length > 1 }}"
    collector.player.failures.max_fraction = 1.0
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    assert trajectory.finish_reason == "failed" and "no tools here" in str(
        collector.player.failures.last
    )


class SlowEngine(ScriptedEngine):
    """Says one letter of `script` at a time; `abort` cuts short what is being said."""

    aborted = False

    async def generate(self, prompt, params, seed):
        text, said = self.script(prompt), []
        self.asked.append((seed, list(prompt), params.max_new_tokens))
        for token in chat.tokenize(self.tokenizer, text)[: params.max_new_tokens]:
            await asyncio.sleep(0.002)
            if self.aborted:
                return SimpleNamespace(
                    tokens=said, logps=self.logps(said), finish_reason="abort", version=self.version
                )
            said.append(token)
        said.append(self.tokenizer.eos_token_id)
        return SimpleNamespace(
            tokens=said, logps=self.logps(said), finish_reason="stop", version=self.version
        )

    def logps(self, said):
        return [-0.5 - self.version] * len(said)

    def abort(self):
        self.aborted = True


def test_a_pause_keeps_tokens_and_goes_on_with_other_weights(tmp_path):
    """Group 0 says 200 letters, the others one: it is paused, then ends its turn under newer
    weights."""
    whole = "x" * 200
    env = """
        def reward_fn(messages, answer):
            return float(len(messages[-1]["content"]))
    """
    collector, prompts, tokenizer = make(tmp_path, None, env, num_prompts=4, deterministic=False)
    start = {len(prompt.tokens): prompt for prompt in prompts}  # q0 to q3 are equally long

    def script(prompt):
        length = len(prompt) - len(prompts[0].tokens)
        return whole[length:] if prompts[0].tokens == prompt[: len(prompts[0].tokens)] else "y"

    assert len(start) == 1
    collector.player.engine = engine = SlowEngine(tokenizer, script)
    engine.asked = []
    params = SamplingParams(max_new_tokens=300)
    done = collector.play(prompts[:3], params, 2, "train", 1, num_groups=2)
    assert sorted({t.group for t in done}) == [1, 2] and all(
        t.versions == [(0, 2)] and t.reward == 1 for t in done
    )
    (paused,) = collector.carried_over
    assert paused.id == 0 and not paused.is_done
    kept = [list(t.samples[0].tokens) for t in paused.trajectories]
    counts = [t.partial_tokens for t in paused.trajectories]
    assert all(0 < count < 200 for count in counts)
    collector.load_state_dict(collector.state_dict())  # as a resumed run does
    first = len(engine.asked)
    engine.version, engine.aborted = 1, False
    done = collector.play(prompts[3:], params, 2, "train", 2, num_groups=2)
    assert not collector.carried_over and len(done) == 4
    for trajectory, tokens, count in zip(done[:2], kept, counts, strict=True):
        (sample,) = trajectory.samples
        assert sample.tokens[: len(tokens)] == tokens and trajectory.reward == 200
        assert trajectory.messages[-1]["content"] == whole and trajectory.num_turns == 1
        assert trajectory.versions == [(0, count), (1, 201 - count)] and sum(sample.mask) == 201
        assert [logp for logp in sample.logps if logp] == [-0.5] * count + [-1.5] * (201 - count)
    asked = {seed: left for seed, _, left in engine.asked[first:] if seed[3] == 0}
    assert [asked[seed] for seed in sorted(asked)] == [300 - count for count in counts]
    assert len({seed for seed, *_ in engine.asked}) == len(engine.asked), (
        "two requests had the same noise"
    )
    told = summarise(done, 1)
    assert told["rollout/staleness"] == pytest.approx(sum(counts) / (2 * 201 + 2 * 2))


def test_a_pause_between_turns_and_during_the_environment(tmp_path):
    """The environment of group 0 is slow: the pause waits for its answer, and the next turn waits
    for the next call."""
    env = """
        import time
        def interact(messages):
            time.sleep(0.2 if "q0" in messages[0]["content"] else 0)
            return [{"role": "tool", "content": "t"}] if len(messages) < 4 else []
        def reward_fn(messages, answer): return float(len(messages))
    """
    collector, prompts, tokenizer = make(tmp_path, None, env, 3, num_prompts=3, deterministic=False)
    collector.player.engine = engine = SlowEngine(tokenizer, lambda prompt: "ok")
    engine.asked = []
    # the store counts by step
    done = collector.play(prompts, PARAMS, 1, "train", 11, num_groups=2)
    assert [t.group for t in done] == [1, 2] and [t.num_turns for t in done] == [2, 2]
    (trajectory,) = collector.carried_over[0].trajectories
    assert (
        trajectory.num_turns == 1
        and trajectory.partial_tokens == 0
        and len(trajectory.messages) == 3
    )
    engine.aborted = False
    (trajectory,) = collector.play([], PARAMS, 1, "train", 12, num_groups=1)
    assert trajectory.num_turns == 2 and trajectory.reward == 4


def test_groups_done_beyond_what_is_wanted_wait_for_the_next_step(tmp_path):
    env = "def reward_fn(messages, answer): return float(answer)"
    collector, prompts, tokenizer = make(
        tmp_path, lambda *_: ("x", "stop"), env, num_prompts=6, deterministic=False
    )
    collector.player.engine.abort = lambda: None
    first = collector.play(prompts, PARAMS, 2, "train", 21, num_groups=3)
    assert [t.group for t in first] == [0, 0, 1, 1, 2, 2]
    assert [group.id for group in collector.carried_over] == [3, 4, 5]
    asked = len(collector.player.engine.prompts)
    done = sum(group.is_done for group in collector.carried_over)
    second = collector.play([], PARAMS, 2, "train", 22, num_groups=3)
    assert [t.reward for t in second] == [
        3.0,
        3.0,
        4.0,
        4.0,
        5.0,
        5.0,
    ] and not collector.carried_over
    assert len(collector.player.engine.prompts) - asked == 2 * (3 - done), (
        "what was done is not played again"
    )


def test_the_collector_owns_the_cursor_and_a_resumed_one_goes_on(tmp_path):
    """Steps of 2 prompts out of 5: the same prompts in one go as by a collector resumed between."""
    env = "def reward_fn(messages, answer): return float(answer)"
    collector, _, tokenizer = make(tmp_path, lambda *_: ("x", "stop"), env)
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(5)
    ]
    prompts = Prompts(rows, tokenizer, max_length=100, shuffle=False, seed=0, batch_size=2)

    def make_collector():
        return Collector(
            collector.player,
            prompts=prompts,
            params=PARAMS,
            prompts_per_step=2,
            samples_per_prompt=3,
            num_steps=4,
            deterministic=True,
        )

    whole, resumed, rewards = make_collector(), make_collector(), []
    for step in (1, 2, 3):
        whole.next_position = (step - 1) * 2
        trajectories = whole.collect(step)
        assert [t.reward for t in resumed.collect(step)] == [t.reward for t in trajectories]
        rewards += [t.reward for t in trajectories[::3]]
        state = resumed.state_dict()
        resumed = make_collector()
        resumed.load_state_dict(state)
    assert rewards == [0, 1, 2, 3, 4, 0] and resumed.next_position == 6


def test_a_record_has_the_mean_advantage_of_all_its_sequences(tmp_path):
    """Trajectory 4 has two sequences, with one and three trained tokens."""
    trajectories = [Trajectory(4, 0, []), Trajectory(3, 0, [])]
    columns = {name: torch.zeros(3, 3) for name in ("inputs", "targets", "engine_logps", "rewards")}
    batch = Batch(
        **columns,
        mask=torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        group=torch.zeros(3),
        trajectory=torch.tensor([4, 4, 3]),
        advantages=torch.tensor([[2.0, 9, 9], [1, 1, 0], [5, 5, 5]]),
    )
    records = to_records(trajectories, batch)
    assert [(record["id"], record["advantage"]) for record in records] == [(3, 0), (4, 1)]
    assert "advantage" not in to_records(trajectories)[0]
