"""Chat templates: messages -> tokens, and the tokens that new messages add to a conversation.

Sampled tokens are never tokenised again: a conversation grows by appending tokens, or it starts anew.
"""

from jinja2 import TemplateError

PROBE = "rl2probe"


def encode_prompt(tokenizer, messages, tools=None) -> list[int]:
    """Tokens of a conversation up to where the assistant speaks; of a plain string, its own tokens (see `render`)."""
    return tokenize(tokenizer, render(tokenizer, messages, tools))


def render(tokenizer, messages, tools=None, prompt: bool = True) -> str:
    """The template's text of `messages`, with the generation prompt if `prompt`.

    A plain string passes as it is, after the beginning-of-sequence token if the tokenizer puts one before plain text.
    Messages with the role "tool" become the user's where the template refuses that role or drops their content.
    Raises ValueError when the template refuses the messages.
    """
    if isinstance(messages, str):
        bos = tokenizer.bos_token
        prepends = bos is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        return bos + messages if prepends and not messages.startswith(bos) else messages
    # A probe, since templates may trim or escape the real content.
    probes = [
        {**message, "content": PROBE} if _is_tool(message) else message for message in messages
    ]
    if probes != messages and not _has_tool_role(tokenizer, probes, tools):
        messages = [
            {**message, "role": "user"} if _is_tool(message) else message for message in messages
        ]
    try:
        return _apply(tokenizer, messages, tools, prompt)
    except (
        TemplateError,
        TypeError,
    ) as error:  # TypeError: a template that adds a list or None to text
        raise ValueError(
            f"the chat template refuses these messages ({error}): {str(messages)[:500]}"
        ) from error


def _is_tool(message) -> bool:
    return message.get("role") == "tool"


def _has_tool_role(tokenizer, probes, tools) -> bool:
    try:
        return PROBE in _apply(tokenizer, probes, tools, True)
    except (TemplateError, TypeError):
        return False


def _apply(tokenizer, messages, tools, prompt) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, tokenize=False
    )


def render_reply(tokenizer, messages, reply, tools=None) -> tuple[str, str]:
    """The text of `messages` where the assistant begins to speak, and the text with its `reply`: a message, or text.
    A plain string is followed by the reply as it is."""
    before = render(tokenizer, messages, tools)
    if isinstance(messages, str):
        return before, before + reply
    reply = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    return before, render(tokenizer, [*messages, reply], tools, prompt=False)


def tokenize(tokenizer, text: str | list[str]):
    """Token ids of a rendered text, or of each text of a list (in parallel, by fast tokenizers)."""
    # The template writes its special tokens itself: adding them again would start with two.
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]


def special_ids(tokenizer) -> set[int]:
    """The ids that no text of a user's becomes: ends of turns and of sequences among them."""
    added = tokenizer.added_tokens_decoder.items()
    return {id for id, token in added if token.special} | set(tokenizer.all_special_ids)


def sequences(tokenizer, replies, specials: set[int]) -> list[tuple[list[int], list[int]]]:
    """(tokens, mask) of training sequences, from the (tokens before, tokens with it) of each reply of a row. The mask is 1
    on a reply up to its end-of-turn token, the last of `specials`; a reply that ends with none gets the end-of-sequence
    token.

    A reply goes on the sequence of the one before it if its tokens begin with that. Else (another reply to the same
    prompt; or a template that rewrites earlier turns, as for reasoning) it starts a sequence of its own. With <e> the end
    of a turn, "U?A" -> "U?A1<e>" and "U?A1<e>V?A" -> "U?A1<e>V?A2<e>" are one sequence, in which 1<e> and 2<e> are trained.
    """
    found = []
    for before, tokens in replies:
        differ = (i for i, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b)
        start = next(differ, min(len(before), len(tokens)))
        end = len(tokens)
        while end > start and tokenizer.decode([tokens[end - 1]]).isspace():
            end -= 1
        if end == start or tokens[end - 1] not in specials:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    "the tokenizer has no eos_token to end a reply with: set one in the model folder"
                )
            tokens = [*tokens, tokenizer.eos_token_id]
            end = len(tokens)
        mask = [0] * start + [1] * (end - start) + [0] * (len(tokens) - end)
        earlier, trained = found[-1] if found else ([], [])
        if found and start >= len(earlier) and tokens[: len(earlier)] == earlier:
            found.pop()
            mask[: len(earlier)] = trained
        found.append((tokens, mask))
    return found


def extend(tokenizer, tokens, messages, new_messages, tools=None) -> list[int] | None:
    """The tokens that `new_messages` add: turn separators, the messages, the next generation prompt.

    `tokens` is everything so far, ending with the sampled turn, which is the last of `messages`. If that turn was cut
    off by the length limit and has no end-of-turn token, the template's own is the first of the new tokens.

    decode(tokens + new) is then the template's text of the whole conversation, up to what the tokenizer normalises.
    None when no tokens could make it so: the template rewrites or drops what was there (reasoning of earlier turns,
    spaces around the content), or the model sampled what no template writes (another end of turn, a special token in
    its text). The caller then starts a new training sequence from `encode_prompt(messages + new_messages)`.
    """
    before = _exact(tokenizer, tokens)
    whole = _exact(tokenizer, encode_prompt(tokenizer, messages + new_messages, tools))
    new = tokenize(tokenizer, whole[len(before) :])
    # This also refuses what a tokenizer does to a text without the one before it, such as starting it with a space.
    return new if _exact(tokenizer, list(tokens) + new) == whole else None


def _exact(tokenizer, tokens) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def decode(tokenizer, tokens) -> str:
    """Text of a completion as the env and the template see it: no special tokens, no spaces cleaned up."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_token_ids(tokenizer, generation_config_eos) -> list[int]:
    """Every id that ends a turn, ascending: the tokenizer's and those of the model's `generation_config.eos_token_id`
    (an int, a list or None; chat models often name several there, of which the tokenizer knows one)."""
    eos = (
        generation_config_eos
        if isinstance(generation_config_eos, list)
        else [generation_config_eos]
    )
    ids = {*eos, tokenizer.eos_token_id} - {None}
    if not ids:
        raise ValueError(
            "neither the tokenizer nor generation_config has an eos_token: set one in the model folder"
        )
    return sorted(ids)
