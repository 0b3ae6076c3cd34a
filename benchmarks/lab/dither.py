"""What actor.dither_weights changes in learning, by learning rate.

    python benchmarks/lab/dither.py run MODEL [--folder runs/dither] [--seeds 3] [--steps 8]
    python benchmarks/lab/dither.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. The tasks are
those of learning.py, with more held-out questions: at the end each is answered NUM_TEST_SAMPLES
times at temperature 1, and once greedily. All runs of a seed see the same prompts in the same
order, and the first rollouts of stored and dithered weights are equal. Kinds of runs:

    stored      weights start as stored, in the middle of their rounding cells
    dithered    actor.dither_weights
    fp32        what the updates do where nothing is rounded
    stochastic  the weights are rounded at random after every update, by torch's generator
    trl         TRL's GRPOTrainer, which rounds the stored weights as the first kind does

`run` is a queue that can be stopped and started again, also in two processes. Each finished run is
a line of benchmarks/lab/results/dither.jsonl; `report` prints the tables. docs/proofs.md has a
part of them.

Needs the `test` and `quickstart` extras.
"""

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from learning import (
    ALGORITHMS,
    TASKS,
    UPDATES,
    make_data,
    make_trl_trainer,
    read_prompts,
    run_keys,
    trl_accuracy,
    without_paths,
)
from rows import read_rows
from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    mean_and_error,
    read_results,
    run_command,
)

RESULTS_FILE = RESULTS / "dither.jsonl"
HELD_OUT = {"sums": replace(TASKS["sums"], num_train=100, num_test=100)}
HELD_OUT["products"] = replace(TASKS["products"], num_train=50, num_test=50)
RATES = ("1e-05", "4e-05", "3e-06", "1e-06")  # the most telling first
KINDS = {
    "stored": ["actor.dither_weights=false"],
    "dithered": ["actor.dither_weights=true"],
    "fp32": ["actor.dtype=float32"],
    "stochastic": ["actor.dither_weights=false"],
    "trl": [],
}
NUM_TEST_SAMPLES = 3  # of each held-out question


class StochasticRounding:
    """Rounds the weights of a worker to bf16 at random after each update of its optimizer.

    The optimizer keeps those that were not rounded. Takes the place of the optimizer's `step`.
    """

    def __init__(self, worker, seed: int):
        import torch

        self.step = worker.optimizer.step
        self.weights = [p.detach().to_local() for p in worker.trained_parameters.values()]
        self.exact = [weight.clone() for weight in self.weights]
        self.generator = torch.Generator().manual_seed(seed)
        self.seconds = 0.0  # for the rounding alone

    def __call__(self, lr: float) -> None:
        import torch

        for weight, exact in zip(self.weights, self.exact, strict=True):
            weight.copy_(exact)
        self.step(lr)
        start = time.process_time()
        for weight, exact in zip(self.weights, self.exact, strict=True):
            exact.copy_(weight)
            bits = weight.view(torch.int32)
            bits += torch.randint(2**16, bits.shape, generator=self.generator, dtype=torch.int32)
            bits &= ~0xFFFF
        self.seconds += time.process_time() - start


def run_trl(arguments, task, folder: Path) -> dict:
    trainer = make_trl_trainer(
        task,
        arguments.seed,
        arguments.model,
        folder,
        learning_rate=float(arguments.rate),
        max_steps=arguments.steps * UPDATES,
    )
    trainer.train()
    test_rows = read_prompts(folder.parent / "test.jsonl")
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "sampled": trl_accuracy(trainer, test_rows, task, NUM_TEST_SAMPLES),
        "greedy": trl_accuracy(trainer, test_rows, task),
        "right": [round(entry["rewards/right/mean"], 4) for entry in log],
        "kl": [],
        "visible_update": [],
    }


def run_one(arguments) -> dict:
    """One run, in this process. Returns its result."""
    if arguments.kind != "trl":
        return run_grpo(arguments, KINDS[arguments.kind])
    task = HELD_OUT[arguments.task]
    folder = prepare(arguments)
    return identity(arguments) | run_trl(arguments, task, folder)


def identity(arguments) -> dict:
    """What tells a run from the others of its study."""
    return {name: getattr(arguments, name) for name in ("task", "kind", "rate", "seed", "steps")}


def prepare(arguments) -> Path:
    """Writes the data of the run's task if it is missing. Returns the run's folder beside it."""
    data = arguments.folder / arguments.task
    make_data(HELD_OUT[arguments.task], data)
    return data / f"{arguments.kind}-{arguments.rate}-{arguments.seed}-{arguments.steps}"


