"""What rows hold reaches the model whole, or the start refuses it or names what is left out.

The templates are those of tests/templates, which behave as the published ones of the families do.
"""

import json

import datasets
import pytest
from chat_families import CHATML, MESSAGE, make_template
from common import write_jsonl

from rl2.data.examples import LABELLED_ROWS, PAIR_ROWS, PROMPT_ROWS, SFT_ROWS, Examples
from rl2.data.formats import labels, read_labelled_row
from rl2.data.rows import load_rows

USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "w"}
TALK = {"messages": [USER, ANSWER]}
EXACT = "chatml llama3 qwen3 gemma3 deepseek_r1 deepseek_v3 mistral_v3 glm4 phi4".split()


def read(tmp_path, row, template, kind=SFT_ROWS, *more_rows):
    """[(text of a sequence, its trained text)] of the row, which is the first of a file."""
    if isinstance(template, str):
        template = make_template(template)
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [row, *more_rows])
    examples = Examples(load_rows(str(path), read=kind.read), template, kind, max_length=10_000)
    sequences = []
    for tokens, mask in examples[0].sequences:
        trained = [token for token, is_trained in zip(tokens, mask, strict=False) if is_trained]
        sequences.append((template.decode(tokens), template.decode(trained)))
    return sequences


def call(arguments, name="weather"):
    function = {"name": name, "arguments": arguments}
    calls = [{"type": "function", "id": "123456789", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


SYSTEM = {"role": "system", "content": "Be brief."}
PARTS = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
BARE_CALL = {name: value for name, value in call({}).items() if name != "content"}
NO_CONTENT = {**BARE_CALL, "content": None}
QUESTION = {"instruction": "Add.", "input": "1 2"}
ADD = [{"role": "user", "content": "Add.\n1 2"}]
PAIR = {"chosen": "w", "rejected": "v"}
LABELLED = {"completion": "w", "label": True}
SAME = [  # (kind, a row, another one that says the same)
    (SFT_ROWS, {"messages": [{**USER, "content": PARTS}, ANSWER]}, TALK),
    (SFT_ROWS, {"messages": [USER, BARE_CALL]}, {"messages": [USER, call({})]}),
    (SFT_ROWS, {"messages": [USER, NO_CONTENT]}, {"messages": [USER, call({})]}),
    (SFT_ROWS, {"messages": [USER, call("")]}, {"messages": [USER, call({})]}),
    (SFT_ROWS, {"messages": [USER, call(None)]}, {"messages": [USER, call({})]}),
    (SFT_ROWS, {**TALK, "completion": "v"}, TALK),
    (SFT_ROWS, {**TALK, "images": [], "videos": None, "audios": ""}, TALK),
    (
        SFT_ROWS,
        {"system": "Be brief.", "instruction": "Add.", "context": "1 2", "response": "w"},
        {"messages": [SYSTEM, *ADD, ANSWER]},
    ),
    (PAIR_ROWS, {**QUESTION, **PAIR}, {"messages": ADD, **PAIR}),
    (
        PAIR_ROWS,
        {"system": "Be brief.", "prompt": "hello", **PAIR},
        {"messages": [SYSTEM, USER], **PAIR},
    ),
    (
        SFT_ROWS,
        {"system_prompt": "Be kind.", "messages": [SYSTEM, USER, ANSWER]},
        {"messages": [SYSTEM, USER, ANSWER]},
    ),
    (
        LABELLED_ROWS,
        {"messages": [USER, ANSWER, USER, ANSWER], "label": True},
        {"messages": [USER, ANSWER, USER], **LABELLED},
    ),
]


@pytest.mark.parametrize(("kind", "row", "same"), SAME)
def test_rows_that_say_the_same_train_the_same(tmp_path, kind, row, same):
    assert read(tmp_path, row, "deepseek_v3", kind) == read(tmp_path, same, "deepseek_v3", kind)


NOT_READ = dict.fromkeys(("input", "history", "loss_weight", "chat_template_kwargs"), "x")
COLUMNS = f"columns neither shown nor trained: {', '.join(map(repr, NOT_READ))}"
REASON = {**ANSWER, "reasoning_content": "because"}
NAMED = [  # (template, kind, row, what is printed of it)
    ("deepseek_r1", SFT_ROWS, TALK, r"ends a prompt with '<think>\n', which is not in front"),
    ("llama3", SFT_ROWS, {"messages": [USER, REASON]}, "not show messages[1].reasoning_content"),
    ("chatml", SFT_ROWS, {**TALK, "tools": [{"name": "f"}]}, "not show tools"),
    ("chatml", SFT_ROWS, {"system": "s", "messages": [SYSTEM, USER, ANSWER]}, "system is not read"),
    ("chatml", SFT_ROWS, {**TALK, "response": "v"}, "'response' is not read"),
    ("chatml", SFT_ROWS, {"prompt": "hello", "completion": "w", **NOT_READ}, COLUMNS),
    ("chatml", PAIR_ROWS, {"prompt": "hello", **PAIR, **NOT_READ}, COLUMNS),
    ("chatml", LABELLED_ROWS, {"prompt": "hello", **LABELLED, **NOT_READ}, COLUMNS),
    ("llama3", PAIR_ROWS, {"messages": [USER], **PAIR, "chosen": REASON}, "not show chosen.reason"),
]


@pytest.mark.parametrize(("name", "kind", "row", "words"), NAMED)
def test_what_is_not_used_is_named(tmp_path, capsys, name, kind, row, words):
    read(tmp_path, row, name, kind)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "deepseek_v3", "glm4", "llama3", "phi3"])
