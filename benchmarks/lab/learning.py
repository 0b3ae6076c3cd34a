"""What the algorithms learn on two small tasks when each samples equally many tokens.

    python benchmarks/lab/learning.py run MODEL [--folder runs/learning] [--seeds 3]
    python benchmarks/lab/learning.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. It is
SmolLM2-135M-Instruct. The tasks are sums and differences of one-digit numbers, as in
examples/pipeline.sh, and products of them. Each has 50 or 30 questions that are held out. A run
ends with the step in which it has sampled SAMPLED_TOKENS. All runs have the learning rate, the
prompts, and the two mini-batches a step in common; an algorithm is only its keys in ALGORITHMS,
without a KL term. TRL's GRPOTrainer has the settings of GRPO, and as many CPU seconds as GRPO took
with rl2.

`run` is a queue that can be stopped and started again, also in two processes. Each finished run is
a line of benchmarks/lab/results/learning.jsonl; `report` prints the tables of learning.md. A run
has one thread (OMP_NUM_THREADS=1), so that its CPU seconds hardly depend on what else runs.

Needs the `test` and `quickstart` extras.
"""

import importlib.util
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rows import read_rows, write_rows
from run_queue import (
    DTYPE,
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    mean_and_error,
    read_results,
    run_command,
)

sys.path.insert(0, str(ROOT / "examples"))
from pipeline import EXAMPLE, draw_questions, make_messages

RESULTS_FILE = RESULTS / "learning.jsonl"
SAMPLED_TOKENS = 8_000  # of a run
LONGEST = 12  # tokens of an answer
PROMPTS, SAMPLES, UPDATES = 16, 8, 2  # of a step
LEARNING_RATE = 4e-5
# As when these rates were chosen: dithered weights learn best at lower ones.
RATE = [f"actor.lr={LEARNING_RATE}", "actor.dither_weights=false"]
MARK = 0.7  # of the right answers in training, as the mean of MARK_STEPS steps
MARK_STEPS = 3
TRL = "TRL's GRPO"


@dataclass(frozen=True)
class Task:
    """Questions of reasoning-gym whose answer is a number."""

    dataset: str
    num_train: int  # questions
    num_test: int
    example: tuple[str, ...]  # a question and its answer, which precede the question, or nothing
    env: str  # file; its reward is `right`, or the sum of `right` and other parts
    has_parts: bool


TASKS = {
    "sums": Task(
        dataset="chain_sum",
        num_train=150,
        num_test=50,
        example=EXAMPLE,
        env="benchmarks/lab/sums_env.py",
        has_parts=True,
    ),
    "products": Task(
        dataset="products",
        num_train=70,
        num_test=30,
        example=(),
        env="envs/arithmetic.py",
        has_parts=False,
    ),
}

GROUP = ["adv.estimator=reinforce", "adv.norm_var=true"]
ALGORITHMS = {
    "PPO": ["adv.estimator=gae", "adv.lamda=0.95", "critic.lr=4e-5", "actor.average=token"],
    "GRPO": [*GROUP, "actor.average=sequence"],
    "Dr. GRPO": [
        "adv.estimator=reinforce",
        "adv.norm_var=false",
        "actor.average=constant",
        f"actor.average_constant={LONGEST}",
    ],
    "RLOO": [
        "adv.estimator=rloo",
        "actor.loss=reinforce",
        "actor.average=constant",
        "actor.average_constant=1",
    ],
    "REINFORCE++": ["adv.estimator=reinforce_plus_plus", "actor.average=token"],
    "DAPO": [
        *GROUP,
        "actor.average=token",
        "actor.clip_high=0.28",
        "rollout.filter=[0,1]",
        "rollout.overlong_buffer=4",
        "rollout.mask_truncated=true",
        "actor.skip_threshold=10",
    ],
    "GSPO": [
        *GROUP,
        "actor.average=sequence",
        "actor.loss=gspo",
        "actor.clip=3e-4",
        "actor.clip_high=4e-4",
    ],
    "CISPO": [*GROUP, "actor.average=token", "actor.loss=cispo", "actor.clip_high=4"],
    "GRPO, K=2": [*GROUP, "actor.average=sequence", "actor.epochs_per_rollout=2"],
}


