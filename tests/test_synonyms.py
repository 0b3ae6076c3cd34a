"""Every key of RL2, verl and TRL gets an answer: a key of rl2, or why there is none."""

import dataclasses
import itertools
import re

import pytest
import yaml
from common import ROOT
from configs import BASE, ROOTS, find_problems, write_files

from rl2.config.arguments import read_arguments
from rl2.config.key import schema_keys
from rl2.config.parse import compose
from rl2.config.presets import find_preset, load_presets
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.config.synonyms import FILE, explain_algorithm, find_answer, load_answers

TRL_CONFIGS = {"GRPOConfig": PPOConfig, "SFTConfig": SFTConfig, "DPOConfig": DPOConfig}
TRL_CONFIGS |= {"RLOOConfig": PPOConfig, "DistillationConfig": PPOConfig, "RewardConfig": RMConfig}
KNOWN = {
    root: {n for n, k in schema_keys(root).items() if not k.is_section} for root in ROOTS.values()
}
ALL_KEYS = set().union(*KNOWN.values())
ANSWERS = load_answers()
OWN_KEY = r"\b(?:actor|critic|teacher|rollout|trainer|kl|adv|dpo|rm)[.][\w.]+\w"


def test_every_answer_names_keys_that_exist():
    for name, answer in ANSWERS.items():
        texts = [answer.reason]
        for key, remark in answer.alternatives:
            assert key in ALL_KEYS, f"{name}: {key}"
            texts.append(remark)
        for mentioned in re.findall(OWN_KEY, " ".join(texts)):
            is_open = mentioned.startswith("rollout.engine_args")
            assert mentioned in ALL_KEYS or is_open, f"{name}: {mentioned}"


def test_no_key_has_two_answers():
    tables = yaml.safe_load(FILE.read_text())
    names = []
    for row in [*tables["absent"], *itertools.chain(*tables["equivalents"].values())]:
        names += row["names"]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})
    assert all(isinstance(name, str) for name in names)  # YAML reads some words as numbers


@pytest.mark.parametrize("kind", TRL_CONFIGS)
def test_every_key_of_trl_has_an_answer(kind):
    trl = pytest.importorskip("trl")
    known = KNOWN[TRL_CONFIGS[kind]]
    for field in dataclasses.fields(getattr(trl, kind)):
        answer = find_answer(field.name, known)
        assert answer is not None, f"{kind}.{field.name} has no answer"


NOTHING = []  # there is no such key here
RL2_AND_VERL = [  # (key, keys of PPO that answer)
    ("actor_rollout_ref.actor.ppo_mini_batch_size", ["actor.update_per_rollout"]),
    ("actor.ppo_mini_batch_size", ["actor.update_per_rollout"]),
    ("actor_rollout_ref.rollout.n", ["data.responses_per_prompt"]),
    ("actor_rollout_ref.model.path", ["actor.model_name"]),
    ("critic.optim.lr", ["critic.lr"]),
    ("actor.optim.betas", ["actor.betas"]),
    ("adam_beta2", ["actor.betas", "critic.betas"]),
    ("adam_epsilon", NOTHING),
    ("critic.model.path", ["critic.model_name"]),
    ("critic.cp_size", ["critic.sp_size"]),
    ("critic.ppo_epochs", ["critic.epochs_per_rollout"]),
    ("ref_actor.ddp_size", NOTHING),
    ("actor.tf_config.pipeline_model_parallel_size", NOTHING),
    ("train_data.path", ["data.path"]),
    ("rollout.server_args.attention_backend", ["rollout.engine_args"]),
    ("rollout.dynamic_filtering", ["rollout.filter"]),
    ("algorithm.filter_groups.enable", ["rollout.filter"]),
    ("mask_truncated_completions", ["rollout.mask_truncated"]),
    ("trainer.total_epochs", ["trainer.n_epochs"]),
    ("trainer.learning_rate", ["actor.lr", "critic.lr"]),
    ("beta", ["kl.coef"]),
    ("ray_kwargs.ray_init.num_cpus", NOTHING),
]


@pytest.mark.parametrize(("key", "keys"), RL2_AND_VERL)
def test_the_answer_to_a_key(key, keys):
    answer = find_answer(key, KNOWN[PPOConfig])
    assert [alternative.key for alternative in answer.usable(KNOWN[PPOConfig])] == keys
    assert bool(answer.reason) == (keys == NOTHING)


def test_a_key_that_means_the_same_is_set():
    """So that no other problem follows. A remark says that it means something else."""
    known = KNOWN[PPOConfig]
    assert find_answer("trainer.learning_rate", known).same_key(known) == "actor.lr"
    assert find_answer("rollout.dynamic_filtering", known).same_key(known) == ""


