"""Kills runs at random moments with SIGKILL, resumes them, and compares them with a run that was
never killed: metrics, transcripts and weights must have equal bits.

    kills.py FOLDER [--kills 100] [--seed 0] [--case NAME ...]

The kills are shared among the cases: trainers and layouts, see CASES. A kill comes at a random time
of the run or while a checkpoint is written, and meets all ranks, as when the power fails, or one of
them; the others get SIGTERM then, as from torchrun, and must end. A quarter are stops: all ranks
get SIGTERM, as from a cluster that takes its machines back, and the run saves and ends. FOLDER
keeps the runs that were not killed, so a further slice with another seed reuses them. Each killed
run prints a line of JSON.
"""

import argparse
import json
import multiprocessing
import random
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from common import make_model, read_untimed_metrics
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
# They replace the data.path before them.
SOURCES = (
    "data.path={{all:{inputs}/prompts.jsonl,few:{inputs}/few_prompts.jsonl}}"
    " data.test_path={{all:{inputs}/prompts.jsonl}}"
    " rollout.env_path={{all:{inputs}/letters.py,few:{inputs}/letters.py}}"
    " rollout.filter=[0.06,0.14] rollout.max_refills=4"
)
SFT_SOURCES = "data.path={{all:{inputs}/conversations.jsonl,few:{inputs}/few_conversations.jsonl}}"
SFT = f"sft {COMMON} {ACTOR} {CONVERSATIONS} data.batch_size=3"
DPO = f"dpo {COMMON} {ACTOR} {PAIRS} data.batch_size=3"
RM = (
    f"rm {COMMON} critic.model_name={{inputs}}/tiny critic.dtype=float32 critic.lr=0.01"
    f" {PAIRS} data.batch_size=3"
)
CASES = {  # name: (processes, trainer and arguments)
    "ppo": (1, PPO),
    "ppo_fsdp": (2, PPO),
    "ppo_sp": (2, f"{PPO} actor.sp_size=2"),
    "ppo_tp": (2, f"{PPO} actor.tp_size=2"),
    "ppo_critic": (2, f"{PPO} {CRITIC} actor.update_per_rollout=2 kl.coef=0.01 kl.type=loss"),
    "ppo_refill": (2, f"{PPO} {REFILL}"),
    "ppo_sources": (2, f"{PPO} {SOURCES}"),
    "ppo_best": (2, f"{PPO} {BEST}"),
    "ppo_overlap": (2, f"{PPO} rollout.num_processes=1 {REFILL} trainer.save_best=auto"),
    "ppo_ahead": (2, f"{PPO} rollout.num_processes=1 rollout.max_staleness=3 {REFILL}"),
    "ppo_top_p": (2, f"{PPO} rollout.train_sampling_params.top_p=0.9"),
    "ppo_lora": (2, f"{PPO} actor.lora_rank=2"),
    "ppo_muon": (2, f"{PPO} actor.optimizer=muon"),
    "sft": (1, SFT),
    "sft_fsdp": (2, SFT),
    "sft_best": (2, f"{SFT} {BEST}"),
    "sft_sources": (1, f"{SFT} {SFT_SOURCES}"),
    "dpo": (1, DPO),
    "dpo_kto": (2, f"{DPO} dpo.loss=kto"),
    "dpo_sp": (2, f"{DPO} actor.sp_size=2"),
    "rm": (1, RM),
    "rm_tp": (2, f"{RM} critic.tp_size=2"),
}
LETTERS = """
def reward_fn(messages, answer):
    reply = messages[-1]["content"]
    return sum(letter in answer for letter in reply) / max(len(reply), 1)
"""


def make_inputs(folder: Path) -> None:
    """A model, data and an env file."""
    make_model(folder / "tiny")
    (folder / "letters.py").write_text(LETTERS)
    prompts, conversations, pairs = [], [], []
    for i in range(8):
        user = {"role": "user", "content": f"say {'abcdefgh'[: i + 1]}"}
        good = {"role": "assistant", "content": "abc" * (i + 1)}
        bad = "xyz" * (8 - i)
        prompts.append({"messages": [user], "answer": "abcdefgh"})
        conversations.append({"messages": [user, good]})
        pairs.append({"messages": [user], "chosen": good["content"], "rejected": bad})
    for name, rows in (("prompts", prompts), ("conversations", conversations), ("pairs", pairs)):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        (folder / f"few_{name}.jsonl").write_text("".join(lines[:3]))


