"""A feature is its files and its rows in one table: without them the rest trains."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common import ROOT, make_model

FEATURES = ("compiled", "dither", "lora", "moe", "nf4", "recurrent", "towers")  # of a model
SERVERS = ("serve", "server", "weight_shards")
ENGINES = tuple(
    f"engine/{name}.py" for name in ("sglang", "states", "vllm", "vllm_start", *SERVERS)
)
ROLLOUT = ("rollout/filter.py", "rollout/partial.py")
OTHERS = ("agents", "teacher.py", *ROLLOUT, *ENGINES)


def remove(package: Path, feature: str) -> None:
    """Deletes a file of rl2/model, and what rl2/model/features.py imports of it."""
    (package / f"model/{feature}.py").unlink()
    table = package / "model/features.py"
    text = table.read_text()
    found = re.search(rf"from rl2.model.{feature} import (.*)\n", text)
    for name in found[1].split(", ") if found else ():
        text = re.sub(rf".*import.*\b{name}\b.*\n|    {name},\n", "", text)
    table.write_text(text)


TRAIN = """
import sys
from rl2.trainer import ppo, sft

common = sys.argv[1:]
for main, keys in (
    (sft.main, "data.batch_size=2 trainer.save_dir=sft"),
    (ppo.main, "data.prompts_per_rollout=1 data.responses_per_prompt=2 rollout.env_path=env.py"
     " rollout.train_sampling_params.max_new_tokens=4 trainer.save_dir=ppo"),
):
    sys.argv[1:] = [*common, *keys.split()]
    main()
"""


def test_the_rest_still_trains(tmp_path):
    shutil.copytree(ROOT / "rl2", tmp_path / "rl2", ignore=shutil.ignore_patterns("__pycache__"))
    for feature in FEATURES:
        remove(tmp_path / "rl2", feature)
    for name in OTHERS:
        (tmp_path / "rl2" / name).rename(tmp_path / name.replace("/", "_"))
    engines = tmp_path / "rl2/config/engines.py"
    rows = re.sub(r'.*"rl2.engine.(sglang|vllm|server):.*\n', "", engines.read_text())
    engines.write_text(rows)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "cd"}\n' * 4)
    (tmp_path / "env.py").write_text("def reward_fn(messages):\n    return 1.0\n")
    keys = [
        f"actor.model_name={make_model(tmp_path / 'tiny')}",
        "data.path=rows.jsonl",
        "trainer.max_steps=1",
        "trainer.disable_wandb=true",
    ]
    environment = {**os.environ, "PYTHONPATH": "."}
    subprocess.run([sys.executable, "-c", TRAIN, *keys], cwd=tmp_path, env=environment, check=True)
    for trainer in ("sft", "ppo"):
        assert (tmp_path / trainer / "model/config.json").exists()
