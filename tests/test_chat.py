"""Chat templates with a byte-level tokenizer, which decodes any text exactly."""

from datetime import date

import pytest
from chat_families import BYTES, CHATML, MESSAGE, REPLY, make_tokenizer

from rl2.data.chat import ChatTemplate
from rl2.data.examples import render_prompt
from rl2.data.probe import find_unshown

ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    f"{MESSAGE}{{% endfor %}}{REPLY}"
)
QUESTION = [{"role": "user", "content": "What is the sum? é ✓"}]
AGAIN = [{"role": "user", "content": "Sure?"}]


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def bytewise(tokenizer, text):
    """One token for each byte. The tokenizer itself would merge the letters of "the"."""
    return tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in text.encode()])


def turn(tokenizer, end="<|im_end|>", prompt=QUESTION):
    """(tokens, messages) after the sampled reply "4", as the rollout has them."""
    completion = bytewise(tokenizer, "4") + tokenizer.convert_tokens_to_ids([end] if end else [])
    tokens = ChatTemplate(tokenizer).encode_prompt(prompt) + completion
    return tokens, [*prompt, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_plain_string_gets_no_template_and_the_tokenizers_own_bos(adds_bos):
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    template = ChatTemplate(tokenizer)
    bos = "<|bos|>" * adds_bos
    assert tokenizer.decode(template.encode_prompt("2+2=")) == f"{bos}2+2="
    assert tokenizer.decode(template.encode_prompt("<|bos|>2+2=")) == "<|bos|>2+2="


def test_an_extension_decodes_and_tokenises_only_what_is_new(monkeypatch):
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    question = [{"role": "user", "content": "word " * 1000}]
    tokens, messages = turn(tokenizer, prompt=question)
    sizes = []
    for name in ("decode", "tokenize"):
        method = getattr(template, name)
        monkeypatch.setattr(
            template, name, lambda x, method=method: sizes.append(len(x)) or method(x)
        )
    assert template.extend(tokens, 2, messages, AGAIN)
    assert len(tokens) > 5000 and sum(sizes) < 400


def test_a_prompt_that_is_not_the_templates_text_starts_a_new_sequence():
    """As that of a row of plain text, whose trajectory holds a message of the user."""
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    messages = [*QUESTION, {"role": "assistant", "content": "4"}]
    for prompt in ("2+2=", "the sum of the numbers 2 and 2 is, as a number,", "assistant\n"):
        tokens = template.encode_prompt(prompt) + bytewise(tokenizer, "4")
        assert template.extend(tokens, 1, messages, AGAIN) is None


def test_refusal_of_a_template_is_an_error_with_its_reason():
    template = ChatTemplate(make_tokenizer(ALTERNATING))
    parts = [{"type": "text", "text": "x"}]
    reply = {"role": "assistant", "content": "two replies are never joined"}
    for messages, reason in (
        ([{"role": "judge", "content": "x"}], "roles must alternate.*judge"),
        ([{"role": "user", "content": parts}], "list"),
        ([*QUESTION, reply, reply], "roles must alternate"),
    ):
        with pytest.raises(ValueError, match=f"refuses these messages.*{reason}"):
            template.encode_prompt(messages)


def test_a_reply_keeps_its_spaces_and_the_stop_token_that_is_text():
    tokenizer = make_tokenizer()
    template = ChatTemplate(tokenizer)
    sampled = bytewise(tokenizer, " a , b .")
    end = tokenizer.eos_token_id
    assert template.decode_reply([*sampled, end], [end]) == " a , b ."
    assert template.decode_reply(sampled, sampled[-1:]) == " a , b ."  # rollout's stop_token_ids


DATES = (
    "{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%A, %-d. %B %y') }}|"
    "{% if strftime_now is defined %}{% set day = strftime_now('%Y-%m-%d') %}{{ day }}{% endif %}"
)


def test_a_template_with_the_date_shows_that_of_the_run_in_every_format():
    tokenizer = make_tokenizer(DATES + CHATML)
    template = ChatTemplate(tokenizer, date=date(2026, 3, 5))
    text = template.render(QUESTION)
    assert text.startswith("05 Mar 2026|Thursday, 5. March 26|2026-03-05<|im_start|>user")
    now = ChatTemplate(tokenizer)  # today's date is what transformers shows
    assert now.render(QUESTION) == rendered(tokenizer, QUESTION)
    assert now.dependencies() != template.dependencies()
    plain = [ChatTemplate(make_tokenizer(), date=date(2026, 3, day)) for day in (5, 6)]
    assert plain[0].dependencies() == plain[1].dependencies()  # which shows no date


@pytest.mark.parametrize(
    "source", [" {% if true %}\n a{% endif %}", "\n\n {{ 1 }}", "x\n  {# y #}"]
)
def test_the_date_changes_no_white_space_of_a_template(source):
    tokenizer = make_tokenizer(source + "{% if false %}{{ strftime_now('%d') }}{% endif %}")
    assert ChatTemplate(tokenizer).render(QUESTION) == rendered(tokenizer, QUESTION)


def test_variables_reach_the_template_and_wrong_ones_are_refused():
    source = "{% if enable_thinking is false %}no {% endif %}" + CHATML
    tokenizer = make_tokenizer(source)
    template = ChatTemplate(tokenizer, variables={"enable_thinking": False})
    assert template.render(QUESTION) == "no " + ChatTemplate(tokenizer).render(QUESTION)
    assert template.dependencies() != ChatTemplate(tokenizer).dependencies()
    for name in ("enable_thinkin_", "tools", "tokenize"):
        with pytest.raises(ValueError, match=f"data.chat_template_kwargs.{name}: .*remove the key"):
            ChatTemplate(tokenizer, variables={name: 1})


def test_the_system_prompt_comes_first_unless_the_row_has_its_own():
    template = ChatTemplate(make_tokenizer(), system_prompt="Be kind.")
    start = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>"
    assert template.render(QUESTION).startswith(start)
    own = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert "kind" not in template.render(own) and template.render("2+2=") == "2+2="
    tokens = template.encode_prompt(QUESTION)
    messages = [*QUESTION, {"role": "assistant", "content": "4"}]
    tokens += bytewise(template.tokenizer, "4")
    assert template.extend(tokens, 1, messages, QUESTION) is not None
    assert find_unshown(template, {"messages": own}, render_prompt) == []
    row = {"messages": "2+2=", "tools": [{"name": "add"}]}
    warnings = find_unshown(template, row, render_prompt)
    assert [line.rpartition(" ")[2] for line in warnings] == ["prompt", "tools"]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_base_model_gets_a_plain_template_on_request(adds_bos):
    tokenizer = make_tokenizer(None, "<|endoftext|>", adds_bos)
    with pytest.raises(ValueError, match="no chat template.*set data.chat_template=plain"):
        ChatTemplate(tokenizer).render(QUESTION)
    template = ChatTemplate(tokenizer, "plain")
    ((tokens, mask),) = sequences(tokenizer, [template.render_reply(QUESTION, "4")])
    bos = "<|bos|>" * adds_bos
    prompt = bos + f"user:\n{QUESTION[0]['content']}\n\nassistant:\n"
    assert tokenizer.decode(tokens) == prompt + "4<|endoftext|>\n\n"
    assert tokenizer.decode(tokens[: mask.index(1)]) == prompt and sum(mask) == 2
    tokens, messages = turn(tokenizer, end="<|endoftext|>")
    new = template.extend(tokens, 2, messages, [{"role": "tool", "content": "5"}])
    assert tokenizer.decode(new) == "\n\ntool:\n5\n\nassistant:\n"


def test_stop_token_ids():
    tokenizer = make_tokenizer()
    eos = tokenizer.eos_token_id
    for extra, expected in (([], [eos]), ([3], [3, eos]), ([eos, 7, 3], [3, 7, eos])):
        assert ChatTemplate(tokenizer).stop_token_ids(extra) == expected
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="eos_token"):
        ChatTemplate(tokenizer).stop_token_ids([])


