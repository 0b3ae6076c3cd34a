"""Losses and estimators that a config key names: what they declare, and names that are refused.

tests/test_key_rules.py has the first call of the user's functions; tests/test_plugins.py runs them.
"""

import pickle
from pathlib import Path

import pytest
import torch
from common import policy_inputs

from rl2.algorithms.find import find_estimator, find_policy_loss
from rl2.config.schema import PPOConfig
from rl2.trainer.ppo import can_drop_rows

USERS_FILE = """
from rl2.algorithms.advantages import AdvantageInputs, Estimator
from rl2.algorithms.losses import PolicyInputs, PolicyLoss

def typed(x: PolicyInputs):
    return -x.advantages * x.logps, {'logp': x.logps}

declared = PolicyLoss(typed, settings=("clip",), vanishes_without_advantage=True)

def critic(x: AdvantageInputs):
    return x.rewards - x.values, x.rewards

estimator = Estimator(critic, needs=("rewards", "values"), settings=())
text = 'no function'
"""
INPUTS = policy_inputs(
    logps=torch.tensor([[-1.0, -2]]),
    old_logps=torch.tensor([[-1.5, -1]]),
    advantages=torch.tensor([[2.0, -3]]),
    mask=torch.ones(1, 2),
)


@pytest.fixture
def users_file(tmp_path):
    file = tmp_path / "custom.py"
    file.write_text(USERS_FILE)
    return file


def test_a_function_of_a_users_file_may_be_declared(users_file):
    bare, declared = (find_policy_loss(f"{users_file}:{name}") for name in ("typed", "declared"))
    assert bare.settings == ("clip", "clip_high", "dual_clip") and declared.settings == ("clip",)
    assert declared.vanishes_without_advantage and not bare.vanishes_without_advantage
    for name, may_drop in (("typed", False), ("declared", True)):
        config = PPOConfig()
        config.actor.loss = f"{users_file}:{name}"
        assert can_drop_rows(config) == may_drop
    for loss in (bare, declared):
        assert loss.compute(INPUTS)[0].equal(-INPUTS.logps * INPUTS.advantages)
    bare, declared = (find_estimator(f"{users_file}:{name}") for name in ("critic", "estimator"))
    assert (bare.needs, declared.needs) == (("rewards",), ("rewards", "values"))
    assert bare.settings == ("gamma", "lamda", "norm_var") and declared.settings == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("custom.py:nothing", "custom.py has no function nothing"),
        ("custom.py:text", "has no function text"),
        ("custom.py:estimator", "declared as Estimator; this key takes PolicyLoss"),
        ("none.py:f", "no such file none.py"),
        ("ppo2", "choose ppo, gspo, cispo, dppo, reinforce, or your own as path/to/file.py:fun"),
        ("broken.py:f", "fails on import:\nTraceback"),
        ("clips.py:f", "does not know clips: choose clip, clip_high"),
        ("values.py:f", "does not know value: choose rewards, reward_parts"),
    ],
)
def test_a_name_without_a_function_is_refused(users_file, monkeypatch, name, message):
    monkeypatch.chdir(users_file.parent)
    files = {
        "broken": "1 / 0",
        "clips": "from rl2.algorithms.losses import PolicyLoss\nf = PolicyLoss(print, ('clips',))",
        "values": "from rl2.algorithms.advantages import Estimator\n"
        "f = Estimator(print, needs=('value',))",
    }
    for file, text in files.items():
        Path(f"{file}.py").write_text(text)
    with pytest.raises(ValueError) as raised:
        find_policy_loss(name)
    assert str(raised.value).startswith(f"actor.loss={name}: ")
    assert message in str(raised.value)


def test_a_users_file_may_import_its_neighbours_and_its_functions_can_be_pickled(tmp_path):
    (tmp_path / "losses_of_ours.py").write_text("SCALE = 2\n")
    (tmp_path / "math.py").write_text(  # named like a standard module
        "from losses_of_ours import SCALE\ndef loss(x):\n    return -SCALE * x.logps, {}\n"
    )
    compute = find_policy_loss(f"{tmp_path}/math.py:loss").compute
    assert pickle.loads(pickle.dumps(compute)) is compute
    assert compute(INPUTS)[0].equal(-2 * INPUTS.logps)
