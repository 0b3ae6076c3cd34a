"""Writes the parts of the pages that are tables of data.

    python docs/generate.py

keys.md comes from rl2/config/schema.py, files.md from the first sentence of each file of rl2/. The
families in models.md come from tests/families.json, which `python tests/families.py` refreshes, and
the memory in gpus.md from tests/memory_fits.json, of `python tests/memory_fits.py`.
tests/test_docs.py compares the committed pages with these.
"""

import ast
import json
import re
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rl2.config import schema
from rl2.config.key import Key, schema_keys
from rl2.config.values import get_value
from rl2.gpu_memory import OUTSIDE_BYTES
from rl2.parallel.device import GIB
from rl2.tools.memory import Plan, judge, totals

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("PPO", "SFT", "DPO", "RM")
FAMILIES = ROOT / "tests/families.json"
MEMORY = ROOT / "tests/memory_fits.json"
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
# GiB of such cards that report the least: an L4, an L40S and an H100.
CARDS = {"24 GB": 22.4, "48 GB": 44.9, "80 GB": 79.2}

KEYS_HEADER = """\
# All keys, by topic

<!-- Written by `python docs/generate.py` from rl2/config/schema.py. -->

The short help and the default of each key. Set it as `key=value` on the command line, or in a YAML
file (`--config-dir DIR --config-name NAME`). `--help KEY` explains it in full. The rest is Hydra's:
`--cfg job` prints the config, `--multirun KEY=A,B` runs a job for each value, one after the other,
in `trainer.save_dir/NUMBER`, and a folder with `algo/NAME.yaml` (`--config-dir`) adds algorithms.
The keys of a section may be one mapping, in quotes:
`'rollout.train_sampling_params={temperature: 1.0, max_new_tokens: 512}'`. A sweep over two rates,
in the folders runs/lr/0 and runs/lr/1:

```bash
python -m rl2.trainer.sft --multirun actor.lr=1e-5,3e-5 trainer.save_dir=runs/lr \\
    data.path=rows.jsonl actor.model_name=MODEL
rl2 ls runs/lr
```

It is for one process. With several, start one torchrun for each value.

Values out of range are refused before a model loads. So are keys that have no effect, if they would
mislead about the algorithm (a clip that the loss ignores). NaN is never accepted, `inf` only where
it turns a bound off.

From "Model" to "Optimizer" and in "Export", `actor.KEY` is also a key of `critic`, for the critic
of PPO and for reward models. The critic inherits `dtype` and "Layout and memory" from the actor
unless they are set (except `share_prompts`), and `update_per_rollout` and `epochs_per_rollout`. The
teacher lies in memory as the actor.

A line begins with the trainers that have the key if they differ from the rest of its topic.
"""

FILES_HEADER = """\
# Where things are

<!-- Written by `python docs/generate.py` from the first sentence of each file. -->

A line a file. Read `train_step` in [`ppo.py`](../rl2/trainer/ppo.py) first: it is the whole
algorithm. A room imports only rooms below it, as the layers of
[pyproject.toml](../pyproject.toml) have them. The files in none come first.
"""
FAMILIES_HEADER = """\
Every causal language model of transformers {transformers}, and some with [towers](#towers), tried
on {date} with torch {torch} as at the [start of a run](#how-a-model-is-admitted), with the
defaults of its config class; other settings are in parentheses. rl2 trains these {num_trained} of
the {num_families}, those with towers on text only, and refuses the others:
[`tests/families.json`](../tests/families.json) has their reasons. This is only a preview, since
your model is tried with its own config.

"""

MEMORY_TEXT = """\
Predicted GiB on one GPU with the shapes of Qwen3, and the smallest card of 24, 48 or 80 GB that
holds the job. These are numbers of [`rl2 plan`](#predict-memory-rl2-plan), not measurements: run it
with your keys and model before you rent a GPU. LoRA is `actor.lora_rank=32`, and QLoRA also
`actor.quantize_base=nf4`. Compute is in bfloat16, the optimizer AdamW, rows and micro-batches have
up to 4,096 tokens, all layers are recomputed, and nothing is offloaded. Cards count with {cards},
of which {outside} GiB are for what is not a tensor.

DPO with a reference takes the same as SFT with LoRA or QLoRA. GRPO has SGLang or vLLM on the same
GPU, with merged weights in bfloat16 also for QLoRA. Its number includes these weights during a
sync, and the card also has room for keys and values.

{table}"""


