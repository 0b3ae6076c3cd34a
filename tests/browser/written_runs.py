"""Run folders for the tests of the report, as a run writes them."""

import json
import math
import random
from pathlib import Path

WORDS = "so the sum of both numbers is then what we carry over to next column since".split()
EVIL = '</script><script>window.isEvil = true</script><img src="http://evil.test/x.png">'
GROUP_SIZE = 8
NAMES = """
reward/right reward/short rollout/zero_variance rollout/length rollout/truncated rollout/turns
actor/loss actor/kl actor/entropy actor/grad_norm actor/lr actor/clip_ratio
actor/mismatch_outside actor/mismatch_ratio time/rollout time/update time/sync time/step
""".split()


def write_run(folder: Path, num_steps: int, num_groups: int, lr: float = 1e-6) -> Path:
    """A run of PPO whose reward rises, with a test set and transcripts of each step."""
    rng = random.Random(num_steps)
    train = folder / "rollouts/train"
    train.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"actor: {{model_name: {folder / 'model'}, lr: {lr}}}\ntrainer: {{save_dir: {folder}}}\n"
    )
    (folder / "run.json").write_text(json.dumps({"starts": [{"versions": {"torch": "2.13"}}]}))
    lines = []
    for step in range(1, num_steps + 1):
        skill = 1 - math.exp(-2 * step / num_steps)
        records = [make_answer(rng, i, skill) for i in range(num_groups * GROUP_SIZE)]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (train / f"step_{step}.jsonl").write_text(text)
        lines.append(json.dumps(make_metrics(rng, step, records)))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def make_answer(rng: random.Random, number: int, skill: float) -> dict:
    """A record of a conversation with one call of a tool."""
    group = number // GROUP_SIZE
    right = float(rng.random() < skill)
    thought = " ".join(rng.choice(WORDS) for _ in range(60))
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
        "row": {"answer": 7 * group},
        "messages": messages,
        "rewards": {"right": right, "short": short},
        "reward": right + short,
        "length": 69,
        "num_turns": 2,
        "finish_reason": "stop" if rng.random() < 0.9 else "length",
        "advantage": round(right - skill, 3),
    }


def make_metrics(rng: random.Random, step: int, records: list[dict]) -> dict:
    """A line of metrics.jsonl with the kinds of metrics of PPO."""
    mean = sum(record["reward"] for record in records) / len(records)
    metrics = {"step": step, "reward/mean": mean, **{name: rng.random() for name in NAMES}}
    metrics["actor/mismatch_kl_k1"] = -3e-5 * rng.random()
    metrics["tokens/per_second"] = 3e6 * rng.random()
    metrics["memory/peak_gib"] = 3 + rng.random()
    if step % 5 == 0 or step == 1:
        metrics |= {"test/avg@4": mean / 2, "test/avg@4_stderr": 0.05, "test/reward/mean": mean / 2}
    return metrics
