"""Rules of single keys: ranges, keys without effect, keys that follow others."""

import math
from pathlib import Path

import pytest
from common import ROOT
from configs import BASE, ROOTS, find_problems, problem_keys, write_files
from omegaconf import OmegaConf

from rl2.config.arguments import read_arguments
from rl2.config.key import schema_keys
from rl2.config.parse import compose, parse
from rl2.config.schema import PPOConfig, dump
from rl2.config.values import get_value


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, with the files that the required keys name."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_files(tmp_path)


def numeric_keys(wanted):
    """The name and the Key of every key of all trainers, one of whose types is among `wanted`."""
    for root in ROOTS.values():
        for name, key in schema_keys(root).items():
            if wanted.intersection(key.types):
                yield name, key


# Rewards, and so what is compared with them or multiplies them, may be any number.
OF_REWARDS = {"rollout.filter", "rollout.reward_weights"}


def test_every_number_has_a_lower_bound():
    for name, key in numeric_keys({int, float}):
        if name in OF_REWARDS:
            assert list(key.broken_bounds(-math.inf)) == ["be finite"]
            continue
        bounds = [x for x in (key.above, key.at_least) if x is not None]
        assert bounds, f"{name} may be any number"
        assert list(key.broken_bounds(bounds[0] - 1)), name


def test_nan_is_refused_everywhere_and_inf_where_it_is_no_bound():
    may_be_infinite = {"clip", "clip_high", "correction_cap", "max_grad_norm"}
    for name, key in numeric_keys({float}):
        assert list(key.broken_bounds(math.nan)) == ["be a number"], name
        is_allowed = name.rpartition(".")[2] in may_be_infinite
        assert (not list(key.broken_bounds(math.inf))) == is_allowed, name
        assert list(key.broken_bounds(-math.inf)), name


SENSIBLE = [  # (trainer, arguments)
    ("ppo", "rollout.partial=true"),
    ("ppo", "rollout.train_sampling_params.top_k=5"),
    ("ppo", "data.chat_template_kwargs.x=null rollout.engine_args.x=null"),
    ("ppo", "actor.max_grad_norm=inf"),
    ("ppo", "actor.update_per_rollout=2 actor.clip=0.1 actor.clip_high=inf"),
    ("ppo", "actor.correction=token_tis actor.correction_cap=1"),
    ("ppo", "actor.loss=cispo actor.clip=4 actor.update_per_rollout=2"),
    ("ppo", "actor.loss=reinforce"),
    ("ppo", "rollout.gpu_memory_utilization=auto"),
    ("sft", "actor.lora_rank=4 trainer.seed=1"),
]


@pytest.mark.parametrize(("trainer", "arguments"), SENSIBLE)
def test_sensible_values_pass(monkeypatch, trainer, arguments):
    monkeypatch.setattr("rl2.config.rules.installed_version", lambda package: "99")
    assert problem_keys(trainer, *arguments.split()) == []


def test_a_loss_of_ages_takes_no_rollouts_of_another_run():
    loss = f"actor.loss={ROOT}/examples/plugins/turns_and_ages.py:aged"
    assert problem_keys("ppo", loss, "trainer.rollouts_from=.") == ["trainer.rollouts_from"]
    assert problem_keys("ppo", "trainer.rollouts_from=.") == problem_keys("ppo", loss) == []


@pytest.mark.parametrize("trainer", ROOTS)
def test_a_whole_config_reads_back_without_a_word(capsys, tmp_path, trainer):
    """Its keys are set, to values that they have anyway."""
    arguments = BASE[trainer] + (["actor.sp_size=1"] if trainer != "rm" else [])
    (tmp_path / "whole.yaml").write_text(dump(parse(ROOTS[trainer], arguments)))
    again = parse(ROOTS[trainer], ["--config-name=whole"])
    assert again == parse(ROOTS[trainer], arguments)
    assert capsys.readouterr().err == ""


