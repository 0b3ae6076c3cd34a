"""Calls of tools in the turns of a model, in the syntax that its own chat template writes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rl2.data.chat import ChatTemplate
from rl2.env.call_syntaxes import LLAMA, SYNTAXES, Syntax, ToolCall, to_call
from rl2.env.found_calls import (
    REASONING,
    Found,
    find_bare_calls,
    find_calls,
    find_marked_calls,
    unreadable_call,
)
from rl2.parallel.rank import print_once

PROMPT_END = 32  # tokens of a prompt that say whether it has begun a reasoning
PROBE_TOOL = "rl2_probe"
PLAIN_TURN = "The answer is 4."
TYPES = {
    "city": "string",
    "days": "integer",
    "share": "number",
    "exact": "boolean",
    "names": "array",
    "options": "object",
}
PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {
                name: {"type": kind, "description": name} for name, kind in TYPES.items()
            },
            "required": [],
        },
    },
}
# The arguments that a template writes and rl2 has to read back.
ARGUMENTS = {
    "city": "it's \"{'a': [1]}\", a <b> \\ and\nmore é",
    "days": -3,
    "share": 0.5,
    "exact": True,
    "names": ["a, b", "c"],
    "options": {"inner": {"list": [1, {"x": False}]}, "text": "a\nb"},
}
EXAMPLE = '<tool_call>{"name": "NAME", "arguments": {"KEY": "VALUE"}}</tool_call>'
# Ids of calls: Mistral's templates take nine characters, Kimi's write the id in place of the name.
IDS = ("rl2probe1", "functions.{}:0")


@dataclass
class CallReader:
    """Reads the calls of tools in turns, and says once what cannot be read.

    `syntax` is the one that the chat template writes and rl2 reads back. Without one, the calls of
    all syntaxes are read.
    """

    template: ChatTemplate
    syntax: Syntax | None = None
    has_response_template: bool = False  # of the tokenizer, and it reads what the template writes

    def __post_init__(self) -> None:
        """Chooses what reads the calls, by what reads back those that the chat template writes."""
        self.example = self._write_call("NAME", {"KEY": "VALUE"}) or EXAMPLE
        written = self._write_call(PROBE_TOOL, ARGUMENTS)
        if written is None:  # there is no call to try the response template with
            self.has_response_template = self._parse([], PLAIN_TURN) is not None
            if not self.has_response_template:
                self._warn(
                    "its chat template writes no calls of tools, so the prompt has to say how to "
                    f"call them. rl2 reads {EXAMPLE}, JSON in a code fence and what "
                    "docs/environments.md lists"
                )
            return
        expected = [ToolCall(PROBE_TOOL, ARGUMENTS)]
        self.syntax = self._find_syntax(written, expected)
        finds_no_call = self._parse([], PLAIN_TURN) == []
        self.has_response_template = finds_no_call and self._parse([], written) == expected
        if not self.syntax and not self.has_response_template:
            self._warn(
                f"its chat template writes calls of tools that rl2 does not read: {written!r}. "
                "Give its tokenizer a response_template (transformers), or set data.chat_template "
                f"to a template that writes {EXAMPLE}"
            )

    def read(self, prompt: Sequence[int], turn: str, tools: list[dict]) -> Found:
        """The calls in a turn that follows the tokens of the prompt."""
        calls = self._parse(prompt, turn, tools) if self.has_response_template else None
        in_reasoning = self._begins_reasoning(prompt)
        if calls is not None:
            found = find_marked_calls(turn, tools, SYNTAXES, in_reasoning)  # their place
            found.calls = calls
        else:
            syntaxes = (self.syntax,) if self.syntax else SYNTAXES
            found = find_calls(turn, tools, syntaxes, in_reasoning)
            if self.has_response_template and not found.calls:
                # It reads turns without a call, so this has one.
                found.calls.append(unreadable_call())
        for call in found.calls:
            if call.is_unreadable:
                call.error += f". Write {self.example}"
        return found

    def _begins_reasoning(self, prompt: Sequence[int]) -> bool:
        end = self.template.decode(prompt[-PROMPT_END:]).rstrip()
        return end.endswith(tuple(REASONING))

    def _parse(
        self, prompt: Sequence[int], turn: str, tools: Sequence[dict] = (PROBE_SCHEMA,)
    ) -> list[ToolCall] | None:
        """The calls that the tokenizer's response template reads; None if it cannot."""
        parsed = self.template.parse_calls(prompt, turn, list(tools))
        if parsed is None:
            return None
        calls = []
        for name, arguments in parsed:
            try:
                calls.append(to_call(name, arguments))
            except Exception as error:  # whatever it has made of the model's text
                calls.append(unreadable_call(str(error)))
        return calls

    def _write_call(self, name: str, arguments: dict[str, Any]) -> str | None:
        """A turn that calls a tool, as the template writes it; None if it writes no calls."""
        for call_id, content in product(IDS, ("", None)):
            function = {"name": name, "arguments": arguments}
            call = {"id": call_id.format(name), "type": "function", "function": function}
            message = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                turn = self.template.render_turn(message, [PROBE_SCHEMA])
            except ValueError:
                continue
            if name in turn:
                return turn
        return None

    def _find_syntax(self, written: str, expected: list[ToolCall]) -> Syntax | None:
        """The syntax that reads what the template writes."""
        tools = [PROBE_SCHEMA]
        for syntax in SYNTAXES:
            if find_marked_calls(written, tools, [syntax]).calls == expected:
                return syntax
        return LLAMA if find_bare_calls(written, tools) == expected else None

    def _warn(self, text: str) -> None:
        name = self.template.tokenizer.name_or_path or "the model"
        print_once([f"warning: tools of {name}: {text}"])
