"""Rows of every format, errors for malformed rows, and the order of prompts and examples."""

import csv
import io
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from chat_families import make_tokenizer
from common import pack_rows, read_cases
from datasets import Dataset, are_progress_bars_disabled, enable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st

from rl2.batch import scored_spans
from rl2.config.schema import PromptConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import (
    LABELLED_ROWS,
    PAIR_ROWS,
    PROMPT_ROWS,
    SFT_ROWS,
    DataCursor,
    Examples,
    Mixture,
    describe_steps,
    hold_out,
)
from rl2.data.formats import read_pair_row, read_ppo_row, read_sft_row
from rl2.data.rows import load_rows
from rl2.inputs import read_system_prompt
from rl2.rewards.text import BOXED_PROMPT
from rl2.trainer.dpo import make_batch as make_dpo_batch
from rl2.trainer.dpo import mismatch

PROMPTS = (
    "{{ '-' if tools is none else tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}?{% endif %}"
)
TURNS = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}"
    "<|im_end|>{% endif %}{% endfor %}"
)


def user(content):
    return [{"role": "user", "content": content}]


ROWS = [
    {"messages": user(f"what is {i}\u2028?"), "answer": str(i), "level": "easy"} for i in range(3)
]


def make_rows(lengths):
    return [{"messages": user("w" * n), "answer": n} for n in lengths]


def make_examples(rows, kind=PROMPT_ROWS, template=PROMPTS, **settings):
    """Examples of rows, or of the rows of a file. Each letter is a token."""
    if not isinstance(rows, list):
        rows = load_rows(str(rows), read=kind.read)
    else:
        rows = pack_rows(rows)
    template = ChatTemplate(make_tokenizer(template))
    return Examples(rows, template, kind, **{"max_length": 99} | settings)


def write(file, rows):
    suffix = file.suffix
    if suffix == ".json" and file.stem != "lines":
        file.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8-sig")
    elif suffix == ".jsonl" or file.stem == "lines":
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        file.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    elif suffix == ".csv":
        with open(file, "w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, rows[0])
            writer.writeheader()
            writer.writerows({**row, "messages": json.dumps(row["messages"])} for row in rows)
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        table = pyarrow.Table.from_pylist(rows)
        new = pyarrow.ipc.new_stream if "stream" in file.name else pyarrow.ipc.new_file
        with new(str(file), table.schema) as out:
            out.write_table(table)
    return str(file)


@pytest.mark.parametrize(
    "name",
    ["a.json", "lines.json", "a.jsonl", "a.csv", "a.parquet", "stream.arrow", "file.arrow"],
)
def test_every_format_gives_the_same_rows(tmp_path, name):
    assert list(load_rows(write(tmp_path / name, ROWS), read=read_ppo_row)) == ROWS


def test_folder_gives_its_files_in_order_or_those_of_the_split(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[2:])
    write(tmp_path / "a.parquet", ROWS[:2])
    (tmp_path / "README.md").write_text("not data")
    assert list(load_rows(str(tmp_path))) == ROWS
    write(tmp_path / "train-00000.json", ROWS[:1])
    write(tmp_path / "training.json", ROWS[1:])
    assert list(load_rows(str(tmp_path))) == ROWS[:1]
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "x.csv", ROWS[1:2])
    assert list(load_rows(str(tmp_path), split="test")) == ROWS[1:2]


def test_messages_and_tools_may_be_json_text_and_other_text_is_a_plain_prompt(tmp_path):
    messages, tools = user("x"), [{"name": "calc"}]
    texts = {"messages": " " + json.dumps(messages), "tools": json.dumps(tools), "answer": 1}
    plain = {"messages": "[1, 2] are", "tools": "", "answer": "[{}]"}
    assert list(load_rows(write(tmp_path / "a.jsonl", [texts, plain]))) == [
        {"messages": messages, "tools": tools, "answer": 1},
        {"messages": "[1, 2] are", "tools": None, "answer": "[{}]"},
    ]


def test_problems_are_listed_once_with_their_number(tmp_path):
    rows = [{"messages": ""}] * 3 + [{"messages": i} for i in range(7)]
    with pytest.raises(ValueError) as error:
        load_rows(write(tmp_path / "a.parquet", rows[:3]), read=read_ppo_row)
    first, second = str(error.value).splitlines()
    assert "(3)" in first and "a.parquet, row 1: " in second and second.endswith("(2 more rows)")
    with pytest.raises(ValueError) as error:
        load_rows(write(tmp_path / "a.jsonl", rows), read=read_ppo_row)
    lines = str(error.value).splitlines()
    assert "(10)" in lines[0] and len(lines) == 7 and lines[6] == "... and 3 other problems"


