"""What `play` of the env file asks the model with: a function, without HTTP.

    async def play(row, generate):
        reply = await generate(row["messages"], max_new_tokens=64)
        reply = await generate(reply.prompt_ids + reply.token_ids + more_ids)
        return float(row["answer"] in reply.text)

`generate` runs on the loop of the env file's async functions, and asks the loop of the engine.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from rl2.agents.form import ChatRequest, JsonObject, read_stop
from rl2.agents.session import AgentSession, Conversation
from rl2.engine.base import SamplingParams, check_request
from rl2.rollout.trajectory import append_tokens, begin_sample


@dataclass(frozen=True)
class Reply:
    """What the model replied."""

    text: str
    """without the stop token, with a text that stopped it"""
    token_ids: list[int]
    """with the stop token"""
    logprobs: list[float]
    """of each token in softmax(logits / temperature), among the tokens that top_p, top_k and min_p
    leave, where the engine can tell these"""
    finish_reason: str
    """stop, or length if a limit of tokens cut it"""
    prompt_ids: list[int]
    """what the model saw"""

    @property
    def message(self) -> dict[str, str]:
        """The reply as a message, with which the conversation can go on."""
        return {"role": "assistant", "content": self.text}


def make_generate(
    session: AgentSession, loop: asyncio.AbstractEventLoop
) -> Callable[..., Awaitable[Reply]]:
    """Returns `generate` of one trajectory. `loop` is that of the engine."""

    async def generate(
        prompt: Sequence[Any],
        *,
        tools: list[JsonObject] | None = None,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Reply:
        """Samples a reply to messages, which the chat template renders, or to token ids.

        A prompt that goes on from an earlier one and its reply continues that sequence of tokens;
        any other begins a new one. `tools` are shown by the template. The run's own sampling
        parameters hold. Its `max_new_tokens` is the most, and `stop` chooses among its own.

        ValueError says what is wrong with the arguments, or which limit of rl2 is met.
        """
        params = session.params
        if stop is not None:
            params = replace(params, stop=read_stop(stop, params))
        if max_new_tokens is not None:
            most = min(params.max_new_tokens, max_new_tokens)
            params = replace(params, max_new_tokens=most)
        if isinstance(prompt, str):
            raise ValueError(f"prompt={prompt!r:.80}, expected messages or token ids, not a text")
        own = deepcopy(list(prompt))  # the caller may change its own objects meanwhile
        coroutine = _generate(session, own, deepcopy(tools), params)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

    return generate


async def _generate(
    session: AgentSession,
    prompt: list[Any],
    tools: list[JsonObject] | None,
    params: SamplingParams,
) -> Reply:
    """Samples a reply, on the loop of the engine."""
    session.check_may_ask()
    is_messages = all(isinstance(message, dict) for message in prompt)
    template = session.player.template_of(session.trajectory)
    check_request([0] if is_messages else prompt, params, template.last_token_id + 1, math.inf)
    if is_messages:
        base, conversation = session.extend(ChatRequest(prompt, tools))
    else:
        base, conversation = _begin_from_tokens(session, prompt)
        if tools:
            raise ValueError("tools: the chat template shows them to messages, not to token ids")
    params = session.limit(conversation, params)
    await session.sample(base, conversation, params)
    assert conversation.last_turn is not None
    sample, num_sampled = conversation.samples[-1], conversation.num_sampled
    reply = Reply(
        text=conversation.messages[-1]["content"],
        token_ids=list(sample.tokens[-num_sampled:]),
        logprobs=list(sample.logps[-num_sampled:]),
        finish_reason=conversation.last_turn["finish_reason"],
        prompt_ids=list(sample.tokens[:-num_sampled]),
    )
    if conversation.known:
        conversation.known.append(reply.message)
    return reply


def _begin_from_tokens(
    session: AgentSession, token_ids: list[int]
) -> tuple[Conversation | None, Conversation]:
    """(the conversation whose tokens these extend, that with these tokens)."""
    own = session.trajectory
    template = session.player.template_of(own)
    bases = [
        conversation
        for conversation in session.conversations
        if (tokens := list(conversation.samples[-1].tokens)) == token_ids[: len(tokens)]
    ]
    base = max(bases, key=lambda c: len(c.samples[-1].tokens), default=None)
    if base:
        conversation = deepcopy(base)
        new = token_ids[len(base.samples[-1].tokens) :]
        append_tokens(conversation.samples[-1], new)
    else:
        conversation = Conversation(own.id, own.group, [], source=own.source)
        new = token_ids
        begin_sample(conversation, new)
    conversation.known = []  # messages do not tell its tokens
    if new:  # for reward_fn and the records
        conversation.messages.append({"role": "user", "content": template.decode(new)})
    return base, conversation