def run_grpo(arguments, kind_keys: list[str]) -> dict:
    """GRPO of rl2, evaluated at the end. Returns its identity, accuracy and curves."""
    from rl2.config.parse import parse
    from rl2.config.schema import PPOConfig
    from rl2.trainer.ppo import train
    from rl2.trainer.ppo_run import PPORun

    task = HELD_OUT[arguments.task]
    folder = prepare(arguments)
    keys = [
        *run_keys(task, arguments.model, arguments.seed, folder),
        f"data.responses_per_test_prompt={NUM_TEST_SAMPLES}",
        f"actor.lr={arguments.rate}",
        *ALGORITHMS["GRPO"],
        "rollout.test_sampling_params.temperature=1",
        f"trainer.max_steps={arguments.steps}",
        "trainer.save_freq=null",
        *kind_keys,
    ]
    run = PPORun(parse(PPOConfig, keys))
    run.recorder.evaluate = None  # below; all runs of a task begin with the same model
    if arguments.kind == "stochastic":
        run.actor.optimizer.step = rounding = StochasticRounding(run.actor, arguments.seed)
    train(run)
    evaluator = run.evaluator
    sampled = evaluator.evaluate(arguments.steps, arguments.steps)
    greedy_params = replace(evaluator.params, temperature=0.0)
    evaluator = replace(evaluator, params=greedy_params, num_samples=1)
    greedy = evaluator.evaluate(arguments.steps + 1, arguments.steps)
    run.engine.close()
    lines = [line for line in read_rows(folder / "metrics.jsonl") if "actor/loss" in line]
    name = "reward/right" if task.has_parts else "reward/mean"
    result = {
        "sampled": sampled[name],
        "greedy": greedy[name],
        "right": [round(line[name], 4) for line in lines],
        "kl": [line["actor/approx_kl"] for line in lines],
        "visible_update": [line.get("actor/visible_update") for line in lines],
        "seconds": [round(line["time/step"], 2) for line in lines],
        "keys": without_paths(keys),
    }
    if arguments.kind == "stochastic":
        result["rounding_cpu_seconds_an_update"] = rounding.seconds / len(lines) / UPDATES
    return identity(arguments) | result


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for rate in arguments.rates:
            for task in arguments.tasks:
                for kind in arguments.kinds:
                    words = (task, kind, rate, seed, arguments.steps)
                    name = "-".join(map(str, words))
                    jobs.append(make_job(arguments, name, arguments.model, *words))
    return jobs


def print_tables(results_file: Path, kinds: Iterable[str]) -> None:
    """Prints a table for each task and number of steps, in Markdown."""
    results = list(read_results(results_file).values())
    for task in HELD_OUT:
        for steps in sorted({run["steps"] for run in results if run["task"] == task}):
            print_table(task, steps, results, kinds)


def print_table(task: str, steps: int, results: list[dict], kinds: Iterable[str]) -> None:
    print(f"\n{task}, {steps} steps\n")
    print("| rate | weights | runs | sampled, % | greedy, % | training, last 2 steps, % ", end="")
    print("| KL a step | visible update |\n|---|---|---|---|---|---|---|---|")
    for rate in sorted({run["rate"] for run in results}, key=float):
        for kind in kinds:
            runs = [
                run
                for run in results
                if (run["task"], run["steps"]) == (task, steps)
                and (run["rate"], run["kind"]) == (rate, kind)
            ]
            if runs:
                print(report_row(f"{float(rate):g}", kind, runs))


def report_row(rate: str, kind: str, runs: list[dict]) -> str:
    def mean(name: str) -> str:
        values = [x for run in runs for x in run[name] if x is not None]
        return f"{sum(values) / len(values):.2g}" if values else "-"

    cells = [
        rate,
        kind,
        str(len(runs)),
        mean_and_error([run["sampled"] for run in runs]),
        mean_and_error([run["greedy"] for run in runs]),
        mean_and_error([sum(run["right"][-2:]) / 2 for run in runs]),
        mean("kl"),
        mean("visible_update"),
    ]
    return f"| {' | '.join(cells)} |"


def report() -> None:
    print_tables(RESULTS_FILE, KINDS)


def add_arguments(run, one, kinds: Iterable[str], rates: Iterable[str]) -> None:
    """Those of both commands. All kinds and rates are run unless the command line chooses some."""
    run.add_argument("model", help="folder of the model")
    run.add_argument("--tasks", nargs="*", choices=HELD_OUT, default=list(HELD_OUT))
    run.add_argument("--rates", nargs="*", choices=rates, default=rates)
    run.add_argument("--kinds", nargs="*", choices=kinds, default=list(kinds))
    run.add_argument("--steps", type=int, default=8)
    for name in ("model", "task", "kind", "rate"):
        one.add_argument(name)
    for name in ("seed", "steps"):
        one.add_argument(name, type=int)


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "dither")
    add_arguments(run, one, KINDS, RATES)
    run.set_defaults(kinds=["stored", "dithered"])
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
