"""Kills runs at random moments with SIGKILL, resumes them, and compares them with a run that was
never killed: metrics, transcripts and weights must have equal bits.

    kills.py FOLDER [--kills 100] [--seed 0] [--case NAME ...]

The kills are shared among the cases: trainers and layouts, see CASES. A kill comes at a random time
of the run or while a checkpoint is written, and meets all ranks, as when the power fails, or one of
them; the others get SIGTERM then, as from torchrun, and must end. A quarter are stops: all ranks
get SIGTERM, as from a cluster that takes its machines back, and the run saves and ends. FOLDER is
new.
"""

import argparse
import itertools
import multiprocessing
import random
import shlex
import shutil
import signal
import time
from pathlib import Path

from common import LETTER_ENV, make_model, read_untimed_metrics, write_jsonl
from forked import ForkedRun, ForkedRuns

from rl2.run import signals

STEPS = 6
MOST_KILLS_OF_A_RUN = 4
SECONDS_OF_A_SAVE = 0.06  # a kill that aims at a save comes so soon after its beginning, at most
SECONDS_FOR_OTHER_RANKS = 60  # to end, after one rank was killed
COMMON = (
    f"trainer.max_steps={STEPS} trainer.n_epochs=9 trainer.save_freq=1 trainer.disable_wandb=true"
    " trainer.watchdog=2 data.max_length=64 trainer.test_freq=2"
)
PROMPTS = "data.path={inputs}/prompts.jsonl data.test_path={inputs}/prompts.jsonl"
CONVERSATIONS = "data.path={inputs}/conversations.jsonl data.test_path={inputs}/conversations.jsonl"
PAIRS = "data.path={inputs}/pairs.jsonl data.test_path={inputs}/pairs.jsonl"
ACTOR = "actor.model_name={inputs}/tiny actor.dtype=float32 actor.lr=0.01"
PPO = (
    f"ppo {COMMON} {ACTOR} {PROMPTS} data.prompts_per_rollout=2"
    " data.responses_per_prompt=4 rollout.env_path={inputs}/letters.py rollout.max_running=8"
    " rollout.train_sampling_params.max_new_tokens=6"
)
CRITIC = "adv.estimator=gae critic.lr=0.01 critic.dtype=float32"
# The mean of a group is outside [0.06, 0.14] often enough to replace some groups in every step.
REFILL = "rollout.filter=[0.06,0.14] rollout.max_refills=4"
BEST = "trainer.save_best=auto trainer.keep_checkpoints=1"
SFT = f"sft {COMMON} {ACTOR} {CONVERSATIONS} data.batch_size=3"
DPO = f"dpo {COMMON} {ACTOR} {PAIRS} data.batch_size=3"
RM = (
    f"rm {COMMON} critic.model_name={{inputs}}/tiny critic.dtype=float32 critic.lr=0.01"
    f" {PAIRS} data.batch_size=3"
)
CASES = {  # name: (processes, trainer and arguments)
    "ppo": (1, PPO),
    "ppo_critic": (2, f"{PPO} {CRITIC} actor.update_per_rollout=2 kl.coef=0.01 kl.type=loss"),
    "ppo_refill": (2, f"{PPO} {REFILL} {BEST}"),
    "ppo_ahead": (2, f"{PPO} rollout.num_processes=1 rollout.max_staleness=3 {REFILL}"),
    "ppo_lora": (2, f"{PPO} actor.lora_rank=2 actor.sp_size=2"),
    "ppo_muon": (2, f"{PPO} actor.optimizer=muon actor.tp_size=2"),
    "sft": (1, f"{SFT} {BEST}"),
    "dpo_kto": (2, f"{DPO} dpo.loss=kto"),
    "rm": (1, RM),
}


def make_inputs(folder: Path) -> None:
    """A model, data and an env file."""
    make_model(folder / "tiny")
    (folder / "letters.py").write_text(LETTER_ENV)
    prompts, conversations, pairs = [], [], []
    for i in range(8):
        user = {"role": "user", "content": f"say {'abcdefgh'[: i + 1]}"}
        good = {"role": "assistant", "content": "abc" * (i + 1)}
        bad = "xyz" * (8 - i)
        prompts.append({"messages": [user], "answer": "abcdefgh"})
        conversations.append({"messages": [user, good]})
        pairs.append({"messages": [user], "chosen": good["content"], "rejected": bad})
    for name, rows in (("prompts", prompts), ("conversations", conversations), ("pairs", pairs)):
        write_jsonl(folder / f"{name}.jsonl", rows)


