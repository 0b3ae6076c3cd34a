r"""Environments of OpenEnv (github.com/huggingface/OpenEnv) on a server, for rollout.max_turns > 1.

Needs the package openenv and a server of an environment, which may run in a container or on another
machine: RL2_OPENENV_URL is its address, http://localhost:8000 by default. It must admit as many
sessions at a time as trajectories are played: max_concurrent_envs of its create_app.

Row: {"messages": [...], "field": "message", "reset": {"seed": 3}}. What the server says at the
start is added to the last message of the prompt. Each turn of the model is an action whose `field`
is the text of the turn; `fields` may have the others. The reward of each action is that of the
server. `reset` are the arguments of its reset; with the same ones all trajectories of a group start
alike. Servers of tools (MCP) are not supported: their tools are known only when they run.

One step on a CPU, with a small model in the folder MODEL, beside a server that
python examples/rows/backwards_server.py starts:

    python -m rl2.trainer.ppo rollout.env_path=openenv_server actor.model_name=MODEL \
        data.path=examples/rows/openenv_server.jsonl trainer.max_steps=1 \
        data.prompts_per_rollout=3 data.responses_per_prompt=2 \
        rollout.train_sampling_params.max_new_tokens=16 rollout.max_turns=3
"""

import json
import os

URL = os.environ.get("RL2_OPENENV_URL", "http://localhost:8000")


class make_env:
    """A session on the server."""

    async def reset(self, field, reset, fields=None):
        from openenv.core.generic_client import GenericEnvClient

        self.field, self.fields = field, fields or {}
        self.client = GenericEnvClient(base_url=URL)
        await self.client.connect()
        result = await self.client.reset(**without_none(reset))
        return f"\n{describe(result.observation)}"

    async def step(self, action):
        result = await self.client.step({**without_none(self.fields), self.field: action})
        return describe(result.observation), result.reward or 0.0, result.done, False, {}

    async def close(self):
        if hasattr(self, "client"):
            await self.client.close()


def describe(observation):
    """An observation as the model sees it: its only text, or else its fields as JSON."""
    shown = {
        name: value
        for name, value in observation.items()
        if name not in ("done", "reward", "metadata")
    }
    values = list(shown.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown, ensure_ascii=False)


def without_none(values):
    """Data sets in columns give each row the keys of all, as None where it has none."""
    return {name: value for name, value in values.items() if value is not None}
