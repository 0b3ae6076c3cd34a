"""Rewards for env files. They import nothing else of rl2: docs/rewards.md."""
