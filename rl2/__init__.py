"""rl2: a minimal, torchrun-native trainer for reinforcement learning of language models."""

from rl2.api import Run, train
from rl2.parallel.processor import ask_for_equal_rows

ask_for_equal_rows()
__version__ = "0.1.0"
__all__ = ["Run", "train"]
