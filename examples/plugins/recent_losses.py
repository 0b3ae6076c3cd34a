r"""Three losses of 2025 and 2026 as you would write them yourself.

    python -m rl2.trainer.ppo rollout.env_path=arithmetic actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        actor.loss=examples/plugins/recent_losses.py:sapo

docs/algorithms.md lists the inputs.
"""

import torch
from torch import Tensor

from rl2.algorithms.losses import (
    PolicyInputs,
    PolicyLoss,
    PreferenceInputs,
    TokenLosses,
    dppo,
    finite_exp,
    logsigmoid,
    masked,
)


def sigmoid_gate(x: PolicyInputs, temperature: float = 1.0) -> TokenLosses:
    """-A (4 / t) sigmoid(t (rho - 1)): SAPO (arXiv:2511.20347), a soft gate in place of the clip.

    Its gradient is that of -A rho at rho = 1 and fades on both sides. The paper has a larger t for
    A < 0.
    """
    ratio = finite_exp(x.log_ratio)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return -x.advantages * gate, {}


def trust_region_with_kl(x: PolicyInputs, kl_coef: float = 1e-3) -> TokenLosses:
    """`dppo` + kl_coef (logp - engine_logp)^2 on every trained token.

    What prime-rl trains with (August 2026). The square pulls the policy back to the one that
    sampled, also where the trust region has cut the gradient.
    """
    losses, metrics = dppo(x)
    moved = masked(x.mask, x.logps - x.engine_logps)
    return losses + kl_coef * moved.square(), metrics


def positive(x: PreferenceInputs, strength: float = 5.0) -> Tensor:
    """-log sigmoid(beta (m - strength max(0, -chosen_gain))): DPO-Positive (arXiv:2402.13228).

    DPO may make both replies less likely, the rejected one more so. This holds the chosen one.
    """
    lost = (-x.chosen_gain).clamp(min=0)
    return -logsigmoid(x.beta * (x.margin - strength * lost))


# The declarations say which settings are read, and that rows without an advantage need no pass.
# The square has a gradient in them, so they are run.
prime_rl = PolicyLoss(trust_region_with_kl, settings=("clip", "clip_high"), corrects_mismatch=True)
sapo = PolicyLoss(sigmoid_gate, settings=(), vanishes_without_advantage=True)
