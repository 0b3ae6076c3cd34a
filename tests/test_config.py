"""Every rule of the config: what it refuses, in which words, and a neighbour that passes."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from common import ROOT

from rl2 import __version__
from rl2.__main__ import main
from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl2.algorithms.losses import POLICY_LOSSES, TOKEN_AVERAGES
from rl2.config.by_name import argument_names, function_of
from rl2.config.conditions import needs_critic
from rl2.config.key import Condition, PositiveInt, Ratio, key, schema_keys, section
from rl2.config.key_rules import check_keys, get_value
from rl2.config.parse import dump, explain, explain_common, parse
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.data.examples import PAIR_ROWS, SFT_ROWS
from rl2.trainer.inputs import find_row_problems
from rl2.trainer.ppo_inputs import find_ppo_problems, read_ppo_inputs


@pytest.fixture
def base(tmp_path, monkeypatch):
    """Arguments that pass; paths are those of `tmp_path`, which is where we stand."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for name in ("train.jsonl", "env.py", "note.txt"):
        (tmp_path / name).write_text("")
    return ["data.path=train.jsonl", "actor.model_name=model", "rollout.env_path=env.py"]


def problems(arguments, capsys) -> str:
    with pytest.raises(SystemExit) as exit_:
        parse(PPOConfig, arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err


RULES = [  # (refused, what the message says, accepted)
    ("actor.lrr=1", "unknown key actor.lrr=1: did you mean actor.lr", "actor.lr=1"),
    ("lr=1", "did you mean actor.lr or critic.lr", "actor.lr=2e-6"),
    (
        "data.prompts_per_rolout=4",
        "did you mean data.prompts_per_rollout?",
        "data.prompts_per_rollout=4",
    ),
    ("actor.lr=fast", "actor.lr=fast: expected a number", "actor.lr=1e-5"),
    ("data.max_length=1.5", "data.max_length=1.5: expected a whole number", "data.max_length=1e2"),
    ("trainer.max_steps=1e-2", "expected a whole number or null", "trainer.max_steps=1e2"),
    ("actor.lora_targets=q", "expected a list, as 'actor.lora_targets=[a,b]'", ""),
    (
        "data.columns=question:messages",
        "expected a map, as data.columns.NAME=VALUE",
        "data.columns.question=messages",
    ),
    ("actor.share_prompts=maybe", "expected true or false", "actor.share_prompts=false"),
    (
        "actor.gradient_checkpointing=1.5",
        "expected true or false or a whole number",
        "actor.gradient_checkpointing=3",
    ),
    (
        "actor.gradient_checkpointing=some",
        "actor.gradient_checkpointing=some: choose true, false, a number or auto",
        "actor.gradient_checkpointing=auto",
    ),
    ("actor.gradient_checkpointing=-1", "must not be below 0", "actor.gradient_checkpointing=0"),
    ("trainer.project=true", "is a text, so quote it", "trainer.project=x"),
    ("data.test_path=", "data.test_path= is empty: write a value", "data.test_path=null"),
    ("actor=3", "actor is a section; set its keys, as actor.NAME=VALUE", "actor.lr=3"),
    ("trainer.save_dir=${oops}", "trainer.save_dir: Interpolation key 'oops' not found", ""),
    ("rollout.engine_args.x=${oops}", "engine_args.x: Interpolation key 'oops' not found", ""),
    ("data.max_length=0", "data.max_length=0: it must be above 0", "data.max_length=1"),
    ("trainer.max_steps=0", "trainer.max_steps=0: it must be above 0", "trainer.max_steps=null"),
    ("actor.weight_decay=-1", "must not be below 0", "actor.weight_decay=0.1"),
    ("actor.warmup_ratio=1.5", "must not be above 1", "actor.warmup_ratio=1"),
    ("rollout.max_env_failures=2", "must not be above 1", "rollout.max_env_failures=1.0"),
    (
        "actor.loss=grpo",
        "actor.loss=grpo: GRPO is adv.norm_var=true actor.average=sequence",
        "actor.loss=gspo",
    ),
    ("kl.type=both kl.coef=1", "kl.type=both: choose reward or loss", "kl.type=loss kl.coef=1"),
    ("+actor.lr=1", "+ and ~ are not needed", "actor.lr=1"),
    ("foo", "'foo' sets no key", ""),
    ("actor.lr:1", "'actor.lr:1' sets no key: write key=value\n", "actor.lr=1"),
    ("ACTOR.LR=1", "did you mean actor.lr?", "actor.lr=1"),
    ("actor.lr=1,", "or without the ',' if it is a slip", "actor.lr=1"),
    ("batch_size=4", "here set data.prompts_per_rollout", "data.prompts_per_rollout=4"),
    ("data.seed=1,2", "names several values", "data.seed=1"),
    (
        "trainer.project=a(b)",
        """'(' after 'a' needs quotes; write 'trainer.project="a(b)"'""",
        "'trainer.project=\"a(b)\"'",
    ),
    (
        "trainer.project=#x",
        """'#' at its start needs quotes; write 'trainer.project="#x"'""",
        "'trainer.project=\"#x\"'",
    ),
    ("trainer.project=\u201cx\u201d", "is a typographic quote; type straight ones", ""),
    ("actor.lora_targets=[q_proj,v", "a bracket is missing", ""),
    ("actor.lora_targets=[a#b]", "put the item with '#' in double quotes", ""),
    ("--quiet", "--quiet: unknown option", ""),
    ("--actor.lr=1", "--actor.lr has dashes: write actor.lr=1", "actor.lr=1"),
    (
        "data.system_prompt=You are good",
        """'are', 'good' set no key: write key=value; if this is the rest of """
        """data.system_prompt, quote the whole: 'data.system_prompt="You are good"'""",
        "'data.system_prompt=\"You are good\"'",
    ),
    ("data.path=[a,b]", "data.path=['a', 'b']: give one path", "data.path=train.jsonl"),
    ("trainer.resume=runs/x", "trainer.resume=runs/x: no such folder", "trainer.resume=auto"),
    ("data.chat_template=a.jinja", "a.jinja: no such file", "data.chat_template=plain"),
    ("--lr 1e-5", "keys are written key=value without dashes", "actor.lr=1e-5"),
    ("--nproc_per_node=4", "options of torchrun come before -m", ""),
    ("--config-name", "--config-name needs a value: --config-name NAME", ""),
    ("--config-name none", "there is no file none.yaml", ""),
    ("data.path=missing.jsonl", "data.path=missing.jsonl: no such file", "data.path=openai/gsm8k"),
    (
        "data.test_path=./missing",
        "data.test_path=./missing: no such file",
        "data.test_path=train.jsonl",
    ),
    (
        "actor.model_name=./missing",
        "actor.model_name=./missing: no such folder",
        "actor.model_name=Qwen/Qwen3-0.6B",
    ),
    ("actor.model_name=.", "holds no model (no config.json)", "actor.model_name=model"),
    (
        "rollout.env_path=note.txt",
        "rollout.env_path=note.txt: this is no Python file",
        "rollout.env_path=env.py",
    ),
    (
        "actor.optimizer_dir=missing",
        "actor.optimizer_dir=missing: no such folder",
        "actor.optimizer_dir=model",
    ),
    (
        "data.chat_template=chatml",
        "data.chat_template=chatml: choose plain or the path of a Jinja file",
        "data.chat_template=plain",
    ),
    (
        "trainer.loggers=[tensorbord]",
        "trainer.loggers=['tensorbord']: choose wandb, tensorboard or trackio",
        "trainer.loggers=[tensorboard]",
    ),
    (
        "trainer.loggers=[wandb,trackio]",
        "trackio is not installed; pip install trackio",
        "trainer.loggers=[]",
    ),
    ("trainer.resume=missing", "choose auto, off, force or the folder", "trainer.resume=off"),
    (
        "actor.fsdp_size=3",
        "does not divide the 4 processes: choose 1, 2, 4 or 0",
        "actor.fsdp_size=2",
    ),
    ("data.max_length=8000", "8000 + 1 x max_new_tokens 512 = 8512", "data.max_length=7680"),
    ("rollout.max_turns=15", "1024 + 15 x max_new_tokens 512 = 8704", "rollout.max_turns=14"),
    (
        "actor.max_inference_length_per_device=1500",
        "1536; raise it",
        "actor.max_inference_length_per_device=1536",
    ),
    (
        "data.responses_per_prompt=1",
        "every advantage would be 0",
        "data.responses_per_prompt=1 adv.estimator=gae",
    ),
    (
        "actor.update_per_rollout=300",
        "more than the 256 trajectories",
        "actor.update_per_rollout=256",
    ),
    ("kl.coef=0.1", "kl.coef=0.1 needs kl.type", "kl.coef=0.1 kl.type=reward"),
    ("kl.type=loss", "kl.type=loss needs kl.coef", "kl.coef=0.1 kl.type=loss"),
    (
        "actor.average=constant",
        "Dr. GRPO takes that of the longest answer, here actor.average_constant=512",
        "actor.average=constant actor.average_constant=512",
    ),
    ("actor.average_constant=9", "needs actor.average=constant", "actor.average=sequence"),
    (
        "actor.save_freq=9",
        "actor.save_freq=9 needs actor.save_dir",
        "actor.save_freq=9 actor.save_dir=x",
    ),
    (
        "actor.save_optimizer=true",
        "no effect without actor.save_dir",
        "actor.save_optimizer=true actor.save_freq=1 actor.save_dir=x",
    ),
    (
        "rollout.train_sampling_params.top_p=0",
        "rollout.train_sampling_params.top_p=0.0: it must be above 0",
        "rollout.train_sampling_params.top_p=0.9",
    ),
    (
        "rollout.train_sampling_params.top_k=0",
        "top_k=0: it must not be below 1; the default is -1",
        "rollout.train_sampling_params.top_k=20",
    ),
    (
        "rollout.train_sampling_params.temperature=0",
        "must be above 0",
        "rollout.train_sampling_params.temperature=0.1",
    ),
    (
        "critic.lr=1e-5",
        "critic.lr=1e-05 has no effect with adv.estimator=reinforce",
        "critic.lr=1e-5 adv.estimator=gae",
    ),
    ("adv.lamda=0.9", "adv.lamda=0.9 has no effect", "adv.lamda=0.9 adv.estimator=gae"),
    (
        "kl.loss_estimator=k3",
        "no effect with kl.type=None",
        "kl.loss_estimator=k3 kl.type=loss kl.coef=1",
    ),
    (
        "kl.reward_estimator=k3",
        "no effect with kl.type=None",
        "kl.reward_estimator=k3 kl.type=reward kl.coef=1",
    ),
    (
        "actor.loss=cispo actor.clip_high=4 actor.clip=0.1",
        "no effect with actor.loss=cispo",
        "actor.loss=cispo actor.clip=4",
    ),
    (
        "actor.correction_cap=3",
        "no effect with actor.correction=none",
        "actor.correction_cap=3 actor.correction=token_tis",
    ),
    (
        "actor.sp_size=3",
        "actor.sp_size=3 does not divide the 4 processes: choose 1, 2, 4",
        "actor.sp_size=4",
    ),
    (
        "actor.tp_size=3",
        "actor.tp_size=3 does not divide the 4 processes: choose 1, 2, 4",
        "actor.tp_size=2",
    ),
    (
        "actor.tp_size=2 actor.sp_size=4",
        "the 2 processes that actor.tp_size=2 leaves: choose 1, 2",
        "actor.sp_size=4",
    ),
    (
        "actor.tp_size=4 actor.fsdp_size=2",
        "tp_size=4 leaves: choose 1 or 0",
        "actor.tp_size=2 actor.fsdp_size=2",
    ),
    (
        "actor.lora_alpha=8",
        "lora_alpha=8.0 has no effect with actor.lora_rank=0",
        "actor.lora_alpha=8 actor.lora_rank=4",
    ),
    (
        "actor.lora_targets=[q_proj]",
        "no effect with actor.lora_rank=0",
        "actor.lora_targets=[q_proj] actor.lora_rank=4",
    ),
    ("actor.lora_rank=-1", "actor.lora_rank=-1: it must not be below 0", "actor.lora_rank=1"),
    (
        "actor.lora_rank=4 actor.lora_alpha=0",
        "actor.lora_alpha=0.0: it must be above 0",
        "actor.lora_rank=4",
    ),
    (
        "actor.lora_rank=4 actor.tp_size=2",
        "adapters are not cut",
        "actor.lora_rank=4 actor.sp_size=2 actor.fsdp_size=2",
    ),
    ("rollout.engine=sglang", "it is not installed; pip install sglang", "rollout.engine=local"),
    (
        "actor.min_lr_ratio=0.1",
        "actor.min_lr_ratio=0.1 has no effect with actor.scheduler=constant",
        "actor.min_lr_ratio=0.1 actor.scheduler=cosine",
    ),
    (
        "actor.skip_threshold=2",
        "actor.skip_threshold=2.0 has no effect with one optimizer step a rollout",
        "actor.skip_threshold=2 actor.epochs_per_rollout=2",
    ),
    (
        "kl.update_freq=5",
        "kl.update_freq=5 has no effect with kl.coef=0",
        "kl.update_freq=5 kl.coef=0.1 kl.type=loss",
    ),
    (
        "kl.update_freq=5 kl.coef=0.1 kl.type=loss actor.lora_rank=4",
        "the reference is the actor without its adapters",
        "kl.coef=0.1 kl.type=loss actor.lora_rank=4",
    ),
    (
        "teacher.coef=0.5",
        "teacher.coef=0.5 has no effect without teacher.model_name",
        "teacher.coef=0.5 teacher.model_name=model",
    ),
    (
        "adv.estimator=distillation",
        "adv.estimator=distillation needs the key teacher.model_name",
        "adv.estimator=distillation teacher.model_name=model",
    ),
    (
        "adv.estimator=distillation teacher.model_name=model kl.coef=0.1 kl.type=reward",
        "kl.type=reward has no effect with adv.estimator=distillation, which takes no rewards",
        "adv.estimator=distillation teacher.model_name=model kl.coef=0.1 kl.type=loss",
    ),
    (
        "adv.estimator=distillation teacher.model_name=model teacher.coef=0.5",
        "teacher.coef=0.5 has no effect with adv.estimator=distillation",
        "teacher.model_name=model teacher.coef=0.5",
    ),
    ("teacher.model_name=./none", "teacher.model_name=./none: no such folder", ""),
    (
        "teacher.model_name=model teacher.tp_size=3",
        "teacher.tp_size=3 does not divide the 4 processes",
        "teacher.model_name=model teacher.tp_size=2",
    ),
]


@pytest.mark.parametrize(("refused", "words", "accepted"), RULES, ids=[rule[0] for rule in RULES])
def test_rule(base, capsys, monkeypatch, refused, words, accepted):
    import shlex

    monkeypatch.setenv("WORLD_SIZE", "4")
    assert words in problems([*base, *refused.split()], capsys)
    parse(PPOConfig, [*base, *shlex.split(accepted)])


def test_all_problems_come_at_once_and_once(base, capsys, monkeypatch):
    text = problems(["actor.lrr=1", "foo", "data.seed=x"], capsys)
    assert text.startswith("6 problems")  # and the three required keys
    text = problems(
        [base[0], "actor.modle_name=./missing", "rollout.env_path=x.py", "adv.lamda=0.9"], capsys
    )
    assert text.startswith("4 problems") and "is missing" not in text, (
        "a slip is read as what it must mean"
    )
    assert (
        "did you mean actor.model_name?" in text
        and "actor.model_name=./missing: no such folder" in text
    )
    text = problems(
        [*base, "adv.estimator=gea", "adv.lamda=0.9", "rollout.engine=sglnag", "data.path=no.csv"],
        capsys,
    )
    assert text.startswith("3 problems") and "no effect" not in text, (
        "estimator and engine are what is wrong, not lamda"
    )
    assert problems([*base, "kl.coef=1", "data.max_length=9999", "critic.lr=1"], capsys).startswith(
        "3 problems"
    )
    monkeypatch.setenv("RANK", "1")
    assert problems([*base, "foo"], capsys) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        "actor.lr = 1",
        "actor.lr =1",
        "actor.lr= 1",
        "--lr 1",
        "data.path=",
        "data.path=a(b)",
        "actor.model_name=null",
        "actor.dtype=bf16",  # which the critic's follows
        "data.prompts_per_rollout=-8 actor.update_per_rollout=500",
        "data.responses_per_prompt=0",
        "data.max_length=-1",
        "rollout.max_turns=0",
        "rollout.train_sampling_params.max_new_tokens=-1",
        "actor.max_length_per_device=-1",
        "actor.sp_size=-1",
        "kl.coef=-1",
        "kl.coef=-1 kl.type=loss",
    ],
)
def test_a_mistake_brings_no_follow_on_messages(base, capsys, arguments):
    assert problems([*base, *arguments.split()], capsys).startswith("1 problem in")


