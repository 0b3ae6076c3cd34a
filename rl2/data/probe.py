"""Whether a chat template shows the rows whole: what it drops is refused or named at the start.

Templates skip roles, fields and calls that they do not know, without a word. So one row of each
form is rendered with a probe, a word of its own, in the place of every text, and each probe has to
come out once. Rows have one form if they have the same columns, roles, fields and neighbours; see
`describe_form`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rl2.data.chat import ChatTemplate
from rl2.data.messages import (
    CONVERSATION_COLUMNS,
    SYSTEM_ROLES,
    Message,
    Row,
    common_prefix_length,
)

Render = Callable[[ChatTemplate, Row], Sequence[tuple[str, ...]]]

UNPROBED_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "id", "type")
# A content that begins with a part in tags, as reasoning: templates cut it out.
TAGGED = re.compile(r"\s*(<[^<>/]+>|\[[A-Z_]+\])(.*?)(</[^<>]+>|\[/[A-Z_]+\])(.*)", re.DOTALL)


@dataclass
class Probes:
    """The probes of a row, by the place that they have: its name for messages."""

    words: dict[str, str] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)  # places that may be left out with a warning
    # What is no text, by place: the planted message or row, and the name of its field.
    others: dict[str, tuple[dict, str]] = field(default_factory=dict)

    def plant(self, place: str, is_optional: bool = False) -> str:
        """Returns a new probe for the place."""
        self.words[place] = f"rl2probe{len(self.words)}x"
        if is_optional:
            self.optional.add(place)
        return self.words[place]

    def plant_row(self, row: Row) -> Row:
        """The row with probes for the texts of its messages. Plain texts stay as they are."""
        planted = dict(row)
        for column in CONVERSATION_COLUMNS:
            value = row.get(column)
            if isinstance(value, dict):
                planted[column] = self._plant_message(value, column)
            elif isinstance(value, list):
                planted[column] = [
                    self._plant_message(m, f"{column}[{i}]") for i, m in enumerate(value)
                ]
        if row.get("tools"):
            self.others["tools"] = (planted, "tools")
        return planted

    def _plant_message(self, message: Message, place: str) -> Message:
        planted = dict(message)
        role = message["role"]
        content = message.get("content")
        tagged = TAGGED.fullmatch(content) if isinstance(content, str) else None
        if tagged and role == "assistant":
            opening, _, closing, rest = tagged.groups()
            inside = self.plant(f"{opening}...{closing} of {place}.content ({role})", True)
            after = self.plant(f"{place}.content ({role})") if rest.strip() else ""
            planted["content"] = opening + inside + closing + after
        elif isinstance(content, str) and content.strip():
            planted["content"] = self.plant(f"{place}.content ({role})")
        for name, value in message.items():
            # The name beside a result is that of its call.
            if name in UNPROBED_FIELDS or not value or (name == "name" and role == "tool"):
                continue
            if not isinstance(value, str):
                self.others[f"{place}.{name} ({role})"] = (planted, name)
            elif value.strip():
                planted[name] = self.plant(f"{place}.{name} ({role})", is_optional=True)
        if calls := message.get("tool_calls"):
            planted["tool_calls"] = [
                self._plant_call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        return planted

    def _plant_call(self, call: dict, place: str) -> dict:
        function = call.get("function", call)
        word = self.plant(f"{place}.name")
        planted = function | {"name": word}
        if isinstance(call.get("id"), str):  # Kimi writes functions.NAME:0 in the place of the name
            call = call | {"id": call["id"].replace(str(function.get("name")), word)}
        if isinstance(function.get("arguments"), dict):
            planted["arguments"] = {
                name: self.plant(f"{place}.arguments.{name}") if isinstance(value, str) else value
                for name, value in function["arguments"].items()
            }
        return call | {"function": planted} if "function" in call else planted


def find_unshown(template: ChatTemplate, row: Row, render: Render) -> list[str]:
    """Warnings of what the template does not show of rows in the form of this one.

    ValueError for the text of a message or a call: without it the row would mean something else.
    """
    probes = Probes()
    planted = probes.plant_row(row)
    rendered = _try(render, template, planted)
    if rendered is None:
        return []  # the row itself is refused too, with its own reason
    texts = list(chain.from_iterable(rendered))
    shown = {}
    for place, word in probes.words.items():
        shown[place] = max(text.count(word) for text in texts)
    is_text = isinstance(row["messages"], str)
    if not any((template.system_prompt or "").strip() in text for text in texts):
        if is_text or row["messages"][0]["role"] not in SYSTEM_ROLES:  # it has none of its own
            shown["the system prompt"] = 0
    for place, (owner, name) in probes.others.items():
        value = owner.pop(name)
        if _try(render, template, planted) == rendered:
            shown[place] = 0
            probes.optional.add(place)
        owner[name] = value
    lost = [place for place, count in shown.items() if not count]
    if is_text:
        return [f"warning: a prompt in plain text does not show {place}" for place in lost]
    if refused := [place for place in lost if place not in probes.optional]:
        raise ValueError(
            f"the model's chat template does not show {', '.join(refused)}: give it another role "
            "or place, write it into the content of a message that is shown, or set "
            "data.chat_template to a template that shows it"
        )
    warnings = [f"warning: the model's chat template does not show {place}" for place in lost]
    for place, count in shown.items():
        if count > 1 and place.endswith(")"):  # a name of a call may come again with its result
            warnings.append(f"warning: the model's chat template shows {place} {count} times")
    return warnings + _find_unlike_prompts(rendered)


def _find_unlike_prompts(rendered: Sequence[tuple[str, ...]]) -> list[str]:
    """A warning if a reply is not trained behind the prompt that the model samples it from."""
    for texts in rendered:
        before, whole = texts[0], texts[-1]  # of a prompt both are the same
        beginning = before[common_prefix_length(before, whole) :]
        if beginning:
            return [
                f"warning: the chat template ends a prompt with {beginning!r}, which is not in "
                "front of the replies that are trained"
            ]
    return []


def _try(render: Render, template: ChatTemplate, row: Row) -> Sequence[tuple[str, ...]] | None:
    """The row as the template renders it; None if it refuses it."""
    try:
        return render(template, row)
    except ValueError:
        return None
