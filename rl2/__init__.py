"""rl2: a minimal, torchrun-native trainer for reinforcement learning of language models."""

__version__ = "0.1.0"
