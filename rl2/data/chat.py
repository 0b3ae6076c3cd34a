"""Chat templates: from messages to tokens, and the tokens that new messages add to a conversation.

`messages` is a list of {"role": ..., "content": ...}, or a plain string to which no template is
applied. `tools` is the list of tool schemas that the template may show.

Sampled tokens are never tokenised again, because a text may have several tokenisations. A
conversation grows by appending tokens, or a new training sequence starts.
"""

import datetime
import inspect
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rl2.data.messages import SYSTEM_ROLES, Message, Messages, abbreviate, common_prefix_length

PROBE = "rl2probe"  # a content that no template changes
MAX_OPENING = 16  # characters of a reply that a generation prompt begins with, such as <think>
REASONING_END = re.compile(r"</[^<>/]+>")
CONTEXT_TOKENS = 16  # in front of tokens to decode: more than one character or word
OWN_VARIABLES = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
# How templates ask for the date: transformers would give that of the day.
DATE_CALL = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# A template for base models, after the beginning-of-sequence token of those that have one.
PLAIN = (
    "{% for message in messages %}{{ message.role + ':\n' + message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


@dataclass
class ChatTemplate:
    """A tokenizer with everything that its chat template depends on.

    The same messages give the same tokens at any time, on every process and in a resumed run.
    """

    tokenizer: PreTrainedTokenizerBase
    source: str | None = None  # "plain" or the path of a Jinja file, put in place of its own one
    variables: dict[str, Any] = field(default_factory=dict)  # for the template, by name
    system_prompt: str | None = None  # of conversations that begin with no system message
    date: datetime.date = field(default_factory=datetime.date.today)  # for templates that show it

    def __post_init__(self) -> None:
        """ValueError if the template lacks one of the variables."""
        if self.source == "plain":
            self.tokenizer.chat_template = self._prepend_bos("") + PLAIN
        elif self.source:
            self.tokenizer.chat_template = Path(self.source).expanduser().read_text("utf-8")
        for name in self.variables:
            if name in OWN_VARIABLES or name not in str(self.tokenizer.chat_template):
                raise ValueError(
                    f"data.chat_template_kwargs.{name}: the chat template has no such variable, or "
                    "rl2 sets it; remove the key"
                )

    def dependencies(self) -> list[object]:
        """All that the tokens of a conversation depend on. Its `repr` names them."""
        tokenizer = self.tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        vocabulary = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
        shows_date = "strftime_now" in str(tokenizer.chat_template)
        return [
            type(tokenizer).__name__,
            vocabulary,
            tokenizer.special_tokens_map,
            tokenizer.chat_template,
            self.variables,
            self.system_prompt,
            shows_date and self.date,
        ]

    def encode_prompt(self, messages: Messages, tools: list | None = None) -> list[int]:
        """The tokens of a conversation up to the place where the assistant's next reply begins."""
        return self.tokenize(self.render(messages, tools))

    def render(
        self, messages: Messages, tools: list | None = None, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation. `add_generation_prompt` adds the header of the next reply.

        A plain string is returned as it is, after the beginning-of-sequence token if the tokenizer
        puts one before plain text. Messages with the role "tool" get the role "user" if the
        template refuses that role or drops their content. If it refuses the messages, those of one
        role in a row are joined, but for replies. ValueError when it still refuses them.
        """
        if isinstance(messages, str):
            return self._prepend_bos(messages)
        self.check_exists()
        messages = self._replace_unknown_tool_role(messages, tools)
        try:
            return self._apply_template(messages, tools, add_generation_prompt)
        except (TemplateError, TypeError) as error:
            joined = _join_neighbours(messages)
            if len(joined) < len(messages):
                return self.render(joined, tools, add_generation_prompt)
            # TypeError: the template joins a text and a content that is a list or None.
            text = f"the chat template refuses these messages ({error}): {str(messages)[:500]}"
            if self.system_prompt:
                text += "; the system prompt is that of data.system_prompt or of the env file"
            raise ValueError(text) from error

    def check_exists(self) -> None:
        """ValueError if the model has no chat template."""
        if not self.tokenizer.chat_template:
            raise ValueError(
                "the model has no chat template, as base models: set data.chat_template=plain or "
                "the path of a Jinja file, or give the rows as plain text (docs/models.md)"
            )

    def render_reply(
        self, messages: Messages, reply: str | Message, tools: list | None = None
    ) -> tuple[str, str]:
        """The text of a conversation (up to where `reply` begins, with `reply`).

        `reply` is the assistant's message or its content. ValueError if it is a message after a
        plain string.
        """
        before = self.render(messages, tools)
        if isinstance(messages, str):
            if not isinstance(reply, str):
                raise ValueError(
                    f"expected a reply that is text, as the prompt is text, got {abbreviate(reply)}"
                )
            return before, before + reply
        if isinstance(reply, str):
            reply = {"role": "assistant", "content": reply}
        whole = self.render(messages + [reply], tools, add_generation_prompt=False)
        # The generation prompt may have begun the reply, with <think> for instance.
        start = max(0, common_prefix_length(before, whole) - MAX_OPENING)
        if not _shows(whole[start:], reply.get("content") or ""):
            return before, self._render_uncut(before, messages, reply, tools)
        if whole.startswith(before):
            return before, whole
        # With the reply the template writes other text in front of it than in its prompt: Mistral
        # shows the system prompt at a last message of the user only. The reply follows its prompt.
        probe = {"role": "assistant", "content": PROBE}
        header = self.render(messages + [probe], tools, False).partition(PROBE)[0]
        if not before[-1].isspace():  # a space after the header belongs to the reply
            header = header.rstrip()
        if whole.startswith(header) and not before.startswith(header):
            whole = before + whole[len(header) :]
        return before, whole

    def _render_uncut(
        self, before: str, messages: list[Message], reply: Message, tools: list | None
    ) -> str:
        """The text of a conversation with a reply of which the template cuts the reasoning.

        The reply follows its prompt `before`, as the model samples it: DeepSeek's templates cut the
        reasoning of all replies, since in a history it is not shown. ValueError if it cannot.
        """
        content = reply["content"].lstrip()
        probe = self.render(messages + [reply | {"content": PROBE}], tools, False)
        _, is_shown, footer = probe.partition(PROBE)
        closing = REASONING_END.search(content)
        if not is_shown or not closing or before.rstrip().endswith(closing[0]):
            raise ValueError(
                f"the chat template does not show the whole reply: {abbreviate(reply['content'])}; "
                "shorten it to what is shown, or set data.chat_template, or a variable of the "
                "template in data.chat_template_kwargs"
            )
        opening = content[: content.find(">") + 1]
        if opening and before.rstrip().endswith(opening):
            content = content.removeprefix(opening)
            if before[-1].isspace():
                content = content.lstrip()
        return before + content + footer

    def render_turn(self, message: Message, tools: list | None = None) -> str:
        """The text of a turn of the assistant as the template writes it in its history.

        It has no end of turn, and mostly no header. ValueError if the template refuses the message.
        """
        question = [{"role": "user", "content": "?"}]
        probe = {"role": "assistant", "content": PROBE}
        header, _, footer = self.render(question + [probe], tools, False).partition(PROBE)
        whole = self.render(question + [message], tools, False)
        if not whole.startswith(header):  # such turns have another header than a plain reply
            header = self.render(question, tools, False)
        return whole[common_prefix_length(header, whole) :].removesuffix(footer)

    def tokenize(self, text: str | list[str]) -> list:
        """The token ids of a rendered text, or of each text of a list.

        Fast tokenizers process a list in parallel.
        """
        # The rendered text holds its special tokens: adding them again would double the first one.
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens with its special tokens, spaces unchanged."""
        return str(self.tokenizer.decode(np.asarray(tokens), clean_up_tokenization_spaces=False))

    def decode_reply(self, tokens: Sequence[int], stop_token_ids: Collection[int]) -> str:
        """The content of a sampled turn: its text without the special token that ended it.

        Other special tokens stay, for instance those that begin a tool call.
        """
        if tokens and tokens[-1] in self.special_ids.intersection(stop_token_ids):
            tokens = tokens[:-1]
        return self.decode(tokens)

    def parse_calls(
        self, prompt: Sequence[int], reply: str, tools: list
    ) -> list[tuple[str, object]] | None:
        """The calls of tools in a reply, as the tokenizer's own response template reads them.

        Each is (name, arguments). None if the tokenizer has no such template, or if it cannot read
        the reply.
        """
        if getattr(self.tokenizer, "response_template", None) is None:
            return None
        try:
            prefix = self.decode(prompt)
            message = self.tokenizer.parse_response(reply, prefix=prefix, tools=tools)
            functions = [call["function"] for call in message.get("tool_calls", [])]
            return [(function["name"], function["arguments"]) for function in functions]
        # The reply is a text of the model, and no text may end the run: it may be nested deep. Also
        # TypeError: transformers < 5.15 takes no tools.
        except Exception:
            return None

    @cached_property
    def special_ids(self) -> set[int]:
        """The ids of all special tokens, ends of turns and of sequences among them."""
        added_tokens = self.tokenizer.added_tokens_decoder.items()
        special_ids = {token_id for token_id, token in added_tokens if token.special}
        return special_ids | set(self.tokenizer.all_special_ids)

    @cached_property
    def last_token_id(self) -> int:
        """The largest id of a token."""
        return max(self.tokenizer.get_vocab().values())

    def stop_token_ids(self, model_eos: list[int]) -> list[int]:
        """The ids that end a turn, ascending: the tokenizer's and the model's.

        Chat models often list several ids in their generation config, of which the tokenizer names
        only one.
        """
        stop_ids = {self.tokenizer.eos_token_id}.union(model_eos) - {None}
        if not stop_ids:
            raise ValueError(
                "neither the tokenizer nor generation_config has an eos_token: set one in the "
                "model folder"
            )
        return sorted(stop_ids)

    def training_sequences(
        self, replies: list[tuple[list[int], list[int]]]
    ) -> list[tuple[list[int], list[int]]]:
        """The sequences (tokens, mask) that train all replies of a row, in as few as possible.

        Each reply is given by the tokens of its conversation (up to where the reply begins, with
        the reply), see `render_reply`. The mask is 1 on the tokens of a reply up to its end of
        turn: the last token, apart from white space, if it is a special token. A reply that does
        not end in one gets the tokenizer's end-of-sequence token.

        A reply continues the sequence of the previous reply if its tokens begin with that sequence.
        Otherwise it starts a new one: it is another reply to the same prompt, or the template has
        rewritten earlier turns, for instance to drop their reasoning.

        Example, one token a character, in which `.` ends a turn and `?A` begins a reply: the
        replies ("U?A", "U?A1.") and ("U?A1.V?A", "U?A1.V?A2.") give one sequence:

            tokens  U ? A 1 . V ? A 2 .
            mask    0 0 0 1 1 0 0 0 1 1
        """
        sequences: list[tuple[list[int], list[int]]] = []
        for before, whole in replies:
            start = common_prefix_length(before, whole)
            tokens, end = self._end_reply(whole, start)
            mask = [0] * start + [1] * (end - start) + [0] * (len(tokens) - end)
            if sequences:
                previous_tokens, previous_mask = sequences[-1]
                length = len(previous_tokens)
                if start >= length and tokens[:length] == previous_tokens:
                    mask[:length] = previous_mask
                    sequences.pop()
            sequences.append((tokens, mask))
        return sequences

    def extend(
        self,
        tokens: Sequence[int],
        num_sampled: int,
        messages: list[Message],
        new_messages: list[Message],
        tools: list | None = None,
    ) -> list[int] | None:
        """The tokens to append to a conversation, so that `new_messages` follow its last turn.

        `tokens` are those of the conversation so far. Its last turn is the last of `messages`, of
        which the last `num_sampled` tokens were sampled; those before are of `encode_prompt` or of
        earlier extensions with the same tools. The result ends with the header of the assistant's
        next turn. With ChatML, for a conversation that ends with "4<|im_end|>" and a new message of
        the user, "Sure?", its text is

            "\\n<|im_start|>user\\nSure?<|im_end|>\\n<|im_start|>assistant\\n"

        If the length limit cut the sampled turn, so that it lacks its end of turn, the result
        begins with the end of turn that the template writes.

        The text of `tokens` and the result is exactly the template's text of the whole conversation
        (as the tokenizer gives it back). None when no tokens can achieve that, because
        - the template rewrites or drops earlier text: reasoning of earlier turns, spaces around it;
        - the model sampled what the template never writes, for instance another end of turn; or
        - the tokenizer changes a text that has nothing before it: it starts it with a space.
        The caller then starts a new sequence with `encode_prompt(messages + new_messages)`.
        """
        start = len(tokens) - num_sampled
        before = self.render(messages[:-1], tools)
        context = tokens[max(0, start - CONTEXT_TOKENS) : start]
        # The context may begin inside a character.
        last_text = self.decode(context).lstrip("\ufffd")
        is_prompt = before.endswith(last_text) if start > CONTEXT_TOKENS else before == last_text
        sampled_text = self._text_behind(context, tokens[start:])
        whole = self.render(messages + new_messages, tools)
        if is_prompt and sampled_text is not None:
            if not whole.startswith(before + sampled_text):
                return None
            new_text = whole[len(before + sampled_text) :]
            new_tokens = self.tokenize(new_text)
            if self._text_behind(tokens[-CONTEXT_TOKENS:], new_tokens) == new_text:
                return new_tokens
        return self._extend_as_given_back(tokens, whole)

    def _extend_as_given_back(self, tokens: Sequence[int], whole: str) -> list[int] | None:
        """The same for a tokenizer that does not give back the text that it got.

        It decodes and tokenises the whole conversation.
        """
        old_text = self.decode(tokens)
        whole_text = self.decode(self.tokenize(whole))
        new_tokens = self.tokenize(whole_text[len(old_text) :])
        return new_tokens if self.decode(list(tokens) + new_tokens) == whole_text else None

    def _text_behind(self, context: Sequence[int], tokens: Sequence[int]) -> str | None:
        """The text that `tokens` add to that of `context`. None if they change that of `context`.

        A tokenizer may decode tokens in another way if nothing precedes them.
        """
        before = self.decode(context)
        text = self.decode(list(context) + list(tokens))
        return text[len(before) :] if text.startswith(before) else None

    def _prepend_bos(self, text: str) -> str:
        """A plain text after the beginning-of-sequence token, if this tokenizer puts one there."""
        bos = self.tokenizer.bos_token
        if bos is None or text.startswith(bos):
            return text
        adds_bos = self.tokenizer("")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return bos + text if adds_bos else text

    def _replace_unknown_tool_role(
        self, messages: list[Message], tools: list | None
    ) -> list[Message]:
        """The messages, with the role "user" for "tool" if the template lacks the latter."""
        # Templates may trim or escape the real content, so a probe takes its place.
        probes = _update_tool_messages(messages, {"content": PROBE})
        if probes == messages:  # no message of a tool
            return messages
        try:
            shows_tool_role = PROBE in self._apply_template(probes, tools, True)
        except (TemplateError, TypeError):
            shows_tool_role = False
        if shows_tool_role:
            return messages
        return _update_tool_messages(messages, {"role": "user"})

    def _apply_template(
        self, messages: list[Message], tools: list | None, add_generation_prompt: bool
    ) -> str:
        """The text of the messages, with the roles and calls that this template shows.

        They follow the system prompt if they begin with none of their own.
        """
        adapted = []
        if self.system_prompt and (not messages or messages[0]["role"] not in SYSTEM_ROLES):
            adapted.append({"role": "system", "content": self.system_prompt})
        for message in messages:
            message = {"content": "", **message}  # beside calls it may be missing
            if message["role"] == "developer" and not self._shows_developer:
                message = message | {"role": "system"}
            if message.get("tool_calls") and self._takes_argument_texts:
                calls = [_with_argument_text(call) for call in message["tool_calls"]]
                message = message | {"tool_calls": calls}
            adapted.append(message)
        return self._fill_template(adapted, tools, add_generation_prompt)

    @cached_property
    def _shows_developer(self) -> bool:
        """Whether the template shows messages with the role developer."""
        messages = [{"role": "developer", "content": PROBE}, {"role": "user", "content": "?"}]
        return PROBE in self._try_template(messages)

    @cached_property
    def _takes_argument_texts(self) -> bool:
        """Whether the template shows the arguments of calls right only if they are JSON text."""
        function = {"name": PROBE, "arguments": {"name": PROBE}}
        call = {"id": "000000000", "type": "function", "function": function}

        def shows(call: dict) -> bool:
            reply = {"role": "assistant", "content": "", "tool_calls": [call]}
            text = self._try_template([{"role": "user", "content": "?"}, reply])
            # Not as Python writes it, nor as a text within a text.
            return text.count(PROBE) == 2 and not re.search(rf"['\\\\]\W?{PROBE}", text)

        return not shows(call) and shows(_with_argument_text(call))

    def _try_template(self, messages: list[Message]) -> str:
        """The text of the messages; "" if the template refuses them."""
        try:
            return self._fill_template(messages, None, False)
        except (TemplateError, TypeError):
            return ""

    def _fill_template(
        self, messages: list[Message], tools: list | None, add_generation_prompt: bool
    ) -> str:
        template = self.tokenizer.get_chat_template(tools=tools)
        if "strftime_now" in template:
            template = DATE_CALL.sub(lambda call: repr(self.date.strftime(call[2])), template)
        text = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self.variables,
        )
        return str(text)

    def _end_reply(self, tokens: list[int], start: int) -> tuple[list[int], int]:
        """(tokens, end): the reply is tokens[start:end], the last of which ends its turn.

        White space after the end of turn stays outside the reply. If there is no end of turn, the
        end-of-sequence token is added after all tokens.
        """
        end = len(tokens)
        while end > start and self.decode([tokens[end - 1]]).isspace():
            end -= 1
        if end > start and tokens[end - 1] in self.special_ids:
            return tokens, end
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has no eos_token to end a reply with: set one in the model folder"
            )
        return tokens + [self.tokenizer.eos_token_id], len(tokens) + 1


def _shows(text: str, content: str) -> bool:
    """Whether the content is in the text, apart from white space."""
    return content.strip() in text or "".join(content.split()) in "".join(text.split())


def _with_argument_text(call: dict) -> dict:
    """A call with its arguments as JSON text."""
    function = call.get("function", call)
    if not isinstance(function.get("arguments"), dict):
        return call
    text = json.dumps(function["arguments"], ensure_ascii=False)
    written = function | {"arguments": text}
    return call | {"function": written} if "function" in call else written


def _update_tool_messages(messages: list[Message], changes: dict[str, str]) -> list[Message]:
    return [m | changes if m.get("role") == "tool" else m for m in messages]


def _join_neighbours(messages: list[Message]) -> list[Message]:
    """The messages, with an empty line between the contents of those that became one."""
    joined: list[Message] = []
    for role, group in groupby(messages, key=itemgetter("role")):
        neighbours = list(group)
        contents: list[Any] = [message.get("content") for message in neighbours]
        if role != "assistant" and all(isinstance(content, str) for content in contents):
            neighbours = [neighbours[0] | {"content": "\n\n".join(contents)}]
        joined += neighbours
    return joined
