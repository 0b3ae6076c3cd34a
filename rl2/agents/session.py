"""The requests of an agent in one trajectory, and the conversations that they make.

A request that extends an earlier one and its answer continues that sequence of tokens; any other
begins a new one.
"""

import asyncio
import secrets
from copy import deepcopy
from dataclasses import dataclass, field, replace
from operator import attrgetter

from rl2.agents.form import (
    MALFORMED,
    ChatAnswer,
    ChatRequest,
    JsonObject,
    RequestError,
    malformed_error,
    to_call,
)
from rl2.engine.base import SamplingParams, Seed
from rl2.env.found_calls import Found
from rl2.rollout.player import Player
from rl2.rollout.trajectory import Trajectory, TurnInfo, begin_sample


@dataclass
class Conversation(Trajectory):
    """Requests of an agent that extend each other, as the player plays them."""

    tools: list[dict] | None = None  # of the request
    known: list[dict] = field(default_factory=list)  # the messages as the agent has them
    last_turn: TurnInfo | None = None  # before its first answer there is none
    answer_number: int = 0  # of its last answer among those of the trajectory

    @property
    def num_sampled(self) -> int:
        """Tokens of the last turn."""
        assert self.last_turn is not None
        return self.last_turn["num_tokens"]


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
    requests: set[asyncio.Task] = field(default_factory=set)  # under way
    is_closed: bool = False

    async def complete(self, request: ChatRequest) -> ChatAnswer:
        """The answer to a request. RequestError says what is wrong with it."""
        try:
            self.check_may_ask()
            base, conversation = self.extend(request)
            params = self.params
            if request.max_tokens:
                most = min(params.max_new_tokens, request.max_tokens)
                params = replace(params, max_new_tokens=most)
            params = self.limit(conversation, params)
        except MALFORMED as error:
            raise malformed_error(error) from error
        await self.sample(base, conversation, params)
        return self._describe(conversation, request.stop)

    async def sample(
        self, base: Conversation | None, conversation: Conversation, params: SamplingParams
    ) -> None:
        """Samples the next turn of `conversation`, which takes the place of `base`.

        What is raised ends the agent, unless something has done that before.
        """
        seed = self.seed[:-1] + (self.num_requests,)
        self.num_requests += 1
        was_cut = self.is_cut
        remaining = base
        if base:
            self.conversations.remove(base)
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        try:
            turn = await self.player.sample_turn(conversation, params, seed)
            if turn is None:
                raise RequestError(400, "the trajectory is not needed any more")
            conversation.last_turn = turn
            self.num_answers += 1
            conversation.answer_number = self.num_answers
            remaining = conversation
            if was_cut:  # the agent knew of the limit, and has gone on
                self.is_cut = False
        except Exception as error:
            if not self.failure.done():
                self.failure.set_result(error)
            raise
        finally:
            self.requests.discard(task)
            if remaining:  # a request that was cancelled leaves what it extended in its place
                self.conversations.append(remaining)
                self.conversations.sort(key=attrgetter("answer_number"))

    def check_may_ask(self) -> None:
        """ValueError if no further request may follow."""
        if self.is_closed:
            raise ValueError("the trajectory has ended")
        if self.num_requests >= self.player.max_turns:
            self.is_cut = True
            raise ValueError(
                f"the trajectory has made its rollout.max_turns={self.player.max_turns} requests; "
                "raise the key if the agent needs more"
            )

    def limit(self, conversation: Conversation, params: SamplingParams) -> SamplingParams:
        """The parameters with at most so many new tokens as have room. ValueError if none has."""
        room = self.player.max_length - len(conversation.samples[-1].tokens)
        if room < 1:
            raise self._length_error()
        return replace(params, max_new_tokens=min(params.max_new_tokens, room))

    def extend(self, request: ChatRequest) -> tuple[Conversation | None, Conversation]:
        """(the conversation that the request extends, that with its messages)."""
        player, own = self.player, self.trajectory
        messages, tools = request.messages, request.tools
        known = [_to_known(message) for message in messages]
        base = self._find_base(known, tools)
        if base:
            conversation = deepcopy(base)  # the request may be cancelled
            new = messages[len(base.known) :]
            if not player.append_messages(conversation, base.num_sampled, new, max_new_tokens=1):
                raise self._length_error()
        else:
            conversation = Conversation(own.id, own.group, messages, tools=tools, source=own.source)
            begin_sample(conversation, player.template_of(own).encode_prompt(messages, tools))
        conversation.known = known
        return base, conversation

    def _length_error(self) -> ValueError:
        self.is_cut = True
        return ValueError(
            "the messages leave no room for an answer: a conversation may have "
            f"{self.player.max_length} tokens"
        )

    def _find_base(self, known: list[dict], tools: list | None) -> Conversation | None:
        """The longest conversation that the messages extend."""
        alike = [c for c in self.conversations if c.known and c.tools == tools]
        bases = [c for c in alike if c.known == known[: len(c.known)]]
        return max(bases, key=lambda c: len(c.known), default=None)

    def _describe(self, conversation: Conversation, stops: tuple[str, ...]) -> ChatAnswer:
        """The last turn as the agent gets it. It is added to the messages that are known."""
        assert conversation.last_turn is not None
        num_sampled = conversation.num_sampled
        text = conversation.messages[-1]["content"]
        found_stops = [stop for stop in stops if stop in text]
        stop = min(found_stops, key=text.index, default=None)
        if stop is not None:
            text = text.partition(stop)[0]
        tools = conversation.tools
        found = self.player.read_calls(conversation, num_sampled, tools) if tools else Found([])
        calls = [
            # Templates of Mistral take ids of nine characters only.
            to_call(secrets.token_hex(5)[:9], call.name, call.arguments)
            for call in found.calls
            if not call.error  # a call that cannot be read stays in the text
        ]
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

    async def end_requests(self) -> None:
        """Ends those under way, and takes no others."""
        self.is_closed = True
        for task in self.requests:
            task.cancel()
        await asyncio.gather(*self.requests, return_exceptions=True)

    def close(self) -> TurnInfo | None:
        """The conversations become those of the trajectory. No request may be under way.

        Returns the last turn of the conversation that reward_fn judges: the one with the most
        messages, and the last of those. None without any.
        """
        own = self.trajectory
        if self.conversations:
            own.messages, own.samples = [], []
        last_turn: TurnInfo | None = None
        for part in self.conversations:
            own.samples += part.samples
            own.versions += part.versions
            own.num_turns += part.num_turns
            own.longest_turn = max(own.longest_turn, part.longest_turn)
            if len(part.messages) >= len(own.messages):
                own.messages, last_turn = part.messages, part.last_turn
        return last_turn


def _to_known(message: JsonObject) -> JsonObject:
    """A message for comparison: clients may strip what they send back."""
    return message | {"content": (message.get("content") or "").strip()}
