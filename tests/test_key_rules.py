"""Rules of single keys: ranges, keys without effect, keys that follow others."""

import math
from pathlib import Path

import pytest
from configs import BASE, ROOTS, find_problems, key_types
from omegaconf import OmegaConf

from rl2.config.arguments import read_arguments
from rl2.config.key import schema_keys
from rl2.config.parse import compose, parse
from rl2.config.schema import PPOConfig, dump
from rl2.config.values import get_value

pytestmark = pytest.mark.usefixtures("base")


def numeric_keys(wanted):
    """The name and the Key of every key of all trainers, one of whose types is among `wanted`."""
    for root in ROOTS.values():
        for name, types in key_types(root):
            if wanted & types or name == AUTO_OR_NUMBER:
                yield name, schema_keys(root)[name]


AUTO_OR_NUMBER = "rollout.gpu_memory_utilization"
# Rewards, and so what is compared with them or multiplies them, may be any number.
OF_REWARDS = {"rollout.filter", "rollout.reward_weights"}


def test_every_number_has_a_lower_bound_and_is_finite_where_inf_is_no_bound():
    may_be_infinite = {"clip", "clip_high", "correction_cap", "max_grad_norm"}
    for name, key in numeric_keys({int, float}):
        if name in OF_REWARDS:
            assert list(key.broken_bounds(-math.inf)) == ["be finite"]
        else:
            bounds = [x for x in (key.above, key.at_least) if x is not None]
            assert bounds, f"{name} may be any number"
            assert list(key.broken_bounds(bounds[0] - 1)), name
    for name, key in numeric_keys({float}):
        assert list(key.broken_bounds(math.nan)) == ["be a number"], name
        is_allowed = name.rpartition(".")[2] in may_be_infinite
        assert (not list(key.broken_bounds(math.inf))) == is_allowed, name


