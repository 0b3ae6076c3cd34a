"""What many rows cost a process at the start of a run: CPU seconds and memory.

    python benchmarks/lab/data.py [--rows 30000] [--old CHECKOUT]

The rows are one jsonl file of word problems, about 250 characters each, for PPO (prompts) and for
SFT (with replies of about 400 characters). A process of its own reads, checks and tokenises them
with a byte-level BPE tokenizer of 4,000 tokens, in one thread, and then asks for every hundredth
item. The cache ($RL2_CACHE) is a fresh folder: the first process builds it, the next one finds it,
as the other processes of a node do. Fewer than 16 MiB of rows (23,000) are not cached. --old is
another checkout of rl2, which goes first.

The memory is what a process does not share with others: its anonymous memory.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import common  # noqa: E402

TRAINERS = ("ppo", "sft")


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


def anonymous_mebibytes() -> float:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Anonymous:")[1].split()[0]) / 1024


def load_items(trainer: str, rows: str, tokenizer):
    """The tokenised rows."""
    from rl2.data.chat import ChatTemplate
    from rl2.data.examples import PROMPT_ROWS, SFT_ROWS, Examples
    from rl2.data.rows import load_rows

    kind = PROMPT_ROWS if trainer == "ppo" else SFT_ROWS
    rows = load_rows(rows, read=kind.read)
    return Examples(rows, ChatTemplate(tokenizer), kind, max_length=512)


def measure(trainer: str, rows: str, model: str) -> None:
    """Prints the figures of this process."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    import rl2.data.examples  # noqa: F401  imports do not count

    memory, seconds = anonymous_mebibytes(), time.process_time()
    items = load_items(trainer, rows, tokenizer)
    seconds = time.process_time() - seconds
    memory = anonymous_mebibytes() - memory
    started = time.process_time()
    some = [items[i] for i in range(0, len(items), 100)]
    each = (time.process_time() - started) / len(some)
    print(f"{seconds:.2f} CPU seconds, {memory:.0f} MiB, {each * 1e6:.0f} us an item", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--old", type=Path, help="another checkout of rl2")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        measure(*arguments.child)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        write_rows(rows, arguments.rows)
        model = make_model(folder, rows)
        print(f"{arguments.rows} rows, {rows.stat().st_size / 1e6:.0f} MB", flush=True)
        checkouts = [("first process", ROOT), ("next process", ROOT)]
        if arguments.old:
            checkouts.insert(0, ("old", arguments.old))
        for trainer, (label, checkout) in itertools.product(arguments.trainers, checkouts):
            environment = os.environ | {
                "PYTHONPATH": str(checkout.resolve()),
                "RL2_CACHE": str(folder / f"cache_{trainer}"),
                "RANK": "1",  # no bars and notes
                "TOKENIZERS_PARALLELISM": "false",
            }
            command = [sys.executable, __file__, "--child", trainer, str(rows), model]
            output = subprocess.run(
                command, env=environment, check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            print(f"{trainer}, {label}: {output.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