@dataclass(frozen=True)
class Topic:
    title: str
    keys: str  # a pattern; each key matches that of one topic
    text: str = ""


ENVIRONMENT_KEYS = r"env_\w+|endpoint_host|max_turns|max_env_failures|reward_weights|score"
TOPICS = [
    Topic("Data", r"data\..*"),
    Topic("Model", r"(actor|critic)\.(model_name|dtype)"),
    Topic(
        "Layout and memory",
        r"actor\.(\w+_size|max_\w+_per_device|gradient_checkpointing|keep_gathered|compile"
        r"|share_prompts|offload_\w+)",
    ),
    Topic("LoRA", r"actor\.(lora_.*|quantize_base)|rollout\.lora"),
    Topic(
        "Optimizer",
        r"(actor|critic)\.(optimizer|lr|weight_decay|betas|max_grad_norm|warmup_ratio|scheduler|min_lr_ratio"
        r"|\w+_per_rollout|freeze_steps|freeze_router|router_aux_loss_coef|routing_replay|optimizer_dir|dither_weights)",
    ),
    Topic(
        "Policy loss",
        r"actor\.(loss|clip|clip_high|dual_clip|off_policy_mask|average.*|correction.*|skip.*|.*entropy)",
        "[algorithms.md](algorithms.md) has the formulas.",
    ),
    Topic("Value loss", r"critic\.clip"),
    Topic("Advantages", r"adv\..*"),
    Topic("KL to the starting model", r"kl\..*"),
    Topic(
        "Teacher",
        r"teacher\..*",
        "The difference of log-probabilities, teacher minus policy, is the advantage of each token "
        "with `adv.estimator=distillation`;\nother estimators add it to theirs.",
    ),
    Topic(
        "Environment and rewards",
        rf"rollout\.({ENVIRONMENT_KEYS})",
    ),
    Topic(
        "Sampling",
        r"rollout\.\w+_sampling_params\..*",
        "Test answers have the same keys, `rollout.test_sampling_params.KEY`, and penalties for "
        "repetition, with which\ntraining would sample from another policy than it trains.",
    ),
    Topic(
        "Engine",
        rf"rollout\.(?!{ENVIRONMENT_KEYS}|lora)\w+",
        "Engines: [engines.md](engines.md). `rollout.exact`: [proofs.md](proofs.md).",
    ),
    Topic(
        "The run",
        r"trainer\..*",
        "Checkpoints and saved rollouts: [run_folder.md](run_folder.md). Evaluation: "
        "[metrics.md](metrics.md#evaluation-by-generation).",
    ),
    Topic("DPO and reward models", r"(dpo|rm)\..*"),
    Topic("Export", r"actor\.save_.*"),
]


@dataclass
class Row:
    """A key in the trainers that have it."""

    declared: dict[str, Key] = field(default_factory=dict)  # by trainer
    defaults: dict[str, str] = field(default_factory=dict)
    trainers: set[str] = field(default_factory=set)  # also those where it is another model's key

    @property
    def meaning(self) -> tuple[str, str]:
        """(help, default) in the first trainer that has the key."""
        first = next(iter(self.declared))
        return self.declared[first].help, self.defaults[first]


def read_rows() -> dict[str, Row]:
    """Returns every key of the schema. The same key of several models is one row, the actor's."""
    rows: dict[str, Row] = {}
    for trainer in TRAINERS:
        root = getattr(schema, f"{trainer}Config")
        for name, key in schema_keys(root).items():
            if key.is_section:
                continue
            row = rows.setdefault(name, Row())
            row.declared[trainer] = key
            row.defaults[trainer] = show(get_value(root(), key.leader or name))
            row.trainers.add(trainer)
    for name in list(rows):
        other = re.sub(r"^(critic|teacher)\.", "actor.", name)
        other = other.replace(".test_sampling_params.", ".train_sampling_params.")
        if other != name and other in rows and rows[other].meaning == rows[name].meaning:
            rows[other].trainers |= rows.pop(name).trainers
    return rows