def test_the_remedy_for_quotes_can_be_pasted(base, capsys):
    import shlex

    for name in ("a(b)", "it's (x)", 'say "x", y', "a=b", "50%; #1", "é"):
        text = problems([*base, f"trainer.project={name}"], capsys).strip()
        remedy = re.search(r"(?:write|for a text) (\S.*)$", text)[1]
        assert parse(PPOConfig, [*base, *shlex.split(remedy)]).trainer.project == name


def test_columns_are_a_map_that_reads_back(base, tmp_path):
    columns = {"question": "messages", "my label": "answer"}
    config = parse(PPOConfig, [*base, "data.columns={question: messages, my label: answer}"])
    assert config.data.columns == columns
    (tmp_path / "again.yaml").write_text(dump(config))
    assert parse(PPOConfig, ["--config-name=again"]).data.columns == columns
    config = parse(PPOConfig, [*base, "data.columns.question=prompt", "data.columns.label=answer"])
    assert config.data.columns == {"question": "prompt", "label": "answer"}


def test_a_key_that_is_set_twice_warns(base, capsys):
    assert parse(PPOConfig, [*base, "data.seed=1", "data.seed=2"]).data.seed == 2
    words = "warning: data.seed is set to 1 and to 2; the last value counts"
    assert words in capsys.readouterr().err
    parse(PPOConfig, [*base, "data.seed=1", "data.seed=1"])
    assert capsys.readouterr().err == ""


