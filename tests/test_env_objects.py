"""Environments with state: what functions may ask for, objects with tools, rewards of turns."""

import asyncio
import sys

import pytest
from common import pack_rows, run
from env_helpers import call_text, load_text, play, trained_text
from scripted import make_row, process_group  # noqa: F401

from rl2.env.load import load_env, play_reply, preflight


def rewards_by_text(player, sample):
    """{the text up to a token with a reward: the reward}."""
    places = [i for i, reward in enumerate(sample.rewards) if reward]
    return {
        player.templates[""].decode(sample.tokens[: i + 1])[-12:]: round(sample.rewards[i], 6)
        for i in places
    }


# How the functions of an env are called: rollout.env_isolation, and what they begin with.
CALLS = [("thread", ""), ("thread", "async "), ("process", "async ")]
INPUTS_ENV = """
    async def interact(messages, state, turn, finish_reason, num_tokens, max_new_tokens):
        state.setdefault("turns", []).append([turn, finish_reason, num_tokens, max_new_tokens])
        return [{"role": "user", "content": "go on"}] if turn < 3 else []
    async def reward_fn(messages, answer, state, num_tokens, turn=None):
        assert [t[:2] for t in state["turns"]] == [[1, "stop"], [2, "stop"]], state
        return {"tokens": num_tokens, "turn": turn, "seen": sum(t[2] for t in state["turns"])}
"""


@pytest.mark.parametrize("isolation, prefix", CALLS)
def test_functions_ask_for_the_state_and_the_last_turn(tmp_path, isolation, prefix):
    env = INPUTS_ENV.replace("async ", prefix)
    script = ["a", "bc", "def"]
    trajectories, player = play(tmp_path, script, env, 2, max_turns=3, isolation=isolation)
    for trajectory in trajectories:  # the end of turn is a token
        assert trajectory.rewards == {"tokens": 4.0, "turn": 3.0, "seen": 5.0}
    assert not player.envs[""]._sessions._by_key and not player.envs[""].open_keys


def test_a_column_comes_before_an_input_of_the_same_name(tmp_path):
    env = "def reward_fn(messages, turn, state, **columns): return len(turn + state + str(columns))"
    row = {**make_row(0), "turn": "left", "state": "Ohio"}
    env = load_text(tmp_path, env)
    given = {"turn": 3, "num_tokens": 5}  # num_tokens is none of the columns
    parts = asyncio.run(env.score(row["messages"], row, "key", given))
    assert parts == {"reward": len("leftOhio" + str({"answer": "0"}))}


SAME_PARTS = """
    def interact(messages, turn):
        return {"messages": [{"role": "user", "content": "go on"}], "reward": 0.25,
                "done": turn == 2}
    def reward_fn(messages): return {"right": 1.0, "turns": 2.0}
"""
SAME_METHOD = """
    class make_env:
        def step(self, message, turn): return {"reward": 0.25, "done": True}
        def reward(self): return {"right": 0.5}
        def get_reward(self): return 1.0
    def reward_fn(messages): return {"right": 1.0, "environment": 2.0}
"""


METHOD_PARTS = {"turns": 0.25, "right": 1.5, "environment": 3.0}


@pytest.mark.parametrize(
    "env, rewards, on_last_token, after_one_turn",
    [
        (SAME_PARTS, {"turns": 2.5, "right": 1.0}, 3.25, {"turns": 2.25, "right": 1.0}),
        (SAME_METHOD, METHOD_PARTS, 4.75, METHOD_PARTS),
    ],
)
def test_reward_parts_of_one_name_are_summed(tmp_path, env, rewards, on_last_token, after_one_turn):
    (trajectory,), player = play(tmp_path, ["a1", "a2"], env, max_turns=5)
    assert trajectory.rewards == rewards and trajectory.reward == sum(rewards.values())
    *_, last = rewards_by_text(player, trajectory.samples[0]).values()
    assert last == on_last_token
    env = load_env(str(tmp_path / "env.py"))
    assert asyncio.run(play_reply(env, 5, make_row(0), "a1", "key")) == after_one_turn


