"""`rl2 chat`: it talks to the model of a run and to the one that it started from."""

import json
import subprocess
import sys

import pytest
import torch
from common import launch, make_environment, make_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.data.chat import ChatTemplate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of SFT that has learned to say abc, with a system prompt."""
    folder = tmp_path_factory.mktemp("chat")
    talk = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "abc"}]
    row = {"messages": talk}
    (folder / "rows.jsonl").write_text((json.dumps(row) + "\n") * 40)
    launch(
        1,
        *("-m", "rl2.trainer.sft", f"data.path={folder / 'rows.jsonl'}", "data.batch_size=4"),
        *(f"actor.model_name={make_model(folder / 'tiny')}", "actor.lr=0.02"),
        *(
            "actor.dtype=float32",
            "trainer.n_epochs=3",
            f"trainer.save_dir={folder / 'run'}",
            "data.system_prompt=Obey.",
        ),
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


def test_both_models_answer_and_remember(folder):
    run, new_tokens = folder / "run", 8
    lines = ["say", "say", "", "/new", "say"]
    done = chat(run, "--max-new-tokens", new_tokens, lines=lines)
    assert done.returncode == 0, done.stderr
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    template = ChatTemplate(tokenizer, system_prompt="Obey.")
    expected = {}
    for name, path in (("start", folder / "tiny"), (f"{run}/model", run / "model")):
        model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
        replies, messages = [], []
        for _ in range(2):
            messages.append({"role": "user", "content": "say"})
            ids = tokenizer(
                template.render(messages), add_special_tokens=False, return_tensors="pt"
            )
            tokens = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
            new = tokens[0, ids["input_ids"].shape[1] :]
            replies.append(tokenizer.decode(new, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": replies[-1]})
        expected[name] = [f"{name}: {reply}" for reply in (*replies, replies[0])]
    both = [line for pair in zip(*expected.values(), strict=True) for line in pair]
    assert done.stdout == "".join(f"{line}\n" for line in both)
    assert "model: abc\n" in done.stdout


@pytest.mark.nightly
def test_the_start_model_has_the_adapters_that_were_trained_further(folder):
    """Training moves nothing here, so the start model says what the model of the run says."""
    base = folder / "tiny"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "adapter")
    launch(
        1,
        *("-m", "rl2.trainer.sft", f"data.path={folder / 'rows.jsonl'}", "trainer.max_steps=1"),
        *(f"actor.model_name={base}", f"actor.adapter={folder / 'adapter'}", "actor.lr=1e-12"),
        *("actor.dtype=float32", f"trainer.save_dir={folder / 'further'}"),
    )
    done = chat(folder / "further", "--max-new-tokens", 8, lines=["say"])
    assert done.returncode == 0, done.stderr
    start, trained = (line.partition(": ")[2] for line in done.stdout.splitlines())
    of_base = chat(folder / "run", "--max-new-tokens", 8, lines=["say"]).stdout.splitlines()[0]
    assert start == trained != of_base.removeprefix("start: ")


def test_alone_and_too_long(folder):
    done = chat(folder / "run", "--alone", "--max-new-tokens", 500, lines=["say"])
    assert done.returncode == 0 and "start:" not in done.stdout and "/new" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["tiny"], "no config.yaml"), (["run", "--best"], "trainer.save_best keeps one")],
)
def test_where_there_is_no_model_it_says_so(folder, arguments, words):
    done = chat(folder / arguments[0], *arguments[1:])
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
