"""Rewards that need the text of a reply alone: which part of it is the answer, format and length.

What finds an answer returns None if there is none, and what compares answers takes None as a wrong
one: `same_text(last_tagged(reply), answer)`. Times are linear in the length of the text.
"""

import re

# System prompts that go with last_boxed, and with last_tagged and is_think_answer.
BOXED_PROMPT = (
    "Solve the problem step by step. Write the final answer, and nothing else, inside \\boxed{}."
)
THINK_ANSWER_PROMPT = (
    "You answer questions. First reason about the question between <think> and </think>. Then "
    "write the final answer, without the reasoning, between <answer> and </answer>. Your whole "
    "reply has this form: <think> the reasoning </think> <answer> the answer </answer>"
)

BOX_OR_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?!\\(?:boxed|fbox)).|[{}]", re.DOTALL)
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(.*)\}", re.DOTALL)
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
THINK_ANSWER = re.compile(
    r"\s*<think>(.*)</think>\s*<answer>(.*)</answer>\s*",
    re.DOTALL,
)
THINK_ANSWER_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def conclusion(text: str) -> str:
    """Returns the text without the thinking: what <think>...</think> holds, and what </think> ends.

    A thought that never ends goes to the end. Where the prompt ends with <think>, as some chat
    templates write it, a reply has its </think> alone.
    """
    return THINKING.sub("\n", text).rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...} in the conclusion. None if it never closes.

    Braces that are part of the content are balanced: \boxed{\frac{1}{2}} has \frac{1}{2}.
    """
    text = conclusion(text)
    content = None
    opened: list[int | None] = []  # where a box begins; None for other braces
    for match in BOX_OR_BRACE.finditer(text):
        if match["box"]:
            opened.append(match.end())
            content = None
        elif match[0] == "{":
            opened.append(None)
        elif match[0] == "}" and opened:
            begin = opened.pop()
            if begin is not None:  # the outermost of boxes in each other: both 7 and 8 may be in it
                content = text[begin : match.start()].strip()
    nested = BOX.fullmatch(content or "")
    return nested[1].strip() if nested else content


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """Returns the content of the last <tag>...</tag> in the conclusion."""
    before, end, _ = conclusion(text).rpartition(f"</{tag}>")
    _, start, content = before.rpartition(f"<{tag}>")
    return content.strip() if start and end else None


def is_think_answer(text: str) -> bool:
    """Whether the whole text is <think>...</think> <answer>...</answer>, each once and not empty.

    Where the prompt ends with <think>, as some chat templates write it, put it in front.
    """
    if any(text.count(tag) != 1 for tag in THINK_ANSWER_TAGS):
        return False
    match = THINK_ANSWER.fullmatch(text)
    return match is not None and bool(match[1].strip() and match[2].strip())


def same_text(field: str | None, answer: str) -> bool:
    """Returns whether two texts are equal apart from capitals and spacing.

    An empty text is not an answer.
    """
    words = (field or "").casefold().split()
    return words != [] and words == answer.casefold().split()


def overlong_score(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's penalty of a long reply: 0.0 up to `buffer` tokens below `max_tokens`, then falling in
    a line to -1.0 at `max_tokens` (arXiv:2503.14476, equation 13)."""
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def length_fraction(num_tokens: int, max_tokens: int) -> float:
    """A reward of length: the share of `max_tokens` that a reply uses, 1.0 beyond. It only grows.

    ValueError unless `max_tokens` is at least 1.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: expected at least 1")
    return min(1.0, num_tokens / max_tokens)