def test_csv_row_is_named_by_its_first_line(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('messages,answer\n"two\nlines",1\nx\ny,1\nz,1,2\n')
    with pytest.raises(ValueError) as error:
        load_rows(str(file))
    _, fewer, more = str(error.value).splitlines()
    assert f"{file}, row 4: expected a cell for each column of the header, got fewer" in fewer
    assert f"{file}, row 6:" in more and "got more" in more


def test_csv_cell_may_be_long(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(f"messages,answer\n{'w' * 200_000},1\n")
    assert len(load_rows(str(file))[0]["messages"]) == 200_000


@pytest.mark.parametrize("case", read_cases("data_files"), ids=str)
def test_unusable_file_is_refused_with_the_reason(tmp_path, case):
    name, content, message, *encoding = case
    (tmp_path / name).write_bytes(content.encode(*encoding or ["latin-1"]))
    with pytest.raises(ValueError, match=rf"{tmp_path / name}.*{message}"):
        load_rows(str(tmp_path / name))


def test_text_of_a_column_that_is_not_unicode_is_refused_with_file_and_row(tmp_path):
    """Tokenizers raise a TypeError for it, and an environment cannot write it anywhere."""
    buffers = pyarrow.array(["[]", "cafe"]).buffers()
    buffers[2] = pyarrow.py_buffer(b"[]caf\xe9")
    text = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"answer": text}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"malformed rows .*\(1\):\n.*a.parquet, row 2: .*utf-8"):
        load_rows(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_deep_nesting_is_a_malformed_row(tmp_path, name):
    nested = "[" * 100_000 + "]" * 100_000
    row = f'{{"messages": "w", "answer": {nested}}}'
    good = json.dumps({"messages": "w", "answer": [[[1]]]})
    text = f"[{good},\n{row}]" if name == "a.json" else f"{good}\n{row}"
    (tmp_path / name).write_text(text)
    # The JSON reader cannot say where in a list it has given up.
    place = "not a readable json file" if name == "a.json" else "row 2"
    with pytest.raises(ValueError, match=rf"{place}: .*recursion"):
        load_rows(str(tmp_path / name), read=read_ppo_row)


def test_missing_file_empty_folder_and_unknown_hub_name_are_refused(tmp_path, monkeypatch):
    for path in ("nowhere/a.jsonl", "./nowhere", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=f"{path}: no such file or folder$"):
            load_rows(path)
    with pytest.raises(ValueError, match="this folder has no file that ends in"):
        load_rows(str(tmp_path))

    monkeypatch.setattr(sys, "stderr", io.StringIO())  # a log, which gets no bars
    enable_progress_bars()

    def load_dataset(name, config, split):
        assert are_progress_bars_disabled()
        if name != "owner/set":
            raise FileNotFoundError(f"{name} is not on the hub\nnor here")
        return Dataset.from_list([{"name": name, "config": config, "split": split}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    for name, config, split in (
        ("owner/set", None, "test"),
        ("owner/set:main", "main", "test"),
        ("owner/set@validation", None, "validation"),
        ("owner/set:main@train[:10]", "main", "train[:10]"),
    ):
        expected = {"name": "owner/set", "config": config, "split": split}
        assert list(load_rows(name, "test")) == [expected]
    with pytest.raises(ValueError, match="^other/set: .*the hub says: .* on the hub$"):
        load_rows("other/set")


def test_prompts_are_the_templates_tokens_and_tools_pass_through(monkeypatch):
    monkeypatch.setattr("rl2.data.examples.ROWS_PER_BATCH", 2)
    with_tools = {**make_rows([1])[0], "tools": [{"w": 0}]}
    rows = [*make_rows([2]), {"messages": "w w", "answer": 0}, with_tools]
    prompts = make_examples(rows, max_length=20)
    texts = [prompts.template.decode(prompt.tokens) for prompt in prompts]
    assert texts == ["-ww?", "w w", "[{'w': 0}]w?"]
    assert all(type(token) is int for token in prompts[0].tokens)
    assert [(prompt.index, prompt.row) for prompt in prompts] == list(enumerate(rows))


def test_a_system_prompt_may_have_a_name():
    for value, text in (("boxed", BOXED_PROMPT), ("Be kind.", "Be kind."), (None, None)):
        assert read_system_prompt(PromptConfig(system_prompt=value)) == text


def test_long_prompts_are_dropped_and_counted():
    rows = make_rows([3, 9, 4, 10])  # two tokens more with - and ?
    prompts = make_examples(rows, max_length=6)
    assert (len(prompts), prompts.num_dropped) == (2, 2)
    assert [(prompt.index, prompt.row["answer"]) for prompt in prompts] == [(0, 3), (2, 4)]
    [warning] = prompts.describe_dropped("training")
    assert re.findall(r"\d+", warning) == ["2", "4", "50", "6", "12"], (
        "numbers to choose a limit by"
    )
    assert warning.startswith("warning: ")
    assert make_examples(rows).describe_dropped("training") == []
    message = "data.max_length=4 leaves none of the 4 .*shortest has 5 .*longest 12"
    with pytest.raises(ValueError, match=message):
        make_examples(rows, max_length=4)


def make_mixture(lengths, shuffle=False, batch_size=1):
    """A mixture of sources a, b, ... with so many prompts of one token more each."""
    names = "abcd"[: len(lengths)]
    sources = {
        name: make_examples(make_rows([1] * length), source=name)
        for name, length in zip(names, lengths, strict=True)
    }
    return Mixture(sources, shuffle=shuffle, seed=5, batch_size=batch_size)


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 15),
    st.integers(1, 3),
    st.booleans(),
)
def test_each_epoch_holds_every_row_once_and_batches_need_only_the_position(
    lengths, batch_size, n_epochs, shuffle
):
    n = sum(lengths)
    cursor = DataCursor(make_mixture(lengths, shuffle, batch_size))
    num_steps = max(1, n * n_epochs // batch_size)
    order = [prompt.index for _ in range(num_steps + n) for prompt in cursor.next_batch()]
    for start in range(0, len(order) - n + 1, n):
        assert Counter(order[start : start + n]) == Counter(range(n))
    start = num_steps * batch_size
    resumed = DataCursor(make_mixture(lengths, shuffle, batch_size))
    resumed.load_state_dict({"rows_done": start})
    batch = [prompt.index for prompt in resumed.next_batch()]
    assert batch == order[start : start + batch_size]
    if not shuffle and len(lengths) == 1:
        assert order[:n] == list(range(n))


def test_the_start_says_how_a_run_uses_the_rows():
    prompts = make_examples(make_rows([1, 2, 99, 1, 1, 1]), max_length=60)
    [sentence] = describe_steps(Mixture({"": prompts}, batch_size=2), 5)
    assert re.findall(r"\d+", sentence) == ["5", "2", "5", "2"]
    prompts = Mixture({"": make_examples(make_rows([1] * 5))}, batch_size=8)
    sentence, problem = describe_steps(prompts, 1)
    assert re.findall(r"[\d.]+", sentence) == ["5", "8", "1", "1.6"]
    assert "data.prompts_per_rollout=8" in problem and " 1.6 times" in problem
    counts = Counter(prompt.index for prompt in DataCursor(prompts).next_batch())
    assert sum(counts.values()) / len(counts) == 1.6
    sentences = describe_steps(make_mixture([6, 2], batch_size=4), 4)
    assert [re.findall(r"[\d.]+\d|\d", sentence) for sentence in sentences] == [
        ["8", "4", "4", "2"],
        ["6", "0.75"],
        ["2", "0.25"],
    ]


@pytest.mark.parametrize("names", ["ab", [""]])
def test_order_differs_by_epoch_seed_and_source(names):
    """Else rows in pairs, as a question in two languages, would always come in the same step."""

    def orders(seed, epoch):
        sources = {name: make_examples(make_rows([1] * 20), source=name) for name in names}
        examples = take(Mixture(sources, shuffle=True, seed=seed), 2 * 20 * len(names))
        of_epoch = examples[epoch * 20 * len(names) :][: 20 * len(names)]
        return [tuple(e.index % 20 for e in of_epoch if e.source == name) for name in names]

    found = [orders(seed, epoch) for seed in range(2) for epoch in range(2)]
    assert len({order for of_sources in found for order in of_sources}) == 4 * len(names)
    assert orders(0, 1) == found[1]


# Several sources


def take(mixture, num_examples):
    return [mixture.at(position) for position in range(num_examples)]


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=3), st.booleans())
def test_a_source_has_its_share_of_every_stretch_of_a_mixture(lengths, shuffle):
    mixture = make_mixture(lengths, shuffle)
    examples = take(mixture, 2 * len(mixture))
    for size in range(1, len(mixture)):
        for start in range(len(mixture)):
            sources = [example.source for example in examples[start : start + size]]
            for name, length in zip("abcd", lengths, strict=False):
                assert abs(sources.count(name) - size * length / len(mixture)) < 2


