"""test_run_folder.py runs this under torchrun: two ranks, as on two nodes, start runs that differ.

    agreement.py MODEL FOLDER

Rank 0 prints the problem that all ranks get, or "agreed".
"""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from rl2.config.schema import ExampleConfig, SFTActorConfig, SFTConfig
from rl2.parallel.mesh import init_distributed
from rl2.run import folder as run_folder
from rl2.run.folder import RunFolder

RANK = int(os.environ["RANK"])


def try_to_start(model: str, lr: float) -> None:
    data = ExampleConfig(path="rows.jsonl")
    config = SFTConfig(data=data, actor=SFTActorConfig(model_name=model, lr=lr))
    config.trainer.save_dir = "runs/default"
    try:
        RunFolder(config)
        problem = "agreed"
    except ValueError as error:
        problem = str(error)
    if RANK == 0:
        print(problem, flush=True)


def main(model: str, folder: Path) -> None:
    init_distributed()
    run_folder.SECONDS_TO_SEE_A_FILE = 0.5
    for number in range(2):
        (folder / str(number)).mkdir(exist_ok=True)
        (folder / str(number) / "rows.jsonl").write_text(json.dumps({"text": f"a {number}"}))
    dist.barrier()
    os.chdir(folder / str(RANK))
    try_to_start(model, 1.0)
    os.chdir(folder / "0")
    hash_package = run_folder.hash_package
    if RANK == 1:
        run_folder.hash_sources = lambda paths: "the hash of other rows"
        run_folder.hash_package = lambda: "the hash of other code"
    try_to_start(model, 0.5 if RANK == 1 else 1.0)
    run_folder.hash_sources = lambda paths: "the same"
    run_folder.hash_package = hash_package
    try_to_start(model, 1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