def make_data(task: Task, folder: Path) -> None:
    """Writes train.jsonl and test.jsonl: all different questions, in the order of their hashes."""
    if (folder / "test.jsonl").exists():
        return
    answers = draw_questions(task.dataset, task.num_train + task.num_test)
    rows = []
    for question, answer in answers.items():
        rows.append({"messages": make_messages(question, task.example), "answer": answer})
    held_out = [row["messages"][-1]["content"] for row in rows[task.num_train :]]
    assert not set(task.example) & set(held_out), "a prompt shows a held-out question"
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[: task.num_train]), ("test", rows[task.num_train :])):
        write_rows(folder / f"{name}.jsonl", part)


class StopAtBudget:
    """Ends a run of rl2 with the step in which it has sampled `budget` tokens, and evaluates it.

    Takes the place of the recorder's `finish_step`. Keeps the CPU seconds at the end of each step.
    """

    def __init__(self, recorder, budget: int):
        self.recorder = recorder
        self.budget = budget
        self.num_sampled = 0
        self.finish_step = recorder.finish_step
        self.cpu_seconds = []
        recorder.finish_step = self

    def __call__(self, step: int, metrics: dict, *records) -> bool:
        self.cpu_seconds.append(time.process_time())
        self.num_sampled += metrics["tokens/sampled"]
        is_last = self.num_sampled >= self.budget
        if is_last:
            self.recorder.num_steps = step  # the last step is evaluated
        return self.finish_step(step, metrics, *records) or is_last


def run_keys(task: Task, model: str, seed: int, folder: Path, dtype: str = DTYPE) -> list[str]:
    """The keys of every run of rl2 in `folder`. The data is beside it."""
    return [
        f"data.path={folder.parent / 'train.jsonl'}",
        f"data.test_path={folder.parent / 'test.jsonl'}",
        f"data.prompts_per_rollout={PROMPTS}",
        f"data.responses_per_prompt={SAMPLES}",
        f"data.seed={seed}",
        f"actor.model_name={model}",
        f"actor.dtype={dtype}",
        f"actor.update_per_rollout={UPDATES}",
        "actor.max_length_per_device=4096",
        "actor.gradient_checkpointing=false",
        f"rollout.env_path={ROOT / task.env}",
        f"rollout.max_running={PROMPTS * SAMPLES}",
        f"rollout.train_sampling_params.max_new_tokens={LONGEST}",
        "trainer.n_epochs=1000",
        f"trainer.seed={seed}",
        f"trainer.save_dir={folder}",
        f"trainer.experiment_name={folder.name}",
        "trainer.resume=off",
        "trainer.disable_wandb=true",
    ]


def without_paths(keys: list[str]) -> list[str]:
    """The keys as a result keeps them."""
    return [key for key in keys if os.sep not in key]


def run_rl2(task: Task, algorithm: str, seed: int, model: str, folder: Path) -> dict:
    from rl2.config.parse import parse
    from rl2.config.schema import PPOConfig
    from rl2.trainer.ppo import train
    from rl2.trainer.ppo_run import PPORun

    arguments = [
        *run_keys(task, model, seed, folder),
        *RATE,
        *ALGORITHMS[algorithm],
    ]
    run = PPORun(parse(PPOConfig, arguments))
    meter = StopAtBudget(run.recorder, SAMPLED_TOKENS)
    start = time.process_time()
    train(run)
    run.engine.close()
    lines = read_rows(folder / "metrics.jsonl")
    name = "reward/right" if task.has_parts else "reward/mean"
    right = [line[name] for line in lines if name in line]
    tests = [line[f"test/{name}"] for line in lines if f"test/{name}" in line]
    cpu_seconds = [end - start for end in meter.cpu_seconds]
    return {
        "before": tests[0],
        "accuracy": tests[-1],
        "sampled_tokens": meter.num_sampled,
        "cpu_seconds": cpu_seconds[-1],
        **curve_to_mark(right, cpu_seconds),
        "keys": without_paths(arguments),
    }