def no_pause_before_the_message(rank: int) -> None:
    signals.SECONDS_BEFORE_OTHER_RANKS_PRINT = 0.1


class Case:
    """One trainer and layout. Its run that is not killed is made once."""

    def __init__(self, name: str, folder: Path, runs: ForkedRuns):
        self.name = name
        self.runs = runs
        self.folder = folder / name
        self.world, command = CASES[name]
        self.trainer, *self.arguments = shlex.split(command.format(inputs=folder / "inputs"))
        duration_file = self.folder / "seconds"
        if not duration_file.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            start = time.monotonic()
            run = self.start("whole")
            statuses = run.wait(200)
            assert statuses == [0] * self.world, run.output[-5000:]
            duration_file.write_text(str(time.monotonic() - start))
        self.seconds = float(duration_file.read_text())

    def start(self, name: str) -> ForkedRun:
        arguments = [*self.arguments, f"trainer.save_dir={self.folder / name}"]
        return self.runs.start(self.world, self.trainer, arguments, no_pause_before_the_message)

    def kill_and_resume(self, rng: random.Random, num_kills: int) -> list[str]:
        """A run with up to `num_kills` kills. Returns where each one met it."""
        name = "killed"
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        kills = []
        for _ in range(num_kills):
            run = self.start(name)
            place = self.kill(run, folder, rng)
            if place is None:
                break
            kills.append(place)
        run = self.start(name)
        statuses = run.wait(200)
        assert statuses == [0] * self.world, run.output[-5000:]
        self.compare(folder)
        return kills

    def kill(self, run: ForkedRun, folder: Path, rng: random.Random) -> str | None:
        """Kills the run. Returns where it was, or None if it ended before."""
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
            return None
        if rng.random() < 0.25:
            run.send(signal.SIGTERM)
            statuses = run.wait(SECONDS_FOR_OTHER_RANKS)
            return "stopped" if statuses == [0] * self.world else "stopped before the loop"
        ranks = None if rng.random() < 0.5 else [rng.randrange(self.world)]
        run.send(signal.SIGKILL, ranks)
        is_in_save = bool(partial_folders(folder))
        time.sleep(0.1)
        if run.is_running:
            run.send(signal.SIGTERM)
        statuses = run.wait(SECONDS_FOR_OTHER_RANKS)
        if -signal.SIGKILL not in statuses:
            return None  # it ended in the moment between
        if not num_lines(folder):
            return "before the first step"
        return "in a save" if is_in_save else "elsewhere"

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


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    folder = arguments.folder.resolve()
    inputs = folder / "inputs"
    if not inputs.exists():
        inputs.mkdir(parents=True)
        # In another process, since this one must run no torch operation before it forks.
        maker = multiprocessing.get_context("fork").Process(target=make_inputs, args=(inputs,))
        maker.start()
        maker.join()
    rng = random.Random(arguments.seed)
    runs = ForkedRuns(folder)
    cases = [Case(name, folder, runs) for name in arguments.case]
    places: Counter[str] = Counter()
    num_failed = 0
    turn = 0
    while places.total() < arguments.kills:
        case = cases[turn % len(cases)]
        turn += 1
        num_kills = min(rng.randint(1, MOST_KILLS_OF_A_RUN), arguments.kills - places.total())
        problem = ""
        kills: list[str] = []
        try:
            kills = case.kill_and_resume(rng, num_kills)
        except (AssertionError, TimeoutError) as error:
            problem = str(error)
            num_failed += 1
        places.update(kills)
        line = {"seed": arguments.seed, "case": case.name, "kills": kills, "problem": problem}
        print(json.dumps(line), flush=True)
        if num_failed == 3:
            break
    print(f"{places.total()} kills: {dict(places)}; {num_failed} runs failed", flush=True)
    sys.exit(min(num_failed, 1))


if __name__ == "__main__":
    main()
