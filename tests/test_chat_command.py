"""`rl2 chat`: it talks to the model of a run, or of a folder."""

import io
import json
import sys

import pytest
from common import launch, make_model, run_main
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.data.chat import ChatTemplate
from rl2.tools import chat


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of SFT with a system prompt. It has learned so little that its replies depend on it."""
    folder = tmp_path_factory.mktemp("chat")
    talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "abc"}]
    (folder / "rows.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8)
    launch(
        1,
        *("-m", "rl2.trainer.sft", f"data.path={folder / 'rows.jsonl'}", "data.batch_size=4"),
        *(f"actor.model_name={make_model(folder / 'tiny')}", "actor.lr=1e-4"),
        *("actor.dtype=float32", "trainer.n_epochs=1", f"trainer.save_dir={folder / 'run'}"),
        "data.system_prompt=Obey.",
    )
    return folder


@pytest.fixture
def talk(monkeypatch, capsys):
    """Talks to the model of a folder. Returns the status and what is printed, also on stderr."""

    def talk(folder, *lines):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run_main(chat.main, folder), *capsys.readouterr()

    return talk


def test_the_model_answers_and_remembers(folder, talk, monkeypatch):
    monkeypatch.setattr(chat, "LONGEST_ANSWER", 16)
    path = folder / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    template = ChatTemplate(tokenizer, system_prompt="Obey.")
    model = AutoModelForCausalLM.from_pretrained(path)
    replies, messages = [], []
    for _ in range(2):
        messages.append({"role": "user", "content": "say"})
        ids = tokenizer(template.render(messages), add_special_tokens=False, return_tensors="pt")
        length = ids["input_ids"].shape[1]
        new = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, length:]
        replies.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
    for name in ("run", "run/model"):
        status, printed, errors = talk(folder / name, "say", "", "say")
        assert status == 0 and printed.strip() == "\n".join(replies).strip(), errors


def test_a_folder_without_a_model_that_talks_is_refused(folder, talk):
    status, _, errors = talk(folder)
    assert status == 2 and "holds no model" in errors
    model = folder / "scores"
    model.mkdir()
    config = json.loads((folder / "run/model/config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (model / "config.json").write_text(json.dumps(config))
    status, _, errors = talk(model)
    assert status == 2 and "reward model" in errors