# Training sequences


def sequences(tokenizer, texts):
    template = ChatTemplate(tokenizer)
    replies = [tuple(template.tokenize(text) for text in pair) for pair in texts]
    return template.training_sequences(replies)


def test_another_reply_to_the_same_prompt_continues_no_sequence():
    """It begins with the text of the first reply. One token a character, "." ends a turn."""
    tokenizer = make_tokenizer()
    prompt, reply, longer = (bytewise(tokenizer, text) for text in ("U?A", "U?A1.", "U?A1.2."))
    template = ChatTemplate(tokenizer)
    template.special_ids = set(bytewise(tokenizer, "."))
    found = template.training_sequences([(prompt, reply), (prompt, longer)])
    assert found == [(reply, [0, 0, 0, 1, 1]), (longer, [0, 0, 0, 1, 1, 1, 1])]


def test_a_reply_without_an_end_of_turn_gets_the_end_of_sequence():
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    reply = ChatTemplate(tokenizer).render_reply(QUESTION, "the sum is 4 é")
    ((tokens, mask),) = sequences(tokenizer, [reply])
    assert tokenizer.decode(tokens).endswith("assistant: the sum is 4 é\n<|im_end|>")
    assert mask[-1] == 1 and tokens[-1] == tokenizer.eos_token_id
    (before, whole) = ChatTemplate(tokenizer).render_reply("plain ", "text")
    assert (before, whole) == ("plain ", "plain text")
    ((tokens, mask),) = sequences(tokenizer, [(before, whole)])
    start = mask.index(1)
    assert tokenizer.decode(tokens[start:]) == "text<|im_end|>" and all(mask[start:])
    tokenizer.add_tokens(["</call>"])  # a token that is added and not special ends no turn
    ((tokens, mask),) = sequences(tokenizer, [("", "text</call>")])
    assert tokenizer.decode(tokens) == "text</call><|im_end|>" and all(mask)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token to end a reply with"):
        sequences(tokenizer, [(before, whole)])