def test_a_developer_is_shown(tmp_path, name):
    developer = {**SYSTEM, "role": "developer"}
    [(text, _)] = read(tmp_path, {"messages": [developer, USER]}, name, PROMPT_ROWS)
    assert text.count("Be brief.") == 1


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "llama3", "gemma3"])
def test_a_late_system_message_is_shown_or_refused(tmp_path, name):
    late = {"role": "system", "content": "Now in French."}
    row = {"messages": [SYSTEM, USER, ANSWER, late, USER]}
    try:
        [(text, _)] = read(tmp_path, row, name, PROMPT_ROWS)
    except ValueError as error:
        assert "messages[3]" in str(error) or "refuses" in str(error)
    else:
        assert text.count("Now in French.") == 1


def chatml_with(source):
    """ChatML's tokenizer with another template."""
    template = make_template("chatml")
    template.tokenizer.chat_template = source
    return template


def test_what_the_template_skips_is_refused_by_name(tmp_path):
    """A system message, and the run's own system prompt."""
    template = chatml_with(
        "{% for m in messages %}{% if m.role != 'system' %}" + MESSAGE + "{% endif %}{% endfor %}"
    )
    row = {"messages": [USER, SYSTEM, USER]}
    with pytest.raises(ValueError, match=r"row 1: .*does not show messages\[1\].content \(system"):
        read(tmp_path, row, template, PROMPT_ROWS)
    template.system_prompt = "Be brief."
    with pytest.raises(ValueError, match="row 1: .*does not show the system prompt"):
        read(tmp_path, {"messages": [USER]}, template, PROMPT_ROWS)


@pytest.mark.parametrize("content", ["<think>because</think>w", "<think>\nbecause\n</think>\n\nw"])
@pytest.mark.parametrize("name", EXACT)
def test_reasoning_is_trained(tmp_path, name, content):
    [(text, trained)] = read(tmp_path, {"messages": [USER, {**ANSWER, "content": content}]}, name)
    assert "because" in trained and "w" in trained.partition("</think>")[2]
    assert text.count("<think>") == 1 and text.count("</think>") == 1


def test_a_reply_after_a_prompt_that_ends_the_reasoning_is_refused(tmp_path):
    template = chatml_with(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{{ m.content.split('</think>')[-1] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n</think>' }}{% endif %}"
    )
    row = {"messages": [USER, {**ANSWER, "content": "<think>because</think>w"}]}
    with pytest.raises(ValueError, match="row 1: .*does not show the whole reply: .*because"):
        read(tmp_path, row, template)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "phi3", "smollm2"])
def test_calls_that_the_template_does_not_write_are_refused(tmp_path, name):
    row = {"messages": [USER, call({"city": "Rome"})]}
    with pytest.raises(ValueError, match=r"does not show messages\[1\].tool_calls\[0\].name"):
        read(tmp_path, row, name)


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3_1", "deepseek_v3", "mistral_v3", "kimi_k2", "glm4_5"]
)
def test_arguments_are_objects_or_their_json_text(tmp_path, name):
    arguments = {"city": "Rome", "days": None}
    rows = [{"messages": [USER, call(given)]} for given in (arguments, json.dumps(arguments))]
    if name == "kimi_k2":  # writes ids in the place of names
        for row in rows:
            row["messages"][1]["tool_calls"][0]["id"] = "functions.weather:0"
    of_object, of_text = (read(tmp_path, row, name) for row in rows)
    assert of_object == of_text
    [(_, trained)] = of_object
    assert "Rome" in trained and "days" in trained and '\\"' not in trained


def test_only_columnar_files_lose_nulls(tmp_path, monkeypatch):
    row = {"messages": [USER, call({"city": "Rome", "days": None})]}
    other = {"messages": [USER, call({"day": 1})]}
    data_set = datasets.Dataset.from_list([row, other])
    data_set.to_parquet(tmp_path / "rows.parquet")
    data_set.save_to_disk(tmp_path / "rows.saved")
    monkeypatch.setattr("datasets.load_dataset", lambda *arguments, **options: data_set)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rows.json").write_text(json.dumps([row]))
    arguments = []
    names = [tmp_path / f"rows.{end}" for end in ("jsonl", "json", "parquet", "saved")]
    for path in [*names, "hub/rows"]:
        rows = load_rows(str(path), read=SFT_ROWS.read)
        [called] = rows[0]["messages"][1]["tool_calls"]
        arguments.append(called["function"]["arguments"])
    whole, part = {"city": "Rome", "days": None}, {"city": "Rome"}
    assert arguments == [whole, whole, part, part, part]


