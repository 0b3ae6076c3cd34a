"""What is installed. The tools are configured in pyproject.toml.

The scripts that make virtual environments hash this file and constraints.txt to know when to
install again."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="rl2",
    version=re.search(r'__version__ = "(.+)"', (HERE / "rl2/__init__.py").read_text())[1],
    description="A minimal, torchrun-native trainer for reinforcement learning of language models",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    python_requires=">=3.11",
    # The ready-made environments stand at the top of the repository; the wheel carries them inside
    # the package.
    packages=[*find_packages(include=["rl2", "rl2.*"]), "rl2.ready_envs"],
    package_dir={"rl2.ready_envs": "envs"},
    package_data={
        "rl2": ["py.typed"],
        "rl2.config": ["presets.yaml"],
        "rl2.report": ["page.html", "page.css", "page.js"],
        "rl2.rewards": ["words.json"],
        "rl2.tools": ["task/*.py", "task/*.jsonl", "task/*.sh"],
    },
    entry_points={"console_scripts": ["rl2 = rl2.__main__:main"]},
    # Ranges, since SGLang pins exact versions of torch and transformers. The whole suite runs with
    # constraints.txt; tests/oldest.sh and tests/newest.sh run both ends of the ranges.
    install_requires=[
        "torch>=2.11,<2.16",
        "transformers>=5.12.1,<5.24",
        "accelerate>=1.10,<2",
        "aiohttp>=3.14.1",
        "datasets>=4.4,<6",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "math-verify>=0.9,<0.10",
        "numpy",
        "psutil",
        "pyarrow",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "wandb": ["wandb"],
        "bitsandbytes": ["bitsandbytes>=0.50.2,<0.51"],
        "lora": ["peft>=0.20,<0.22"],
        "sglang": ["sglang>=0.5.17,<=0.5.23"],
        "vllm": ["vllm>=0.32,<0.33"],
        "quickstart": ["gguf>=0.10", "matplotlib", "reasoning-gym>=0.1.25"],
        "test": [
            "anthropic>=2",
            "bitsandbytes>=0.50.2,<0.51",
            "hypothesis",
            "import-linter>=2.17",
            "ipykernel",
            "matplotlib",
            "mypy>=2.4",
            "nbformat",
            "openai>=2",
            "openai-agents>=0.24",
            "peft>=0.20,<0.22",
            "pytest",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
            "smolagents>=1.20",
            "trl>=1.16",
        ],
    },
)