def test_a_config_with_a_layout_reads_back_without_a_word(capsys, tmp_path, monkeypatch):
    """The critic's keys that follow the actor's are in the file; GRPO has no critic."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "whole.yaml").write_text(dump(parse(PPOConfig, [*BASE["ppo"], "actor.sp_size=4"])))
    assert parse(PPOConfig, ["--config-name=whole"]).critic.sp_size == 4
    assert capsys.readouterr().err == ""


LAYOUT = (
    "adv.estimator=gae actor.sp_size=4 actor.max_length_per_device=2048"
    " actor.gradient_checkpointing=false actor.warmup_ratio=0.1"
)
SGLANG = "rollout.engine=sglang"
FOLLOWING = [  # (arguments of PPO, keys that follow them and their values)
    # The critic lies in memory as the actor unless it is told otherwise.
    (LAYOUT, "critic.sp_size=4 critic.max_length_per_device=2048"),
    (LAYOUT, "critic.gradient_checkpointing=false critic.warmup_ratio=0.0"),
    (LAYOUT, "critic.lr=5e-6 critic.model_name=null"),
    (f"{LAYOUT} critic.sp_size=2", "critic.sp_size=2 critic.max_length_per_device=2048"),
    ("adv.estimator=gae actor.update_per_rollout=4", "critic.update_per_rollout=4"),
    # GAE whitens advantages.
    ("", "adv.norm_var=false"),
    ("adv.norm_var=true", "adv.norm_var=true"),
    ("adv.estimator=gae", "adv.norm_var=true"),
    ("adv.estimator=gae adv.norm_var=false", "adv.norm_var=false"),
    # Adapters have a higher rate.
    ("adv.estimator=gae", "actor.lr=1e-6 critic.lr=5e-6"),
    ("adv.estimator=gae actor.lora_rank=4", "actor.lr=1e-5 critic.lr=5e-6"),
    ("adv.estimator=gae actor.lora_rank=4 critic.lora_rank=4", "actor.lr=1e-5 critic.lr=5e-5"),
    ("adv.estimator=gae actor.lora_rank=4 actor.lr=1e-6", "actor.lr=1e-6 critic.lr=5e-6"),
    # Test answers end where those of training do.
    ("data.test_path=model TRAIN.stop=['x']", "TRAIN.stop=['x'] TEST.stop=['x']"),
    ("data.test_path=model TRAIN.stop=['x'] TEST.stop=[]", "TRAIN.stop=['x'] TEST.stop=[]"),
    ("TRAIN.max_new_tokens=77", "TEST.max_new_tokens=77"),
    (
        "data.test_path=model TRAIN.max_new_tokens=77 TEST.max_new_tokens=9",
        "TEST.max_new_tokens=9",
    ),
    # A correction is on where the engine and the trainer differ.
    ("", "actor.correction=none"),
    (SGLANG, "actor.correction=sequence_mask"),
    ("rollout.engine=vllm", "actor.correction=sequence_mask"),
    ("rollout.partial=true", "actor.correction=token_tis"),
    (f"{SGLANG} rollout.partial=true", "actor.correction=token_tis"),
    (f"{SGLANG} actor.loss=dppo", "actor.correction=none"),
    (f"{SGLANG} trainer.rollouts_from=runs/old", "actor.correction=none"),
    (f"{SGLANG} actor.correction=token_mask", "actor.correction=token_mask"),
    (f"{SGLANG} actor.correction=none", "actor.correction=none"),
]


@pytest.mark.parametrize(("arguments", "expected"), FOLLOWING)
def test_keys_follow_others_unless_they_are_set(monkeypatch, arguments, expected):
    """Without a word, where the engine is installed."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    for short, name in (("TRAIN", "train"), ("TEST", "test")):
        section = f"rollout.{name}_sampling_params"
        arguments, expected = (x.replace(short, section) for x in (arguments, expected))
    words = arguments.split()
    config = compose(PPOConfig, read_arguments(PPOConfig, [*BASE["ppo"], *words])).config
    for word in expected.split():
        name, _, value = word.partition("=")
        assert get_value(config, name) == OmegaConf.create(f"x: {value}").x, name
    if "rollout.engine" not in arguments:
        assert find_problems("ppo", words) == []