def test_a_mixture_in_the_order_of_its_files():
    names = [(e.source, e.index) for e in take(make_mixture([4, 2]), 6)]
    assert names == [("a", 0), ("b", 4), ("a", 1), ("a", 2), ("b", 5), ("a", 3)]


def test_a_mixture_is_as_long_as_its_longest_source():
    sources = {str(length): make_examples(make_rows([length])) for length in (1, 3, 2)}
    assert Mixture(sources).longest == sources["3"].longest


def contents(sets):
    return {e.row["messages"][0]["content"] for examples in sets.values() for e in examples}


def test_test_rows_are_held_out_by_their_content_without_their_copies():
    def hold_out_of(ratio, **ranges):
        sources = {name: make_examples(make_rows(lengths)) for name, lengths in ranges.items()}
        return sources, hold_out(sources, ratio)

    # They share the rows of 20 to 29 words.
    sources, held_out = hold_out_of(0.3, a=range(30), b=range(20, 50))
    assert held_out.keys() == {"a", "b"}
    assert not contents(sources) & contents(held_out)
    assert sum(map(len, sources.values())) + sum(map(len, held_out.values())) == 60
    [in_order, reversed_, twice] = [
        hold_out_of(0.25, a=lengths)[1]
        for lengths in ([*range(20)], [*range(19, -1, -1)], [*range(20)] * 2)
    ]
    assert contents(in_order) == contents(reversed_) == contents(twice)
    assert (len(in_order["a"]), len(twice["a"])) == (5, 10)
    with pytest.raises(ValueError, match=r"data.test_ratio=0.999 .*data.path.a"):
        hold_out_of(0.999, a=range(30), b=range(20, 50))
    with pytest.raises(ValueError, match="data.test_ratio=0.9 leaves none of the 2 prompts"):
        hold_out({"": make_examples(make_rows([1, 1]))}, 0.9)


