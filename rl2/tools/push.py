"""`rl2 push RUN [OWNER/NAME]`: the final model of a run on the Hugging Face hub.

Its card, RUN/model/README.md, is made from the run folder. The card may be public: a path of this
machine is shown by its last name, and hosts are not shown.
"""

import argparse
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from rl2.config import schema
from rl2.config.arguments import Assignment, quote_for_shell, read_override
from rl2.config.parse import dump
from rl2.config.values import flatten
from rl2.report.page import Record, read_lines, spread

CURVE = r"reward/mean|rollout/(length|truncated)|(actor|critic)/(loss|kl|accuracy|grad_norm)"
CURVE_STEPS = 8
# Of the test rows, without lengths, counts and errors.
HELD_OUT = r"test/(?!(.+/)?(rollout|tokens)/)(?!.*(_stderr|/std)$).*"
HUB_KEYS = r"\w+\.model_name|data\.(path|test_path\b.*)"
HUB_NAME = r"[\w.-]+/[\w.-]+(@[\w.-]+)?"
FILES_OF_ROWS = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
FOLDERS_IN_TEXT = r"(?<![\w:/])[~/][^\s/]*/(?:[^\s/]+/)*"
ALGORITHM = ("adv.estimator", "actor.loss", "dpo.loss", "kl.type", "actor.lora_rank")
WHERE_TO_WRITE = r"(actor|critic)\.save_\w+|trainer\.(save_dir|resume)"
CONFIDENCE = 1.96  # standard errors: 95%
SECRET = r"\b(hf_|sk-)[\w-]{16,}"


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
    if adapter.exists() and not is_hub_name(_read(adapter)["base_model_name_or_path"]):
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

    ValueError if `run` is the folder of no run, or has no final model.
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
    """The text of the card. `base_model` stands for the model that the config names."""
    config, record = _read(run / "config.yaml"), _read(run / "run.json")
    values = {key: without_folders(key, value) for key, value in leaf_values(config)}
    section = "actor" if "actor" in config else "critic"
    base_key = f"{section}.model_name"
    values[base_key] = base_model or values[base_key]
    step = record["model_step"]
    lines = [line for line in read_lines(run / "metrics.jsonl")[0] if line["step"] <= step]
    if not lines:
        raise ValueError(f"{run}/metrics.jsonl has no line of the steps that made model/")
    trainer = record["identity"]["trainer"].removesuffix("Config").lower()
    base, data = values[base_key], values["data.path"]
    front_matter = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=data.split("@")[0] if is_hub_name(data) else None,
        library_name="transformers",
        pipeline_tag="text-generation" if section == "actor" else "text-classification",
        tags=["rl2", trainer],
    )
    title = (name or values["trainer.experiment_name"]).split("/")[-1]
    hashes = find_hashes(run, lines[-1]) | record["identity"]["contents"]
    card = f"""---
{front_matter.to_yaml()}
---

# {title}

Trained from `{base}` by the trainer `{trainer}` of rl2, until step {step}.

{make_table(["", ""], describe_run(record, values))}

## Held-out rows

{make_table(["metric", "before", "after"], compare_tests(lines))}

Errors are those of 95%.

## Curve

{make_curve(lines)}

## Hashes

{make_table(["hash of", ""], hashes.items())}

## The command

These are all non-default keys. Files and folders of the machine are shown by their
last name; the hashes above are those of their content.

```bash
{make_command(record, values)}
```

`rl2 replay RUN --step {step}` runs this step again, in the folder RUN of the run, and
compares it with what was recorded.
"""
    return re.sub(SECRET, "(removed)", card)