def test_the_home_folder_may_be_written_as_a_tilde(base, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home (1)"))
    config = parse(PPOConfig, [*base, "trainer.save_dir=~/runs", 'trainer.project="~/x"'])
    assert config.trainer.save_dir == f"{tmp_path}/home (1)/runs"
    assert config.trainer.project == f"{tmp_path}/home (1)/x"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a", "holds no keys"),
        ("actor: 3", "actor is a section"),
        ("actor:\n  lr: ${oops}", "Interpolation key 'oops' not found"),
        ("actor:\n  lr: 1\n  lr: 2", "found duplicate key lr"),
        ("\0", "not readable YAML"),
    ],
)
def test_a_recipe_with_errors_is_refused_in_words(base, capsys, text, words):
    Path("wrong.yaml").write_text(text)
    assert words in problems([*base, "--config-name=wrong"], capsys)
    Path("right.yaml").write_text("actor:\ntrainer:\n  max_steps: 1e2\n")
    assert parse(PPOConfig, [*base, "--config-name=right"]).trainer.max_steps == 100


def test_what_else_is_wrong_comes_in_the_same_round(base, capsys, monkeypatch):
    def find_problems(config):
        assert config.data.path == "train.jsonl"
        return {"data.path": "train.jsonl has no rows", "actor.lr": "has a problem already"}

    with pytest.raises(SystemExit):
        parse(PPOConfig, [*base, "actor.lr=x"], find_problems)
    text = capsys.readouterr().err
    assert text.startswith("2 problems") and "has no rows" in text and "already" not in text
    parse(PPOConfig, base, find_problems)  # the run itself will find them
    assert capsys.readouterr().err == ""


