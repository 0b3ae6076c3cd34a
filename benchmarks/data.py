"""What many rows cost at the start of a run: seconds, CPU seconds and memory of a rank.

    python benchmarks/data.py [--rows 200000] [--ranks 2] [--old CHECKOUT]

The rows are one jsonl file of word problems, about 250 characters each, for PPO (prompts) and for
SFT (with replies of about 400 characters). A tiny random model is trained for one step, with a
byte-level BPE tokenizer of 4,000 tokens. The same run on 64 rows is subtracted, so that the figures
are those of the rows. The cache ($RL2_CACHE) is a fresh folder: the first run builds it, the second
one finds it. --old runs another checkout of rl2 before, on the same file.

The CPU seconds are those of all ranks, divided by their number. The memory is the peak of resident
memory of the largest rank; it counts pages of the cache, which the ranks of a node share.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import common  # noqa: E402

FEW_ROWS = 64
# Of the longest prompt: longer than all of them.
SETTINGS = {
    "ppo": [
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=2",
        "rollout.train_sampling_params.max_new_tokens=4",
        "rollout.env_path=gsm8k",
        "rollout.max_env_failures=1",
    ],
    "sft": ["data.batch_size=2"],
}


def make_words(generator: random.Random) -> list[str]:
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    lengths = [generator.randint(2, 9) for _ in range(3000)]
    return ["".join(generator.choices(letters, k=length)) for length in lengths]


def write_rows(file: Path, count: int) -> None:
    generator = random.Random(0)
    words = make_words(generator)
    with open(file, "w") as out:
        for i in range(count):
            question = " ".join(generator.choices(words, k=38)) + f" {i}?"
            reply = " ".join(generator.choices(words, k=60)) + f" #### {i}"
            prompt = [{"role": "user", "content": question}]
            row = {"prompt": prompt, "completion": reply, "answer": str(i)}
            out.write(json.dumps(row) + "\n")


def make_model(folder: Path, rows: Path) -> str:
    texts = [line for line, _ in zip(open(rows), range(2000), strict=False)]
    backend = ByteLevelBPETokenizer()
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    backend.train_from_iterator(texts, vocab_size=4000, special_tokens=specials)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=common.CHATML,
    )
    path = common.make_model(folder / "model", vocab_size=4096, max_position_embeddings=1024)
    tokenizer.save_pretrained(path)
    return path


def measure(checkout: Path, trainer: str, rows: Path, model: str, ranks: int, cache: Path) -> dict:
    """Wall seconds, CPU seconds a rank and the peak of resident MiB of one run of one step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *[sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"],
            *["--standalone", "-m", f"rl2.trainer.{trainer}"],
            *[f"data.path={rows}", f"actor.model_name={model}", "data.max_length=512"],
            *[f"trainer.save_dir={folder}/run", "trainer.disable_wandb=true"],
            *["trainer.max_steps=1", *SETTINGS[trainer]],
        ]
        environment = os.environ | {"PYTHONPATH": str(checkout), "RL2_CACHE": str(cache)}
        started = time.monotonic()
        with open(f"{folder}/log", "w") as log:
            process = subprocess.Popen(
                command, cwd=checkout, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        if status:
            raise SystemExit(Path(folder, "log").read_text())
    cpu_seconds = (usage.ru_utime + usage.ru_stime) / ranks
    return {"seconds": seconds, "cpu": cpu_seconds, "MiB": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--old", type=Path, help="another checkout of rl2")
    parser.add_argument("--trainers", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "few.jsonl", FEW_ROWS)
        write_rows(folder / "many.jsonl", arguments.rows)
        model = make_model(folder, folder / "many.jsonl")
        megabytes = (folder / "many.jsonl").stat().st_size / 1e6
        print(f"{arguments.rows} rows, {megabytes:.0f} MB, {arguments.ranks} ranks")
        for trainer in arguments.trainers:
            runs = [("old", arguments.old)] if arguments.old else []
            runs += [("first run", ROOT), ("next run", ROOT)]
            for label, checkout in runs:
                few, many = (
                    measure(
                        checkout.resolve(),
                        trainer,
                        folder / file,
                        model,
                        arguments.ranks,
                        folder / f"cache_{trainer}",
                    )
                    for file in ("few.jsonl", "many.jsonl")
                )
                figures = ", ".join(f"{many[key] - few[key]:.1f} {key}" for key in many)
                print(f"{trainer} {label}: {figures} (with {FEW_ROWS} rows: {few})", flush=True)


if __name__ == "__main__":
    main()