def test_an_answer_for_another_trainer_says_so():
    answer = find_answer("num_generations", KNOWN[SFTConfig])
    assert answer.usable(KNOWN[SFTConfig]) == [] and answer.same_key(KNOWN[SFTConfig]) == ""
    answer = find_answer("beta", KNOWN[DPOConfig])
    assert answer.same_key(KNOWN[DPOConfig]) == "dpo.beta"


def test_the_tables_are_read_only_for_an_unknown_key():
    load_answers.cache_clear()
    for word, is_read in (("actor.lr=1", 0), ("actor.learning_rate=1", 1)):
        compose(PPOConfig, read_arguments([word]))
        assert load_answers.cache_info().currsize == is_read


def test_own_names_are_no_synonyms():
    """A misspelled key of rl2, or one without its section, still gets the nearest key."""
    for key in ("lr", "actor.lrr", "data.prompts_per_rolout", "actor.modle_name", "nonsense"):
        assert find_answer(key, KNOWN[PPOConfig]) is None


def test_the_page_for_newcomers_agrees():
    """In each row of docs/coming_from.md, the names of others have an answer in the first cell."""
    page = (ROOT / "docs/coming_from.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| (.*) \|$", page, re.M)
    assert len(rows) > 20
    checked = 0
    for ours, theirs in rows:
        theirs = re.sub(r" / [\w.]+", "", theirs)  # what a size is divided by has a row of its own
        own = set(re.findall(r"[a-z]+[.][\w.]+", ours))
        for name in re.findall(r"(?<![\w.(])[a-z]+[._][\w.]*\w", theirs):
            if name not in ALL_KEYS:
                assert name in ANSWERS, f"{name} has no answer"
                keys = {alternative.key for alternative in ANSWERS[name].alternatives}
                assert keys & own, f"{name}: {keys}, not {ours}"
                checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("grpo", "grpo"),
        ("GRPO", "grpo"),
        ("Dr. GRPO", "dr_grpo"),
        ("reinforce++", "reinforce_plus_plus"),
        ("sapo", ""),
    ],
)
def test_a_preset_is_found_in_any_spelling(text, name):
    assert find_preset(text) == name
    assert (f"algo={name}" in explain_algorithm(text)) == bool(name)


def test_a_name_that_is_no_algorithm_of_ppo():
    assert "python -m rl2 dpo" in explain_algorithm("dpo")


def compose_keys(*words):
    return compose(PPOConfig, read_arguments([*BASE["ppo"], *words])).config


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The required keys name files of the current folder."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_is_its_line_in_the_docs(name):
    """Both make the same config, but for what the docs add as an example."""
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    text = page.partition("## Estimators")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    [keys] = [row[-1].strip("`").split() for row in rows if row[0] == f"`{name}`"]
    examples = {
        "dr_grpo": {"actor.average_constant=512"},  # that of the config
        "rloo": {"kl.coef=0.05", "kl.type=reward"},
        "dapo": {"rollout.overlong_buffer=102"},
        "distillation": {"teacher.model_name=Qwen/Qwen3-8B"},
    }.get(name, set())
    assert examples <= set(keys)
    words = [key for key in keys if key not in examples]
    if name == "dr_grpo":
        words.append("actor.average_constant=77")
    longest = "rollout.train_sampling_params.max_new_tokens=77"
    assert compose_keys(f"algo={name}", longest) == compose_keys(*words, longest)


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_passes_the_checks(in_folder, name):
    needed = ["teacher.model_name=model"] if name == "distillation" else []
    sizes = ["data.prompts_per_rollout=8", "data.responses_per_prompt=4"]
    if name == "reinforce_plus_plus":
        sizes = ["data.prompts_per_rollout=8"]
    assert find_problems("ppo", [f"algo={name}", *needed, *sizes])[0] == []


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["actor.clip_high=0.3", "algo=dapo"], []),
        (["algo=grpo", "algo=dapo", "actor.clip_high=0.3"], []),
        (["algo=ppo", "adv.estimator=rloo"], []),  # adv.lamda has no effect, but nobody wrote it
        (["algo=null"], []),
        (["algo=grpq"], ["algo=grpq"]),
        (["algorithm=grpo"], ["algo=grpo"]),
    ],
)
def test_what_is_written_beside_a_preset_wins(in_folder, words, problems):
    words = [*words, "data.prompts_per_rollout=8", "data.responses_per_prompt=4"]
    found = find_problems("ppo", words)[0]
    assert len(found) == len(problems)
    assert all(text in str(problem) for text, problem in zip(problems, found, strict=True))
    config = compose_keys(*words)
    if "actor.clip_high=0.3" in words:
        assert config.actor.clip_high == 0.3 and config.rollout.filter == [0, 1]
    if "adv.estimator=rloo" in words:
        assert config.adv.estimator == "rloo" and config.actor.epochs_per_rollout == 4


def test_a_preset_is_for_ppo_alone():
    draft = compose(DPOConfig, read_arguments([*BASE["dpo"], "algo=grpo"]))
    assert [problem.key for problem in draft.problems] == ["algo"]