# Examples of SFT, DPO and reward models

OTHERS = read_cases("rows_of_other_projects")
USER, REPLY = OTHERS["user"], OTHERS["reply"]
GOOD_PAIR = {"messages": [USER], "chosen": "w", "rejected": "ww"}


def test_labelled_replies_and_pairs_and_their_mismatched_rows(tmp_path):
    rows = [
        {"prompt": [USER], "completion": "?", "label": True},
        {"prompt": user("??"), "completion": [{**REPLY, "content": "ww"}], "label": 0},
        GOOD_PAIR,
    ]
    file = write(tmp_path / "a.jsonl", rows)
    examples = list(make_examples(file, LABELLED_ROWS, TURNS))
    config = SimpleNamespace(dpo=SimpleNamespace(loss="kto"), data=SimpleNamespace(max_length=5))
    batch = make_dpo_batch(SimpleNamespace(config=config), examples)
    assert batch.label.tolist() == [1, 0, 1, 0]
    assert batch.token_weights.sum(1).tolist() == [0.25] * 4

    def sequences(batch):
        rows = zip(batch.tokens.tolist(), scored_spans(batch), strict=True)
        return [(tokens[:prompt], tokens[prompt : end + 1]) for tokens, (prompt, end) in rows]

    prompts, replies = zip(*sequences(batch), strict=True)
    other = mismatch(batch, 5)
    expected = [
        (prompts[0], replies[2]),  # the first example gets the chosen reply of the last one
        (prompts[1], replies[0]),
        (prompts[2], replies[1]),
        (prompts[3], replies[1]),
    ]
    assert sequences(other) == expected
    assert [len(reply) for _, reply in sequences(mismatch(batch, 4))] == [
        min(len(reply), 4 - len(prompt)) for prompt, reply in expected
    ]


