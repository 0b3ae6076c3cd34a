"""Evaluation by generation in SFT and DPO: the model answers prompts, and environments score them.

Only a run with rollout.env_path imports this. Without it these trainers load no environment, no
rollout and no engine.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from rl2.config.problem import Problem
from rl2.config.schema import EvaluationConfig, source_name
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples
from rl2.data.rows import Rows
from rl2.engine.local import LocalEngine
from rl2.engine.select import MAX_RUNNING
from rl2.env.call import Env
from rl2.model.folder import load_eos_token_ids, max_positions
from rl2.report.health import Metrics
from rl2.rollout.collect import Collector
from rl2.rollout.evaluate import Evaluator
from rl2.run.folder import RunFolder
from rl2.trainer.inputs import (
    TRIAL_ROWS,
    check_length,
    print_once,
    read_files,
    warn_of_text_prompts,
)
from rl2.trainer.sampling import (
    check_stop_ids,
    choose_deterministic,
    close_rollout,
    common_engine_settings,
    end_with_run,
    find_unknown_stop_ids,
    make_player,
    make_sampling_params,
    read_envs,
)
from rl2.worker import Worker


def find_test_problems(config: Any) -> list[Problem]:
    """The problems of prompts and environments, for a config that has other problems.

    Only the first rows of files that are on this machine are read.
    """
    problems: list[Problem] = []
    read_envs(config.rollout, _read_prompt_rows(config, problems, TRIAL_ROWS), problems)
    return problems


def _read_prompt_rows(
    config: Any, problems: list[Problem], limit: int | None = None
) -> dict[str, Rows]:
    paths = config.rollout.test_paths
    return read_files(paths, "test", PROMPT_ROWS, config.rollout.columns, problems, limit)


def read_test_prompts(
    config: Any, template: ChatTemplate, problems: list[Problem]
) -> "TestPrompts":
    """Reads the prompts and tries the environments on them, before a model is loaded.

    What is wrong is added to the problems; then a set or an environment may be missing. The first
    process prints the warnings.
    """
    rows = _read_prompt_rows(config, problems)
    envs, warnings = read_envs(config.rollout, rows, problems)
    problems += find_unknown_stop_ids(config, template)
    sets: dict[str, Examples] = {}
    max_length = config.data.max_length
    for key, set_rows in rows.items():
        name = source_name(key)
        try:
            sets[name] = Examples(
                set_rows, template, PROMPT_ROWS, max_length=max_length, source=name
            )
        except ValueError as error:
            problems.append(Problem(key, set_rows.path, str(error)))
        print_once(warn_of_text_prompts(set_rows, template))
    print_once([f"warning: {warning}" for warning in warnings])
    return TestPrompts(config, envs, sets, template)


@dataclass
class TestPrompts:
    """The prompts of rollout.test_path by the name of their set, and what scores the answers."""

    config: Any
    envs: dict[str, Env]  # by set; "" is that of all sets
    sets: dict[str, Examples]
    template: ChatTemplate

    __test__ = False  # pytest takes the name for that of a test

    def limit(self) -> None:
        """Keeps as many prompts as data.test_limit says, and prints how many are dropped.

        ValueError if an answer may get too long for the model, or if the model lacks a stop token.
        """
        rollout: EvaluationConfig = self.config.rollout
        turns, answer = rollout.max_turns, rollout.test_sampling_params.max_new_tokens
        for prompts in self.sets.values():
            prompts.kept = prompts.kept[: self.config.data.test_limit]
            print_once(prompts.describe_dropped("test "))
            remedy = (
                f"a conversation may get {prompts.longest} (the longest prompt of "
                f"{prompts.rows.path}) + {turns} x {answer} tokens: lower "
                "rollout.test_sampling_params.max_new_tokens, data.max_length or rollout.max_turns"
            )
            check_length(self.config, prompts, remedy, turns * answer)
        check_stop_ids(self.config)

    def start(self, worker: Worker, folder: RunFolder, device: torch.device) -> "PlayedTests":
        """Returns what plays the prompts with the weights of `worker`. All processes must call."""
        return PlayedTests(self, worker, folder, device)


class PlayedTests:
    """Plays the test prompts with an engine of its own, which sleeps while the model is trained."""

    def __init__(
        self, prompts: TestPrompts, worker: Worker, folder: RunFolder, device: torch.device
    ):
        config, template = prompts.config, prompts.template
        rollout: EvaluationConfig = config.rollout
        self.worker = worker
        self.envs = prompts.envs
        is_deterministic = choose_deterministic(config, device)
        settings = replace(
            common_engine_settings(config, device, is_deterministic),
            max_running_requests=rollout.max_running or MAX_RUNNING,
            stop=rollout.test_sampling_params.stop,
        )
        # SGLang would take its memory by a plan of PPO's phases.
        self.engine = end_with_run(LocalEngine(settings))
        self.engine.sleep()
        max_length = max_positions(config.actor.model_name)
        player = make_player(rollout, self.engine, prompts.envs, template, max_length)
        stop_ids = template.stop_token_ids(load_eos_token_ids(config.actor.model_name))
        params = make_sampling_params(rollout.test_sampling_params, stop_ids)
        collector = Collector(
            player,
            params=params,
            seed=config.trainer.seed,
            deterministic=is_deterministic,
            write_records=folder.write_records,
        )
        num_samples = rollout.responses_per_test_prompt
        self.evaluator = Evaluator(collector, prompts.sets, params, num_samples)

    def evaluate(self, step: int) -> Metrics:
        """Plays all sets with the worker's weights and writes their transcripts.

        Returns their metrics. All processes must call.
        """
        version = self.worker.version
        self.engine.wake()
        self.engine.load_weights(self.worker.iter_full_weights(self.worker.dtype), version)
        metrics = self.evaluator.evaluate(step, version)
        self.engine.sleep()
        return metrics

    def close(self) -> None:
        """Ends the engine and the environments."""
        close_rollout(self.engine, self.envs)