def test_keys_of_another_machine_have_no_problems(base, capsys):
    """For a plan: what they name need not be here, and they may be missing."""
    elsewhere = ("data.", "rollout.env_path")
    arguments = ["data.path=no.jsonl", "actor.model_name=model", "actor.clip=0.3"]
    assert parse(PPOConfig, arguments, elsewhere=elsewhere).actor.clip == 0.3
    assert parse(PPOConfig, arguments[1:], elsewhere=elsewhere).data.path == ""
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        parse(PPOConfig, [*arguments, "actor.sp_size=0"], elsewhere=elsewhere)
    assert capsys.readouterr().err.startswith("1 problem in")


def test_values_and_types(base):
    config = parse(
        PPOConfig, [*base, "trainer.experiment_name=x", "trainer.resume=off", "actor.lr=3e-4"]
    )
    assert (
        isinstance(config, PPOConfig)
        and config.trainer.save_dir == "runs/x"
        and config.actor.lr == 3e-4
    )
    assert config.trainer.resume == "off" and config.rollout.test_sampling_params.temperature == 0


SIBLINGS = {
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
}
SIBLING_RULES = [  # (trainer, refused, what the message says, accepted)
    ("sft", "data.batch_size=0", "data.batch_size=0: it must be above 0", "data.batch_size=1"),
    (
        "sft",
        "data.prompts_per_rollout=4",
        "unknown key data.prompts_per_rollout=4",
        "data.batch_size=4",
    ),
    ("sft", "data.turns=first", "data.turns=first: choose all or last", "data.turns=last"),
    ("sft", "actor.average=constant", "choose token or sequence", "actor.average=sequence"),
    ("sft", "actor.clip=0.1", "unknown key actor.clip", "actor.max_grad_norm=2"),
    (
        "sft",
        "actor.max_length_per_device=1000",
        "shorter than a row may get: data.max_length 1024 x 1 = 1024",
        "actor.max_length_per_device=1024",
    ),
    ("sft", "actor.save_optimizer=true", "no effect without actor.save_dir", ""),
    (
        "sft",
        "actor.sp_size=3",
        "actor.sp_size=3 does not divide the 4 processes",
        "actor.sp_size=2",
    ),
    ("sft", "actor.warmup_ratio=2", "must not be above 1", "actor.warmup_ratio=0.1"),
    ("sft", "actor.model_name=./missing", "actor.model_name=./missing: no such folder", ""),
    ("dpo", "dpo.loss=nca", "dpo.loss=nca: choose sigmoid, ipo, hinge, or", "dpo.loss=ipo"),
    ("dpo", "dpo.beta=0", "dpo.beta=0.0: it must be above 0", "dpo.beta=0.5"),
    ("dpo", "dpo.label_smoothing=0.5", "it must be below 0.5", "dpo.label_smoothing=0.1"),
    ("dpo", "dpo.label_smoothing=-1", "must not be below 0", "dpo.label_smoothing=0.0"),
    (
        "dpo",
        "dpo.loss=hinge dpo.label_smoothing=0.1",
        "no effect with dpo.loss=hinge",
        "dpo.loss=hinge",
    ),
    (
        "dpo",
        "data.max_length=5000",
        "shorter than a row may get: data.max_length 5000 x 2 = 10000",
        "data.max_length=4096",
    ),
    (
        "dpo",
        "data.path=missing.jsonl",
        "data.path=missing.jsonl: no such file",
        "actor.share_prompts=false",
    ),
    ("rm", "rm.center=-1", "rm.center=-1.0: it must not be below 0", "rm.center=0.01"),
    ("rm", "actor.lr=1", "unknown key actor.lr=1: did you mean critic.lr", "critic.lr=1e-4"),
    (
        "rm",
        "critic.freeze_steps=1",
        "unknown key critic.freeze_steps",
        "critic.share_prompts=false",
    ),
    (
        "rm",
        "data.max_length=5000",
        "critic.max_length_per_device=8192 is shorter",
        "critic.max_length_per_device=2048",
    ),
    (
        "rm",
        "critic.lora_rank=4 critic.tp_size=4",
        "set critic.tp_size=1",
        "critic.lora_rank=4 critic.fsdp_size=4",
    ),
    (
        "rm",
        "critic.optimizer_dir=missing",
        "critic.optimizer_dir=missing: no such folder",
        "critic.optimizer_dir=model",
    ),
]


