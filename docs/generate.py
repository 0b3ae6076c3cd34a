"""Writes the pages that are tables of data: keys.md and families.md.

    python docs/generate.py

keys.md comes from rl2/config/schema.py. families.md comes from tests/families.json, which
`python tests/families.py` refreshes. tests/test_docs.py compares the committed pages with both.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from rl2.config import schema
from rl2.config.conditions import WITH_GPU
from rl2.config.key import Key, schema_keys
from rl2.config.values import get_value

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = ("PPO", "SFT", "DPO", "RM")
FAMILIES = ROOT / "tests/families.json"

KEYS_HEADER = """\
# All keys, by topic

<!-- Written by `python docs/generate.py` from rl2/config/schema.py. -->

Keys are set as `key=value` on the command line, or in a YAML file (`--config-dir DIR --config-name
NAME`). `--help` explains the usual ones, `--help SECTION` and `--help all` the others; `--cfg job`
prints the resolved configuration. Below, a key is shown with its default, if it has one. Before a
model is loaded, a value outside its range is refused, and so is a key without an effect if it would
mislead about the algorithm (a clip that the loss ignores). Harmless ones (a seed where nothing is
random) and unusual values warn. NaN is never accepted, `inf` only where it switches a bound off.

In the topics "Model" to "Optimizer" and in "Export", `actor.KEY` stands for `critic.KEY` too: the
critic of PPO and the reward model. The teacher has the keys that a frozen model reads. In PPO the
`dtype` of the critic and of the teacher and their keys of "Layout and memory" follow the actor's
unless they are set, except for `share_prompts` of the critic. So do `head_dtype` of the teacher,
and `update_per_rollout` and `epochs_per_rollout` of the critic. The critic's rates are its own.

A line starts with the trainers that have the key, where they are not those of most keys of its
topic.
"""

FAMILIES_HEADER = """\
# Model families

<!-- Written by `python docs/generate.py` from tests/families.json. -->

Every causal language model of transformers {transformers}, tried on {date} with torch {torch} as
rl2 tries a model at start: a small random copy of its architecture runs packed in rl2 and plain in
transformers, and log-probabilities and gradients must agree. {num_trained} of {num_families} are
trained, the others are refused. Copies have the defaults of their config class; settings other than
these are in brackets. Your own model is tried with its own config whenever a run starts, so this
page is a preview and decides nothing. [`tests/families.json`](../tests/families.json) has every
reason in full; `python tests/families.py FAMILY` tries one again.

"No class" means that transformers has no critic of the family. The engine is the embedded one. Why
a family is refused:

"""

# A part of a full reason -> the word for it. The first one counts.
REASONS = {
    "see each other": "packs",
    "changes its logits": "scores",
    "attention interface": "attention",
    "not given the keywords": "attention",
    "takes no part": "weights",
    "a small copy of it": "copy",
    "default config": "config",
    "rl2 cannot run it": "error",
}
MEANINGS = {
    "packs": "log-probabilities are wrong: sequences of one pack see each other",
    "scores": "log-probabilities are wrong: it changes its logits or its attention in a way that "
    "rl2 does not compute",
    "asks for X": "its attention has an argument X that rl2 does not compute",
    "attention": "its attention does not go through transformers' attention interface, or not with "
    "all arguments",
    "weights": "some of its weights take no part in the scores of a text",
    "copy": "a small copy of it, which rl2 tries at start, does not run",
    "config": "its default config does not work",
    "error": "rl2 cannot run it",
}


@dataclass(frozen=True)
class Topic:
    title: str
    keys: str  # a pattern; each key matches that of one topic
    text: str = ""


TOPICS = [
    Topic("Data", r"data\..*"),
    Topic("Model", r"(actor|critic)\.(model_name|dtype|head_dtype)"),
    Topic(
        "Layout and memory",
        r"actor\.(\w+_size|max_\w+_per_device|gradient_checkpointing|compile|share_prompts"
        r"|offload_\w+)",
    ),
    Topic("LoRA", r"actor\.lora_.*"),
    Topic(
        "Optimizer",
        r"(actor|critic)\.(lr|weight_decay|max_grad_norm|warmup_ratio|scheduler|min_lr_ratio"
        r"|\w+_per_rollout|freeze_steps|optimizer_dir)",
    ),
    Topic(
        "Policy loss",
        r"actor\.(loss|clip|clip_high|dual_clip|average.*|correction.*|skip_threshold|.*entropy)",
        "[algorithms.md](algorithms.md) has the formulas.",
    ),
    Topic("Value loss", r"critic\.clip"),
    Topic("Advantages", r"adv\..*"),
    Topic("KL to the starting model", r"kl\..*"),
    Topic(
        "Teacher",
        r"teacher\..*",
        "The teacher's log-probability minus the policy's estimates minus KL(policy, teacher). It "
        "is the advantage of each token\n(`adv.estimator=distillation`) or is added to that of "
        "another estimator.",
    ),
    Topic("Environment", r"rollout\.(env_.*|max_turns|max_env_failures)"),
    Topic(
        "Sampling",
        r"rollout\.\w+_sampling_params\..*",
        "The answers on `data.test_path` have the same keys, as "
        "`rollout.test_sampling_params.KEY`.",
    ),
    Topic(
        "Engine",
        r"rollout\.(?!env_|max_turns|max_env_failures)\w+",
        "Engines: [engines.md](engines.md). `rollout.exact`: [proofs.md](proofs.md).",
    ),
    Topic(
        "The run",
        r"trainer\..*",
        "[run_folder.md](run_folder.md) explains checkpoints and saved rollouts, "
        "[metrics.md](metrics.md#evaluation-of-ppo) evaluation.",
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
    """Every key of the schema. The same key of several models is one row, the actor's."""
    rows: dict[str, Row] = {}
    for trainer in TRAINERS:
        root = getattr(schema, f"{trainer}Config")
        for name, key in schema_keys(root).items():
            if key.is_section:
                continue
            row = rows.setdefault(name, Row())
            row.declared[trainer] = key
            row.defaults[trainer] = show(get_value(root(), name))
            row.trainers.add(trainer)
    for name in list(rows):
        other = re.sub(r"^(critic|teacher)\.", "actor.", name)
        other = other.replace(".test_sampling_params.", ".train_sampling_params.")
        if other != name and other in rows and rows[other].meaning == rows[name].meaning:
            rows[other].trainers |= rows.pop(name).trainers
    return rows


