"""Size of a report, the time to write it, and the time until a browser has it open.

Makes a run of 1,000 steps with 500 trajectories a step. Needs what tests/browser/run.sh installs:

    PYTHONPATH=.:tests/browser .venv-browser/bin/python benchmarks/lab/report.py [steps] [groups]
"""

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright
from written_runs import write_run

from rl2.report.page import write_page

DISTINCT_STEPS = 20  # the other steps have copies of their transcripts


def make_run(folder: Path, num_steps: int, num_groups: int) -> Path:
    """A run of 10 answers to a prompt, each of some 1,000 tokens' worth of words."""
    write_run(folder, min(num_steps, DISTINCT_STEPS), num_groups, group_size=10, num_words=700)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for step in range(len(lines) + 1, num_steps + 1):
        source = (step - 1) % DISTINCT_STEPS + 1
        lines.append(lines[source - 1].replace(f'"step": {source},', f'"step": {step},'))
        rollouts = folder / "rollouts/train"
        os.link(rollouts / f"step_{source}.jsonl", rollouts / f"step_{step}.jsonl")
    metrics.write_text("\n".join(lines) + "\n")
    return folder


def main() -> None:
    num_steps, num_groups = map(int, [*sys.argv[1:], *("1000", "50")[len(sys.argv) - 1 :]])
    folder = Path(tempfile.mkdtemp())
    try:
        run = make_run(folder / "run", num_steps, num_groups)
        page = folder / "report.html"
        start = time.perf_counter()
        write_page([run], page)
        seconds = time.perf_counter() - start
        transcripts = sum(path.stat().st_size for path in run.glob("rollouts/*/*"))
        print(f"{num_steps} steps x {10 * num_groups} answers, {transcripts / 1e9:.2f} GB")
        print(f"written in {seconds:.1f} s, {page.stat().st_size / 1e6:.1f} MB")
        with sync_playwright() as playwright:
            path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for _ in range(3):
                tab = browser.new_page()
                tab.goto(page.as_uri())
                milliseconds = tab.evaluate(
                    "performance.getEntriesByType('navigation')[0].duration"
                )
                answers = tab.locator("#answer-note").inner_text()
                print(f"open after {milliseconds / 1000:.2f} s; {answers}")
                tab.close()
            browser.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
