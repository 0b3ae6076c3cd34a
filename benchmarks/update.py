"""Tokens per second of an update, and its share of the machine's rate of matrix products.

    python benchmarks/update.py MODEL [--document 2048] [--pack 8192] [--packs 4] [--steps 4]
        [--processes 1] [key=value ...]

The update is that of rl2.trainer.sft; the keys are the trainer's, such as actor.compile=true. A
process has --packs micro-batches a step, each of --pack tokens in documents of --document tokens,
all of them trained. --pack auto leaves actor.max_length_per_device to the trainer. The first two
steps are a warm-up and do not count.

Every token counts 6 FLOPs a weight of the layers and the head, and its causal attention; layers
that run again do not count twice. The rate of matrix products is that of two large square ones in
the dtype of the computation, measured afterwards. For models without experts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from shared import train
from transformers import AutoConfig, AutoTokenizer

from rl2.model.classes import empty_language_model
from rl2.model.token_model import attention_cost
from rl2.parallel.device import compute_dtype

TEXT = Path(__file__).parent.parent / "docs/environments.md"
WARM_UP = 2  # steps


def write_rows(file: Path, model: str, count: int, length: int) -> None:
    """Writes texts of at most `length` tokens, the end token included, and nearly as many."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokens = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    tokens = tokens * (1 + length // len(tokens))
    text = tokenizer.decode(tokens[: length - max(length // 100, 2)])
    file.write_text((json.dumps({"text": text}) + "\n") * count)


def flops_per_token(model: str, document: int) -> float:
    hf = empty_language_model(AutoConfig.from_pretrained(model))
    size = sum(parameter.numel() for parameter in hf.parameters())
    is_tied = hf.config.get_text_config().tie_word_embeddings
    looked_up = 0 if is_tied else hf.get_input_embeddings().weight.numel()
    return 6 * (size - looked_up + size * attention_cost(hf) * document)


def matrix_rate() -> float:
    """FLOP/s of one process."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 2048
    dtype = compute_dtype("auto", device)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(13):
        start = time.perf_counter()
        product = a @ b
        product[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--document", type=int, default=2048)
    parser.add_argument("--pack", default="8192")
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("keys", nargs="*")
    arguments = parser.parse_intermixed_args()
    steps = WARM_UP + arguments.steps
    pack = 8192 if arguments.pack == "auto" else int(arguments.pack)
    batch_size = pack // arguments.document * arguments.packs * arguments.processes
    keys = [
        f"data.max_length={arguments.document}",
        f"data.batch_size={batch_size}",
        f"actor.model_name={arguments.model}",
        "actor.lr=1e-6",
        f"actor.max_length_per_device={arguments.pack}",
        *arguments.keys,
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        count = batch_size * steps
        write_rows(folder / "rows.jsonl", arguments.model, count, arguments.document)
        lines = train("sft", folder, keys, arguments.processes)[WARM_UP:]
    best = min(lines, key=lambda line: line["time/update"])
    rate = best["tokens/total"] / best["time/update"]
    num_tokens, seconds = (sum(x[key] for x in lines) for key in ("tokens/total", "time/step"))
    used = rate * flops_per_token(arguments.model, arguments.document)
    peak = matrix_rate() * arguments.processes
    print(
        f"update {best['time/update']:.3f} s, {best['tokens/total']:.0f} tokens, {rate:,.0f} "
        f"tokens/s ({num_tokens / seconds:,.0f} over whole steps); {used / 1e12:.2f} of "
        f"{peak / 1e12:.2f} TFLOP/s, {used / peak:.0%}; peak memory "
        f"{best['memory/peak_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    main()
