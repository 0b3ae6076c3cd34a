"""Calls of tools: what each family's template writes is read back, and no text ends the run."""

import json
import random
import re

import pytest
import transformers
from chat_families import FAMILIES, make_template, make_tokenizer, write_calls
from common import RESPONSE_TEMPLATE, read_cases
from packaging.version import Version

from rl2.data.chat import ChatTemplate
from rl2.env.call_syntaxes import SYNTAXES, ToolCall
from rl2.env.found_calls import MAX_CALLS, REASONING, find_calls
from rl2.rollout.calls import CallReader

WRITERS = [name for name, family in FAMILIES.items() if family.syntax]
CASES = read_cases("tool_calls")
TYPES = {"text": "string", "n": "integer", "x": "number", "yes": "boolean", "maybe": ["string"]}
TYPES |= {"names": "array", "inner": "object"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in TYPES.items()},
            },
        },
    }
    for name in ("find", "note-2")
]
ARGUMENTS = [
    {},
    {"text": "Rome", "n": 3},
    {"text": "5", "n": -12345678901234567890, "x": 0.25, "yes": False},
    {"text": "it's {\"a\": ['b']}, \\ said\nhe\n\n  <b>\t é✓", "yes": True},
    {
        "text": "true",
        "names": ["a, b", "", "c)"],
        "inner": {"a": {"b": [1, None, "d"]}, "e": "f\ng"},
    },
    {"text": "", "inner": {}, "names": []},
    {"text": "<think> a </think> b"},
]


@pytest.fixture(scope="module", params=WRITERS)
def family(request):
    """(name, template, reader) of a family whose template writes calls."""
    template = make_template(request.param)
    return request.param, template, CallReader(template)


def read(reader, turn, prompt=()):
    return reader.read(prompt, turn, TOOLS).calls


def test_the_syntax_is_the_one_that_the_template_writes(family):
    name, _, reader = family
    assert reader.syntax.name == FAMILIES[name].syntax


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_a_call_is_read_back_as_it_was_written(family, arguments):
    name, template, reader = family
    turn = write_calls(template, FAMILIES[name], "", ("find", arguments))
    assert read(reader, turn) == [ToolCall("find", arguments)]


@pytest.mark.parametrize("content", ["", "Let me (see): {a}, [b]."])
def test_several_calls_and_the_text_before_them(family, content):
    name, template, reader = family
    calls = [("find", ARGUMENTS[3]), ("note-2", ARGUMENTS[4]), ("find", {})]
    if FAMILIES[name].syntax == "llama":  # one call, without a text
        calls = calls[:1]
    if name in ("llama3_1", "mistral_nemo", "mistral_v3"):  # which write either a text or calls
        content = ""
    found = reader.read((), write_calls(template, FAMILIES[name], content, *calls), TOOLS)
    assert found.calls == [ToolCall(*call) for call in calls]
    if content and FAMILIES[name].syntax != "cohere":
        turn = write_calls(template, FAMILIES[name], content, *calls)
        assert turn[: found.start].strip() == content


def test_a_call_that_cannot_be_read_is_answered_in_its_own_syntax(family):
    name, template, reader = family
    if FAMILIES[name].syntax == "llama":  # no mark says that this was meant as a call
        return
    turn = write_calls(template, FAMILIES[name], "", ("find", ARGUMENTS[4]))
    place = reader.read((), turn, TOOLS)
    opening = re.compile(reader.syntax.opening).match(turn, place.start)[0]
    [call] = read(reader, f"Well: {opening}oops((({{'")
    form = write_calls(template, FAMILIES[name], "", ("NAME", {"KEY": "VALUE"}))
    assert call.error.replace("rl2probe1", "0" * 9).endswith(form)


@pytest.mark.parametrize("opening", REASONING)
def test_calls_in_a_reasoning_are_no_calls(family, opening):
    name, template, reader = family
    call = write_calls(template, FAMILIES[name], "", ("find", {"n": 1}))
    good = write_calls(template, FAMILIES[name], "", ("find", {"n": 2}))
    closing = REASONING[opening]
    assert read(reader, f"{opening}\n{call}{closing}{good}") == [ToolCall("find", {"n": 2})]
    assert read(reader, f"{opening}\n{call}{closing}\n\nThe end.") == []
    assert read(reader, f"{opening}\n{call}") == []
    prompt = template.tokenize(f"a{opening}\n")
    assert read(reader, f"{call}{closing}{good}", prompt) == [ToolCall("find", {"n": 2})]
    assert read(reader, f"hm {call}", prompt) == []
    assert read(reader, good, template.tokenize(f"{opening}x{closing}\n\n")) != []


HEAD = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
TAIL = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
ONE_CALL = "{% for c in m.tool_calls or [] %}{{ WRITTEN }}{% endfor %}"


@pytest.mark.parametrize(
    "written, warning",
    [
        ("''", "its chat template writes no calls of tools"),
        (
            "'@' ~ c.function.name ~ '@'",
            "that rl2 does not read: '@rl2_probe@'",
        ),
        (  # without line breaks
            "'<tool_call>' ~ (c.function | tojson | replace('\\\\n', ' ')) ~ '</tool_call>'",
            "that rl2 does not read: '<tool_call>",
        ),
        ("'<tool_call>' ~ (c.function | tojson) ~ '</tool_call>'", ""),
    ],
)
def test_what_cannot_be_read_is_said_once_with_the_name_of_the_model(written, warning, capsys):
    tokenizer = make_tokenizer(HEAD + ONE_CALL.replace("WRITTEN", written) + TAIL)
    tokenizer.name_or_path = "org/model"
    reader = CallReader(ChatTemplate(tokenizer))
    output = capsys.readouterr().out
    assert output.count("warning") == bool(warning)
    assert warning in output and ("org/model" in output) == bool(warning)
    # What is not known is read as any of the syntaxes.
    call = '<tool_call>{"name": "find", "arguments": {"n": 1}}</tool_call>'
    assert read(reader, call) == [ToolCall("find", {"n": 1})]