OWN_FUNCTIONS = """
import numpy, torch
from rl2.algorithms.advantages import Estimator
from rl2.algorithms.losses import PolicyLoss, UnpairedLoss

def scalar(x):
    return -(x.logps * x.advantages).mean(), {}
def alone(x):
    return -x.logps * x.advantages
def number_metric(x):
    return -x.logps * x.advantages, {"logp": x.logps.mean()}
def no_metrics(x):
    return -x.logps * x.advantages, None
def detached(x):
    return -x.logps.detach() * x.advantages, {}
def nan(x):
    return -x.logps.log() * x.advantages, {}
def wrong_shape(x):
    return -x.logps * x.advantages[:, 1:], {}
def taken(x):
    return -x.logps * x.advantages, {"loss": x.logps}
def with_bonus(x):
    return -x.logps * x.advantages - 0.1 * x.logps, {}
not_vanishing = PolicyLoss(with_bonus, vanishes_without_advantage=True)
def by_name(logps, advantages):
    return -advantages * logps, {}
def root(x):
    return -(x.logps - x.logps.detach()).abs().sqrt() * x.advantages, {}
def leaves(x):
    raise SystemExit(0)
def good(x):
    return -(x.logps - x.old_logps).exp() * x.advantages, {"logp": x.logps, "high": x.logps > -0.5}

def by_trajectory(x):
    return x.rewards.sum(1)
def differences(x):
    return x.rewards - x.values
no_returns = Estimator(differences, needs=("rewards", "values"))
def typed_critic(x):
    return x.rewards - x.values, x.rewards
declared_critic = Estimator(typed_critic, needs=("rewards", "values"))

def summed(x):
    return x.margin.sum()
def good_pairs(x):
    return torch.exp(-x.beta * x.mean_margin)

def labelled(x):
    return torch.where(x.label, -1, 1) * torch.tanh(x.beta * x.gain)
good_replies = UnpairedLoss(labelled, needs=("ref_logps",))
no_point = UnpairedLoss(lambda x: x.gain - x.reference_point, needs=("ref_logps",))
"""


@pytest.mark.parametrize(
    ("trainer", "key", "function", "words"),
    [
        ("ppo", "actor.loss", "scalar", "of shape [] for inputs of shape [4, 4]: return (losses"),
        ("ppo", "actor.loss", "alone", "returned a Tensor, no pair: return (losses"),
        ("ppo", "actor.loss", "number_metric", "the metric logp of shape []"),
        ("ppo", "actor.loss", "no_metrics", "metrics of type NoneType: return (losses, metrics)"),
        ("ppo", "actor.loss", "detached", "no gradient: they have to depend on the logps"),
        ("ppo", "actor.loss", "nan", "losses that are not finite"),
        ("ppo", "actor.loss", "root", "its gradient is not finite"),
        ("ppo", "actor.loss", "not_vanishing", "do not declare vanishes_without_advantage"),
        ("ppo", "actor.loss", "wrong_shape", "RuntimeError: The size of tensor a (4) must match"),
        ("ppo", "actor.loss", "wrong_shape", "(line 19 of own.py)"),
        ("ppo", "actor.loss", "taken", "another name for the metric 'loss'"),
        ("ppo", "actor.loss", "by_name", "'advantages'"),
        ("ppo", "actor.loss", "leaves", "fails: SystemExit: 0"),
        ("ppo", "actor.loss", "good", ""),
        ("ppo", "adv.estimator", "by_trajectory", "advantages of shape [4]"),
        ("ppo", "adv.estimator", "no_returns", "return (advantages, returns)"),
        ("ppo", "adv.estimator", "typed_critic", "declares Estimator(function, needs=...)"),
        ("ppo", "adv.estimator", "declared_critic", ""),
        ("dpo", "dpo.loss", "summed", "losses of shape [] for inputs of shape [2]"),
        ("dpo", "dpo.loss", "good_pairs", ""),
        ("dpo", "dpo.loss", "good_replies", ""),
        ("dpo", "dpo.loss", "no_point", "declares UnpairedLoss(function, needs=...)"),
        ("ppo", "actor.loss", "good_replies", "declared as UnpairedLoss; this key takes PolicyL"),
    ],
)
def test_a_function_of_the_users_file_is_called_once_at_the_start(
    capsys, trainer, key, function, words
):
    Path("own.py").write_text(OWN_FUNCTIONS)
    arguments = [*BASE[trainer], f"{key}=own.py:{function}"]
    if not words:
        parse(ROOTS[trainer], arguments)
        return
    with pytest.raises(SystemExit):
        parse(ROOTS[trainer], arguments)
    error = capsys.readouterr().err
    assert words in error and f"{key}=own.py:{function}" in error and "1 problem" in error