def show(default: Any) -> str:
    """A default as one writes it on the command line, "" for none."""
    if default is None:
        return ""
    return str(default).lower() if isinstance(default, bool) else str(default)


def explain(key: Key) -> str:
    """The help of a key, its choices if the help does not name them, and its range."""
    text = key.help
    choices = [str(choice) for choice in key.choices]
    if key.functions:
        choices = list(key.functions.built_in)
    if not all(re.search(rf"\b{re.escape(choice)}\b", text) for choice in choices):
        text += f"; one of {', '.join(choices)}"
    if key.functions:
        text += "; or `file.py:function`"
    if key.only_if is WITH_GPU:
        text += "; GPU only"
    limit = key.range
    limits = []
    if limit.above or limit.at_least:  # that most numbers are not negative goes without saying
        limits.append(f"above {limit.above}" if limit.above else f"at least {limit.at_least}")
    if limit.below is not None:
        limits.append(f"below {limit.below}")
    if limit.at_most is not None and limit.at_most != schema.LARGEST_SEED:
        limits.append(f"at most {limit.at_most}")
    return "; ".join([text, *limits]).replace("<", "&lt;")


def key_line(name: str, row: Row, usual_trainers: frozenset[str]) -> str:
    first, *others = row.declared
    key, default = row.declared[first], row.defaults[first]
    text = explain(key)
    if row.trainers != usual_trainers:
        text = f"{', '.join(t for t in TRAINERS if t in row.trainers)}: {text}"
    for trainer in others:
        other = row.declared[trainer]
        if row.defaults[trainer] != default:
            text += f"; in {trainer} {row.defaults[trainer].replace(MISSING, 'required')}"
        if other.choices != key.choices:
            text += f"; in {trainer} one of {', '.join(other.choices)}"
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


def refusal_word(reason: str) -> str:
    """The reason for which a family is refused, in one or two words."""
    argument = re.search(r"asks for (.+?), which rl2 does not compute", reason)
    if argument:
        return f"asks for {argument[1]}"
    for part, word in REASONS.items():
        if part in reason:
            return word
    raise ValueError(f"no word in REASONS describes the refusal: {reason}")


def family_line(name: str, verdict: dict[str, str]) -> str:
    """A row of the table. `verdict` has a reason for each of refused, critic and engine that fails.

    A refused family is not tried as a critic or in the engine.
    """
    if "refused" in verdict:
        return f"| {name} | no: {refusal_word(verdict['refused'])} |"
    critic = engine = "yes"
    if "critic" in verdict:
        has_class = "no such class" not in verdict["critic"]
        critic = f"no: {refusal_word(verdict['critic'])}" if has_class else "no class"
    if "engine" in verdict:
        engine = "not tried" if verdict["engine"].startswith("not tried") else "no"
    return f"| {name} | yes | {critic} | {engine} |"


def families_page() -> str:
    record = json.loads(FAMILIES.read_text())
    families = record.pop("families")
    num_trained = sum("refused" not in verdict for verdict in families.values())
    header = FAMILIES_HEADER.format(**record, num_trained=num_trained, num_families=len(families))
    words = [f"- {word}: {meaning}" for word, meaning in MEANINGS.items()]
    table = ["| family | trained | critic | engine |", "|---|---|---|---|"]
    table += [family_line(name, verdict) for name, verdict in sorted(families.items())]
    return header + "\n".join(words) + "\n\n" + "\n".join(table) + "\n"


PAGES = {"docs/keys.md": keys_page, "docs/families.md": families_page}


if __name__ == "__main__":
    for name, make_page in PAGES.items():
        (ROOT / name).write_text(make_page(), encoding="utf-8")
