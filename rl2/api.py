"""`rl2.train`: a trainer in the process of a script or a notebook. Its import loads no torch."""

import difflib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from rl2.python_inputs import Inputs

Rows = str | PurePath | Iterable[Mapping[str, object]]


@dataclass(frozen=True)
class Run:
    """A run in its folder, finished or not. Everything is read from the folder when asked for.

    FileNotFoundError if there is no such folder.
    """

    path: Path

    def __post_init__(self) -> None:
        if not Path(self.path).is_dir():
            raise FileNotFoundError(f"{self.path}: there is no such run; `rl2 ls` lists the runs")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one a step. Step 0 is the evaluation before training."""
        from rl2.run.records import MetricsFile

        return MetricsFile(Path(self.path)).read()

    @property
    def model_path(self) -> Path:
        """The final model, a folder in the form of Hugging Face."""
        return Path(self.path, "model")

    @property
    def best_model_path(self) -> Path:
        """The model of the best evaluation, with trainer.save_best."""
        return Path(self.path, "best_model")

    def load(self) -> tuple[Any, Any]:
        """Returns (model, tokenizer) of transformers, on the CPU in the dtype of the export.

        A reward model is one for sequence classification. FileNotFoundError without a final model,
        which an evaluation does not have.
        """
        import transformers

        from rl2.model.classes import language_model_class

        config = self.model_path / "config.json"
        if not config.exists():
            raise FileNotFoundError(f"{self.model_path}: this run has exported no model")
        [architecture] = json.loads(config.read_text(encoding="utf-8"))["architectures"]
        kind = language_model_class(transformers.AutoConfig.from_pretrained(self.model_path))
        if architecture.endswith("ForSequenceClassification"):
            kind = transformers.AutoModelForSequenceClassification
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.model_path)
        return kind.from_pretrained(self.model_path, dtype="auto"), tokenizer

    def rollouts(self, step: int, split: str = "train") -> list[dict[str, Any]]:
        """Returns the trajectories of a step of PPO: messages, row, rewards and more.

        `split` is train, test, or test_NAME for a named test set. FileNotFoundError for a step
        without them.
        """
        path = Path(self.path, "rollouts", split, f"step_{step}.jsonl")
        return [json.loads(line) for line in path.read_bytes().splitlines()]


def train(
    trainer: str,
    /,  # the config has a section of that name
    *,
    rows: Rows | Mapping[str, Rows] | None = None,
    test_rows: Rows | Mapping[str, Rows] | None = None,
    model_name: str | PurePath | None = None,
    env: str | PurePath | None = None,
    reward_fn: Callable | None = None,
    interact: Callable | None = None,
    group_reward_fn: Callable | None = None,
    make_env: Callable | None = None,
    run: Callable | None = None,
    play: Callable | None = None,
    **keys: object,
) -> Run:
    """Trains in this process, as `python -m rl2.trainer.NAME` does in one of its own.

        run = rl2.train("sft", rows=rows, model_name="Qwen/Qwen3-0.6B", **{"actor.lr": 1e-5})

    `trainer` is ppo, sft, dpo or rm. `keys` are those of the command line, written "actor.lr" or
    as nested dicts. Four of them have short names: `rows` is data.path, `test_rows` is
    data.test_path, `env` is rollout.env_path, and `model_name` is that of the trained model.

    `rows` and `test_rows` may be dicts instead of a path; they are saved as JSON in the run folder.
    A mapping as `rows` has several sources by name, one as `test_rows` several test sets. Instead
    of `env`, the functions of an env file may be given. They are called in this process, first of
    all to try them, and their source is recorded in the run folder.

    A run is resumed as on the command line. While it trains, Ctrl-C or a notebook's stop button
    ends it after the current step, with a checkpoint and a model; a second time it raises
    KeyboardInterrupt. Whatever ends the run, signal handlers, environment variables and torch's
    random numbers are then as before, and another run may follow.

    ValueError lists the problems of the arguments. RuntimeError if the run cannot go on, or if this
    process has a run or a process group already.
    """
    from rl2.config.schema import TRAINER_CONFIGS  # here, so that `import rl2` is fast

    if trainer not in TRAINER_CONFIGS:
        near = difflib.get_close_matches(trainer, TRAINER_CONFIGS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"trainer={trainer!r}: {hint}there are {', '.join(TRAINER_CONFIGS)}")
    given = {
        "reward_fn": reward_fn,
        "interact": interact,
        "group_reward_fn": group_reward_fn,
        "make_env": make_env,
        "run": run,
        "play": play,
    }
    functions = {name: function for name, function in given.items() if function is not None}
    if functions and trainer != "ppo":
        names = ", ".join(functions)
        raise ValueError(f"{names}: {trainer} has no environment, as ppo has")
    inputs = Inputs()
    inputs.set_keys(keys)
    for argument, key, given_rows in (
        ("rows", "data.path", rows),
        ("test_rows", "data.test_path", test_rows),
    ):
        if isinstance(given_rows, Mapping):
            for name, rows_of_name in given_rows.items():
                inputs.set_rows(f"{argument}[{name!r}]", f"{key}.{name}", rows_of_name)
        elif given_rows is not None:
            inputs.set_rows(argument, key, given_rows)
    if model_name is not None:
        worker = "critic" if trainer == "rm" else "actor"
        inputs.set_value("model_name", f"{worker}.model_name", model_name)
    if env is not None:
        inputs.set_value("env", "rollout.env_path", env)
    if functions:
        inputs.set_functions(functions)
    in_process = importlib.import_module("rl2.in_process")  # loads torch
    start = importlib.import_module(f"rl2.trainer.{trainer}").start
    if functions:
        start = partial(start, functions=functions)
    return Run(in_process.train_inside(TRAINER_CONFIGS[trainer], inputs, start))