def describe_run(record: Record, values: Record) -> list[tuple[str, Any]]:
    """What the model was made of, as rows of a table."""
    start = record["starts"][-1]
    algorithm = [f"`{key}={values[key]}`" for key in ALGORITHM if values.get(key)]
    return [
        ("data", values["data.path"]),
        ("algorithm", ", ".join(algorithm)),
        ("processes", start["world_size"]),
        ("versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())),
        ("commit of rl2", start["commit"]),
        ("first start", record["date"]),
    ]


def find_hashes(run: Path, line: Record) -> dict[str, str]:
    """Those that the run's last line has of its weights; else the SHA-256 of the model's files."""
    recorded = line.get("weights", {})
    hashes = {f"the weights of the {name}": digest for name, digest in recorded.items()}
    if hashes:
        return hashes
    for path in sorted(run.glob("model/*.safetensors")):
        with open(path, "rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return hashes


def compare_tests(lines: list[Record]) -> list[list[str]]:
    """The metrics of the first and the last evaluation, as rows of a table."""
    tests = [line for line in lines if any(re.fullmatch(HELD_OUT, name) for name in line)]
    names = [name for name in tests[0] if re.fullmatch(HELD_OUT, name)] if tests else []
    return [[name, *(with_error(line, name) for line in (tests[0], tests[-1]))] for name in names]


def with_error(line: Record, name: str) -> str:
    """The metric of a line, with its error where that was measured."""
    error = line.get(f"{name}_stderr")
    text = show(line.get(name))
    return f"{text} ± {show(CONFIDENCE * error)}" if error else text


def make_curve(lines: list[Record]) -> str:
    """A table of a few steps, from the first to the last one."""
    steps = [line for line in lines if line["step"] > 0]
    names = ["step", *(name for name in steps[-1] if re.fullmatch(CURVE, name))]
    return make_table(
        names, [[show(line.get(name)) for name in names] for line in spread(steps, CURVE_STEPS)]
    )


def show(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def make_table(heads: list[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table of Markdown; "none" without rows."""
    lines = [heads, ["---"] * len(heads), *rows]
    text = "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)
    return text if rows else "None."


def make_command(record: Record, values: Record) -> str:
    """The command that starts the run, with all non-default keys."""
    kind = getattr(schema, record["identity"]["trainer"])
    defaults = dict(leaf_values(yaml.safe_load(dump(kind()))))
    start = record["starts"][-1]
    num_nodes = len(start["hosts"])
    launch = ["python"]
    if start["world_size"] > 1:
        launch = ["torchrun", f"--nproc_per_node={start['world_size'] // num_nodes}"]
    if num_nodes > 1:
        launch += [f"--nnodes={num_nodes}", "--rdzv_backend=c10d --rdzv_endpoint=HOST:29500"]
    words = []
    for key, value in values.items():
        follows = key in schema.FOLLOWED_KEYS and value == values.get(schema.FOLLOWED_KEYS[key])
        if (
            value != defaults.get(key, ...)
            and not follows
            and not re.fullmatch(WHERE_TO_WRITE, key)
        ):
            words.append(write_override(key, value))
    module = f"-m rl2.trainer.{kind.__name__.removesuffix('Config').lower()}"
    return " \\\n    ".join([" ".join([*launch, module]), *words])


def write_override(key: str, value: Any) -> str:
    """The argument that sets the key, quoted for a shell; `read_override` reads it."""
    text = value if isinstance(value, str) else json.dumps(value)
    override = read_override(f"{key}={text}")
    if isinstance(override, Assignment) and override.value == value:
        return shlex.quote(f"{key}={text}")
    return quote_for_shell(key, text)


def leaf_values(config: Record) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a config, also below the keys that take any names."""
    for key, value in flatten(config):
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{key}.")
        else:
            yield key, value


def without_folders(key: str, value: Any) -> Any:
    """The value with local paths cut to their last name; names on the hub stay."""
    if isinstance(value, list):
        return [without_folders(key, item) for item in value]
    if not isinstance(value, str) or re.fullmatch(HUB_KEYS, key) and is_hub_name(value):
        return value
    if re.search(r"\s", value) and not value.startswith(("/", "~")):
        return re.sub(FOLDERS_IN_TEXT, "", value)
    return value.rstrip("/").rpartition("/")[2]


def is_hub_name(name: str) -> bool:
    """Whether it is OWNER/NAME of the hub, and no file or folder of this machine."""
    is_local = Path(name).exists() or name.endswith(FILES_OF_ROWS)
    return not is_local and re.fullmatch(HUB_NAME, name) is not None


def _read(path: Path) -> Record:
    """A file of YAML or JSON."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))
