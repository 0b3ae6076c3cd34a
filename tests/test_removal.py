"""A feature of a model is its files and its rows in one table: without them the rest trains.

That no other file of the trainers imports one of them is a contract of import-linter.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common import make_model

ROOT = Path(__file__).resolve().parent.parent
FEATURES = ("compiled", "dither", "lora", "moe", "nf4", "recurrent", "towers")


def remove(package: Path, feature: str) -> None:
    """Deletes a file of rl2/model, and what rl2/model/attachments.py imports of it."""
    (package / f"model/{feature}.py").unlink()
    table = package / "model/attachments.py"
    text = table.read_text()
    found = re.search(rf"from rl2.model.{feature} import (.*)\n", text)
    for name in found[1].split(", ") if found else ():
        text = re.sub(rf".*import.*\b{name}\b.*\n|    {name},\n", "", text)
    table.write_text(text)


def test_the_rest_still_trains(tmp_path):
    shutil.copytree(ROOT / "rl2", tmp_path / "rl2", ignore=shutil.ignore_patterns("__pycache__"))
    for feature in FEATURES:
        remove(tmp_path / "rl2", feature)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n' * 4)
    keys = {
        "actor.model_name": make_model(tmp_path / "tiny"),
        "data.path": "rows.jsonl",
        "data.batch_size": 2,
        "trainer.save_dir": "run",
        "trainer.max_steps": 1,
        "trainer.disable_wandb": "true",
    }
    command = [sys.executable, "-m", "rl2.trainer.sft", *(f"{k}={v}" for k, v in keys.items())]
    subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": "."}, check=True)
    assert (tmp_path / "run/model/config.json").exists()