needs_response_templates = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.15"), reason="needs transformers 5.15"
)
WRITTEN = "'<call>' ~ (c.function | tojson) ~ '</call>'"


@needs_response_templates
@pytest.mark.parametrize("written", [WRITTEN, "''"])
def test_a_response_template_reads_what_rl2_does_not(written, capsys):
    tokenizer = make_tokenizer(HEAD + ONE_CALL.replace("WRITTEN", written) + TAIL)
    tokenizer.response_template = RESPONSE_TEMPLATE
    reader = CallReader(ChatTemplate(tokenizer))
    assert not capsys.readouterr().out
    good = 'So <call>{"name": "find", "arguments": {"n": 1}}</call>'
    assert read(reader, good) == [ToolCall("find", {"n": 1})]
    assert read(reader, "The answer is 4.") == []
    for bad in ("{oops", '{"name": "find", "arguments": {"n": ' + "[" * 100_000):
        [call] = read(reader, f"So <call>{bad}</call>")
        assert "the call cannot be read" in call.error
        assert ("<call>" in call.error) == (written == WRITTEN)
    [call] = read(reader, '<call>{"name": "find", "arguments": {"n": 1e999}}</call>')
    assert "Out of range" in call.error


@needs_response_templates
def test_a_response_template_that_does_not_fit_is_not_used(capsys):
    tokenizer = make_tokenizer(make_template("qwen3_coder").tokenizer.chat_template)
    tokenizer.response_template = RESPONSE_TEMPLATE
    reader = CallReader(ChatTemplate(tokenizer))
    assert reader.syntax.name == "qwen3_coder" and not capsys.readouterr().out
    turn = "<tool_call><function=find><parameter=n>1</parameter></function></tool_call>"
    assert read(reader, turn) == [ToolCall("find", {"n": 1})]


HOSTILE = [
    '{"name": "find", "arguments": {"n": ' + "9" * 5000 + "}}",
    '{"name": "find", "arguments": {"n": 1e999, "x": NaN, "y": -Infinity}}',
    '{"name": "find", "arguments": {"n": 1e999}}',
    '{"name": "find", "name": "find", "arguments": {"n": 1, "n": 2}}',
    '{"name": "\\ud800", "arguments": {"\\udfff": "\\ud83d\\ude00"}}',
    '{"name": "find", "arguments": ' + '{"a": ' * 60 + "1" + "}" * 61 + "}",
    '{"name": "find", "arguments": ' + "[" * 50_000,
    '{"name": ["find"], "arguments": null}',
    '{"name": "' + "n" * 5000 + '"}',
    "[[[[]]]]",
    "find\n<arg_key>" + "</arg_key><arg_value>" * 5000,
    "\n<function=find>\n" + "<parameter=n>" * 5000,
    "<function=find>" * 5000,
    "call:find{" + "{a:" * 20_000,
    'call:find{a:<|"|>' + "x" * 1000,
    "functions.find:0<|tool_call_argument_begin|>" * 500,
    "find[CALL_ID][ARGS]" * 1000,
    " " * 200_000,
    "```\n" * 30_000,
    "add(" * 10_000,
    "function<｜tool▁sep｜>" + " " * 200_000,
    "\x00\ufffd\u2028",
]
MARKS = CASES["marks"]


def check_plain(calls):
    """The calls can be sent as JSON, and everything about them fits into a message."""
    assert len(calls) <= MAX_CALLS + 1
    for call in calls:
        text = json.dumps([call.name, call.arguments, call.error], allow_nan=False)
        text.encode()
        assert json.dumps([call.name, call.arguments], ensure_ascii=False).encode()
        assert len(call.error) < 1000 and (call.name or call.error)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_texts_are_answered(hostile):
    openings = ["", "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<｜tool▁call▁begin｜>"]
    openings += ["<|tool_call_begin|>", "<|START_ACTION|>", "<|tool_call>", "<|tool_call|>"]
    openings += ["to=functions."]
    for opening in openings:
        check_plain(find_calls(opening + hostile, TOOLS, SYNTAXES).calls)
        check_plain(find_calls((opening + hostile[:500]) * 200, TOOLS, SYNTAXES).calls)


@pytest.mark.parametrize("seed", range(20))
def test_random_texts_are_answered(seed):
    rng = random.Random(seed)
    for _ in range(300):
        text = "".join(rng.choices(MARKS, k=rng.randint(1, 40)))
        check_plain(find_calls(text, TOOLS, SYNTAXES, rng.random() < 0.2).calls)


@pytest.mark.parametrize("text, calls", CASES["read"])
def test_calls_are_read_from_the_syntax_of_each_family(text, calls):
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "mul")]
    found = find_calls(text, tools, SYNTAXES).calls
    assert len(found) == len(calls)
    for call, expected in zip(found, calls, strict=True):
        if isinstance(expected, str):
            assert expected in call.error
        else:
            assert call == ToolCall(*expected)


@pytest.mark.parametrize("declared, text, value", CASES["typed"])
def test_arguments_without_quotes_have_the_type_of_the_schema(declared, text, value):
    schema = {} if declared is None else {"type": declared}
    parameters = {"properties": {"k": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for turn in (
        f"<tool_call>\n<function=f>\n<parameter=k>\n{text}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    ):
        [call] = find_calls(turn, tools, SYNTAXES).calls
        assert call == ToolCall("f", {"k": value}) and type(call.arguments["k"]) is type(value)
