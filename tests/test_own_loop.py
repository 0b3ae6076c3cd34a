"""A loop of one's own: `play` of an env file, and the function `generate` that it gets."""

import pytest
from common import pack_rows
from env_helpers import make_agent, play, trained_text
from scripted import PARAMS, make_row, process_group  # noqa: F401

from rl2.config.schema import RolloutConfig
from rl2.env.load import load_env
from rl2.ppo_inputs import read_envs


def texts(player, trajectory):
    """The trained text of each sequence."""
    return [trained_text(player, sample) for sample in trajectory.samples]


def test_token_ids_continue_a_sequence_or_begin_one(tmp_path):
    """All sampled tokens are trained once, those that the loop adds are not.

    Messages go on from sequences of messages only.
    """
    env = """
        async def play(row, generate):
            prompt = [3, 40, 41]
            first = await generate(prompt)
            assert first.prompt_ids == prompt and first.text == "ab"
            assert len(first.token_ids) == len(first.logprobs) == 3 and first.token_ids[-1] == 2
            assert [round(-10 * logprob) for logprob in first.logprobs] == [1, 2, 3]
            second = await generate(prompt + first.token_ids + [50, 51])
            assert second.prompt_ids == prompt + first.token_ids + [50, 51]
            again = await generate(second.prompt_ids + second.token_ids)  # nothing in between
            await generate(prompt + [60])
            by_messages = await generate([user("a")])
            more = await generate(by_messages.prompt_ids + by_messages.token_ids + [50])
            await generate([user("a"), by_messages.message, more.message, user("b")])
            return 1.0
    """
    (trajectory,), player = play(tmp_path, ["ab", *"cdefgh"], env, max_turns=7)
    long, short, *of_messages = texts(player, trajectory)
    assert long == "ab<|im_end|>c<|im_end|>d<|im_end|>" and short == "e<|im_end|>"
    assert of_messages == ["f<|im_end|>g<|im_end|>", "h<|im_end|>"]
    long, short, *_ = trajectory.samples
    assert list(long.mask) == [0] * 3 + [1] * 3 + [0] * 2 + [1] * 4
    assert list(short.tokens[:4]) == [3, 40, 41, 60] and list(short.mask) == [0] * 4 + [1] * 2
    assert trajectory.rewards == {"play": 1.0} and trajectory.num_turns == 7


@pytest.mark.parametrize(
    "call, reason",
    [
        ("row['messages'], max_new_tokens=0", "max_new_tokens=0"),
        ("row['messages'], stop='never'", "train_sampling_params.stop"),
        ("[]", "messages"),
        ("'a text'", "expected messages or token ids"),
        ("[1, 1000]", "ids 1 to 1000"),
        ("[1], tools=[{}]", "tools"),
        ("[{'role': 'assistant', 'content': 'a'}]", "assistant"),
    ],
)
def test_what_is_refused_has_a_reason_and_the_loop_may_go_on(tmp_path, call, reason):
    env = f"""
        async def play(row, generate):
            try:
                await generate({call})
            except ValueError as error:
                assert {reason!r} in str(error), error
            else:
                raise AssertionError("not refused")
            await generate(row["messages"])
            return 1.0
    """
    (trajectory,), player = play(tmp_path, ["x"], env)
    assert trajectory.finish_reason == "stop", player.failures.last
    assert texts(player, trajectory) == ["x<|im_end|>"]


def test_a_reply_that_nobody_awaits_ends_with_the_loop(tmp_path):
    env = """
        import asyncio
        tasks = []
        async def play(row, generate):
            await generate(row["messages"])
            tasks.append(asyncio.ensure_future(generate([user("late")])))
            await asyncio.sleep(0.05)
            return 1.0
    """
    collector, prompts, player = make_agent(tmp_path, ["1", "2"], env)
    player.engine.seconds = lambda seed: 1000.0 if seed[-1] else 0.001
    (trajectory,) = collector.play(prompts, PARAMS, 1, "train", 1)
    player.envs[""].close()
    assert texts(player, trajectory) == ["1<|im_end|>"] and player.engine.num_running == 0


@pytest.mark.parametrize(
    "body, reason",
    [
        ("return 1.0", "asked the model for nothing"),
        ("await generate(row['messages'])", "no reward"),
        ("await generate(row['messages']); raise KeyError('of mine')", "of mine"),
    ],
)
def test_a_loop_without_a_result_fails(tmp_path, body, reason):
    env = f"""
        async def play(row, generate):
            {body}
    """
    (trajectory,), player = play(tmp_path, ["1"], env)
    assert trajectory.finish_reason == "failed" and reason in str(player.failures.last)


def test_it_cannot_run_in_another_process(tmp_path):
    (tmp_path / "env.py").write_text("async def play(row, generate): ...")
    with pytest.raises(ValueError, match="rollout.env_isolation=process"):
        load_env(str(tmp_path / "env.py"), isolation="process")


def test_it_may_stand_beside_agents_and_not_beside_other_environments(tmp_path):
    files = {
        "play": "async def play(row, generate): ...",
        "run": "def run(base_url): ...",
        "plain": "def reward_fn(messages): return 1.0",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    for other, num_problems in (("run", 0), ("plain", 1)):
        paths = {name: str(tmp_path / f"{name}.py") for name in ("play", other)}
        rows = {f"data.path.{name}": pack_rows([make_row(0)]) for name in paths}
        problems = []
        read_envs(RolloutConfig(env_path=paths, max_turns=2), rows, problems)
        of_kinds = [problem for problem in problems if problem.startswith("rollout.env_path:")]
        assert len(of_kinds) == num_problems, problems
