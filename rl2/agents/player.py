"""Agents: `run` or `play` of the env file takes the turns, by asking the model for each.

`run` gets an address of its own for each trajectory, in protocols that people's agents speak
(endpoint.py). `play` gets a function (generate.py).
"""

import asyncio
from dataclasses import dataclass
from typing import Any

from rl2.agents.endpoint import LOCAL_HOST, Address, Endpoint
from rl2.agents.form import MODEL, RequestError
from rl2.agents.generate import make_generate
from rl2.agents.session import AgentSession
from rl2.engine.base import SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import EnvError, LateError, add_parts
from rl2.rollout.player import Player
from rl2.rollout.trajectory import Trajectory, TurnInfo


@dataclass
class AgentPlayer(Player):
    """Plays trajectories whose turns an agent asks for: `run` or `play` of the env file."""

    endpoint_host: str = LOCAL_HOST  # where `run` finds the model

    def __post_init__(self) -> None:
        super().__post_init__()
        self.endpoint: Endpoint | None = None
        if any(env.spec.run for env in self.envs.values()):
            self.endpoint = Endpoint(self.engine.loop, self.endpoint_host)

    async def _play_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> TurnInfo | None:
        """Runs the agent, which takes all turns. None if the engine was told to abort."""
        env = self.env_of(trajectory)
        session = AgentSession(self, trajectory, params, seed)
        address = None
        if self.endpoint and env.spec.run:
            address = self.endpoint.open(session.complete, params)
        try:
            result = await self._run_agent(env, session, address)
        finally:
            await session.end_requests()
            if self.endpoint and address:
                self.endpoint.close(address)
        last_turn = session.close()
        failure = session.failure.result() if session.failure.done() else None
        if isinstance(failure, RequestError):
            return None
        if failure:
            raise failure
        is_cut = False
        if isinstance(result, dict):
            add_parts(trajectory.rewards, result)
        elif isinstance(result, EnvError) and session.is_cut and env.spec.judges:
            is_cut = True  # a limit of rl2 has ended the agent, and reward_fn judges its messages
        else:
            raise _without_secrets(result, session, address) from None
        if not last_turn:
            raise EnvError(_describe_silence(env, address))
        if not (trajectory.rewards or env.spec.judges):
            text = "returned no reward, and the env file has no reward_fn"
            raise EnvError(f"{env.spec.agent} {text}")
        return last_turn | {"finish_reason": "length"} if is_cut else last_turn

    async def _run_agent(
        self, env: Env, session: AgentSession, address: Address | None
    ) -> dict[str, float] | BaseException:
        """Runs the agent until it ends. Returns its rewards, or what it has raised."""
        inputs: dict[str, Any]
        if address:
            inputs = {"base_url": address.base_url, "model": MODEL, "api_key": address.api_key}
        else:
            inputs = {"generate": make_generate(session, self.engine.loop)}
        trajectory = session.trajectory
        agent = asyncio.ensure_future(env.run_agent(trajectory.row, trajectory.key, inputs))
        session.failure.add_done_callback(lambda _: agent.cancel())
        [result] = await asyncio.gather(agent, return_exceptions=True)
        return result


def _without_secrets(
    error: BaseException, session: AgentSession, address: Address | None
) -> BaseException:
    """The error of an agent, as logs may show it: errors of clients have the URL."""
    if not isinstance(error, EnvError):
        return error
    hide = address.hide if address else str
    reason = hide(str(error))
    if isinstance(error, LateError):
        reason += f"; until then the model has answered it {session.num_answers} times"
    return EnvError(reason, hide(error.kind))


def _describe_silence(env: Env, address: Address | None) -> str:
    """Why there is no answer of the model in the trajectory of an agent that has ended well."""
    name = env.spec.agent
    if address is None:
        return f"{name} asked the model for nothing: it must await generate(...)"
    if address.refusal:
        refusal = address.hide(address.refusal)
        return f"{name} got no answer of the model, which refused its last request: {refusal}"
    return f"{name} asked the model for nothing: no request has come to its base_url"
