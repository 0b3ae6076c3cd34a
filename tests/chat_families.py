"""Chat templates and byte-level tokenizers of small size, as published families have them.

templates/ has a template of each family and families.yaml, which says what the tests know of it.
"""

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rl2.data.chat import ChatTemplate

TEMPLATES = Path(__file__).parent / "templates"
DATE = date(2024, 2, 29)
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
# What ChatML writes of a message m, and before a reply.
MESSAGE = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
REPLY = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CHATML = f"{{% for m in messages %}}{MESSAGE}{{% endfor %}}{REPLY}"
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTABLE]
BYTES = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(HIDDEN)
}  # as GPT-2's


@dataclass
class Family:
    """What the tests know of a family besides its template. Tokens are separated by spaces."""

    special: str
    eos: str
    bos: str | None = None
    added: str = ""  # tokens of their own that are not special
    other_ends: str = ""  # tokens that end a turn as `eos` does
    clean_reply: str = "{}"  # a reply as the template writes it ...
    clean_end: str | None = None  # ... and its end; None: `eos`
    has_system: bool = True
    has_calls: bool = False  # whether the template writes `tool_calls` beside any content
    syntax: str = ""  # of the calls that the template writes
    moves_system: bool = False  # the system prompt is shown at a last message of the user only
    strips_right: bool = False  # special tokens swallow the white space behind them
    # Training sequences of three turns, without and with a system prompt.
    num_sequences: tuple[int, int] = (1, 1)

    @property
    def ends(self) -> list[str]:
        return [self.eos, *self.other_ends.split()]


def load_families() -> dict[str, Family]:
    content = yaml.safe_load((TEMPLATES / "families.yaml").read_text(encoding="utf-8"))
    families = {}
    for name, fields in content["families"].items():
        families[name] = Family(**fields | {"special": " ".join(fields["special"])})
    return families


FAMILIES = load_families()


def make_backend(merges: list[tuple[str, str]]) -> Tokenizer:
    """A tokenizer of all bytes, and of the given merges."""
    vocab = {character: i for i, character in enumerate(sorted(BYTES.values()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def make_tokenizer(template=CHATML, eos="<|im_end|>", adds_bos=False):
    backend = make_backend([("t", "h"), ("th", "e"), ("Ġ", "the")])
    names = ["<|bos|>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<|endoftext|>"]
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token=eos, chat_template=template
    )


def make_template(name: str) -> ChatTemplate:
    """The family's template with a tokenizer that merges some letters, newlines and spaces."""
    family = FAMILIES[name]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "m")]
    backend = make_backend(merges)
    for token in family.special.split():
        token = AddedToken(token, special=True, normalized=False, rstrip=family.strips_right)
        backend.add_special_tokens([token])
    backend.add_tokens([AddedToken(token, normalized=False) for token in family.added.split()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.eos,
        chat_template=(TEMPLATES / f"{name}.jinja").read_text(),
    )
    return ChatTemplate(tokenizer, date=DATE)


def write_calls(template: ChatTemplate, family: Family, content: str, *calls: tuple) -> str:
    """A turn with calls (name, arguments) as the template writes it.

    Families without a syntax of their own use a fence. ValueError if the template refuses it.
    """
    if not family.syntax:
        bare = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{content}\n```json\n{json.dumps(bare)}\n```"
    tool_calls = []
    for i, (name, arguments) in enumerate(calls):
        if family.syntax == "deepseek":
            arguments = json.dumps(arguments, ensure_ascii=False)
        # Kimi's template writes ids in place of names, Mistral's take nine characters.
        call_id = f"functions.{name}:{i}" if family.syntax == "kimi" else f"{i:09}"
        function = {"name": name, "arguments": arguments}
        tool_calls.append({"id": call_id, "type": "function", "function": function})
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return template.render_turn(message, TOOLS)
