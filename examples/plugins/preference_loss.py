r"""A preference loss for DPO.

    python -m rl2.trainer.dpo data.path=PAIRS.jsonl actor.model_name=MODEL \
        dpo.loss=examples/plugins/preference_loss.py:exponential

docs/algorithms.md lists what a preference loss may ask for by the names of its parameters.
"""

from torch import Tensor

from rl2.algorithms.losses import finite_exp


def exponential(margin: Tensor, beta: float) -> Tensor:
    """exp(-beta m) (GPO, arXiv:2402.05749)."""
    return finite_exp(-beta * margin)