def curve_to_mark(right: list[float], cpu_seconds: list[float]) -> dict:
    """The shares of right answers, and when the mean of MARK_STEPS of them first reached MARK."""
    result = {
        "right": [round(share, 4) for share in right],
        "steps_to_mark": None,
        "cpu_seconds_to_mark": None,
    }
    for step in range(MARK_STEPS, len(right) + 1):
        if sum(right[step - MARK_STEPS : step]) / MARK_STEPS >= MARK:
            result |= {"steps_to_mark": step, "cpu_seconds_to_mark": cpu_seconds[step - 1]}
            break
    return result


def run_trl(task: Task, seed: int, model: str, folder: Path) -> dict:
    """TRL's GRPOTrainer for as many CPU seconds as GRPO's runs of this task took on average."""
    from transformers import TrainerCallback

    seconds = mean_cpu_seconds(task)
    cpu_seconds = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            cpu_seconds.append(time.process_time() - start)
            if cpu_seconds[-1] >= seconds and len(cpu_seconds) % UPDATES == 0:
                control.should_training_stop = True

    trainer = make_trl_trainer(task, seed, model, folder, callbacks=[Clock()])
    test_rows = read_prompts(folder.parent / "test.jsonl")
    before = trl_accuracy(trainer, test_rows, task)
    start = time.process_time()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    # Only the first of a step's updates has rewards in the log: those of all answers.
    sampled = sum(entry["completions/mean_length"] * PROMPTS * SAMPLES for entry in log)
    right_shares = [entry["rewards/right/mean"] for entry in log]
    return {
        "before": before,
        "accuracy": trl_accuracy(trainer, test_rows, task),
        "sampled_tokens": round(sampled),
        "cpu_seconds": cpu_seconds[-1],
        **curve_to_mark(right_shares, cpu_seconds[UPDATES - 1 :: UPDATES]),
    }


def read_prompts(path: Path) -> list[dict]:
    """The rows as TRL wants them."""
    return [{"prompt": row["messages"], "answer": row["answer"]} for row in read_rows(path)]


def make_trl_trainer(task: Task, seed: int, model: str, folder: Path, callbacks=(), **settings):
    """TRL's GRPOTrainer on train.jsonl beside `folder`, with the settings of GRPO here."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    score = load_env(task)

    def right(prompts, completions, answer, **_):
        return [score(*pair)["right"] for pair in zip(completions, answer, strict=True)]

    def others(prompts, completions, answer, **_):
        parts = [score(*pair) for pair in zip(completions, answer, strict=True)]
        return [sum(part.values()) - part["right"] for part in parts]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = {
        "output_dir": str(folder),
        "max_steps": 1000,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "loss_type": "grpo",
        "num_generations": SAMPLES,
        "max_completion_length": LONGEST,
        "temperature": 1.0,
        "per_device_train_batch_size": PROMPTS * SAMPLES // UPDATES,
        "steps_per_generation": UPDATES,
        "gradient_checkpointing": False,
        "bf16": DTYPE == "bfloat16",
        "use_cpu": device.type == "cpu",
        "seed": seed,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model=model,
        args=GRPOConfig(**config | settings),
        reward_funcs=[right, others],
        train_dataset=Dataset.from_list(read_prompts(folder.parent / "train.jsonl")),
        callbacks=list(callbacks),
    )


def trl_accuracy(trainer, rows: list[dict], task: Task, num_samples: int = 0) -> float:
    """The share of right answers of TRL's model, generated by transformers: greedy ones.

    With `num_samples`, that many of each question at temperature 1.
    """
    import torch

    score = load_env(task)
    tokenizer, model = trainer.processing_class, trainer.model.eval()
    inputs = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows],
        add_generation_prompt=True,
        padding=True,
        padding_side="left",
        return_tensors="pt",
        return_dict=True,
    )
    options = {"do_sample": False}
    if num_samples:
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        options["num_return_sequences"] = num_samples
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=LONGEST, **options)
    replies = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], True)
    right = 0.0
    for i, reply in enumerate(replies):
        row = rows[i // max(num_samples, 1)]
        right += score([{"role": "assistant", "content": reply}], row["answer"])["right"]
    return right / len(replies)


def load_env(task: Task):
    """The reward function of the task's file. It returns parts, one of them `right`."""
    spec = importlib.util.spec_from_file_location("task_env", ROOT / task.env)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if task.has_parts:
        return module.reward_fn
    return lambda messages, answer: {"right": module.reward_fn(messages, answer)}