GAME = """
    closed = []
    class Game:
        '''A number to guess.'''
        def reset(self, answer, **columns):
            self.number, self.log = int(answer) + 7, []
            return f" It is below {self.number + 5}."
        def step(self, action):
            self.log.append(action)
            if action == str(self.number):
                return "right", 1.0, True, False, {}
            return ("higher" if int(action) < self.number else "lower"), -0.1, False, False, {}
        def reward(self):
            return {"guesses": len(self.log)}
        def close(self):
            closed.append(self.number)
    make_env = Game
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_object_with_reset_and_step_as_of_gymnasium(tmp_path, isolation):
    script = ["5", "9", "7", "never"]
    (trajectory,), player = play(tmp_path, script, GAME, isolation=isolation)
    assert trajectory.finish_reason == "stop" and trajectory.num_turns == 3
    assert trajectory.rewards == {"turns": pytest.approx(0.8), "guesses": 3.0}
    texts = " | ".join(message["content"] for message in trajectory.messages)
    assert texts == "q0 It is below 12. | 5 | higher | 9 | lower | 7 | right"
    assert trajectory.row["messages"] == make_row(0)["messages"], "the row is changed"
    (sample,) = trajectory.samples
    assert "q0 It is below 12.<|im_end|>" in player.templates[""].decode(sample.tokens)
    assert rewards_by_text(player, sample) == {
        "\n5<|im_end|>": -0.1,
        "\n9<|im_end|>": -0.1,
        "\n7<|im_end|>": 4.0,  # 1 of the turn, and 3 of `reward`
    }
    assert trained_text(player, sample) == "5<|im_end|>9<|im_end|>7<|im_end|>"
    # The message that came with the end is in the transcript and not in the tokens.
    assert "right" not in player.templates[""].decode(sample.tokens)
    if isolation == "thread":
        assert sys.modules[player.envs[""].spec.make_env.__module__].closed == [7]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_an_object_that_fails_costs_its_trajectory_and_is_closed(tmp_path, isolation):
    """A failure of `close` alone costs nothing: the trajectory has its reward."""
    log = tmp_path / "log"
    env = f"""
        class make_env:
            def reset(self, answer):
                self.answer = answer
                self.check(1)
            def step(self, message):
                self.check(2)
            def reward(self):
                self.check(3)
                return 1.0
            def close(self):
                open({str(log)!r}, "a").write(self.answer)
                self.check(4)
            def check(self, number):
                if self.answer == str(number):
                    raise KeyError("broken")
    """
    trajectories, player = play(tmp_path, ["x"] * 4, env, num_prompts=6, isolation=isolation)
    reasons = [t.finish_reason for t in trajectories]
    assert reasons == ["stop", "failed", "failed", "failed", "stop", "stop"]
    assert sorted(log.read_text()) == [*"012345"]
    assert player.failures.count == 4 and "broken" in str(player.failures.last)


def test_objects_are_closed_when_the_engine_fails_and_the_program_ends(tmp_path):
    (tmp_path / "env.py").write_text(
        "class make_env:\n    def step(self, message): pass\n"
        "    async def close(self): print('closed', flush=True)\n"
    )
    code = (
        "import asyncio, sys\nfrom rl2.env.load import load_env\nenv = load_env(sys.argv[1], 5)\n"
        "asyncio.run(env.begin({'messages': [{'role': 'user', 'content': 'x'}]}, 0))\n"
        "raise RuntimeError('of the engine')"
    )
    done = run("-c", code, tmp_path / "env.py", check=False)
    assert done.returncode == 1 and "of the engine" in done.stderr
    assert done.stdout == "closed\n" and "shutdown" not in done.stderr


# As the documentation of TRL's environment_factory shows them: state on the object, results as
# text, an exception where a call is not allowed.
TRL_ENV = '''
    class CounterEnv:
        def __init__(self):
            self.counter = 0

        def reset(self, **kwargs) -> str | None:
            self.counter = 0
            self.done = False
            return None

        def increment(self, step: int) -> int:
            """
            Increment the internal counter.

            Args:
                step: Value to add to the counter.

            Returns:
                The updated counter value.
            """
            if self.done:
                raise ValueError("Game over.")
            self.counter += step
            self.done = self.counter > 5
            return self.counter

    def reward_fn(environment):
        return environment.counter

    make_env = CounterEnv
'''


@pytest.mark.parametrize("isolation, prefix", CALLS)
def test_a_class_for_trls_environment_factory_runs_unchanged(tmp_path, isolation, prefix):
    env = TRL_ENV.replace("def increment", f"{prefix}def increment")
    script = [
        "I add. " + call_text("increment", step=2) + call_text("increment", step=4),
        call_text("increment", step=1),
        "It is 6.",
    ]
    trajectories, player = play(tmp_path, script, env, num_samples=2, isolation=isolation)
    for trajectory in trajectories:
        assert trajectory.rewards == {"reward": 6.0} and trajectory.finish_reason == "stop"
        results = [m for m in trajectory.messages if m["role"] == "tool"]
        assert [m["content"] for m in results] == ["2", "6", "error: ValueError: Game over."]
        assert {m["name"] for m in results} == {"increment"}
        (sample,) = trajectory.samples
        text = player.templates[""].decode(sample.tokens)
        assert text.startswith("<tool>increment</tool>") and text.count("<|im_start|>tool") == 3
        assert trained_text(player, sample) == "<|im_end|>".join([*script, ""])
        assert list(sample.rewards).count(0.0) == len(sample.rewards) - 1


TOOLS = '''
    class make_env:
        def __init__(self):
            self.notes = {}

        def note(self, key: str, value: float = 1.0) -> dict:
            """Keeps a value.

            Args:
                key: its name
                value: the number to keep
            """
            self.notes[key] = value
            return self.notes

        def fail(self):
            """Always fails."""
            raise SystemExit(3)

        def helper(self, x):
            return x

        def reward(self):
            return float(len(self.notes))
'''


def test_bad_calls_are_answered_with_what_is_wrong(tmp_path):
    bad = [
        (call_text("helper", x=1), "error: no tool 'helper'; there are fail, note"),
        (call_text("close"), "error: no tool 'close'; there are fail, note"),
        (call_text("note"), "error: note: missing a required argument: 'key'"),
        (call_text("note", key="k", value=2), '{"k": 2}'),
        ('<tool_call>{"name": 5}</tool_call>', "error: no tool '5'; there are fail, note"),
        # Half of a character, which no tokenizer takes.
        ('<tool_call>{"name": "\\ud800"}</tool_call>', "error: no tool '\ufffd'; there are"),
        (call_text("note", key="\ud800"), '{"k": 2, "\ufffd": 1.0}'),
        ("<tool_call>{oops", "error: the call cannot be read: "),
    ]
    text = "".join(call for call, _ in bad)
    (trajectory,), _ = play(tmp_path, [text, "done"], TOOLS, max_length=5000)
    results = [m["content"] for m in trajectory.messages if m["role"] == "tool"]
    for result, (_, expected) in zip(results, bad, strict=True):
        assert result.startswith(expected)
    assert trajectory.rewards == {"environment": 2.0} and trajectory.num_turns == 2
    ids = [m["tool_call_id"] for m in trajectory.messages if m["role"] == "tool"]
    assert len({*ids}) == 8 and {len(i) for i in ids} == {9}


def test_a_tool_that_exits_costs_the_trajectory(tmp_path):
    (trajectory,), player = play(tmp_path, [call_text("fail"), "done"], TOOLS)
    assert trajectory.finish_reason == "failed" and "SystemExit" in str(player.failures.last)


GROUP_ENV = """
    def reward_fn(messages, answer):
        if messages[-1]["content"] == "bb":
            raise KeyError("bb")
        return 0.5
    def group_reward_fn(trajectories):
        lengths = [len(t["messages"][-1]["content"]) for t in trajectories]
        assert [t["rewards"] for t in trajectories] == [{"reward": 0.5}] * len(trajectories)
        assert {t["row"]["answer"] for t in trajectories} == {"0"}
        return [float(length == max(lengths)) for length in lengths]
