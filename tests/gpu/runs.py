"""Whole runs of the trainer on one GPU, and ring attention over two GPUs."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from figures import Skip, record
from tools import (
    DRY,
    error,
    make_batch,
    make_model,
    need_sglang,
    sglang_args,
    used_gib,
    worker_config,
)


def torchrun(world, *command):
    """Runs the command under torchrun. A failure reports the end of its output."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world}",
        *command,
    ]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    assert done.returncode == 0, "...".join(["", done.stdout.split("Sending process")[0][-400:]])


def _grpo(engine, model, *more):
    """Runs three steps of GRPO and checks that no GPU memory stays in use after the end.

    The runner (run.py) checks that no process is left.
    """
    before, name = used_gib(), make_model(model)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        rows = [
            {"messages": [{"role": "user", "content": f"say something, {i}"}], "answer": ""}
            for i in range(24)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "env.py").write_text(
            "def reward_fn(messages, answer):\n    return len(messages[-1]['content']) % 5 / 5\n"
        )
        samples, length = (4, 16) if DRY else (16, 256)
        torchrun(
            1,
            "-m",
            "rl2.trainer.ppo",
            f"data.path={folder / 'rows.jsonl'}",
            f"rollout.env_path={folder / 'env.py'}",
            f"actor.model_name={name}",
            f"rollout.engine={engine}",
            "data.prompts_per_rollout=8",
            "adv.norm_var=true",
            f"data.responses_per_prompt={samples}",
            f"rollout.train_sampling_params.max_new_tokens={length}",
            "actor.offload_model=true",
            "actor.offload_optimizer=true",
            "actor.lr=1e-6",
            "rollout.max_running=128",
            f"trainer.save_dir={folder / 'run'}",
            "trainer.disable_wandb=true",
            "trainer.max_steps=3",
            *more,
        )
        lines = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ]
        assert [line["step"] for line in lines][-3:] == [1, 2, 3]
        assert list((folder / "run/model").glob("*.safetensors"))
    last = lines[-1]
    for key in (
        "time/step",
        "time/rollout",
        "time/update",
        "time/sync",
        "tokens/per_second",
        "actor/grad_norm",
    ):
        if key in last:
            record(**{key: last[key]})
    worst = max(line["actor/mismatch_logp_difference"] for line in lines[-3:])
    record(mismatch=worst)
    assert worst < 0.05 and all(
        line["actor/grad_norm"] > 0 and not line["actor/skipped"] for line in lines[-3:]
    )
    time.sleep(3)
    record(memory_left_gib=used_gib() - before)
    assert used_gib() - before < 0.5, "memory of the GPU is held after the end"


def sglang_grpo():
    need_sglang()
    arguments = [f"rollout.engine_args.{key}={value}" for key, value in sglang_args().items()]
    _grpo("sglang", "qwen3-1.7b", "rollout.gpu_memory_utilization=0.5", *arguments)


def local_grpo():
    _grpo("local", "small")


def ring():
    """Checks that two updates with two GPUs per sequence equal those of one process on a CPU."""
    if not DRY and torch.cuda.device_count() < 2:
        raise Skip("nccl needs one GPU a process, and there is one")
    torchrun(2, __file__, make_model("small"))


def _ring(name):
    from training import norm_error, two_steps

    from rl2.parallel.mesh import init_distributed
    from rl2.worker import Worker

    device = init_distributed()
    batch = make_batch(1024, groups=3, samples=3, prompt=40, answer=90)
    settings = {"lr": 0.1, "max_length_per_device": 400}
    config = worker_config(name, sp_size=2, **settings)
    scores, updates, moved = two_steps(Worker(config, device, num_updates=10), batch)
    config = worker_config(name, dtype="float32", **settings)
    cpu_worker = Worker(config, torch.device("cpu"), num_updates=10)
    cpu_scores, cpu_updates, cpu_moved = two_steps(cpu_worker, batch)
    figures = {
        "logps": (scores.logps - cpu_scores.logps).abs().max().item(),
        "grad_norm": norm_error(updates, cpu_updates),
        "worst_weight": max(error(moved[key], cpu_moved[key]) for key in moved),
    }
    if os.environ["RANK"] == "0":
        record(**figures)
    assert figures["logps"] < 0.2
    assert figures["grad_norm"] < 0.03
    assert figures["worst_weight"] < 0.15


if __name__ == "__main__":
    _ring(sys.argv[1])
