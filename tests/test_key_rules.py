"""Rules of single keys: ranges, keys without effect, keys that follow others."""

import math
from pathlib import Path

import pytest
from common import ROOT
from configs import BASE, ROOTS, problem_keys, warning_keys, write_files

from rl2.config.key import schema_keys
from rl2.config.key_rules import broken_bounds
from rl2.config.parse import parse
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
            assert list(broken_bounds(key, -math.inf)) == ["be finite"]
            continue
        bounds = [x for x in (key.above, key.at_least) if x is not None]
        assert bounds, f"{name} may be any number"
        assert list(broken_bounds(key, bounds[0] - 1)), name


def test_nan_is_refused_everywhere_and_inf_where_it_is_no_bound():
    may_be_infinite = {"clip", "clip_high", "correction_cap", "max_grad_norm"}
    for name, key in numeric_keys({float}):
        assert list(broken_bounds(key, math.nan)) == ["be a number"], name
        is_allowed = name.rpartition(".")[2] in may_be_infinite
        assert (not list(broken_bounds(key, math.inf))) == is_allowed, name
        assert list(broken_bounds(key, -math.inf)), name


WARNED = [  # (trainer, arguments, keys)
    ("ppo", "kl.coef=0.1 kl.type=loss kl.loss_estimator=k1", ["kl.loss_estimator"]),
    ("ppo", "actor.loss=reinforce actor.epochs_per_rollout=3", ["actor.loss"]),
    ("ppo", "actor.clip=0.1", ["actor.clip"]),
    # Sensible bounds pass without a word.
    ("ppo", "rollout.partial=true", []),
    ("ppo", "rollout.train_sampling_params.top_k=5", []),
    ("ppo", "data.chat_template_kwargs.x=null rollout.engine_args.x=null", []),
    ("ppo", "actor.max_grad_norm=inf", []),
    ("ppo", "actor.update_per_rollout=2 actor.clip=0.1 actor.clip_high=inf", []),
    ("ppo", "actor.correction=token_tis actor.correction_cap=1", []),
    ("ppo", "actor.loss=cispo actor.clip=4 actor.update_per_rollout=2", []),
    ("ppo", "actor.loss=reinforce", []),
    ("ppo", "rollout.gpu_memory_utilization=auto", []),
    ("sft", "actor.lora_rank=4 trainer.seed=1", []),
]


@pytest.mark.parametrize(("trainer", "arguments", "keys"), WARNED)
def test_what_is_easily_misunderstood_warns(monkeypatch, trainer, arguments, keys):
    monkeypatch.setattr("rl2.config.combinations.installed_version", lambda package: "99")
    assert warning_keys(trainer, *arguments.split()) == keys


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


def test_the_critic_lies_in_memory_as_the_actor_unless_it_is_told_otherwise(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    layout = [
        "adv.estimator=gae",
        "actor.sp_size=4",
        "actor.max_length_per_device=2048",
        "actor.gradient_checkpointing=false",
        "actor.warmup_ratio=0.1",
    ]
    critic = parse(PPOConfig, [*BASE["ppo"], *layout]).critic
    assert (critic.sp_size, critic.max_length_per_device) == (4, 2048)
    assert not critic.gradient_checkpointing and critic.warmup_ratio == 0.0
    assert (critic.lr, critic.model_name) == (5e-6, None)
    split = [*BASE["ppo"], "adv.estimator=gae", "actor.update_per_rollout=4"]
    assert parse(PPOConfig, split).critic.update_per_rollout == 4
    critic = parse(PPOConfig, [*BASE["ppo"], *layout, "critic.sp_size=2"]).critic
    assert (critic.sp_size, critic.max_length_per_device) == (2, 2048)
    # A wrong size of the actor is one problem, not two.
    assert problem_keys("ppo", "adv.estimator=gae", "actor.sp_size=3") == ["actor.sp_size"]


def test_gae_whitens_advantages_unless_it_is_told_otherwise(capsys):
    def norm_var(*arguments):
        return parse(PPOConfig, [*BASE["ppo"], *arguments]).adv.norm_var

    assert norm_var() is False
    assert norm_var("adv.norm_var=true") is True
    assert norm_var("adv.estimator=gae") is True
    assert norm_var("adv.estimator=gae", "adv.norm_var=false") is False
    assert capsys.readouterr().err == ""


def test_test_answers_end_at_the_stop_strings_of_training_unless_set(capsys):
    train = 'rollout.train_sampling_params.stop=["</a>"]'
    for overrides, expected in (([], ["</a>"]), (["rollout.test_sampling_params.stop=[]"], [])):
        config = parse(PPOConfig, [*BASE["ppo"], train, "data.test_path=model", *overrides])
        assert config.rollout.train_sampling_params.stop == ["</a>"]
        assert config.rollout.test_sampling_params.stop == expected
    assert capsys.readouterr().err == ""


def test_test_answers_are_as_long_as_those_of_training_unless_set(capsys):
    train = "rollout.train_sampling_params.max_new_tokens"
    test = "rollout.test_sampling_params.max_new_tokens"
    config = parse(PPOConfig, [*BASE["ppo"], f"{train}=77"])
    assert get_value(config, test) == 77
    config = parse(PPOConfig, [*BASE["ppo"], f"{train}=77", f"{test}=9", "data.test_path=model"])
    assert get_value(config, test) == 9
    assert capsys.readouterr().err == ""


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
