"""LoRA and QLoRA on two small tasks: rank, scale, layers and learning rate.

    python benchmarks/lab/lora.py run MODEL [--folder runs/lora] [--seeds 3] [--steps 8]
    python benchmarks/lab/lora.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. Tasks, steps
and evaluations are those of dither.py, which trains all weights. `run` is a queue that can be
stopped and started again, also in two processes; --kinds, --rates and --tasks choose a part of it.
Each finished run is a line of benchmarks/lab/results/lora.jsonl; `report` prints the tables.

Needs the `test` and `quickstart` extras, and for QLoRA the `bitsandbytes` extra.
"""

from dither import add_arguments, make_jobs, print_tables, run_grpo
from run_queue import RESULTS, ROOT, make_parser, run_command

RESULTS_FILE = RESULTS / "lora.jsonl"
RATES = ("1e-4", "3e-4", "1e-3")
KINDS = {  # without lora_alpha it is 64: rank 32 is scaled by 2
    "rank32": ["actor.lora_rank=32"],
    "rank32-attention": [
        "actor.lora_rank=32",
        "actor.lora_targets=[q_proj,k_proj,v_proj,o_proj]",
    ],
    "rank32-nf4": ["actor.lora_rank=32", "actor.quantize_base=nf4"],
    "rank1": ["actor.lora_rank=1", "actor.lora_alpha=2"],
    "rank1-alpha32": ["actor.lora_rank=1", "actor.lora_alpha=32"],
    "rank32-alpha32": ["actor.lora_rank=32", "actor.lora_alpha=32"],
}


def run_one(arguments) -> dict:
    return run_grpo(arguments, KINDS[arguments.kind])


def report() -> None:
    print_tables(RESULTS_FILE, KINDS)


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "lora")
    add_arguments(run, one, KINDS, RATES)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