def show(default: Any) -> str:
    """Returns a default as it is written on the command line, "" for none."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def explain(key: Key) -> str:
    """Returns the short help of a key, its default in words, its choices and its range."""
    first, *details = key.help.split(";")
    text = ";".join([first, *(part for part in details if part.startswith(" by default"))])
    choices = [str(choice) for choice in key.choices]
    if key.functions:
        choices = list(key.functions)
    if not all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        text += f"; {'one of ' if choices[1:] else 'or '}{', '.join(choices)}"
    if key.functions:
        text += "; or `file.py:function`"
    limits = []
    if key.above or key.at_least:  # most numbers are not negative
        limits.append(f"above {key.above}" if key.above else f"at least {key.at_least}")
    if key.below is not None:
        limits.append(f"below {key.below}")
    if key.at_most is not None and key.at_most != schema.LARGEST_SEED:
        limits.append(f"at most {key.at_most}")
    return "; ".join([text, *limits]).replace("<", "&lt;")


def key_line(name: str, row: Row, usual_trainers: frozenset[str]) -> str:
    first, *others = row.declared
    key, default = row.declared[first], row.defaults[first]
    text = explain(key)
    if row.trainers != usual_trainers:
        text = f"{', '.join(t for t in TRAINERS if t in row.trainers)}: {text}"
    other_defaults: dict[str, list[str]] = {}
    for trainer in others:
        other = row.declared[trainer]
        if row.defaults[trainer] != default:
            own = row.defaults[trainer].replace(MISSING, "required") or "not set"
            other_defaults.setdefault(own, []).append(trainer)
        if other.choices != key.choices:
            text += f"; in {trainer} one of {', '.join(other.choices)}"
    for own, of_trainers in other_defaults.items():
        text += f"; in {' and '.join(of_trainers)} {own}"
    if default == MISSING:
        return f"- `{name}` (required): {text}"
    return f"- `{name}{default and '='}{default}`: {text}"


def keys_page() -> str:
    rows = read_rows()
    for name in rows:
        titles = [topic.title for topic in TOPICS if re.fullmatch(topic.keys, name)]
        if len(titles) != 1:
            raise ValueError(f"{name} has the topics {titles}: change TOPICS so that it has one")
    parts = [KEYS_HEADER]
    for topic in TOPICS:
        chosen = {name: row for name, row in rows.items() if re.fullmatch(topic.keys, name)}
        counts = Counter(frozenset(row.trainers) for row in chosen.values())
        usual_trainers = counts.most_common(1)[0][0]
        parts.append(f"## {topic.title}\n")
        if topic.text:
            parts.append(topic.text + "\n")
        lines = [key_line(name, row, usual_trainers) for name, row in chosen.items()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def support(verdict: dict[str, str]) -> str:
    """Returns the heading of a trained family: which roles it can take."""
    has_engine = "engine" not in verdict
    if "critic" not in verdict:
        return (
            "Actor and critic" if has_engine else "Actor and critic; fails in the embedded engine"
        )
    if "no such class" not in verdict["critic"]:
        raise ValueError(f"the page has no heading for a refused critic: {verdict['critic']}")
    reason = "transformers has no critic class"
    return (
        f"Actor; {reason}"
        if has_engine
        else f"Actor; fails or was not tried in the embedded engine; {reason}"
    )


def models_page() -> str:
    """Returns docs/models.md with the families of today.

    Each family has a verdict: a reason for everything that does not work. A refused family is not
    tried as a critic or in the engine.
    """
    record = json.loads(FAMILIES.read_text())
    families = record.pop("families")
    trained: dict[str, list[str]] = {}
    for name, verdict in sorted(families.items()):
        if "refused" not in verdict:
            trained.setdefault(support(verdict), []).append(name)
    num_trained = sum(len(names) for names in trained.values())
    parts = [
        FAMILIES_HEADER.format(**record, num_trained=num_trained, num_families=len(families)),
        *family_lists(trained),
    ]
    return with_section("docs/models.md", "families", "".join(parts))


def with_section(page: str, section: str, text: str) -> str:
    """Returns a page with `text` between the two comments that enclose its generated section.

    Raises ValueError if the page lacks them.
    """
    begin = f"<!-- `python docs/generate.py` writes the section {section} -->\n\n"
    end = "\n<!-- end -->"
    before, found, rest = (ROOT / page).read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} lacks the comments around its section {section}")
    return f"{before}{begin}{text}{end}{after}"


def family_lists(groups: dict[str, list[str]]) -> list[str]:
    """Returns a line for each heading, the longest list first."""
    by_length = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [f"- **{heading}**: {', '.join(names)}\n" for heading, names in by_length]


def gpus_page() -> str:
    """Returns docs/gpus.md with the memory that three methods take, and the card they need."""
    plans = {name: Plan(**plan) for name, plan in json.loads(MEMORY.read_text()).items()}
    models = list(dict.fromkeys(name.split()[0] for name in plans))
    columns = [(trainer, method) for trainer in ("sft", "grpo") for method in METHODS]
    titles = [f"{trainer.upper()}, {METHODS[method]}" for trainer, method in columns]
    table = f"| Qwen3 | {' | '.join(titles)} |\n|{'---|' * (len(columns) + 1)}\n"
    for model in models:
        size = model.removeprefix("qwen3-").upper()
        cells = [describe_fit(plans[f"{model} {method}"], trainer) for trainer, method in columns]
        table += f"| {size} | {' | '.join(cells)} |\n"
    cards = ", ".join(f"{gib} GiB" for gib in CARDS.values())
    text = MEMORY_TEXT.format(cards=cards, outside=OUTSIDE_BYTES // GIB, table=table)
    return with_section("docs/gpus.md", "memory", text)


def describe_fit(plan: Plan, trainer: str) -> str:
    """Returns the GiB that a job needs and the smallest card that has them, in words."""
    needed = max(plan.peaks.values())
    if trainer == "grpo":  # the engine's weights are there while the trainer sends its own
        needed = max(needed, plan.sync + plan.engine_weights)
    card = next((name for name, gib in CARDS.items() if fits(plan, trainer, gib * GIB)), "none")
    return f"{needed / GIB:.1f}, {card}"


def fits(plan: Plan, trainer: str, gpu_bytes: float) -> bool:
    """Whether the job fits a card, with room for an engine if there is one."""
    size = int(gpu_bytes)
    if trainer == "sft":
        return judge({phase: (peak, 0) for phase, peak in plan.peaks.items()}, size)[0]
    config = schema.PPOConfig()
    config.rollout.engine = "sglang"
    phases = totals(config, plan, size)
    _, room = phases["rollout"]
    return room > plan.engine_weights and judge(phases, size)[0]


def files_page() -> str:
    """Returns docs/files.md: what each file of the package is for."""
    package = ROOT / "rl2"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [layers] = [each["layers"] for each in contracts["contracts"] if each["id"] == "rings"]
    names = [name for layer in layers for name in layer.split(" | ")]
    parts = [FILES_HEADER]
    for room in ("", *(name for name in names if (package / name).is_dir())):
        files = (package / room).rglob("*.py") if room else package.glob("*.py")
        lines = []
        for path in sorted(files):
            if text := ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
                first = " ".join(text.split("\n\n")[0].split())
                sentence = re.split(r"\. |\.$|: `torchrun", first)[0]
                name = path.relative_to(package / room)
                lines.append(f"- [`{name}`](../{path.relative_to(ROOT)}): {sentence}.\n")
        parts.append(f"\n## rl2/{room}\n\n{''.join(lines)}")
    return "".join(parts)


PAGES = {
    "docs/keys.md": keys_page,
    "docs/files.md": files_page,
    "docs/models.md": models_page,
    "docs/gpus.md": gpus_page,
}


if __name__ == "__main__":
    for name, make_page in PAGES.items():
        (ROOT / name).write_text(make_page(), encoding="utf-8")
