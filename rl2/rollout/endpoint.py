"""Agents from outside: the engine behind the protocol of OpenAI's chat completions.

`run` of the env file is an agent. It gets an address of its own for each trajectory, and its
requests there are the turns of the trajectory.
"""

import asyncio
import json
import os
import secrets
import warnings
from collections.abc import Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from rl2.data.messages import check_ends_before_reply, check_messages, check_text
from rl2.engine.base import SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import API_KEY, EnvError, add_parts
from rl2.env.results import MAX_NESTING, check_nesting
from rl2.env.tool_calls.find import Found
from rl2.rollout.http import MAX_BODY_BYTES, Connection, Request
from rl2.rollout.player import Player
from rl2.rollout.trajectory import Trajectory, begin_sample

HOST = "127.0.0.1"
MODEL = "rl2"  # the name of the policy
LIMITS = ("max_tokens", "max_completion_tokens")
# Fields of a request that have an effect, and those that may have no other value than this.
USED = ("model", "messages", "tools", "stop", *LIMITS)
FIXED = {"n": 1, "stream": False, "logprobs": False, "response_format": {"type": "text"}}
CHARACTERS_PER_TOKEN = 8  # more than texts have on average
# Of a request whose fields have other types than the protocol says, and of the chat template.
MALFORMED = (EnvError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class RequestError(Exception):
    """Refuses a request, with a status of HTTP and the reason in words."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


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
    agent: asyncio.Future  # is done when `run` has ended
    # In the order of their last answers. A request under way has taken out what it extends.
    conversations: list[Conversation] = field(default_factory=list)
    num_requests: int = 0
    num_answers: int = 0
    answers: set[asyncio.Task | None] = field(default_factory=set)  # under way
    # A limit of rl2 refused a request, and no request after it was answered.
    is_cut: bool = False
    failure: Exception | None = None  # of the engine; RequestError if it was told to abort

    async def complete(self, body: bytes) -> dict[str, Any]:
        """The answer to a request for a chat completion. RequestError says what is wrong."""
        try:
            request = _read_request(body, self.params)
            base, conversation, params = self._prepare(request)
        except MALFORMED as error:
            raise RequestError(400, f"the request cannot be answered: {error}") from error
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
            answer = self._describe(conversation, request["stop"])
            self.num_answers += 1
            conversation.answer_number = self.num_answers
            remaining = conversation
            if goes_on:
                self.is_cut = False
        except Exception as error:
            self.failure = error
            self.agent.cancel()
            raise
        finally:
            if remaining:  # a request that was cancelled leaves what it extended in its place
                self.conversations.append(remaining)
                self.conversations.sort(key=attrgetter("answer_number"))
        return answer

    def _prepare(
        self, request: dict[str, Any]
    ) -> tuple[Conversation | None, Conversation, SamplingParams]:
        """(the conversation that the request extends, that with its messages, how to sample)."""
        player, own = self.player, self.trajectory
        if self.num_requests >= player.max_turns:
            raise self._limit_error()
        messages = [_to_message(message) for message in request["messages"]]
        tools = request.get("tools") or None
        for tool in tools or []:
            check_text(tool["function"]["name"], "name of a tool")
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
        limits = filter(None, map(request.get, LIMITS))
        most = min(self.params.max_new_tokens, room, *limits)
        if type(most) is not int or most < 1:
            raise ValueError(f"max_tokens={most}, expected a whole number above 0")
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

    def _describe(self, conversation: Conversation, stops: list[str]) -> dict[str, Any]:
        """The last turn as the protocol has it. Its message is added to those that are known."""
        num_sampled = conversation.last_turn["num_tokens"]
        reason = conversation.last_turn["finish_reason"]
        content = conversation.messages[-1]["content"]
        for stop in stops:
            content = content.partition(stop)[0]
        message = {"role": "assistant", "content": content}
        tools = conversation.tools
        found = self.player.read_calls(conversation, num_sampled, tools) if tools else Found([])
        tool_calls = []
        for call in found.calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            if not call.error:  # a call that cannot be read stays in the text
                # Templates of Mistral take ids of nine characters only.
                call_id = secrets.token_hex(5)[:9]
                tool_calls.append({"id": call_id, "type": "function", "function": function})
        if tool_calls:
            reason = "tool_calls"
            message |= {"content": content[: found.start].strip(), "tool_calls": tool_calls}
        conversation.known.append(_to_known(_to_message(deepcopy(message))))
        num_tokens = len(conversation.samples[-1].tokens)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": num_tokens - num_sampled,
                "completion_tokens": num_sampled,
                "total_tokens": num_tokens,
            },
        }

    async def close(self) -> dict[str, Any]:
        """Ends the requests under way. The conversations become those of the trajectory.

        Returns what reward_fn may ask about the last turn of the conversation that it judges: the
        one with the most messages, and the last of those.
        """
        tasks = [task for task in self.answers if task and task.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
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

    sessions: dict[str, AgentSession] = field(
        default_factory=dict
    )  # by the secret in their address

    def __post_init__(self) -> None:
        super().__post_init__()
        self.api_key = os.environ[API_KEY]
        loop = self.engine.loop
        serving = loop.create_server(lambda: Connection(self.answer), HOST, 0)
        self.port = loop.run_until_complete(serving).sockets[0].getsockname()[1]

    async def _play_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed, key: Hashable
    ) -> dict[str, Any] | None:
        """Runs the agent, which takes all turns. None if the engine was told to abort."""
        secret = secrets.token_urlsafe()
        url = f"http://{HOST}:{self.port}/{secret}/v1"
        address = {"base_url": url, "model": MODEL, "api_key": self.api_key}
        env = self.env_of(trajectory)
        agent = asyncio.ensure_future(env.run_agent(trajectory.row, key, address))
        session = self.sessions[secret] = AgentSession(self, trajectory, params, seed, agent)
        if self.may_pause and not await self.ended_or_paused(agent):
            agent.cancel()  # the trajectory is not needed any more
        [result] = await asyncio.gather(agent, return_exceptions=True)
        del self.sessions[secret]
        last_turn = await session.close()
        if isinstance(session.failure, RequestError):
            return None
        if session.failure:
            raise session.failure
        if agent.cancelled():
            return None
        if isinstance(result, dict):
            add_parts(trajectory.rewards, result)
        elif not (session.is_cut and isinstance(result, EnvError) and env.judges):
            raise result
        if not last_turn:
            raise EnvError("run asked the model for nothing: no request was answered")
        if not (trajectory.rewards or env.judges):
            raise EnvError("run returned no reward, and the env file has no reward_fn")
        is_cut = session.is_cut and not isinstance(result, dict)
        return {**last_turn, "finish_reason": "length"} if is_cut else last_turn

    async def answer(self, request: Request, body: bytes) -> tuple[int, bytes]:
        """The status and the JSON that answer a request."""
        status = 200
        try:
            answer = await self._route(request, body)
        except RequestError as error:
            status = error.status
            details = {"message": error.reason, "type": "invalid_request_error", "code": None}
            answer = {"error": details}
        return status, json.dumps(answer).encode()

    async def _route(self, request: Request, body: bytes) -> dict[str, Any]:
        authorization = dict(request.headers).get(b"authorization", b"")
        if not secrets.compare_digest(authorization, f"Bearer {self.api_key}".encode()):
            raise RequestError(401, "wrong API key: `run` may ask for the argument api_key")
        secret, _, route = request.target.decode()[1:].partition("/v1/")
        session = self.sessions.get(secret)
        if session and (request.method, route) == (b"GET", "models"):
            model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rl2"}
            return {"object": "list", "data": [model]}
        if not session or (request.method, route) != (b"POST", "chat/completions"):
            raise RequestError(404, f"/v1/{route} is not served, or `run` has ended")
        task = asyncio.current_task()
        session.answers.add(task)
        try:
            return await session.complete(body)
        finally:
            session.answers.discard(task)


def player_class(envs: Mapping[str, Env]) -> type[Player]:
    """Returns the class of players, by whether an agent takes the turns of all environments."""
    has_agent = all(env.spec.run is not None for env in envs.values())
    return AgentPlayer if has_agent else Player


def _read_request(body: bytes, params: SamplingParams) -> dict[str, Any]:
    """The fields of a request. RequestError or one of MALFORMED if rl2 cannot answer it.

    A field that rl2 does not know is ignored with a warning, unless it says what holds anyway.
    """
    if len(body) > MAX_BODY_BYTES:
        raise RequestError(413, f"a request may have {MAX_BODY_BYTES} bytes")
    request = json.loads(body)
    json.dumps(request, ensure_ascii=False).encode()  # lone surrogates are no text
    check_messages(request.get("messages"))
    check_nesting(request, MAX_NESTING)
    check_ends_before_reply(request["messages"])
    if request.get("model") != MODEL:
        raise RequestError(404, f"model={request.get('model')!r}: there is {MODEL!r} only")
    stop = request.get("stop") or []
    request["stop"] = [stop] if isinstance(stop, str) else stop
    if unknown := {*request["stop"]} - {*params.stop}:
        raise ValueError(
            f"stop={min(unknown)!r}: add it to rollout.train_sampling_params.stop and to "
            "rollout.test_sampling_params.stop, which hold for all turns"
        )
    for name in request.keys() - {*USED}:
        value = request[name]
        if value in (None, "auto", FIXED.get(name, getattr(params, name, None))):
            continue
        if name in FIXED:
            raise ValueError(f"{name}={value!r}: only {FIXED[name]!r} is supported")
        text = f"{name} of agents is ignored: the run's own sampling parameters hold"
        warnings.warn(text, stacklevel=1)  # Python shows a text once
    return request


def _to_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: its content is text, arguments are objects."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    names = ("role", "name", "tool_call_id", "tool_calls")
    plain = {name: message[name] for name in names if message.get(name)}
    for call in plain.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {**plain, "content": content}


def _to_known(message: dict[str, Any]) -> dict[str, Any]:
    """A message for comparison: clients may strip what they send back."""
    return {**message, "content": message["content"].strip()}
