"""Agents from outside: `run` of the env file drives one, and its requests are the turns.

It gets an address of its own for each trajectory (endpoint.py), in protocols that people's agents
speak (dialects/). Here a request is a `ChatRequest`, whatever its protocol.
"""

import asyncio
import secrets
from collections.abc import Callable, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

from rl2.engine.base import SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import EnvError, add_parts
from rl2.env.tool_calls.find import Found
from rl2.rollout.dialects.form import (
    MALFORMED,
    MODEL,
    Call,
    ChatAnswer,
    ChatRequest,
    RequestError,
    malformed_error,
)
from rl2.rollout.endpoint import LOCAL_HOST, Endpoint
from rl2.rollout.player import Player
from rl2.rollout.trajectory import Trajectory, begin_sample

CHARACTERS_PER_TOKEN = 8  # more than texts have on average
CONNECTIONS_PER_AGENT = 16  # on average, of all that may run at a time


@dataclass
class Conversation(Trajectory):
    """Requests of an agent that extend each other, as the player plays them."""

    tools: list[dict] | None = None  # of the request
    known: list[dict] = field(default_factory=list)  # the messages as the agent has them
    last_turn: dict[str, Any] = field(default_factory=dict)  # what reward_fn may ask about it
    answer_number: int = 0  # of its last answer among those of the trajectory