def no_pause_before_the_message(rank: int) -> None:
    signals.SECONDS_BEFORE_OTHER_RANKS_PRINT = 0.1


class Case:
    """One trainer and layout, with its run that is not killed."""

    def __init__(self, name: str, folder: Path, runs: ForkedRuns):
        self.name = name
        self.runs = runs
        self.folder = folder / name
        self.world, command = CASES[name]
        self.trainer, *self.arguments = shlex.split(command.format(inputs=folder / "inputs"))
        self.folder.mkdir()
        start = time.monotonic()
        self.finish("whole")
        self.seconds = time.monotonic() - start

    def start(self, name: str) -> ForkedRun:
        arguments = [*self.arguments, f"trainer.save_dir={self.folder / name}"]
        return self.runs.start(self.world, self.trainer, arguments, no_pause_before_the_message)

    def finish(self, name: str) -> None:
        run = self.start(name)
        statuses = run.wait(200)
        assert statuses == [0] * self.world, run.output[-5000:]

    def kill_and_resume(self, rng: random.Random, most_kills: int) -> int:
        """A run with up to `most_kills` kills. Returns how many met it."""
        name = "killed"
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        num_kills = 0
        while num_kills < most_kills and self.kill(self.start(name), folder, rng):
            num_kills += 1
        self.finish(name)
        self.compare(folder)
        return num_kills

    def kill(self, run: ForkedRun, folder: Path, rng: random.Random) -> bool:
        """Kills or stops the run. Returns whether it had not ended before."""
        aims_at_save = rng.random() < 0.6
        step = rng.randint(min(num_lines(folder), STEPS - 1), STEPS - 1)
        while run.is_running and num_lines(folder) < step:
            time.sleep(0.001)
        if aims_at_save:
            while run.is_running and not partial_folders(folder):
                pass  # a save takes milliseconds
            time.sleep(rng.uniform(0, SECONDS_OF_A_SAVE))
        else:
            time.sleep(rng.uniform(0, self.seconds / STEPS))
        if not run.is_running:
            return False
        if rng.random() > 0.25:
            run.send(signal.SIGKILL, None if rng.random() < 0.5 else [rng.randrange(self.world)])
            time.sleep(0.1)
        if run.is_running:
            run.send(signal.SIGTERM)
        run.wait(SECONDS_FOR_OTHER_RANKS)
        return True

    def compare(self, folder: Path) -> None:
        whole = self.folder / "whole"
        assert read_untimed_metrics(folder) == read_untimed_metrics(whole), "the metrics differ"
        for pattern in ("model/*.safetensors", "best_model/*.safetensors", "rollouts/*/*.jsonl"):
            expected = files(whole, pattern)
            assert files(folder, pattern) == expected, f"{pattern} differ"
            assert expected or not pattern.startswith("model"), "nothing was compared"
        left = partial_folders(folder)
        assert not left, f"the resumed run leaves {left}"


def files(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob(pattern)}


def num_lines(folder: Path) -> int:
    """The steps in the metrics of a run, so far."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def partial_folders(folder: Path) -> list[Path]:
    return list((folder / "checkpoints").glob("*.partial"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    # In another process, since this one must run no torch operation before it forks.
    maker = multiprocessing.get_context("fork").Process(target=make_inputs, args=(inputs,))
    maker.start()
    maker.join()
    rng = random.Random(arguments.seed)
    runs = ForkedRuns(folder)
    left = arguments.kills
    for case in itertools.cycle([Case(name, folder, runs) for name in arguments.case]):
        if left == 0:
            break
        num_kills = case.kill_and_resume(rng, min(rng.randint(1, MOST_KILLS_OF_A_RUN), left))
        left -= num_kills
        print(f"{case.name}: equal after {num_kills} kills", flush=True)


if __name__ == "__main__":
    main()