@pytest.mark.parametrize("trainer", ROOTS)
def test_a_whole_config_reads_back_without_a_word(capsys, tmp_path, monkeypatch, trainer):
    """Its keys are set, to values that they have anyway, also those of the critic that GRPO lacks,
    which follow the actor's."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    worker = "critic" if trainer == "rm" else "actor"
    config = parse(ROOTS[trainer], [*BASE[trainer], f"{worker}.sp_size=4"])
    (tmp_path / "whole.yaml").write_text(dump(config))
    assert parse(ROOTS[trainer], ["--config-name=whole"]) == config
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
    (f"{LAYOUT} critic.sp_size=2", "critic.sp_size=2 critic.max_length_per_device=2048"),
    ("adv.estimator=gae actor.update_per_rollout=4", "critic.update_per_rollout=4"),
    # Another way to set it, which wins over a preset.
    ("algo=dapo data.batch_size=64", "actor.update_per_rollout=4 critic.update_per_rollout=4"),
    ("data.batch_size=256", "actor.update_per_rollout=1"),
    # A mapping sets its keys.
    (
        "rollout.train_sampling_params={top_k:5,max_new_tokens:7}",
        "TRAIN.top_k=5 TEST.max_new_tokens=7",
    ),
    (
        "rollout={max_turns:2,train_sampling_params:{stop:['x']}}",
        "rollout.max_turns=2 TEST.stop=['x']",
    ),
    # The buffer of DAPO.
    ("rollout.overlong_buffer=auto TRAIN.max_new_tokens=77", "rollout.overlong_buffer=19"),
    ("rollout.overlong_buffer=auto TRAIN.max_new_tokens=8192", "rollout.overlong_buffer=1024"),
    # GAE whitens advantages.
    ("", "adv.norm_var=false"),
    ("adv.estimator=gae", "adv.norm_var=true"),
    ("adv.estimator=gae adv.norm_var=false", "adv.norm_var=false"),
    # Adapters have a higher rate.
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
    ("rollout.partial=true", "actor.correction=token_tis"),
    (f"{SGLANG} rollout.partial=true", "actor.correction=token_tis"),
    (f"{SGLANG} actor.loss=dppo", "actor.correction=none"),
    (f"{SGLANG} trainer.rollouts_from=runs/old", "actor.correction=none"),
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
    config, _ = compose(PPOConfig, read_arguments(PPOConfig, BASE["ppo"] + words))
    for word in expected.split():
        name, _, value = word.partition("=")
        assert get_value(config, name) == OmegaConf.create(f"x: {value}").x, name
    if "rollout.engine" not in arguments:
        assert find_problems("ppo", words) == []


OWN = """
from rl2.algorithms.advantages import Estimator
from rl2.algorithms.losses import PolicyLoss, PreferenceLoss
f = {}
"""
OWN_FUNCTIONS = {  # by key: a function and a part of what is said; nothing is said of a good one
    "actor.loss": [
        (
            "lambda x: (x.logps.mean(), {})",
            "of shape [] in place of [4, 4]: return",
        ),
        ("lambda x: x.logps", "returned a Tensor, no pair: return (losses"),
        ("lambda x: (x.logps, {'logp': x.logps.mean()})", "the metric logp of shape []"),
        ("lambda x: (x.logps, None)", "metrics of type NoneType: return (losses, metrics)"),
        ("lambda x: (x.logps.detach(), {})", "no gradient: they have to depend on the logps"),
        ("lambda x: (x.logps / x.mask, {})", "losses that are not finite"),
        ("lambda x: ((x.logps - x.logps.detach()).abs().sqrt(), {})", "its gradient is not finite"),
        ("PolicyLoss(lambda x: (x.logps, {}), vanishes_without_advantage=True)", "do not declare"),
        ("lambda x: (x.logps + x.advantages[:, 1:], {})", "(line 4 of own.py)"),
        ("lambda x: (x.logps, {'loss': x.logps})", "another name for the metric 'loss'"),
        ("lambda x: exit(0)", "fails: SystemExit: 0"),
        ("Estimator(abs)", "declared as Estimator; this key takes PolicyLoss"),
        ("'no function'", "own.py has no function f"),
        ("PolicyLoss(abs, ('clips',))", "does not know clips: choose clip, clip_high"),
        ("lambda x: (x.logps * x.advantages, {'logp': x.logps, 'high': x.logps > -0.5})", ""),
    ],
    "adv.estimator": [
        ("lambda x: x.rewards.sum(1)", "advantages of shape [4]"),
        ("Estimator(lambda x: x.values, needs=('values',))", "return (advantages, returns)"),
        ("lambda x: x.rewards - x.values", "declares Estimator(function, needs=...)"),
        ("Estimator(abs, needs=('value',))", "does not know value: choose rewards, reward_parts"),
        ("Estimator(lambda x: (x.rewards, x.values), needs=('rewards', 'values'))", ""),
    ],
    "dpo.loss": [
        ("lambda x: x.margin.sum()", "losses of shape [] in place of [2]"),
        ("PreferenceLoss(lambda x: -x.gains, needs=())", "declares PreferenceLoss(function, needs"),
        ("PreferenceLoss(lambda x: x.gains, in_pairs=True)", "losses of shape [4] in place of [2]"),
        ("PreferenceLoss(lambda x: x.gains * x.labels, in_pairs=False)", ""),
        ("lambda x: (-x.beta * x.mean_margin).exp()", ""),
    ],
}


@pytest.mark.parametrize(
    ("key", "function", "words"),
    [(key, *case) for key, cases in OWN_FUNCTIONS.items() for case in cases],
)
def test_a_function_of_the_users_file_is_called_once_at_the_start(capsys, key, function, words):
    Path("own.py").write_text(OWN.format(function))
    trainer = "dpo" if key == "dpo.loss" else "ppo"
    arguments = [*BASE[trainer], f"{key}=own.py:f"]
    if not words:
        parse(ROOTS[trainer], arguments)
        return
    with pytest.raises(SystemExit):
        parse(ROOTS[trainer], arguments)
    error = capsys.readouterr().err
    assert words in error and f"{key}=own.py:f" in error and "1 problem" in error


def test_a_function_that_changes_its_inputs_spoils_no_later_trial(capsys):
    Path("own.py").write_text(
        "from rl2.algorithms.losses import PolicyLoss\n"
        "def f(x): return x.rewards * x.mask.mul_(0)\n"
        "g = PolicyLoss(lambda x: (x.logps, {}), vanishes_without_advantage=True)\n"
    )
    for _ in range(2):  # the second is in the order that the first trial had none
        with pytest.raises(SystemExit):
            parse(ROOTS["ppo"], [*BASE["ppo"], "adv.estimator=own.py:f", "actor.loss=own.py:g"])
    assert capsys.readouterr().err.count("do not declare") == 2
