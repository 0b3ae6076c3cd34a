"""`rl2 plan [ppo | sft | dpo | rm] key=value ...`: the memory that a job will need."""

import argparse
import os
import sys

from rl2.config.schema import TRAINER_CONFIGS, Config

# Keys of what need not be on this machine.
ELSEWHERE = (
    "data",
    "rollout.env_path",
    "rollout.engine",
    "rollout.engine_args",
    "trainer.resume",
)
USUAL_GPU_GIB = 79.2  # of an H100 or A100 that is sold with 80 GB


def main() -> None:
    """Prints the plan. Exits with status 1 if the job does not fit, 2 if it cannot be planned."""
    parser = argparse.ArgumentParser(
        prog="rl2 plan",
        usage="%(prog)s [ppo | sft | dpo | rm] [--gpus N] [--gpu-memory GIB] key=value ...",
        description="Predicts the memory of each phase of a job. It needs no GPU, no weights and "
        "no data; the model is its config.json. docs/gpus.md has a table of what fits on 24, 48 "
        "and 80 GB.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=int, default=1, help="processes of the job")
    # By default that of the GPU here or, without one, of a usual GPU.
    parser.add_argument("--gpu-memory", type=float, help="GiB of one GPU")
    arguments, words = parser.parse_known_args()
    trainer = words.pop(0) if words and words[0].isalnum() else "ppo"
    if trainer not in TRAINER_CONFIGS:
        parser.error(f"{trainer}: there are {', '.join(TRAINER_CONFIGS)}")
    for option in ("gpus", "gpu_memory"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            parser.error(f"argument --{option.replace('_', '-')}: {value} is not above 0")
    os.environ["WORLD_SIZE"] = str(arguments.gpus)  # by which layouts are checked
    from rl2.config.parse import parse  # takes seconds, and --help does not need it

    config = parse(TRAINER_CONFIGS[trainer], words, elsewhere=ELSEWHERE)
    sys.exit(0 if print_plan(config, arguments.gpus, arguments.gpu_memory) else 1)


def print_plan(config: Config, num_gpus: int, gpu_gib: float | None) -> bool:
    """Prints the bytes of each phase. Returns whether the job fits."""
    import torch

    from rl2.config.conditions import count_samplers
    from rl2.config.rules import loaded_models
    from rl2.gpu_memory import OUTSIDE_BYTES, choose
    from rl2.model.folder import check_config
    from rl2.parallel.device import GIB
    from rl2.run.signals import user_errors
    from rl2.tools.memory import judge, predict, totals

    if gpu_gib is None:
        gpu_gib = USUAL_GPU_GIB
        if torch.cuda.is_available():
            gpu_gib = torch.cuda.get_device_properties(0).total_memory / GIB
    num_samplers = count_samplers(config)
    with user_errors():
        for name, model in loaded_models(config).items():
            if model.model_name:  # a critic's may be the actor's
                check_config(f"{name}.model_name", model.model_name)
        for line in choose(config, num_gpus, int(gpu_gib * GIB)):
            print(line)
        plan = predict(config, num_gpus - num_samplers)
    if num_samplers:
        print(
            f"{num_samplers} of the {num_gpus} GPUs only sample: an engine's weights take "
            f"{plan.engine_weights / GIB:.1f} GiB of each, and the rest is for keys and values"
        )
    print(f"GiB on each of {num_gpus - num_samplers} GPUs of {gpu_gib:.1f} GiB, predicted:")
    print("phase      trainer   engine      sum")
    phases = totals(config, plan, int(gpu_gib * GIB))
    for phase, (trainer, engine) in phases.items():
        numbers = (trainer, engine, trainer + engine)
        print(f"{phase:8}" + "".join(f"{number / GIB:9.1f}" for number in numbers))
    print(f"Add about {OUTSIDE_BYTES / GIB:.0f} for what is not a tensor: contexts, graphs, gaps.")
    fits, verdict = judge(phases, int(gpu_gib * GIB))
    print(verdict)
    if not fits:
        print(
            "What needs less, the nearest first: a smaller max_length_per_device, "
            "offload_optimizer=true, offload_model=true, more --gpus"
        )
    return fits
