"""Finds the calls in a turn of the model.

A text of a model never raises here: what is wrong with a call is a call with an error.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl2.env.call_syntaxes import JSON_START, Syntax, ToolCall, read_json_calls, skip_space

MAX_CALLS = 100  # in a turn
UNREADABLE = "the call cannot be read"
# What begins and ends a reasoning at the beginning of a turn, by family: Qwen and most others,
# Mistral, Gemma, Kimi, Cohere, gpt-oss. Calls inside do not count.
REASONING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|end|>",
}
FENCED = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass
class Found:
    """What a turn says: its calls, and where the text of the calls begins."""

    calls: list[ToolCall]
    start: int = 0


def find_calls(
    text: str, tools: Sequence[dict], syntaxes: Sequence[Syntax], in_reasoning: bool = False
) -> Found:
    """Returns the calls in a turn of the model, in their order.

    They follow the marks of the syntaxes. What is wrong there is a call with an error.
    Without a mark, the whole text or what is in code fences may be calls of the tools, or anything
    else. `in_reasoning` says that the prompt has begun a reasoning.
    """
    found = find_marked_calls(text, tools, syntaxes, in_reasoning)
    return found if found.calls else Found(find_bare_calls(text, tools, in_reasoning))


def find_marked_calls(
    text: str, tools: Sequence[dict], syntaxes: Sequence[Syntax], in_reasoning: bool = False
) -> Found:
    """Returns the calls after the marks of the syntaxes."""
    found = Found([])
    position = _end_of_reasoning(text, in_reasoning)
    any_mark = re.compile("|".join(syntax.opening for syntax in syntaxes))
    while mark := any_mark.search(text, position):
        if len(found.calls) == MAX_CALLS:
            error = f"a turn may have {MAX_CALLS} calls, those after them are not made"
            found.calls.append(ToolCall("", error=error))
            break
        calls, position = _read_at(text, mark.start(), tools, syntaxes)
        if not found.calls:
            found.start = mark.start()
        found.calls += calls[: MAX_CALLS - len(found.calls)]
    return found


def _read_at(
    text: str, start: int, tools: Sequence[dict], syntaxes: Sequence[Syntax]
) -> tuple[list[ToolCall], int]:
    """The calls after the mark at `start`, by the first of the syntaxes that can read them."""
    errors = []
    for syntax in syntaxes:
        mark = re.compile(syntax.opening).match(text, start)
        if mark is None:
            continue
        try:
            return syntax.read(text, mark.end(), tools, syntax.closing)
        except Exception as error:  # the text is the model's: no text may end the run
            errors.append((syntax, mark, _describe(error)))
    # The first syntax that has this mark explains itself.
    syntax, mark, reason = errors[0]
    return [unreadable_call(reason)], _end_of_unreadable(text, syntax, mark.end())


def unreadable_call(reason: str = "") -> ToolCall:
    """A call that cannot be read, and why, if that is known."""
    error = f"{UNREADABLE}: {reason}" if reason else UNREADABLE
    return ToolCall("", error=error, is_unreadable=True)


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg  # without the place in the text
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deep"
    return str(error)


def _end_of_unreadable(text: str, syntax: Syntax, start: int) -> int:
    """Returns where a call ends that cannot be read: after its mark, or before the next call."""
    mark = re.escape(syntax.closing) or f"(?={syntax.opening})"
    end = re.compile(mark).search(text, start)
    return end.end() if end else len(text)


def find_bare_calls(text: str, tools: Sequence[dict], in_reasoning: bool = False) -> list[ToolCall]:
    """Returns the calls of tools that are the whole text, or are in code fences."""
    names = {tool["function"]["name"] for tool in tools}
    said = text[_end_of_reasoning(text, in_reasoning) :]
    parts = [said] + FENCED.findall(said)
    return [call for part in parts for call in _read_bare_calls(part.strip(), names)][:MAX_CALLS]


def _read_bare_calls(text: str, names: set[str]) -> list[ToolCall]:
    """Returns the calls of the tools if a text has nothing but calls, and none otherwise."""
    if not JSON_START.match(text):
        return []
    try:
        calls, end = read_json_calls(text, 0)
    except Exception:  # any other text
        return []
    is_whole = skip_space(text, end) == len(text)
    return [call for call in calls if is_whole and call.name in names]


def _end_of_reasoning(text: str, in_reasoning: bool) -> int:
    """Returns where the reasoning ends with which a turn begins, or the prompt has begun one."""
    position = 0
    if in_reasoning:
        ends = [(text.find(mark), mark) for mark in REASONING.values() if mark in text]
        position = min((place + len(mark) for place, mark in ends), default=len(text))
    while begun := next(
        (mark for mark in REASONING if text.startswith(mark, skip_space(text, position))), None
    ):
        end = text.find(REASONING[begun], position)
        position = len(text) if end < 0 else end + len(REASONING[begun])
    return position
