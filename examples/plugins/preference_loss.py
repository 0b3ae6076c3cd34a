r"""A preference loss for DPO.

    python -m rl2.trainer.dpo data.path=PAIRS.jsonl actor.model_name=MODEL \
        dpo.loss=examples/plugins/preference_loss.py:exponential

docs/algorithms.md lists the inputs.
"""

from torch import Tensor

from rl2.algorithms.losses import PreferenceInputs, finite_exp


def exponential(x: PreferenceInputs) -> Tensor:
    """exp(-beta m) (GPO, arXiv:2402.05749)."""
    return finite_exp(-x.beta * x.margin)
