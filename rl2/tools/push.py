"""`rl2 push RUN [OWNER/NAME]`: the final model of a run to the Hugging Face hub.

Its card, RUN/model/README.md, is made from the run folder. The card may be public: local files and
folders are shown by their last name, and hosts are not shown.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from rl2.report.saved import Record, read_lines, read_yaml

HUB_NAME = r"[\w.-]+/[\w.-]+(@[\w.-]+)?"
FILES_OF_ROWS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
# Metrics of the test rows that are not lengths, counts or errors.
HELD_OUT = r"test/(?!(.+/)?(rollout|tokens)/)(?!.*(_stderr|/std)$).*"
CONFIDENCE = 1.96  # standard errors: 95%


def main() -> None:
    """Writes the card, and pushes if there is a name. Exits with status 2 if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="rl2 push",
        description="Writes a card into RUN/model/README.md, unless there is one, and pushes the "
        "folder to the Hugging Face hub. Without OWNER/NAME nothing is sent: read the card first.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run that has ended")
    parser.add_argument("name", metavar="OWNER/NAME", nargs="?", help="the model on the hub")
    parser.add_argument("--private", action="store_true", help="if the hub has no such model yet")
    parser.add_argument("--base-model", help="the hub's name of a base model in a local folder")
    arguments = parser.parse_args()
    try:
        card = write_card(arguments.run, arguments.name, arguments.base_model)
        if arguments.name:
            print(push(card.parent, arguments.name, arguments.private))
        else:
            print(f"{card} is written and nothing is sent; edit it, and give OWNER/NAME to push")
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 push: {error}\n")


def push(folder: Path, name: str, is_private: bool) -> str:
    """Uploads a model folder as the model `name` of the hub. Returns its address.

    ValueError in words if the hub does not take it.
    """
    validate_repo_id(name)
    if "/" not in name:
        raise ValueError(f"{name} has no owner: write OWNER/{name}")
    if get_token() is None:
        raise ValueError("this machine is not logged in to the hub: run `hf auth login`")
    if not sys.stderr.isatty():
        disable_progress_bars()
    hub = HfApi(library_name="rl2")
    adapter = folder / "adapter/adapter_config.json"
    ignored = None
    settings: Any = read_yaml(adapter)  # None without adapters
    if settings and not is_hub_name(settings["base_model_name_or_path"]):
        ignored = ["adapter/*"]
        print("adapter/ is left out: it names a local folder as its base; the model is merged")
    try:
        address = hub.create_repo(name, private=is_private or None, exist_ok=True)
        hub.upload_folder(
            repo_id=name,
            folder_path=folder,
            commit_message="Push the model of a run of rl2",
            ignore_patterns=ignored,
        )
    except Exception as error:  # no network, no right to write, a card that the hub refuses
        status = getattr(getattr(error, "response", None), "status_code", None)
        remedy = "it may be unreachable; the same command tries again"
        if status in (401, 403):
            remedy = f"run `hf auth login` with a token that may write to {name.split('/')[0]}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the hub did not take {name}: {remedy} ({reason})") from error
    return str(address)


def write_card(run: Path, name: str | None, base_model: str | None) -> Path:
    """Writes the card of a run's final model unless it has one. Returns the path of the card.

    ValueError if `run` is not the folder of a run, or has no final model.
    """
    if not (run / "config.yaml").exists() or not (run / "run.json").exists():
        raise ValueError(
            f"{run} is not the folder of a run: it lacks config.yaml or run.json. Give the "
            "trainer.save_dir of a run"
        )
    model = run / "model"
    if not (model / "config.json").exists():
        raise ValueError(
            f"{run} has no model/ yet: it is written when the run ends; the command of the run "
            "resumes from its newest checkpoint"
        )
    card = model / "README.md"
    if not card.exists():  # a new export replaces the folder, so the card is of this model
        card.write_text(make_card(run, name, base_model), encoding="utf-8")
    return card


def make_card(run: Path, name: str | None, base_model: str | None) -> str:
    """Returns the text of the card. `base_model` replaces the model that the config names."""
    config: Record = read_yaml(run / "config.yaml") or {}
    record: Record = read_yaml(run / "run.json") or {}  # JSON is YAML
    step = record["model_step"]
    lines = [line for line in read_lines(run / "metrics.jsonl")[0] if line["step"] <= step]
    if not lines:
        raise ValueError(f"{run}/metrics.jsonl has no line of the steps that made model/")
    section = "actor" if "actor" in config else "critic"
    trainer = record["identity"]["trainer"].removesuffix("Config").lower()
    base = base_model or config[section]["model_name"]
    data = config["data"]["path"]
    front_matter = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=data.split("@")[0] if is_hub_name(data) else None,
        library_name="transformers",
        pipeline_tag="text-generation" if section == "actor" else "text-classification",
        tags=["rl2", trainer],
    )
    start = record["starts"][-1]
    facts = {
        "base model": public_name(base),
        "data": public_name(data),
        "trainer": f"{trainer}, {step} steps",
        "first start": record["date"],
        "commit of rl2": start["commit"],
        **start["versions"],
    }
    for worker, digest in lines[-1].get("weights", {}).items():
        facts[f"hash of the weights of the {worker}"] = digest
    title = name or config["trainer"]["experiment_name"]
    return f"""---
{front_matter.to_yaml()}
---

# {public_name(title).split("/")[-1]}

| | |
|---|---|
{make_rows([[key, str(fact)] for key, fact in facts.items()])}

Test rows, with errors of 95%:

| metric | before | after |
|---|---|---|
{make_rows(compare_tests(lines))}
"""


def compare_tests(lines: list[Record]) -> list[list[str]]:
    """Returns the metrics of the first and the last evaluation, as rows of a table."""
    tests = [line for line in lines if any(re.fullmatch(HELD_OUT, name) for name in line)]
    rows = []
    for name in tests[0] if tests else ():
        if re.fullmatch(HELD_OUT, name):
            rows.append([name, with_error(tests[0], name), with_error(tests[-1], name)])
    return rows


def with_error(line: Record, name: str) -> str:
    """Returns the metric of a line, with its error where that was measured."""
    value, error = line.get(name), line.get(f"{name}_stderr")
    if value is None:
        return ""
    return f"{value:.4g} ± {CONFIDENCE * error:.4g}" if error else f"{value:.4g}"


def make_rows(rows: list[list[str]]) -> str:
    """Returns the rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def public_name(name: str) -> str:
    """Returns a name of the hub as it is, a local path by its last name."""
    return name if is_hub_name(name) else Path(name).name


def is_hub_name(name: str) -> bool:
    """Returns whether it is OWNER/NAME of the hub, not a file or folder of this machine."""
    is_local = Path(name).exists() or name.endswith(FILES_OF_ROWS)
    return not is_local and re.fullmatch(HUB_NAME, name) is not None
