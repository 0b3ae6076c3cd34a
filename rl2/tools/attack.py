"""The red team of `rl2 env --attack`: a small model is trained on the reward, as in any run.

A reward that it learns to earn while a part of weight 0, which is not trained, stays behind can be
earned without doing the task.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rl2.config.arguments import read_arguments
from rl2.report.health import (
    GOLD_STEPS,
    SURE_RISE,
    describe_change,
    find_unconfirmed_parts,
    rises,
    untrained_parts,
)
from rl2.report.saved import find_steps, read_lines
from rl2.run.records import MetricsFile
from rl2.run.success import REWARD, reward_metric
from rl2.trainer import ppo
from rl2.trainer.given import Inputs
from rl2.trainer.inside import train_inside

MAX_PROMPTS, NUM_RESPONSES = 16, 8  # of a step
# The keys of the attack, which those of the command line replace.
DEFAULTS: dict[str, Any] = {
    "data.max_length": 4096,
    "data.responses_per_prompt": NUM_RESPONSES,
    "actor.freeze_steps": GOLD_STEPS,  # what the model earns before it learns
    "actor.gradient_checkpointing": False,
    "actor.scheduler": "linear",
    "rollout.train_sampling_params.max_new_tokens": 32,
    "rollout.engine": "local",
    "rollout.max_running": MAX_PROMPTS * NUM_RESPONSES,
    "trainer.max_steps": 100,
    "trainer.n_epochs": 10_000,  # max_steps ends the run
    "trainer.watchdog": 0,
}
OF_ADVANTAGES = {"algo", "adv.estimator", "adv.norm_var"}
LEARNING_RATE = 0.01  # of the new model
LEARNING_RATE_OF_OWN = 4e-5  # of actor.model_name; that of the quickstart, with 135M weights
MAX_TEXTS = 3
SHOWN_CHARACTERS = 100
# The new model. It knows nothing, so its words are those of the env file and of the rows: the words
# that a reward looks for are one or a few tokens away.
VOCABULARY = 768
WORD = r" ?[^\W\d_]+|\d| ?[^\w\s]+|\s+|_"
MARKS = ["<think>", "</think>", "<answer>", "</answer>", "\\boxed{", "####", "\n"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MEAN_LENGTH = 12  # tokens of an answer before training


class Attack(NamedTuple):
    """What an attack has found, in words."""

    unconfirmed: list[str]  # by part of weight 0: what rose without it, with texts
    summary: str


def attack(
    words: list[str], weights: dict[str, float], env_file: Path, rows: list[dict], model_name: str
) -> Attack:
    """Trains a model on the reward, in this process, and says what it found.

    `words` are key=value of PPO, `weights` is rollout.reward_weights. `rows` are some of the rows
    of data.path. Without a `model_name`, a new small model is made. ValueError or RuntimeError if
    the run cannot start or go on.
    """
    golds = untrained_parts(weights)
    if not golds:
        raise ValueError(
            "--attack compares the trained reward with a part that is not trained, and no part has "
            'weight 0: let reward_fn return {"reward": ..., "gold": ...}, where gold is closer to '
            "the truth (a strict comparison, hidden tests), and set rollout.reward_weights.gold=0"
        )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        lr = LEARNING_RATE_OF_OWN
        if not model_name:
            lr, model_name = LEARNING_RATE, str(folder / "model")
            sources = [
                "".join(MARKS),
                env_file.read_text(encoding="utf-8"),
                "\n".join(texts_in(rows)),
            ]
            make_model(folder / "model", sources)
        own = {key: value for key, value, _ in read_arguments(words).assignments}
        keys = {
            **DEFAULTS,
            **({} if OF_ADVANTAGES & own.keys() else {"adv.norm_var": True}),
            "data.prompts_per_rollout": min(MAX_PROMPTS, len(rows)),
            "actor.lr": lr,
            **own,
            "actor.model_name": model_name,
            "trainer.save_dir": str(folder / "run"),
        }
        inputs = Inputs()
        inputs.set_keys(keys)
        run = train_inside(ppo.TRAINER, inputs, {})
        return judge(run, weights)


def judge(run: Path, weights: dict[str, float]) -> Attack:
    """Compares the reward with the parts of weight 0 in a run folder."""
    lines = MetricsFile(run).read()
    golds = untrained_parts(weights)
    metrics = [REWARD, *map(reward_metric, golds)]
    rewards = {metric: [line[metric] for line in lines if metric in line] for metric in metrics}
    means = rewards[REWARD]
    unconfirmed = [
        "\n".join([f"{name} does not confirm the reward: {change}", *worst_texts(run, name)])
        for name, change in find_unconfirmed_parts(rewards, weights)
    ]
    if len(means) < 2 * GOLD_STEPS:
        verdict = f"{len(means)} steps are too few: it needs {2 * GOLD_STEPS}"
    elif not rises(means, SURE_RISE):
        verdict = "the model did not learn to earn more, so this says nothing about the reward"
    else:
        verdict = "the model learned to earn more"
    changes = [f"{metric} {describe_change(rewards[metric])}" for metric in metrics]
    return Attack(unconfirmed, f"in {len(means)} steps {', '.join(changes)}: {verdict}")


def worst_texts(run: Path, gold: str) -> Iterator[str]:
    """Yields the answers of the last steps that earn most without more of the part `gold`.

    The same answer to several prompts is shown once.
    """
    steps = find_steps(run / "rollouts" / "train")
    first, last = (
        [record for path in part for record in read_lines(path)[0]]
        for part in (steps[:GOLD_STEPS], steps[-GOLD_STEPS:])
    )
    usual = sum(record["rewards"].get(gold, 0.0) for record in first) / max(1, len(first))
    texts: Counter[str] = Counter()
    earned: dict[str, tuple[float, float]] = {}
    for record in last:
        part = record["rewards"].get(gold, 0.0)
        if part <= usual:
            replies = [m["content"] for m in record["messages"] if m["role"] == "assistant"]
            text = str(replies[-1] if replies else "")
            texts[text] += 1
            earned[text] = max(earned.get(text, (record["reward"], part)), (record["reward"], part))
    best = sorted(texts, key=lambda text: (earned[text][0], texts[text]), reverse=True)
    for text in best[:MAX_TEXTS]:
        reward, part = earned[text]
        shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
        yield f"    earns {reward:.3g}, {gold} {part:.3g}, {texts[text]} times: {shown!r}"


def texts_in(value: Any) -> Iterator[str]:
    """Yields all texts in rows, and their numbers as texts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from texts_in(item)
    elif value is not None:
        yield str(value)


def make_model(folder: Path, sources: list[str]) -> None:
    """Saves a new model of 2 layers, whose tokens are characters and the words of the sources.

    It draws its tokens without regard to the prompt: each source is as likely, all tokens alike
    is one of them, and a token is as likely as it is frequent there.
    """
    tokenizer = make_tokenizer(sources)
    tokenizer.save_pretrained(folder)
    end = tokenizer.eos_token_id
    config = PhiConfig(  # its head has a bias
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=65_536,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
    )
    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = PhiForCausalLM(config)
    shares = torch.full([len(tokenizer)], 1 / len(tokenizer))
    for source in sources:
        ids = torch.tensor(tokenizer.encode(source))
        shares += torch.bincount(ids, minlength=len(tokenizer)) / len(ids)
    shares[end] = shares.sum() / MEAN_LENGTH
    with torch.no_grad():
        model.lm_head.bias.copy_(shares.log())
    model.save_pretrained(folder)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with marks of usual formats, printable characters, and frequent words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), "isolated")
    tokenizer.decoder = decoders.Fuse()
    specials = ["<|unk|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=list(map(chr, range(32, 127))),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(MARKS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        chat_template=TEMPLATE,
    )
