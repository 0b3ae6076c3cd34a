"""A taskset of verifiers with an environment of several turns, for envs/verifiers_tasks.py."""

import verifiers.v1 as vf

__all__ = ["HiddenNumberTaskset", "HiddenNumberEnv"]


class HiddenNumberData(vf.TaskData):
    number: int


class HiddenNumberTask(vf.Task[HiddenNumberData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.25)
    async def brief(self, trace) -> float:
        """1.0 if all guesses are numbers and nothing else."""
        return float(all(m.content.isdecimal() for m in trace.assistant_messages))


class HiddenNumberConfig(vf.TasksetConfig):
    largest: int = 9


class HiddenNumberTaskset(vf.Taskset[HiddenNumberTask, HiddenNumberConfig]):
    def load(self):
        largest = self.config.largest
        for number in range(1, largest + 1):
            data = HiddenNumberData(
                name=f"number {number}",
                system_prompt="Reply with a number and nothing else.",
                prompt=f"Find the number from 1 to {largest}.",
                number=number,
            )
            yield HiddenNumberTask(data, self.config.task)


class HiddenNumberEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class HiddenNumberEnv(vf.Env[HiddenNumberEnvConfig]):
    async def run(self, task, agents):
        found = False
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and not found:
                guess = segment.last_reply
                found = guess == str(task.data.number)
                if not found:
                    is_low = guess.isdecimal() and int(guess) < task.data.number
                    segment = await interaction.turn("higher" if is_low else "lower")
        interaction.trace.record_reward("found", float(found))
