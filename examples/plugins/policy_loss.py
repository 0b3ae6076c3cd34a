r"""A policy loss: importance sampling without a clip.

    python -m rl2.trainer.ppo rollout.env_path=arithmetic actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        actor.loss=examples/plugins/policy_loss.py:loss

docs/algorithms.md lists what a policy loss may ask for by the names of its parameters.
"""

from torch import Tensor

from rl2.algorithms.losses import PolicyLoss, TokenLosses, finite_exp


def unclipped(log_ratio: Tensor, advantages: Tensor) -> TokenLosses:
    """-A rho, rho = exp(log_ratio). Logs the fraction of tokens whose ratio is above 2."""
    ratio = finite_exp(log_ratio)
    return -advantages * ratio, {"large_ratio": ratio > 2}


# Without this declaration, rows whose advantages are all 0 are run too.
# `actor.loss=examples/plugins/policy_loss.py:unclipped` works as well.
loss = PolicyLoss(unclipped, vanishes_without_advantage=True)
