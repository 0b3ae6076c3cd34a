"""Several runs of a trainer in one launch, to import once: several.py TRAINER key=value ... [-- key=value ...] ..."""

import importlib
import sys

import torch.distributed as dist

from rl2.trainer import run


def main(trainer, words):
    module = importlib.import_module(f"rl2.trainer.{trainer}")
    device, destroy = run.init(), dist.destroy_process_group
    run.init = module.init = lambda: device
    dist.destroy_process_group = lambda: None
    while words:
        end = words.index("--") if "--" in words else len(words)
        sys.argv[1:], words = words[:end], words[end + 1 :]
        module.main()
    destroy()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