@dataclass
class AgentSession:
    """The conversations of one trajectory with its agent."""

    player: Player
    trajectory: Trajectory
    params: SamplingParams
    seed: Seed
    # In the order of their last answers. A request under way has taken out what it extends.
    conversations: list[Conversation] = field(default_factory=list)
    num_requests: int = 0
    num_answers: int = 0
    # A limit of rl2 refused a request, and no request after it was answered.
    is_cut: bool = False
    # Of the engine; RequestError if it was told to abort. It ends the agent.
    failure: asyncio.Future[Exception] = field(default_factory=asyncio.Future)

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The answer to a request. RequestError says what is wrong with it."""
        try:
            base, conversation, params = self._prepare(request)
        except MALFORMED as error:
            raise malformed_error(error) from error
        seed = (*self.seed[:-1], self.num_requests)
        self.num_requests += 1
        goes_on = self.is_cut  # the agent knows of the limit
        remaining = base
        if base:
            self.conversations.remove(base)
        try:
            turn = await self.player.sample_turn(conversation, params, seed)
            if turn is None:
                raise RequestError(400, "the trajectory is not needed any more")
            conversation.last_turn = turn
            answer = self._describe(conversation, request.stop)
            self.num_answers += 1
            conversation.answer_number = self.num_answers
            remaining = conversation
            if goes_on:
                self.is_cut = False
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            if remaining:  # a request that was cancelled leaves what it extended in its place
                self.conversations.append(remaining)
                self.conversations.sort(key=attrgetter("answer_number"))
        return answer

    def _prepare(
        self, request: ChatRequest
    ) -> tuple[Conversation | None, Conversation, SamplingParams]:
        """(the conversation that the request extends, that with its messages, how to sample)."""
        player, own = self.player, self.trajectory
        if self.num_requests >= player.max_turns:
            raise self._limit_error()
        messages, tools = request.messages, request.tools
        known = [_to_known(message) for message in messages]
        base = self._find_base(known, tools)
        fits = True
        if base:
            conversation = deepcopy(base)  # the request may be cancelled
            new, num_sampled = messages[len(base.known) :], base.last_turn["num_tokens"]
            self._check_length("".join(message["content"] for message in new))
            fits = player.append_messages(conversation, num_sampled, new, max_new_tokens=1)
        else:
            if len(messages) > player.max_length:
                raise self._limit_error()
            self._check_length(player.template.render(messages, tools))
            conversation = Conversation(own.id, own.group, messages, tools=tools, source=own.source)
            begin_sample(conversation, player.template.encode_prompt(messages, tools))
        conversation.known = known
        room = player.max_length - len(conversation.samples[-1].tokens)
        if room < 1 or not fits:
            raise self._limit_error()
        most = min(self.params.max_new_tokens, room, request.max_tokens or room)
        return base, conversation, replace(self.params, max_new_tokens=most)

    def _check_length(self, text: str) -> None:
        """ValueError if a text surely has too many tokens, judged by its beginning.

        The engine waits while a text is tokenised, so one of megabytes may not be.
        """
        template, limit = self.player.template, self.player.max_length
        beginning = text[: limit * CHARACTERS_PER_TOKEN]
        if len(beginning) < len(text) and len(template.tokenize(beginning)) > limit:
            raise self._limit_error()

    def _limit_error(self) -> ValueError:
        """The limit that a request has met: of requests, or else of tokens."""
        self.is_cut = True
        player = self.player
        if self.num_requests >= player.max_turns:
            return ValueError(
                f"the trajectory has made its rollout.max_turns={player.max_turns} requests; raise "
                "the key if the agent needs more"
            )
        return ValueError(
            "the messages leave no room for an answer: a conversation may have "
            f"{player.max_length} tokens"
        )

    def _find_base(self, known: list[dict], tools: list | None) -> Conversation | None:
        """The longest conversation that the messages extend."""
        alike = [c for c in self.conversations if c.tools == tools]
        bases = [c for c in alike if c.known == known[: len(c.known)]]
        return max(bases, key=lambda c: len(c.known), default=None)

    def _describe(self, conversation: Conversation, stops: tuple[str, ...]) -> ChatAnswer:
        """The last turn as the agent gets it. It is added to the messages that are known."""
        num_sampled = conversation.last_turn["num_tokens"]
        text = conversation.messages[-1]["content"]
        found_stops = [stop for stop in stops if stop in text]
        stop = min(found_stops, key=text.index, default=None)
        if stop is not None:
            text = text.partition(stop)[0]
        tools = conversation.tools
        found = self.player.read_calls(conversation, num_sampled, tools) if tools else Found([])
        calls = tuple(
            # Templates of Mistral take ids of nine characters only.
            Call(secrets.token_hex(5)[:9], call.name, call.arguments)
            for call in found.calls
            if not call.error  # a call that cannot be read stays in the text
        )
        if calls:
            text = text[: found.start].strip()
        answer = ChatAnswer(
            id=secrets.token_hex(8),
            text=text,
            calls=calls,
            is_cut=conversation.last_turn["finish_reason"] == "length",
            stop=stop,
            num_prompt=len(conversation.samples[-1].tokens) - num_sampled,
            num_sampled=num_sampled,
        )
        conversation.known.append(_to_known(answer.message()))
        return answer

    def close(self) -> dict[str, Any]:
        """The conversations become those of the trajectory. No request may be under way.

        Returns what reward_fn may ask about the last turn of the conversation that it judges: the
        one with the most messages, and the last of those.
        """
        own = self.trajectory
        if self.conversations:
            own.messages, own.samples = [], []
        last_turn: dict[str, Any] = {}
        for part in self.conversations:
            own.samples += part.samples
            own.versions += part.versions
            own.num_turns += part.num_turns
            own.longest_turn = max(own.longest_turn, part.longest_turn)
            if len(part.messages) >= len(own.messages):
                own.messages, last_turn = part.messages, part.last_turn
        return last_turn


@dataclass
class AgentPlayer(Player):
    """Plays trajectories whose turns an agent asks for: `run` of the env file."""

    endpoint_host: str = LOCAL_HOST  # where the agents find the model

    def __post_init__(self) -> None:
        super().__post_init__()
        num_agents = sum(env.concurrency for env in self.envs.values())
        max_connections = CONNECTIONS_PER_AGENT * num_agents
        self.endpoint = Endpoint(self.engine.loop, self.endpoint_host, max_connections)

    async def _play_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed, key: Hashable
    ) -> dict[str, Any] | None:
        """Runs the agent, which takes all turns. None if the engine was told to abort."""
        env = self.env_of(trajectory)
        session = AgentSession(self, trajectory, params, seed)
        address = self.endpoint.open(session.complete, params)
        inputs = {"base_url": address.base_url, "model": MODEL, "api_key": address.api_key}
        agent = asyncio.ensure_future(env.run_agent(trajectory.row, key, inputs))
        session.failure.add_done_callback(lambda _: agent.cancel())
        try:
            if self.may_pause and not await self.ended_or_paused(agent):
                agent.cancel()  # the trajectory is not needed any more
            [result] = await asyncio.gather(agent, return_exceptions=True)
        finally:
            await self.endpoint.close(address)
        last_turn = session.close()
        failure = session.failure.result() if session.failure.done() else None
        if isinstance(failure, RequestError):
            return None
        if failure:
            raise failure
        if agent.cancelled():
            return None
        if isinstance(result, dict):
            add_parts(trajectory.rewards, result)
        elif not isinstance(result, EnvError):
            raise result
        elif not (session.is_cut and env.judges):
            # Errors of clients have the URL.
            raise EnvError(address.hide(str(result)), address.hide(result.kind)) from None
        if not last_turn:
            raise EnvError("run asked the model for nothing: no request was answered")
        if not (trajectory.rewards or env.judges):
            raise EnvError("run returned no reward, and the env file has no reward_fn")
        is_cut = session.is_cut and not isinstance(result, dict)
        return {**last_turn, "finish_reason": "length"} if is_cut else last_turn


def player_class(envs: Mapping[str, Env], endpoint_host: str = LOCAL_HOST) -> Callable[..., Player]:
    """Returns the class of players, by whether an agent takes the turns of all environments.

    Agents find the model at a port of `endpoint_host`.
    """
    has_agent = all(env.spec.run is not None for env in envs.values())
    return partial(AgentPlayer, endpoint_host=endpoint_host) if has_agent else Player


def _to_known(message: dict[str, Any]) -> dict[str, Any]:
    """A message for comparison: clients may strip what they send back."""
    return {**message, "content": message["content"].strip()}
