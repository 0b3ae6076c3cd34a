r"""A policy loss: importance sampling without a clip.

    python -m rl2.trainer.ppo rollout.env_path=arithmetic actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        actor.loss=examples/plugins/policy_loss.py:loss

docs/algorithms.md lists the inputs.
"""

from rl2.algorithms.losses import PolicyInputs, PolicyLoss, TokenLosses, finite_exp


def unclipped(x: PolicyInputs) -> TokenLosses:
    """-A rho, rho = exp(log_ratio). Logs the fraction of tokens whose ratio is above 2."""
    ratio = finite_exp(x.log_ratio)
    return -x.advantages * ratio, {"large_ratio": ratio > 2}


# The declaration is optional: `actor.loss=examples/plugins/policy_loss.py:unclipped` works as well.
# With it, a clip that the loss does not read is refused, and rows whose advantages are all 0 are
# not run.
loss = PolicyLoss(unclipped, settings=(), vanishes_without_advantage=True)