def test_a_row_is_as_long_as_its_longest_sequence(tmp_path):
    rows = [GOOD_PAIR, {**GOOD_PAIR, "rejected": "wwww"}, {**GOOD_PAIR, "chosen": "wwwww"}]
    path = write(tmp_path / "a.jsonl", rows)
    examples = make_examples(path, PAIR_ROWS, TURNS, max_length=6)
    assert (len(examples), examples.num_dropped, examples.longest) == (2, 1, 6)
    assert [example.index for example in examples] == [0, 1]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [(kind, *case) for kind, cases in read_cases("malformed_rows").items() for case in cases],
)
def test_malformed_row_names_file_row_and_remedy(tmp_path, kind, row, message):
    template = (
        "{% for m in messages %}{% if m.content == 'refuse' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ m.content }}{% endfor %}<|im_end|>"
    )
    row_kind, good = {
        "ppo": (PROMPT_ROWS, {"messages": user("x"), "answer": 1}),
        "sft": (SFT_ROWS, {"messages": [USER, REPLY]}),
        "pairs": (PAIR_ROWS, GOOD_PAIR),
        "labelled": (LABELLED_ROWS, GOOD_PAIR),
    }[kind]
    file = tmp_path / "a.jsonl"
    lines = [line if isinstance(line, str) else json.dumps(line) for line in (good, row, good)]
    file.write_text("\n\n".join(lines))
    with pytest.raises(ValueError, match=rf"(?s)\(1\):.*{file}, row 3: .*{message}"):
        make_examples(file, row_kind, template)


def read(tmp_path, capsys, reader, row, **columns):
    """(the row as it is read, without columns named other; what is printed)."""
    file = write(tmp_path / "a.jsonl", [{**row, "other": 1}])
    [row] = load_rows(file, read=reader, columns=columns)
    assert row.pop("other") == 1
    return row, capsys.readouterr().out


READERS = {"ppo": read_ppo_row, "sft": read_sft_row, "pair": read_pair_row}


@pytest.mark.parametrize(
    ("kind", "row", "expected", "notes"),
    [(kind, *case) for kind in ("ppo", "pair") for case in OTHERS[kind]],
)
def test_rows_of_other_projects_are_read_and_that_is_said(
    tmp_path, capsys, kind, row, expected, notes
):
    seen, text = read(tmp_path, capsys, READERS[kind], row)
    assert seen == expected
    assert len(text.splitlines()) == len(notes) and all(note in text for note in notes)


def test_columns_are_renamed(tmp_path, capsys, monkeypatch):
    row = {"question": [USER], "label": 5, "answer": "long"}
    seen, text = read(tmp_path, capsys, read_ppo_row, row, question="messages", label="answer")
    assert seen == {"messages": [USER], "answer": 5} and not text
    with pytest.raises(ValueError, match="row 1: data.columns renames quest, which the row lacks"):
        read(tmp_path, capsys, read_ppo_row, row, quest="messages")
    monkeypatch.setenv("RANK", "1")
    assert read(tmp_path, capsys, read_ppo_row, {"prompt": "x"}) == ({"messages": "x"}, "")


PUBLIC = read_cases("public_rows")


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in READERS for name in PUBLIC[kind]]
)
def test_rows_of_public_data_sets_are_read_as_they_come(tmp_path, capsys, kind, name):
    case = PUBLIC[kind][name]
    seen, _ = read(tmp_path, capsys, READERS[kind], case["row"], **case.get("columns", {}))
    assert {column: seen.get(column) for column in case["expected"]} == case["expected"]


@pytest.mark.parametrize(("row", "text", "mask"), OTHERS["sft"])
def test_conversations_of_other_projects_are_trained(tmp_path, row, text, mask):
    examples = make_examples(write(tmp_path / "a.jsonl", [row]), SFT_ROWS, TURNS)
    [[(tokens, found)]] = [example.sequences for example in examples]
    assert examples.template.decode(tokens) == text.replace(".", "<|im_end|>") and found == mask


def test_an_unusual_role_warns_once(tmp_path, capsys):
    row = {"messages": [{"role": "critic", "content": "x"}]}
    rows = [ROWS[0], row, row]
    assert list(load_rows(write(tmp_path / "a.jsonl", rows), read=read_ppo_row)) == rows
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: the role 'critic' is unusual")
    assert line.endswith(f"(2 of 3 rows, first {tmp_path}/a.jsonl, row 3)")