@pytest.mark.parametrize(
    ("trainer", "refused", "words", "accepted"), SIBLING_RULES, ids=lambda x: x
)
def test_rule_of_a_trainer_without_rollouts(
    base, capsys, monkeypatch, trainer, refused, words, accepted
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = SIBLINGS[trainer]
    worker = "critic" if trainer == "rm" else "actor"
    required = ["data.path=train.jsonl", f"{worker}.model_name=model"]
    with pytest.raises(SystemExit) as exit_:
        parse(config, [*required, *refused.split()])
    assert exit_.value.code == 2 and words in capsys.readouterr().err
    assert isinstance(parse(config, [*required, *accepted.split()]), config)


ROOTS = [PPOConfig, *SIBLINGS.values()]


@pytest.mark.parametrize("root", ROOTS)
def test_every_key_is_explained(root):
    text = explain(root)
    for name, entry in schema_keys(root).items():
        assert len(entry.help) > 5, name
        assert entry.is_section or f"  {name}=" in text
        for value in [*entry.choices, *(entry.functions or ())]:
            assert value in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_field_that_only_changes_a_default_keeps_all_else():
    known = schema_keys(PPOConfig)
    assert known["critic.lr"] == known["actor.lr"] and known["critic.lr"].above == 0
    assert PPOConfig().critic.lr == 5e-6 and PPOConfig().actor.lr == 1e-6
    assert known["critic.max_grad_norm"].help == known["actor.max_grad_norm"].help


def test_recipes_round_trip_and_overrides_win(base, capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        parse(PPOConfig, [*base, "actor.lr=0.5", "kl.coef=0.1", "kl.type=loss", "--cfg", "job"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    os.makedirs("recipes")
    (tmp_path / "recipes/mine.yaml").write_text(
        text
    )  # a whole one, with keys in vain at their defaults
    config = parse(PPOConfig, ["--config-dir", "recipes", "--config-name=mine", "actor.clip=0.3"])
    assert (config.actor.lr, config.actor.clip, config.kl.type) == (0.5, 0.3, "loss")
    assert yaml.safe_load(dump(config))["actor"]["clip"] == 0.3
    (tmp_path / "recipes/mine.yaml").write_text("actor:\n  lrr: 1\ntrainer:\n  resume: off\n")
    text = problems([*base, "--config-dir=recipes", "--config-name", "mine"], capsys)
    assert "unknown key actor.lrr=1" in text and "mine.yaml)" in text
    assert "trainer.resume=false: this key is a text, so quote it" in text
    (tmp_path / "recipes/mine.yaml").write_text("actor: [")
    assert "not readable YAML" in problems(
        [*base, "--config-dir=recipes", "--config-name", "mine"], capsys
    )


def test_saved_rollouts_are_not_on_the_policy_and_have_no_tests(base, tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"messages": "x"}\n')
    arguments = [*base, "actor.clip=0.1", f"data.test_path={tmp_path / 't.jsonl'}"]
    parse(PPOConfig, arguments)
    text = capsys.readouterr().err
    assert "the ratio is exactly 1" in text and "nothing is sampled" not in text
    parse(PPOConfig, [*arguments, f"trainer.rollouts_from={tmp_path}"])
    text = capsys.readouterr().err
    assert "the ratio is exactly 1" not in text
    assert "data.test_path: nothing is sampled with trainer.rollouts_from" in text
    with pytest.raises(SystemExit):
        parse(PPOConfig, [*arguments, "trainer.rollouts_from=nowhere", "trainer.eval_only=true"])
    assert "trains on no rollouts: leave trainer.rollouts_from out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(PPOConfig, [*base, "trainer.rollouts_from=nowhere"])
    assert "trainer.rollouts_from=nowhere: no such folder" in capsys.readouterr().err


def test_k1_in_the_loss_warns(base, capsys):
    parse(PPOConfig, [*base, "kl.coef=0.1", "kl.type=loss", "kl.loss_estimator=k1"])
    assert "gradient of k1" in capsys.readouterr().err


def test_a_loss_without_a_ratio_warns_of_several_updates(base, capsys):
    parse(PPOConfig, [*base, "actor.loss=reinforce", "actor.epochs_per_rollout=3"])
    assert "after the first of the 3 updates of a rollout" in capsys.readouterr().err
    parse(PPOConfig, [*base, "actor.loss=reinforce"])
    assert capsys.readouterr().err == ""


def test_lora_without_peft_is_refused(base, capsys, monkeypatch):
    monkeypatch.setattr("rl2.config.rules.is_installed", lambda package: False)
    assert "actor.lora_rank=8 needs peft, which is not installed; pip install peft" in problems(
        [*base, "actor.lora_rank=8"], capsys
    )
    parse(PPOConfig, base)


def test_what_only_the_hardware_makes_idle_warns(base, capsys):
    parse(PPOConfig, [*base, "actor.offload_model=true", "actor.clip=0.1"])
    text = capsys.readouterr().err
    assert "actor.offload_model=True has no effect without a GPU" in text and "exactly 1" in text
    parse(PPOConfig, [*base, "rollout.gpu_memory_utilization=0.5", "rollout.engine_args.x=1"])
    text = capsys.readouterr().err
    for argument in ("rollout.gpu_memory_utilization=0.5", "rollout.engine_args.x=1"):
        assert f"{argument} has no effect with rollout.engine=auto, which is the local" in text
    parse(PPOConfig, [*base, "rollout.gpu_memory_utilization=auto"])
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "value, problem",
    [("lots", "choose a number or auto"), ("0", "it must be above 0"), ("1.5", "above 1")],
)
def test_the_share_of_sglang_is_a_number_or_auto(base, capsys, value, problem):
    key = "rollout.gpu_memory_utilization"
    assert parse(PPOConfig, base).rollout.gpu_memory_utilization == "auto"
    assert parse(PPOConfig, [*base, f"{key}=1"]).rollout.gpu_memory_utilization == 1.0
    capsys.readouterr()
    text = problems([*base, f"{key}={value}"], capsys)
    assert f"{key}={value}" in text and problem in text


@pytest.fixture
def sglang_on_a_gpu(base, monkeypatch):
    """A command for a machine that has a GPU and SGLang 0.5.23; without the toolkit's checks."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("rl2.config.rules.is_installed", lambda package: True)
    monkeypatch.setattr("rl2.config.toolkit.version", lambda package: "0.5.23")
    return [*base, "rollout.engine=sglang"]


def test_expandable_segments_are_refused_with_sglang_on_a_gpu(
    base, sglang_on_a_gpu, capsys, monkeypatch
):
    """torch_memory_saver, by which SGLang gives its memory back, would end its processes."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    parse(PPOConfig, [*base, "rollout.engine=local"])
    text = problems(sglang_on_a_gpu, capsys)
    assert "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:512,expandable_segments:True" in text
    assert "take it out of the variable" in text
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parse(PPOConfig, sglang_on_a_gpu)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    parse(PPOConfig, sglang_on_a_gpu)


def test_a_machine_on_which_sglang_cannot_run_is_refused(sglang_on_a_gpu, capsys, monkeypatch):
    """What is refused of it is tested in test_toolkit.py."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("rl2.config.rules.toolkit_problems", lambda: ["there is no nvcc"])
    assert "rollout.engine=sglang: there is no nvcc" in problems(sglang_on_a_gpu, capsys)
    monkeypatch.setattr("rl2.config.rules.toolkit_problems", lambda: [])
    monkeypatch.setattr("rl2.config.toolkit.version", lambda package: "0.5.17")
    text = problems(sglang_on_a_gpu, capsys)
    assert "rollout.engine=sglang: sglang 0.5.17 converts the whole head" in text
    for choice in ("rollout.engine_args.enable_fp32_lm_head=false", "actor.head_dtype=bfloat16"):
        parse(PPOConfig, [*sglang_on_a_gpu, choice])
    monkeypatch.setattr("rl2.config.toolkit.version", lambda package: "0.5.2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "sglang 0.5.2 is too old" in problems(sglang_on_a_gpu, capsys)


def test_the_short_help_is_one_screen(base, capsys):
    for root in ROOTS:
        lines = explain_common(root).splitlines()
        assert len(lines) <= 50 and max(map(len, lines)) <= 100
        assert any(line.startswith("  data.path=(required)") for line in lines)
        assert not any(line.startswith("  trainer.project=") for line in lines)
    for topic, included, left_out in [
        ([], "actor.lr=1e-06", "critic.lr"),
        (["actor"], "actor.share_prompts=true", "data.path"),
        (["actor.clip"], "actor.clip=0.2", "actor.clip_high="),
        (["all"], "critic.lr=5e-06", "nothing"),
    ]:
        with pytest.raises(SystemExit) as exit_:
            parse(PPOConfig, ["--help", *topic, "actor.lr=1"])
        text = capsys.readouterr().out
        assert exit_.value.code == 0 and included in text and left_out not in text
    assert "--help actr: there is no such section or key; try actor" in problems(
        ["--help", "actr"], capsys
    )


@pytest.mark.parametrize("arguments", [["--help"], ["ppo", "--help", "all"]])
def test_help_survives_a_reader_that_leaves(arguments):
    command = [sys.executable, "-m", "rl2", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0


@pytest.mark.parametrize("root", ROOTS)
def test_every_setting_of_a_function_is_used_by_one(root):
    known = schema_keys(root)
    for name, entry in known.items():
        if entry.setting_of:
            section, _, setting = name.rpartition(".")
            table = known[f"{section}.{entry.setting_of}"].functions.values()
            assert any(setting in argument_names(function_of(entry)) for entry in table), name


OWN_FUNCTIONS = """
def loss(log_ratio, advantages, clip_high):
    return -log_ratio * advantages, {}
def estimator(rewards, values, mask, lamda):
    return rewards - values, rewards
def group_estimator(rewards, mask, group):
    return rewards * mask
"""
FUNCTION_RULES = [  # (refused, what the message says, accepted)
    (
        "actor.loss=own.py:loss actor.clip=0.1 actor.clip_high=4",
        "actor.clip=0.1 has no effect with actor.loss=own.py:loss, which uses clip_high; clip is "
        "used by ppo, gspo",
        "actor.loss=own.py:loss actor.clip=4",
    ),
    (
        "actor.loss=own.py:los",
        "own.py:los: own.py has no function los; it has loss, estimator, group_estimator",
        "actor.loss=own.py:loss",
    ),
    ("actor.loss=other.py:loss", "actor.loss=other.py: there is no such file", "actor.loss=gspo"),
    (
        "adv.estimator=broken.py:f",
        "NameError: name 'undefined' is not defined",
        "adv.estimator=gae",
    ),
    (
        "adv.estimator=own.py:estimator adv.gamma=0.9",
        "adv.gamma=0.9 has no effect with adv.estimator=own.py:estimator, which uses lamda",
        "adv.estimator=own.py:estimator adv.lamda=0.9 critic.lr=1e-5",
    ),
    (
        "adv.estimator=own.py:group_estimator adv.norm_var=true critic.lr=1e-5",
        "critic.lr=1e-05 has no effect with adv.estimator=own.py:group_estimator",
        "adv.estimator=own.py:group_estimator",
    ),
    (
        "adv.estimator=own.py:group_estimator data.responses_per_prompt=1",
        "leaves adv.estimator=own.py:group_estimator no group to compare with",
        "adv.estimator=own.py:estimator data.responses_per_prompt=1",
    ),
    (
        "adv.estimator=own.py:estimator critic.sp_size=3",
        "critic.sp_size=3 does not divide",
        "adv.estimator=own.py:estimator critic.sp_size=2",
    ),
]


@pytest.mark.parametrize(("refused", "words", "accepted"), FUNCTION_RULES)
def test_rule_of_a_function_from_a_file(
    base, capsys, tmp_path, monkeypatch, refused, words, accepted
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "own.py").write_text(OWN_FUNCTIONS)
    (tmp_path / "broken.py").write_text("f = undefined")
    assert words in problems([*base, *refused.split()], capsys)
    parse(PPOConfig, [*base, *accepted.split()])


def test_needs_critic(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FUNCTIONS)
    assert needs_critic("gae") and needs_critic(f"{tmp_path}/own.py:estimator")
    assert not needs_critic("reinforce") and not needs_critic("gea")


@dataclass
class Section:
    size: int = key(4, "a size", above=0, at_most=8)
    ratio: float | None = key(None, "a ratio", at_least=0, below=1)
    top_k: int = key(-1, "a count; -1 = all", at_least=1)
    num_parts: PositiveInt | None = key(None, "a number of parts")
    share: Ratio = key(0.5, "a share of the whole")
    detail: int = key(
        0, "a detail", only_if=Condition(lambda config, section: section.ratio, "in {path}")
    )


@dataclass
class LargeSection(Section):
    size: int = 6
    num_parts: int | None = 3


@dataclass
class Root:
    small: Section = section(Section, "a section")
    large: LargeSection = section(LargeSection, "a section with another default")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("size", 0, "it must be above 0; the default is 6"),
        ("size", 9, "it must not be above 8; the default is 6"),
        ("ratio", -0.5, "it must not be below 0; the default is None"),
        ("ratio", 1.0, "it must be below 1; the default is None"),
        ("top_k", 0, "it must not be below 1; the default is -1 (a count; -1 = all)"),
        ("num_parts", 0, "it must be above 0; the default is 3"),
        ("share", -0.1, "it must not be below 0; the default is 0.5"),
        ("share", 1.1, "it must not be above 1; the default is 0.5"),
        ("size", 8, None),
        ("num_parts", None, None),
        ("num_parts", 1, None),
        ("share", 1.0, None),
        ("ratio", 0.0, None),
        ("ratio", None, None),
        ("top_k", -1, None),
    ],
)
def test_a_range_stands_beside_its_field_and_is_inherited(name, value, problem):
    config = Root()
    setattr(config.large, name, value)
    expected = [f"large.{name}={value}: {problem}"] if problem else []
    assert check_keys(config, set_keys=set()) == (expected, [])


def test_a_condition_stands_beside_its_field():
    config = Root()
    config.large.detail = 1
    problem = "large.detail=1 has no effect in large"
    assert check_keys(config, {"large.detail", "small.detail"}) == ([problem], [])
    config.large.ratio = 0.5
    assert check_keys(config, {"large.detail"}) == ([], [])


def test_a_key_without_help_is_an_error():
    @dataclass
    class Plain:
        size: int = 1

    with pytest.raises(TypeError, match="Plain.size is declared without key"):
        schema_keys(Plain)


def test_commands(capsys, monkeypatch):
    def run_main(*arguments):
        monkeypatch.setattr("sys.argv", ["rl2", *arguments])
        main()

    run_main()
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("ppo", "sft", "dpo", "rm"))
    assert "torchrun --nproc_per_node=N -m rl2 COMMAND" in text
    run_main("--version")
    assert capsys.readouterr().out.startswith(f"rl2 {__version__}, Python 3.")
    with pytest.raises(SystemExit) as exit_:
        run_main("pop", "actor.lr=1")
    assert exit_.value.code == 2 and "did you mean ppo?" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        run_main("rm", "critic.lrr=1", "foo")
    assert exit_.value.code == 2 and "did you mean critic.lr" in capsys.readouterr().err


def test_a_function_that_asks_for_what_is_not_there_is_refused_with_what_there_is(base, capsys):
    Path("mine.py").write_text("def f(logps, secret, clip=1):\n    return logps, {}\n")
    refused = problems([*base, "actor.loss=mine.py:f"], capsys)
    assert "actor.loss=mine.py:f asks for secret; it may ask for advantages, clip, " in refused
    assert "log_ratio, logps, mask, old_logps" in refused
    refused = problems([*base, "adv.estimator=mine.py:f"], capsys)
    assert "adv.estimator=mine.py:f asks for logps, secret; it may ask for gamma" in refused


def test_a_function_may_take_what_it_does_not_name(base):
    Path("mine.py").write_text("def f(logps, **rest):\n    return logps, {}\n")
    parse(PPOConfig, [*base, "actor.loss=mine.py:f"])


def test_problems_of_config_data_and_env_come_in_one_round(base, capsys, tmp_path):
    """And each of them once."""
    row = '{"messages": [{"role": "user", "content": "x"}]}\n'
    (tmp_path / "train.jsonl").write_text(row)
    (tmp_path / "test.jsonl").write_text(row + '{"messages": []}\n')
    (tmp_path / "env.py").write_text("def reward_fn(messages, answer): return 0")
    arguments = [*base, "data.test_path=test.jsonl"]
    with pytest.raises(SystemExit):
        parse(PPOConfig, [*arguments, "actor.lr=x"], find_ppo_problems)
    text = capsys.readouterr().err
    assert "\n3 problems" in "\n" + text and "actor.lr=x: expected a number" in text
    assert "test.jsonl, row 2: column 'messages': expected" in text
    assert "reward_fn needs column 'answer', which 1 of 1 rows of data.path lack" in text
    config = parse(PPOConfig, arguments)
    with pytest.raises(ValueError, match="(?s)test.jsonl, row 2: .*needs column 'answer'"):
        read_ppo_inputs(config)
    with pytest.raises(SystemExit):
        parse(PPOConfig, [*base[1:], "data.path=no.jsonl", "actor.lr=x"], find_ppo_problems)
    assert capsys.readouterr().err.startswith("2 problems")
    (tmp_path / "env.py").write_text("def reward_fn(messages): return 1")
    (tmp_path / "test.jsonl").write_text(row * 2)
    rows, env = read_ppo_inputs(config)
    assert {key: len(of_key) for key, of_key in rows.items()} == {
        "data.path": 1,
        "data.test_path": 2,
    }
    assert env.reward_fns["reward_fn"]([]) == 1


def test_rows_of_every_trainer_are_tried_beside_the_config(base, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    path = "data.path=train.jsonl"
    for root, kind, word in (
        (SFTConfig, SFT_ROWS, "completion"),
        (DPOConfig, PAIR_ROWS, "chosen"),
        (RMConfig, PAIR_ROWS, "chosen"),
    ):
        worker = "critic" if root is RMConfig else "actor"
        config = parse(root, [path, f"{worker}.model_name=model"])
        problems = find_row_problems(kind, config)
        assert list(problems) == ["data.path"] and f"'{word}'" in problems["data.path"]


def published_algorithms() -> list[list[str]]:
    """The cells of each row of docs/algorithms.md that has the keys of an algorithm."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    table = text.partition("## By published name")[2].partition("## Estimators")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return rows[2:]


@pytest.mark.parametrize("row", published_algorithms(), ids=lambda row: row[0])
def test_the_keys_of_a_published_algorithm(base, capsys, row):
    """They pass all checks without a warning, each changes a default, and the row agrees."""
    overrides = row[5].strip("`").split()
    config = parse(PPOConfig, [*base, *overrides])
    assert "warning" not in capsys.readouterr().err
    resolved = [config.adv.estimator, config.actor.loss, config.actor.average]
    assert [cell.strip("`") for cell in row[2:5]] == resolved
    for override in overrides:
        name = override.partition("=")[0]
        assert get_value(config, name) != get_value(PPOConfig(), name), f"{name} is the default"


def test_every_estimator_loss_and_average_is_explained():
    """docs/algorithms.md has a row for each, and names no other."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    tables = (
        ("adv.estimator", ADVANTAGE_ESTIMATORS),
        ("actor.loss", POLICY_LOSSES),
        ("actor.average", TOKEN_AVERAGES),
    )
    for key_name, names in tables:
        table = text.partition(f"| `{key_name}` |")[2].partition("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(names)
