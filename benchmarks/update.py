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
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer

from rl2.model.classes import empty_language_model
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
    config = hf.config.get_text_config()
    layers = hf.get_decoder().layers
    head = config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in layers.parameters()) + head
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # Scores and values, forward and backward: 12 FLOPs a channel and visible token, on average
    # half of the document.
    return 6 * weights + 6 * len(layers) * config.num_attention_heads * head_dim * document


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
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={arguments.processes}"]
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        write_rows(rows, arguments.model, batch_size * steps, arguments.document)
        keys = [
            f"data.path={rows}",
            f"data.max_length={arguments.document}",
            f"data.batch_size={batch_size}",
            f"actor.model_name={arguments.model}",
            "actor.lr=1e-6",
            f"actor.max_length_per_device={arguments.pack}",
            f"trainer.save_dir={folder}/run",
            "trainer.disable_wandb=true",
            *arguments.keys,
        ]
        command = [sys.executable, *launcher * (arguments.processes > 1), "-m", "rl2.trainer.sft"]
        subprocess.run([*command, *keys], check=True, stdout=sys.stderr)
        metrics = Path(folder, "run/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()][WARM_UP:]
    best = min(lines, key=lambda line: line["time/update"])
    rate = best["tokens/total"] / best["time/update"]
    step_rate = sum(line["tokens/total"] for line in lines) / sum(x["time/step"] for x in lines)
    used = rate * flops_per_token(arguments.model, arguments.document)
    peak = matrix_rate() * arguments.processes
    print(
        f"update {best['time/update']:.3f} s, {best['tokens/total']:.0f} tokens, {rate:,.0f} "
        f"tokens/s ({step_rate:,.0f} over whole steps); {used / 1e12:.2f} of {peak / 1e12:.2f} "
        f"TFLOP/s, {used / peak:.0%}; peak memory {best['memory/peak_gib']:.1f} GiB"
    )


if __name__ == "__main__":
    main()
