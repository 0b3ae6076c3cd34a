"""Checks that this environment has the releases that the installed SGLang asks for.

SGLang is installed without its dependencies. A new release of it may ask for another torch, and
then tests/sglang/requirements.txt has to follow.
"""

from importlib.metadata import requires, version

from packaging.requirements import Requirement

NAMES = ("torch", "transformers", "tokenizers", "huggingface_hub", "torchvision", "xgrammar")

for requirement in map(Requirement, requires("sglang") or []):
    if requirement.name in NAMES and requirement.marker is None:
        installed = version(requirement.name)
        if not requirement.specifier.contains(installed.partition("+")[0], prereleases=True):
            raise SystemExit(f"tests/sglang/requirements.txt: {requirement}, not {installed}")
