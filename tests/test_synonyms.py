"""Every key of RL2, verl and TRL gets an answer: a key of rl2, or why there is none."""

import dataclasses
import re

import pytest
from common import ROOT

from rl2.config.key import schema_keys
from rl2.config.parse import parse
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.config.synonyms import ABSENT, ALGORITHMS, EQUIVALENTS, all_answers, find_synonym

ROOTS = {"GRPOConfig": PPOConfig, "SFTConfig": SFTConfig, "DPOConfig": DPOConfig}
ROOTS |= {"RLOOConfig": PPOConfig, "DistillationConfig": PPOConfig, "RewardConfig": RMConfig}
KNOWN = {
    root: {n for n, k in schema_keys(root).items() if not k.is_section} for root in ROOTS.values()
}
ALL_KEYS = set().union(*KNOWN.values())


def keys_of(text):
    """The keys of rl2 that an answer names first, before its remarks."""
    return {answer.split()[0] for answer in text.partition("; here ")[2].split(" | ") if answer}


def test_every_answer_names_keys_that_exist_and_no_key_has_two():
    for name, text in all_answers().items():
        assert keys_of(text) <= ALL_KEYS, f"{name}: {text}"
        for mentioned in re.findall(
            r"\b(?:actor|critic|teacher|rollout|trainer|kl|adv|dpo|rm)[.][\w.]+\w", text
        ):
            assert mentioned in ALL_KEYS or mentioned.startswith("rollout.engine_args"), text
    names = []
    for table in (ABSENT, *EQUIVALENTS.values()):
        names += " ".join(table.values()).split()
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


@pytest.mark.parametrize("kind", ROOTS)
def test_every_key_of_trl_has_an_answer(kind):
    trl = pytest.importorskip("trl")
    known = KNOWN[ROOTS[kind]]
    for field in dataclasses.fields(getattr(trl, kind)):
        text, candidates = find_synonym(field.name, known)
        assert "here" in text, f"{kind}.{field.name} has no answer"
        assert set(candidates) <= known


RL2_AND_VERL = [
    ("actor_rollout_ref.actor.ppo_mini_batch_size", "verl's; here set actor.update_per_rollout"),
    ("actor.ppo_mini_batch_size", "verl's; here set actor.update_per_rollout"),
    ("actor_rollout_ref.rollout.n", "verl's; here set data.responses_per_prompt"),
    ("actor_rollout_ref.model.path", "verl's; here set actor.model_name"),
    ("critic.optim.lr", "verl's; here set critic.lr"),
    ("critic.model.path", "verl's; here set critic.model_name"),
    ("critic.cp_size", "RL2's; here set critic.sp_size"),
    ("critic.ppo_epochs", "verl's; here set critic.epochs_per_rollout"),
    ("ref_actor.ddp_size", "the reference is the model that the run starts from"),
    ("actor.tf_config.pipeline_model_parallel_size", "Megatron is not supported"),
    ("train_data.path", "RL2's; here set data.path"),
    ("rollout.server_args.attention_backend", "here set rollout.engine_args (as rollout"),
    ("rollout.dynamic_filtering", "RL2's; here set rollout.filter (as rollout.filter=[0,1])"),
    ("algorithm.filter_groups.enable", "verl's; here set rollout.filter (as"),
    ("mask_truncated_completions", "TRL's; here set rollout.mask_truncated"),
    ("trainer.total_epochs", "verl's; here set trainer.n_epochs"),
    ("trainer.learning_rate", "TRL's; here set actor.lr or critic.lr"),
    ("beta", "TRL's; here set kl.coef"),
    ("ray_kwargs.ray_init.num_cpus", "torchrun starts the processes"),
]


@pytest.mark.parametrize(("key", "words"), RL2_AND_VERL, ids=lambda x: x)
def test_the_answer_is_in_the_message(capsys, key, words):
    with pytest.raises(SystemExit):
        parse(PPOConfig, [f"{key}=1"])
    [line] = [
        line for line in capsys.readouterr().err.splitlines() if f"unknown key {key}=1" in line
    ]
    assert words in line


def test_an_answer_for_another_trainer_says_so():
    text, candidates = find_synonym("num_generations", KNOWN[SFTConfig])
    assert text.endswith("here data.responses_per_prompt, which this trainer does not have")
    assert candidates == []
    assert find_synonym("beta", KNOWN[DPOConfig])[1] == ["dpo.beta"]


def test_own_names_are_no_synonyms():
    """A misspelled key of rl2, or one without its section, still gets the nearest key."""
    for key in ("lr", "actor.lrr", "data.prompts_per_rolout", "actor.modle_name", "nonsense"):
        assert find_synonym(key, KNOWN[PPOConfig]) == ("", [])


def test_the_page_for_newcomers_agrees():
    """In each row of docs/coming_from.md, the names of others have an answer in the first cell."""
    page = (ROOT / "docs/coming_from.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.*) \|$", page, re.M)
    assert len(rows) > 20
    answers = all_answers()
    checked = 0
    for ours, theirs in rows:
        theirs = re.sub(r" / [\w.]+", "", theirs)  # what a size is divided by has a row of its own
        own = set(re.findall(r"[a-z]+[.][\w.]+", ours))
        for name in re.findall(r"(?<![\w.(])[a-z]+[._][\w.]*\w", theirs):
            if name not in ALL_KEYS:
                assert name in answers, f"{name} has no answer"
                assert keys_of(answers[name]) & own, f"{name}: {answers[name]}, not {ours}"
                checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("adv.estimator=grpo", "GRPO is adv.norm_var=true actor.average=sequence"),
        ("adv.estimator=ppo", "PPO is adv.estimator=gae adv.lamda=0.95"),
        ("adv.estimator=dr_grpo", "Dr. GRPO is actor.average=constant"),
        ("actor.loss=grpo", "GRPO is adv.norm_var=true"),
        ("actor.loss=dpo", "python -m rl2 dpo"),
        ("actor.loss=sapo", "choose ppo, gspo, cispo, reinforce, or your own"),
        ("algorithm=GRPO", "GRPO is adv.norm_var=true actor.average=sequence"),
        ("algo=reinforce++", "REINFORCE++ is adv.estimator=reinforce_plus_plus"),
        ("algorithm.name=other", "set adv.estimator, actor.loss, actor.average"),
    ],
)
def test_the_name_of_an_algorithm_gets_its_keys(argument, words, capsys):
    with pytest.raises(SystemExit):
        parse(PPOConfig, [argument])
    [line] = [line for line in capsys.readouterr().err.splitlines() if argument in line]
    assert words in line


def test_an_algorithm_has_one_meaning():
    """That of its line in docs/algorithms.md, of README and of the hints."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    published = {row[0]: set(row[-1].strip("`").split()) for row in rows if len(row) == 6}
    for name, keys in ALGORITHMS.items():
        in_words = {key for key in keys.split() if not key.partition("=")[2].isupper()}
        assert in_words <= published[name], name
    assert set(ALGORITHMS["GRPO"].split()) == published["GRPO"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [row] = re.findall(r"^\| GRPO \| `(.*)` \|", readme, re.M)
    assert set(row.split()) == published["GRPO"] | {"adv.estimator=reinforce"}
