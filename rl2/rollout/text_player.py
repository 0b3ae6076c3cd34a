"""Env files of RL2 upstream: `async def step(state, action, extra_info)`, which sees texts.

`state` is the prompt of a turn, as the chat template writes it, and `action` the model's answer.
`rl2.env.contract.TextTurn` has what it returns.
"""

from rl2.engine.base import SamplingParams, Seed
from rl2.env.contract import EnvError
from rl2.rollout.player import Player
from rl2.rollout.trajectory import Trajectory, TurnInfo, append_tokens, begin_sample


class TextPlayer(Player):
    """Plays trajectories by `step` of the env file, and those of other env files as `Player`."""

    async def _play_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> TurnInfo | None:
        """Plays all turns, also one that a limit has cut. None if the engine was told to abort.

        What `next_state` adds to state and action is appended as tokens. If it does not begin with
        them, it begins a new training sequence.
        """
        env, template, row = self.env_of(trajectory), self.template_of(trajectory), trajectory.row
        if env.spec.step is None:
            return await super()._play_turn(trajectory, params, seed)
        state = template.render(row["messages"], row.get("tools"))
        extra_info = row.get("extra_info", {})
        trajectory.rewards = {"turns": 0.0, "score": 0.0}
        while True:
            turn = await self.sample_turn(trajectory, params, (*seed[:-1], trajectory.num_turns))
            if turn is None or self.is_pausing:
                return None
            action = trajectory.messages[-1]["content"]
            answer = await env.step(state, action, extra_info, trajectory.key)
            self._add_turn_reward(trajectory, answer.reward)
            trajectory.rewards["score"] += answer.score
            if answer.done or trajectory.num_turns >= self.max_turns:
                return turn
            if not answer.next_state:
                found = repr(answer.next_state)
                raise EnvError(f"step: expected a text next_state, as done is false, got {found}")
            sample = trajectory.samples[-1]
            is_continued = answer.next_state.startswith(state + action)
            text = answer.next_state.removeprefix(state + action)
            tokens = template.tokenize(text)
            length = len(tokens) + is_continued * len(sample.tokens)
            if length + params.max_new_tokens > self.max_length:
                return turn | {"finish_reason": "length"}
            trajectory.messages.append({"role": "user", "content": text})  # for the records
            if is_continued:
                append_tokens(sample, tokens)
            else:
                begin_sample(trajectory, tokens)
            state, extra_info = answer.next_state, answer.extra_info

    async def _score(self, trajectory: Trajectory, last_turn: TurnInfo) -> None:
        """The score is logged and not trained."""
        await super()._score(trajectory, last_turn)
        if self.env_of(trajectory).spec.step is not None:
            trajectory.weights = {"score": 0.0} | trajectory.weights