"""


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_group_is_judged_at_once_when_all_of_it_are_done(tmp_path, isolation):
    def script(turn, seed):
        return ["a", "bb", "ccc", "dd"][seed[-1 - 1]], "stop"

    trajectories, _ = play(tmp_path, script, GROUP_ENV, 4, max_turns=1, isolation=isolation)
    assert [t.finish_reason for t in trajectories] == ["stop", "failed", "stop", "stop"]
    parts = [t.rewards for t in trajectories if t.finish_reason == "stop"]
    assert [p["group"] for p in parts] == [0.0, 1.0, 0.0]
    assert [sum(t.samples[0].rewards) for t in trajectories] == [0.5, 0.0, 1.5, 0.5]


@pytest.mark.parametrize("result", ["[1.0]", "1.0", "[1.0, None]", "1 / 0"])
def test_a_judge_of_groups_that_fails_costs_the_group(tmp_path, result):
    env = f"def reward_fn(messages): return 0\ndef group_reward_fn(trajectories): return {result}"
    trajectories, player = play(tmp_path, ["x"], env, max_turns=1, num_samples=2)
    assert [t.finish_reason for t in trajectories] == ["failed"] * 2
    assert "group_reward_fn" in str(player.failures.last)


def test_preflight_plays_objects_and_names_what_they_lack(tmp_path):
    env = load_text(tmp_path, GAME)
    with pytest.raises(ValueError, match=r"(?s)environment.step raised.*invalid literal"):
        preflight(env, {"data.path": pack_rows([make_row(0)])}, 3)  # "" is no number
    row = {"messages": make_row(0)["messages"]}
    with pytest.raises(ValueError, match="environment.reset needs column 'answer'"):
        preflight(env, {"data.path": pack_rows([row])}, 3)
    with pytest.raises(ValueError, match="make_env, but some rows of data.path are plain strings"):
        preflight(env, {"data.path": pack_rows([{"messages": "x", "answer": "1"}])}, 1)
    assert not env.open_keys
    env.close()


def test_a_prompt_that_does_not_fit_with_its_tools_is_a_failure(tmp_path):
    (trajectory,), player = play(tmp_path, ["x"], TOOLS, max_length=40)
    assert trajectory.finish_reason == "failed"
    assert "the prompt with the tools and the text of reset has" in str(player.failures.last)