@pytest.mark.parametrize("field", [{"weight": 0}, {"weight": 0.0}, {"weight": False}], ids=str)
def test_a_reply_of_weight_0_is_not_trained(tmp_path, field):
    first = {**ANSWER, "content": "first", **field}
    [(text, trained)] = read(tmp_path, {"messages": [USER, first, USER, ANSWER]}, "chatml")
    assert "first" in text and "first" not in trained and "w" in trained
    shared = {"from": "gpt", "value": "first", **field}
    turns = [{"from": "human", "value": "hello"}, shared, {"from": "human", "value": "hello"}]
    row = {"conversations": [*turns, {"from": "gpt", "value": "w"}]}
    assert read(tmp_path, row, "chatml") == [(text, trained)]


@pytest.mark.parametrize("nothing", [None, "", [], {}])
def test_an_empty_column_is_not_named(tmp_path, nothing, capsys):
    empty = {"input": nothing, "tools": nothing, "system": nothing}
    for row in (TALK, {"instruction": "hello", "output": "w"}):
        read(tmp_path, row, "chatml")
        expected = capsys.readouterr().out
        read(tmp_path, row | empty, "chatml")
        assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "text", ['[{"a": 1}]', "[{broken", '[{"role": "user", "content": "x"}, 1]']
)
def test_text_that_begins_like_json_is_text(tmp_path, text):
    row = {"prompt": text, "completion": text}
    [(whole, trained)] = read(tmp_path, row, "chatml")
    assert whole.startswith(text + text) and trained.startswith(text)
    row = {"messages": [USER], "chosen": text, "rejected": "w"}
    assert read(tmp_path, row, "chatml", PAIR_ROWS)[0][1].startswith(text)


def test_both_replies_of_a_pair_see_the_tools(tmp_path):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Looks it up.", "parameters": parameters}
    row = {"messages": [USER], **PAIR, "tools": [{"type": "function", "function": function}]}
    for text, _ in read(tmp_path, row, "qwen3", PAIR_ROWS):
        assert "Looks it up." in text


def test_labels_of_csv_are_read(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,label\na,b,True\na,c,false\na,d,1\na,e,0\n")
    examples = load_rows(str(path), read=read_labelled_row)
    assert [labels(row) for row in examples] == [[True], [False], [True], [False]]


def test_a_missing_chat_template_is_no_fault_of_the_rows(tmp_path):
    template = make_template("chatml")
    template.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="^the model has no chat template"):
        read(tmp_path, TALK, template)


@pytest.mark.parametrize("name", EXACT)
def test_fields_that_are_not_shown_are_named(tmp_path, name, capsys):
    fields = {"name": "x", "score": 3, "flag": True, "tags": ["a"], "meta": {"a": 1}}
    plain = read(tmp_path, TALK, name)
    assert read(tmp_path, {"messages": [USER | fields, ANSWER]}, name) == plain
    printed = capsys.readouterr().out
    for field in fields:
        assert f"messages[0].{field} (user)" in printed


def test_a_field_that_is_shown_or_that_says_what_is_trained_is_not_named(tmp_path, capsys):
    template = chatml_with(
        CHATML.replace("m.content", "m.content + (m.name or '') + ('!' if m.flag else '')")
    )
    messages = [{**USER, "name": "Ada", "flag": True}, {**ANSWER, "weight": 0}, USER, ANSWER]
    [(text, _)] = read(tmp_path, {"messages": messages}, template)
    assert "helloAda!" in text and "warning" not in capsys.readouterr().out
    rows = [{"messages": [{**USER, "flag": flag}, ANSWER]} for flag in (False, True)]
    read(tmp_path, rows[0], "chatml", SFT_ROWS, rows[1])
    assert "not show messages[0].flag" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1"])
def test_calls_of_sharegpt_are_calls_and_bare_functions_are_tools(tmp_path, name):
    function = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    written = {"name": "weather", "arguments": {"city": "Rome"}}
    turns = [
        {"from": "human", "value": "hello"},
        {"from": "function_call", "value": json.dumps(written)},
    ]
    row = {"conversations": turns, "tools": json.dumps([function])}
    calls = [{"type": "function", "function": written}]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"type": "function", "function": function}]
    expected = read(tmp_path, {"messages": messages, "tools": tools}, name)
    assert read(tmp_path, row, name) == expected
    turns[1]["weight"] = 0
    with pytest.raises(ValueError, match="every reply has weight 0"):
        read(tmp_path, row, name)
