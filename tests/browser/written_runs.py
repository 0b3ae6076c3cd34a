"""Run folders for the tests and the benchmark of the report, as a run writes them."""

import json
import math
import random
from pathlib import Path

WORDS = "so the sum of both numbers is then what we carry over to next column since".split()
EVIL = '</script><script>window.isEvil = true</script><img src="http://evil.test/x.png">'


def write_run(
    folder: Path,
    num_steps: int,
    num_groups: int,
    group_size: int = 8,
    num_words: int = 60,
    lr: float = 1e-6,
    seed: int = 0,
) -> Path:
    """A run of PPO whose reward rises, with a test set and transcripts of each step."""
    rng = random.Random(seed)
    train = folder / "rollouts/train"
    train.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"actor: {{model_name: {folder / 'model'}, lr: {lr}}}\ntrainer: {{save_dir: {folder}}}\n"
    )
    (folder / "run.json").write_text(json.dumps({"starts": [{"versions": {"torch": "2.13"}}]}))
    lines = []
    for step in range(1, num_steps + 1):
        skill = 1 - math.exp(-2 * step / num_steps)
        records = [
            make_answer(rng, i, i // group_size, skill, num_words)
            for i in range(num_groups * group_size)
        ]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (train / f"step_{step}.jsonl").write_text(text)
        lines.append(json.dumps(make_metrics(rng, step, records)))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_answer(rng: random.Random, number: int, group: int, skill: float, num_words: int) -> dict:
    """A record of a conversation with one call of a tool."""
    right = float(rng.random() < skill)
    thought = " ".join(rng.choice(WORDS) for _ in range(num_words))
    reply = f"{thought}. The answer is {7 * group + (1 - int(right))}"
    messages = [
        {"role": "user", "content": f"What is 7 x {group}?"},
        {"role": "assistant", "content": "<tool>calculator</tool>"},
        {"role": "tool", "content": f"calculator: {7 * group}"},
        {"role": "assistant", "content": reply},
    ]
    short = round(0.1 * rng.random(), 3)
    return {
        "id": number,
        "group": group,
        "row": {"answer": 7 * group, "source": "made"},
        "messages": messages,
        "rewards": {"right": right, "short": short},
        "weights": {},
        "reward": right + short,
        "length": num_words + 9,
        "num_turns": 2,
        "finish_reason": "stop" if rng.random() < 0.9 else "length",
        "versions": [[1, num_words]],
        "is_filtered": None,
        "advantage": round(right - skill, 3),
    }


def make_metrics(rng: random.Random, step: int, records: list[dict]) -> dict:
    """A line of metrics.jsonl with as many metrics as a run of PPO has."""
    mean = sum(record["reward"] for record in records) / len(records)
    metrics = {"step": step, "reward/mean": mean, "rollout/zero_variance": rng.random() / 2}
    metrics |= {f"reward/{part}": mean * rng.random() for part in ("right", "short")}
    for name in ("length", "truncated", "failed", "turns"):
        metrics[f"rollout/{name}"] = rng.random()
    for name in ("loss", "kl", "approx_kl", "entropy", "grad_norm", "lr", "clip_ratio"):
        metrics[f"actor/{name}"] = rng.random()
    for name in ("logp_difference", "kl_k1", "kl_k3", "outside", "ratio"):
        metrics[f"actor/mismatch_{name}"] = rng.random()
    for name in ("rollout", "infer", "update", "sync", "other", "step"):
        metrics[f"time/{name}"] = rng.random()
    metrics["actor/mismatch_kl_k1"] = -3e-5 * rng.random()
    metrics["actor/mismatch_kl_k3"] = -3e-8 * rng.random()
    metrics["tokens/per_second"] = 3e6 * rng.random()
    metrics["memory/peak_gib"] = 3 + rng.random()
    if step % 5 == 0 or step == 1:
        metrics |= {"test/avg@4": mean / 2, "test/avg@4_stderr": 0.05, "test/reward/mean": mean / 2}
    return metrics
