"""`rl2 chat`: it talks to the model of a run, or of a folder."""

import json
import subprocess
import sys

import pytest
from common import launch, make_environment, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.data.chat import ChatTemplate
from rl2.tools.chat import LONGEST_ANSWER


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of SFT that has learned to say abc, with a system prompt."""
    folder = tmp_path_factory.mktemp("chat")
    talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "abc"}]
    (folder / "rows.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    launch(
        1,
        *("-m", "rl2.trainer.sft", f"data.path={folder / 'rows.jsonl'}", "data.batch_size=4"),
        *(f"actor.model_name={make_model(folder / 'tiny')}", "actor.lr=0.02"),
        *("actor.dtype=float32", "trainer.n_epochs=3", f"trainer.save_dir={folder / 'run'}"),
        "data.system_prompt=Obey.",
    )
    return folder


def chat(*arguments, lines=()):
    return subprocess.run(
        [sys.executable, "-m", "rl2", "chat", *map(str, arguments)],
        input="".join(f"{line}\n" for line in lines),
        env=make_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("name", ["run", "run/model"])
def test_the_model_answers_and_remembers(folder, name):
    done = chat(folder / name, lines=["say", "", "say"])
    assert done.returncode == 0, done.stderr
    path = folder / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    template = ChatTemplate(tokenizer, system_prompt="Obey.")
    model = AutoModelForCausalLM.from_pretrained(path)
    replies, messages = [], []
    for _ in range(2):
        messages.append({"role": "user", "content": "say"})
        ids = tokenizer(template.render(messages), add_special_tokens=False, return_tensors="pt")
        length = ids["input_ids"].shape[1]
        room = min(LONGEST_ANSWER, model.config.max_position_embeddings - length)
        new = model.generate(**ids, max_new_tokens=room, do_sample=False)[0, length:]
        replies.append(tokenizer.decode(new, skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
    assert replies[0] == "abc"
    assert done.stdout.strip() == "\n".join(replies)


def test_where_there_is_no_model_it_says_so(folder):
    done = chat(folder)
    assert done.returncode == 2 and "holds no model" in done.stderr


def test_a_reward_model_is_refused(folder):
    model = folder / "scores"
    model.mkdir()
    config = json.loads((folder / "run/model/config.json").read_text())
    config["architectures"] = ["Qwen3ForSequenceClassification"]
    (model / "config.json").write_text(json.dumps(config))
    done = chat(model)
    assert done.returncode == 2 and "reward model" in done.stderr