def mean_cpu_seconds(task: Task) -> float:
    """Of the runs of GRPO on this task."""
    results = read_results(RESULTS_FILE).values()
    seconds = [
        result["cpu_seconds"]
        for result in results
        if result["algorithm"] == "GRPO" and TASKS[result["task"]] == task
    ]
    if not seconds:
        raise SystemExit("TRL has as many CPU seconds as GRPO took: run GRPO first")
    return sum(seconds) / len(seconds)


def make_jobs(arguments) -> list[Job]:
    """Seed by seed, so that all algorithms have a result early."""
    jobs = []
    for seed in range(arguments.seeds):
        for algorithm in arguments.algorithms or [*ALGORITHMS, TRL]:
            for task in arguments.tasks or TASKS:
                name = job_name(task, algorithm, seed)
                jobs.append(make_job(arguments, name, arguments.model, task, algorithm, seed))
    return jobs


def job_name(task: str, algorithm: str, seed: int) -> str:
    words = "".join(letter if letter.isalnum() else "-" for letter in algorithm.lower())
    return f"{task}-{words}-{seed}"


def run_one(arguments) -> dict:
    """One run, in this process. Returns its result."""
    task = TASKS[arguments.task]
    folder = arguments.folder / arguments.task
    make_data(task, folder)
    save_dir = folder / job_name(arguments.task, arguments.algorithm, arguments.seed)
    if arguments.algorithm == TRL:
        result = run_trl(task, arguments.seed, arguments.model, save_dir)
    else:
        result = run_rl2(task, arguments.algorithm, arguments.seed, arguments.model, save_dir)
    chosen = {"task": arguments.task, "algorithm": arguments.algorithm, "seed": arguments.seed}
    return chosen | result


def report() -> None:
    """Prints the table of each task in Markdown."""
    results = list(read_results(RESULTS_FILE).values())
    for task in TASKS:
        runs = [result for result in results if result["task"] == task]
        if not runs:
            continue
        dates = sorted({run["date"] for run in runs})
        print(
            f"\n{task}: {dates[0]} to {dates[-1]}, {runs[0]['machine']}; before training ", end=""
        )
        print(f"{mean_and_error([run['before'] for run in runs if run['algorithm'] != TRL])}%\n")
        print("| algorithm | runs | held out, % | steps | sampled tokens | CPU s | ", end="")
        print("steps to the mark | CPU s to the mark |\n|---|---|---|---|---|---|---|---|")
        for algorithm in [*ALGORITHMS, TRL]:
            rows = [run for run in runs if run["algorithm"] == algorithm]
            if rows:
                print(report_row(algorithm, rows))


def report_row(algorithm: str, runs: list[dict]) -> str:
    def mean(values: list[float | None]) -> str:
        reached = [value for value in values if value is not None]
        text = f"{sum(reached) / len(reached):.0f}" if reached else "-"
        is_partial = 0 < len(reached) < len(values)
        return f"{text} ({len(reached)} of {len(values)} runs)" if is_partial else text

    cells = [
        algorithm,
        str(len(runs)),
        mean_and_error([run["accuracy"] for run in runs]),
        mean([len(run["right"]) for run in runs]),
        mean([run["sampled_tokens"] for run in runs]),
        mean([run["cpu_seconds"] for run in runs]),
        mean([run["steps_to_mark"] for run in runs]),
        mean([run["cpu_seconds_to_mark"] for run in runs]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "learning")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--tasks", nargs="*", choices=TASKS)
    run.add_argument("--algorithms", nargs="*", choices=[*ALGORITHMS, TRL])
    for name in ("model", "task", "algorithm"):
        one.add_argument(name)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
