from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="rl2",
    version="0.1.0",
    description="A minimal, torchrun-native trainer for reinforcement learning of language models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["rl2", "rl2.*"]),
    # Ranges, since SGLang pins exact versions of torch and transformers; constraints.txt is the set that is tested.
    install_requires=[
        "torch>=2.11",
        "transformers>=5.12",
        "accelerate>=1.10",
        "datasets>=4.0",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "numpy",
        "pyarrow",
        "safetensors",
        "tqdm",
    ],
    extras_require={
        "wandb": ["wandb"],
        "lora": ["peft>=0.20"],
        "quickstart": ["gguf>=0.10", "matplotlib", "reasoning-gym>=0.1.25"],
        "test": ["hypothesis", "psutil", "peft>=0.20", "pytest", "ruff", "trl>=1.16"],
    },
)
