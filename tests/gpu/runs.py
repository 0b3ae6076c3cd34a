"""Whole runs of the trainers, and the layouts of two GPUs."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from common import letter_run, read_jsonl, read_metrics, write_jsonl, write_letter_task
from figures import Skip, record
from parity import make_batch
from tools import DRY, check_memory_is_free, make_model, need, sglang_args, used_gib
from training import compare_with_cpu

from rl2.parallel.mesh import init_distributed

TIMES = (
    "time/step",
    "time/rollout",
    "time/update",
    "time/sync",
    "tokens/per_second",
    "actor/grad_norm",
    "memory/peak_gib",
)


def run_program(*command):
    subprocess.run([sys.executable, *command], check=True)


def torchrun(world, *command):
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    run_program(*words, *command)


def run_trainer(trainer, *keys, world=1):
    command = ["-m", f"rl2.trainer.{trainer}", *keys]
    if DRY and world == 1:  # without torchrun
        run_program(*command)
    else:
        torchrun(world, *command)


def grpo(engine, model, *more, prompts=8, samples=16, length=256, steps=3, world=1):
    """Runs some steps of GRPO and checks that no GPU memory stays in use after the end.

    The runner (run.py) checks that no process is left. Returns the metrics of the steps.
    """
    name = make_model(model)
    before = used_gib()
    if DRY:
        samples, length = 4, 16
    with tempfile.TemporaryDirectory(dir=os.environ["RL2_GPU_MODELS"]) as folder:
        folder = Path(folder)
        keys = [
            *write_letter_task(folder),
            f"actor.model_name={name}",
            f"rollout.engine={engine}",
            f"data.prompts_per_rollout={prompts}",
            "adv.norm_var=true",
            f"data.responses_per_prompt={samples}",
            f"rollout.train_sampling_params.max_new_tokens={length}",
            "actor.offload_model=true",
            "actor.offload_optimizer=true",
            "actor.lr=1e-6",
            "rollout.max_running=128",
            f"trainer.save_dir={folder / 'run'}",
            f"trainer.max_steps={steps}",
            "trainer.disable_wandb=true",
            *more,
        ]
        start = time.perf_counter()
        run_trainer("ppo", *keys, world=world)
        record(seconds=time.perf_counter() - start)
        lines = read_metrics(folder / "run")[-steps:]
        assert [line["step"] for line in lines] == list(range(1, steps + 1))
        assert list((folder / "run/model").glob("*.safetensors"))
    record(**{key: lines[-1][key] for key in TIMES if key in lines[-1]})
    mismatch = max(line["actor/mismatch_logp_difference"] for line in lines)
    record(mismatch=mismatch)
    assert mismatch < 0.1  # on an H100, random weights of 1.7B had 0.038
    assert all(line["actor/grad_norm"] > 0 and not line["actor/skipped"] for line in lines)
    check_memory_is_free(before, seconds=3)
    return lines


def sglang_keys():
    return [f"rollout.engine_args.{key}={value}" for key, value in sglang_args().items()]


def sglang_7b():
    """Two steps of 7B on one GPU: weights are compared while the engine is awake, and synced.

    The engine takes the share of the memory that rl2 plans for it.
    """
    need("sglang")
    lines = grpo("sglang", "qwen2.5-7b", *sglang_keys(), samples=8, length=512, steps=2)
    record(**{f"first_{key}": lines[0][key] for key in TIMES if key in lines[0]})


def sglang_resume():
    """Kills a run with SGLang after its second checkpoint, and starts the same command again.

    SGLang's processes end with the run and give the memory of the GPU back.
    """
    need("sglang")
    before = used_gib()
    with tempfile.TemporaryDirectory(dir=os.environ["RL2_GPU_MODELS"]) as folder:
        folder = Path(folder)
        keys = [
            *letter_run(folder, make_model("small")),
            "actor.dtype=auto",
            "actor.lr=1e-6",
            "rollout.engine=sglang",
            "trainer.max_steps=4",
            "trainer.save_freq=1",
            f"trainer.save_dir={folder / 'run'}",
            *sglang_keys(),
        ]
        command = ["-m", "rl2.trainer.ppo", *keys]
        with subprocess.Popen([sys.executable, *command]) as process:
            checkpoint = folder / "run/checkpoints/step_2"
            while not checkpoint.exists() and process.poll() is None:
                time.sleep(0.05)
            assert process.poll() is None, "it ended before it was killed"
            process.kill()
        check_memory_is_free(before, seconds=30)
        run_program(*command)
        steps = [line["step"] for line in read_metrics(folder / "run")]
    assert steps == [1, 2, 3, 4], steps


def sglang_two():
    """Two GPUs share an engine (rollout.tp_size=2), and the actor is sharded over them."""
    need("sglang")
    need_two_gpus()
    more = ["rollout.tp_size=2", "rollout.check_weights=true"]
    grpo("sglang", "small", *sglang_keys(), *more, steps=2, world=2)


def local_grpo():
    grpo("local", "small", steps=2 if DRY else 3)


def gsm8k():
    """SFT of a real model on GSM8K, then GRPO of the result with SGLang.

    The folder RL2_GPU_GSM8K has `model`, and train.jsonl and test.jsonl: conversations, the reply
    of which is a solution that ends in "#### 72".
    """
    source = os.environ.get("RL2_GPU_GSM8K")
    if source is None:
        raise Skip("RL2_GPU_GSM8K names no folder with a model and the rows of GSM8K")
    if not DRY:
        need("sglang")
    with tempfile.TemporaryDirectory(dir=os.environ["RL2_GPU_MODELS"]) as folder:
        files = {"path": "train.jsonl", "test_path": "test.jsonl"}
        for name in files.values():
            rows = []
            for row in read_jsonl(Path(source, name)):
                *prompt, reply = row["messages"]
                rows.append({"messages": prompt, "answer": reply["content"]})
            write_jsonl(Path(folder, name), rows)
        keys = ["actor.gradient_checkpointing=false", "actor.max_length_per_device=16384"]
        run_trainer(
            "sft",
            *[f"data.{key}={source}/{name}" for key, name in files.items()],
            f"actor.model_name={source}/model",
            "actor.lr=1e-4",
            "actor.scheduler=cosine",
            f"data.batch_size={4 if DRY else 64}",
            "data.max_length=512",
            f"trainer.save_dir={folder}/sft",
            "trainer.disable_wandb=true",
            *keys,
        )
        lines = read_metrics(Path(folder, "sft"))
        losses = [line["test/loss"] for line in lines if "test/loss" in line]
        record(first_loss=losses[0], last_loss=losses[-1])
        assert losses[-1] < losses[0] * (1 if DRY else 0.8)
        keys += [f"data.{key}={folder}/{name}" for key, name in files.items()]
        keys += ["data.max_length=256", "actor.lr=1e-5", "actor.offload_model=false"]
        if not DRY:  # where it learns the letters: a random model earns nothing in GSM8K
            keys += ["rollout.env_path=gsm8k", "rollout.max_running=512", *sglang_keys()]
        steps = 2 if DRY else 10
        keys += [f"trainer.test_freq={steps}"]
        engine, prompts = ("local", 4) if DRY else ("sglang", 64)
        lines = grpo(engine, f"{folder}/sft/model", *keys, prompts=prompts, steps=steps)
    record(**{key: value for key, value in lines[-1].items() if key.startswith("test/reward")})


# Layouts of two GPUs, by the part that compares each with one process.
LAYOUTS = {
    "ring": {"sp_size": 2},
    "fsdp": {"fsdp_size": 2},
    "hybrid": {"fsdp_size": 1},  # a copy on each
    "tensor": {"tp_size": 2},
}


def need_two_gpus():
    if not DRY and torch.cuda.device_count() < 2:
        raise Skip("nccl needs one GPU a process, and there is one")


def two_gpus(layout):
    """Checks that two updates on two GPUs equal those of one process on a CPU."""
    need_two_gpus()
    torchrun(2, __file__, layout)


def _compare_layout(layout):
    device = init_distributed()
    if dist.get_rank() == 0:
        make_model("small")
    dist.barrier()
    settings = {"max_length_per_device": 400, **LAYOUTS[layout]}
    compare_with_cpu(device, make_batch(longest=90), **settings)


if __name__ == "__main__":
    _compare_layout(*sys.argv[1:])
