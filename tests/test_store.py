"""Large data: read, checked and tokenised by one process of a node, and mapped by all of them."""

import datetime
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from common import make_tokenizer, write_jsonl
from env_helpers import env_of

from rl2.config.schema import SFTConfig
from rl2.data import store
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PAIR_ROWS, PROMPT_ROWS, SFT_ROWS, Examples
from rl2.data.formats import read_ppo_row, read_sft_row
from rl2.data.rows import Rows, hash_data, load_rows
from rl2.env.load import preflight
from rl2.inputs import read_examples

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """All data is large, and the cache is a folder of its own."""
    monkeypatch.setattr("rl2.data.rows.LARGE_BYTES", 1)
    monkeypatch.setenv("RL2_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_rows(count=5):
    return [
        {"messages": [{"role": "user", "content": f"{i} + 1?"}], "answer": i} for i in range(count)
    ]


def write(file, rows):
    write_jsonl(file, rows)
    return str(file)


def tables(cache):
    return sorted(cache.glob("**/*.arrow"))


def test_large_data_is_read_and_tokenised_once(cache, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.jsonl", make_rows())
    pairs = [{"prompt": f"{i}", "chosen": f"yes {i}", "rejected": "no"} for i in range(3)]
    pairs_path = write(tmp_path / "pairs.jsonl", pairs)
    template = ChatTemplate(make_tokenizer())

    def read_all():
        rows = load_rows(path, read=read_ppo_row)
        prompts = Examples(rows, template, PROMPT_ROWS, max_length=99)
        pair_rows = load_rows(pairs_path, read=PAIR_ROWS.read)
        return (
            list(rows),
            list(prompts),
            list(Examples(pair_rows, template, PAIR_ROWS, max_length=99)),
        )

    first = read_all()
    assert len(tables(cache)) == 4 and first[0] == make_rows()
    notes = capsys.readouterr().out.splitlines()
    assert len(notes) == 2
    assert all(note.endswith(f"(3 of 3 rows, first {pairs_path}, row 1)") for note in notes)
    monkeypatch.setattr("rl2.data.rows._parse_row", None)  # nothing calls them again
    monkeypatch.setattr("rl2.data.chat.ChatTemplate.tokenize", None)
    assert read_all() == first
    assert capsys.readouterr().out.splitlines() == notes
    monkeypatch.setenv("RANK", "1")
    read_all()
    assert capsys.readouterr().out == ""


def test_what_the_tables_depend_on(cache, tmp_path):
    path = write(tmp_path / "a.jsonl", make_rows())
    template = ChatTemplate(make_tokenizer())
    seen = set()

    def is_new(read=read_ppo_row, **options):
        rows = load_rows(path, read=read, **options)
        Examples(rows, template, PROMPT_ROWS, max_length=99)
        new = set(tables(cache)) - seen
        seen.update(new)
        return len(new)

    assert (is_new(), is_new()) == (2, 0)
    assert is_new(columns={"answer": "solution"}) == 2
    template = ChatTemplate(make_tokenizer(), system_prompt="Count.")
    assert (is_new(), is_new()) == (1, 0)  # other tokens of the same rows
    template.tokenizer.chat_template += " "
    assert is_new() == 1
    write(tmp_path / "a.jsonl", make_rows(6))
    assert (is_new(), is_new()) == (2, 0)
    row = {**make_rows(1)[0], "completion": "1"}
    write(tmp_path / "a.jsonl", [row])
    assert (is_new(), is_new(read_sft_row)) == (2, 2)


def test_small_data_leaves_nothing(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("rl2.data.rows.LARGE_BYTES", 2**20)
    rows = load_rows(write(tmp_path / "a.jsonl", make_rows()), read=read_ppo_row)
    Examples(rows, ChatTemplate(make_tokenizer()), PROMPT_ROWS, max_length=99)
    assert not cache.exists()


def test_rows_of_any_value_come_back_as_they_were(cache, tmp_path):
    rows = [
        {
            **row,
            "day": datetime.date(2026, 1, i + 1),
            "raw": b"\xff",
            "scores": [0.1, None],
            "none": None,
        }
        for i, row in enumerate(make_rows(28))
    ] * 90  # more than a batch
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for _ in range(2):
        loaded = load_rows(str(file), read=read_ppo_row)
        assert list(loaded) == rows and loaded[-1] == rows[-1]
        assert loaded.locate(2000) == f"{file}, row 2001"
        with pytest.raises(IndexError):
            loaded[len(rows)]
    assert cache.stat().st_mode & 0o77 == 0  # pickles are for their owner


def test_malformed_rows_of_large_data_leave_no_table(cache, tmp_path):
    path = write(tmp_path / "a.jsonl", [*make_rows(), {"messages": 5}])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"malformed rows .*\(1\):\n.*a.jsonl, row 6: "):
            load_rows(path, read=read_ppo_row)
    assert not tables(cache)


def test_a_cache_that_cannot_be_written_is_refused_with_the_remedy(cache, tmp_path):
    cache.write_text("a file")
    with pytest.raises(ValueError, match="set RL2_CACHE to another folder"):
        load_rows(write(tmp_path / "a.jsonl", make_rows()))


def test_preflight_looks_at_one_row_of_each_kind(cache, tmp_path, monkeypatch):
    rows = make_rows(3000)
    del rows[1500]["answer"], rows[2000]["answer"]
    rows = load_rows(write(tmp_path / "a.jsonl", rows), read=read_ppo_row)
    unpacked = []
    unpack = Rows.__getitem__
    monkeypatch.setattr(Rows, "__getitem__", lambda self, i: unpacked.append(i) or unpack(self, i))
    row_sets = {"data.path": rows}
    with pytest.raises(
        ValueError, match="answer.*2 of 3000 rows of data.path lack, the first at .*row 1501"
    ):
        preflight(env_of(lambda messages, answer: 0.0), row_sets, 1)
    preflight(env_of(lambda messages, answer=0: 0.0), row_sets, 1)
    Examples(rows, ChatTemplate(make_tokenizer()), PROMPT_ROWS, max_length=99)
    assert len(unpacked) < 3000 + 30


def test_problems_of_training_and_test_rows_come_together(tmp_path):
    config = SFTConfig()
    config.data.path = write(tmp_path / "train.jsonl", [{"messages": 5}])
    refused = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    }
    config.data.test_path = write(tmp_path / "test.jsonl", [refused])
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(ValueError) as error:
        read_examples(config, SFT_ROWS, ChatTemplate(tokenizer))
    assert "train.jsonl, row 1: column 'messages'" in str(error.value)
    assert "test.jsonl, row 1: the chat template refuses" in str(error.value)


def build(folder, builders, seconds):
    """Opens a table that takes `seconds` to build, and says so in a file of its own."""
    os.environ["RL2_CACHE"] = str(folder)

    def rows():
        Path(builders, str(os.getpid())).touch()
        yield from ({"number": 1}, {"number": 2})
        time.sleep(seconds)

    table = store.make_table("name", rows, "build")
    assert table["number"].to_pylist() == [1, 2]


def test_one_process_builds_and_the_next_one_takes_over_if_it_is_killed(tmp_path):
    builders = tmp_path / "builders"
    builders.mkdir()
    arguments = (tmp_path / "cache", builders)
    killed = FORK.Process(target=build, args=(*arguments, 60), daemon=True)
    killed.start()
    deadline = time.monotonic() + 20
    while not list(builders.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    others = [FORK.Process(target=build, args=(*arguments, 0), daemon=True) for _ in range(3)]
    for process in others:
        process.start()
    time.sleep(0.2)
    assert len(list(builders.iterdir())) == 1  # the others wait
    os.kill(killed.pid, signal.SIGKILL)
    for process in others:
        process.join(20)
        assert process.exitcode == 0
    assert len(list(builders.iterdir())) == 2  # one of them has built
    assert len(tables(tmp_path / "cache")) == 1


def test_the_hash_of_a_path_is_that_of_its_files(tmp_path, monkeypatch):
    """A run that only evaluates has no data.path."""
    monkeypatch.chdir(tmp_path)
    assert hash_data("") == ""
    (tmp_path / "rows.jsonl").write_text("{}")
    assert hash_data("") == ""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hash_data("~/rows.jsonl") == hash_data("rows.jsonl") != ""


def test_a_damaged_table_is_refused_with_the_remedy(cache, tmp_path):
    path = write(tmp_path / "a.jsonl", make_rows())
    load_rows(path)
    [table] = tables(cache)
    for content in (b"", table.read_bytes()[:-20], b"ARROW1" + b"\0" * 500):
        table.write_bytes(content)
        with pytest.raises(ValueError, match=f"delete {cache}, or set RL2_CACHE"):
            load_rows(path)
