"""The names of the built-in losses, estimators and corrections.

The functions are in losses.py and advantages.py, which import torch. That takes seconds, and the
schema and `--help` need only the names. `tests/test_algorithms.py` compares them with the tables.
"""

ADVANTAGE_ESTIMATOR_NAMES = (
    "reinforce",
    "rloo",
    "maxrl",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "distillation",
    "gae",
)
POLICY_LOSS_NAMES = ("ppo", "gspo", "cispo", "dppo", "reinforce")
PREFERENCE_LOSS_NAMES = ("sigmoid", "ipo", "hinge", "simpo", "orpo", "kto")
KL_ESTIMATOR_NAMES = ("k1", "k2", "k3")
IMPORTANCE_CORRECTION_NAMES = ("token_tis", "token_mask", "sequence_mask", "geometric_mask")
TOKEN_AVERAGES = ("token", "sequence", "prompt", "constant")
