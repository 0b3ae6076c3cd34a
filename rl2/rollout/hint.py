"""What a teacher sees and the policy does not: self-distillation."""

from array import array
from typing import Any

from rl2.data.chat import ChatTemplate
from rl2.rollout.trajectory import Group


class Hint:
    """A text with columns of the row, such as "The answer is {answer}", in the teacher's prompt."""

    def __init__(self, text: str, template: ChatTemplate):
        self.text = text
        self.template = template

    def add_teacher_prompts(self, group: Group) -> None:
        """Gives the trajectories of one prompt the tokens of the teacher's prompt.

        ValueError if the row lacks a column that the text names.
        """
        row = group.prompt.row
        messages = add_hint(row["messages"], fill_in(self.text, row))
        tokens = array("i", self.template.encode_prompt(messages, row.get("tools")))
        for trajectory in group.trajectories:
            for sample in trajectory.samples:
                sample.teacher_prompt = tokens


def fill_in(text: str, row: dict[str, Any]) -> str:
    """The text with the columns of the row. ValueError names what is wrong with it."""
    try:
        return text.format_map(row)
    except KeyError as error:
        columns = ", ".join(name for name in row if name != "messages")
        raise ValueError(
            f"teacher.hint: a row has no column {error.args[0]}; this one has {columns or 'none'}"
        ) from error
    except (ValueError, IndexError, AttributeError) as error:
        raise ValueError(
            f"teacher.hint={text}: {error}; write {{NAME}} for a column, and double a brace that "
            "is meant as one"
        ) from error


def add_hint(messages: Any, text: str) -> Any:
    """The messages with the text after the last one, which asks for the answer."""
    if isinstance(messages, str):
        return f"{messages}\n\n{text}"
    last = messages[-1]
    return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
