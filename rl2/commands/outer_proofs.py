"""The proofs of what meets the trainer: engine, exported folder, TRL's losses, chat template."""

import asyncio
import importlib
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rl2.algorithms.losses import token_weights
from rl2.batch import Sample, collate
from rl2.commands.proofs import (
    CPU,
    Difference,
    Skipped,
    Subject,
    compare_columns,
    compare_named,
    make_sample,
    weighted_sum,
)
from rl2.config.schema import ActorConfig
from rl2.data.chat import SYSTEM_ROLES, ChatTemplate
from rl2.engine.base import EngineSettings, Generation, SamplingParams
from rl2.engine.local import LocalEngine
from rl2.engine.select import is_installed
from rl2.model.admission import SCORE_TOLERANCE
from rl2.model.token_model import TokenModel, TokenScores
from rl2.packing import pack, unpack, zigzag
from rl2.parallel.ring import Ring
from rl2.trainer.ppo import actor_loss

NEW_TOKENS = 24
OTHER_TEMPERATURE = 0.7
MOST_SHOWN = 60  # characters
LOSS_TOLERANCE = 1e-5  # relative
# (actor.loss, actor.average, settings of TRL's GRPO that mean the same)
TRL_LOSSES = (
    ("ppo", "token", {"loss_type": "dapo"}),
    ("ppo", "sequence", {"loss_type": "grpo"}),
    ("ppo", "constant", {"loss_type": "dr_grpo"}),
    ("gspo", "sequence", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ("cispo", "token", {"loss_type": "cispo"}),
)
CONSTANT = 11  # the length of average=constant


def prove_engine(subject: Subject) -> Iterator[Difference]:
    """Answers of the embedded engine, which got the weights of a step, against the trainer."""
    config = subject.config
    worker = subject.worker(subject.small, **subject.lora)
    worker.update(subject.batch(), weighted_sum)
    settings = EngineSettings(
        model_name=subject.small,
        dtype=torch.float32,
        device=CPU,
        max_running_requests=4,
        deterministic=config.trainer.deterministic is not False,
    )
    engine = LocalEngine(settings)
    weights = dict(worker.iter_full_weights(torch.float32))
    engine.load_weights(weights.items(), worker.version)
    held = {name: weight for name, weight in engine.model.state_dict().items() if name in weights}
    meaning = "load_weights did not replace every weight"
    yield compare_named("weights", held, weights, 0.0, meaning)
    meaning = "the engine feeds other positions or keys, or has other weights"
    usual = config.rollout.train_sampling_params.temperature
    for temperature in dict.fromkeys((0.0, usual, OTHER_TEMPERATURE)):
        batch = collate(_play(engine, subject.samples(), temperature))
        logps: Any = worker.infer(batch, temperature or 1.0).logps
        what = f"log-probability at temperature {temperature:g}" if temperature else "greedy"
        difference = compare_columns(batch.engine_logps, logps, meaning, what)
        yield difference
        if difference.is_ok:
            meaning = "at another temperature they agree: it divides the logits on one side only"
    engine.close()


def _play(engine: LocalEngine, samples: list[Sample], temperature: float) -> list[Sample]:
    """The answers to the beginnings of the samples."""
    params = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS)
    prompts = [list(sample.tokens[: 4 * row + 3]) for row, sample in enumerate(samples)]

    async def answer() -> list[Generation]:
        calls = [engine.generate(prompt, params, (0, i)) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*calls)

    played = []
    answers = engine.loop.run_until_complete(answer())
    for row, (prompt, out) in enumerate(zip(prompts, answers, strict=True)):
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        logps = [0.0] * len(prompt) + out.logps
        played.append(make_sample(prompt + out.tokens, mask, row, logps))
    return played


def prove_export(subject: Subject) -> Iterator[Difference]:
    """The exported folder, which transformers loads, against the worker after a step."""
    worker = subject.worker(subject.small, **subject.lora)
    batch = subject.batch()
    worker.update(batch, weighted_sum)
    expected = worker.infer(batch, with_entropy=True)
    folder = f"{subject.folder}/export"
    worker.export(folder, subject.template.tokenizer)
    settings: Any = {"attn_implementation": "rl2", "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings)
    hf, report = loaded
    names = sorted({*report["missing_keys"], *report["unexpected_keys"]})
    meaning = "the folder lacks weights, or has some that the architecture does not know"
    yield Difference("weights without a place", len(names), 0, ", ".join(names[:3]), meaning)
    weights = dict(worker.iter_full_weights(torch.float32))
    actual_weights = {name: weight for name, weight in hf.state_dict().items() if name in weights}
    meaning = "a weight is not what was trained; with LoRA: the adapters are not merged into it"
    yield compare_named("weights", actual_weights, weights, SCORE_TOLERANCE, meaning)
    packed = zigzag(pack(batch), size=1, rank=0)
    with torch.no_grad():
        scores = TokenModel(hf, Ring())(packed, with_entropy=True)
    meaning += "; else config.json of the folder says another architecture"
    for what, pairs in scores.items():
        actual = unpack(packed, pairs, batch.mask.shape)
        yield compare_columns(actual, getattr(expected, what), meaning, what)


class Stub(SimpleNamespace):
    """An object whose other attributes are None."""

    def __getattr__(self, name: str) -> None:
        return None


def prove_losses(subject: Subject) -> Iterator[Difference]:
    """Policy losses and their gradients against TRL's GRPO, with the clips and the KL asked for."""
    if not is_installed("trl"):
        raise Skipped("TRL is not installed: pip install trl")
    config = subject.config
    kl = replace(config.kl, type="loss", loss_estimator="k3")
    plain: Any = {"correction": "none", "entropy": 0.0, "average_constant": CONSTANT}
    for loss, average, settings in TRL_LOSSES:
        actor = replace(config.actor, loss=loss, average=average, **plain)
        case = _make_case()
        case.token_weights = token_weights(case.mask, case.trajectory, average, CONSTANT)
        expected = _trl_loss(actor, kl.coef, settings, case)
        actual, _ = actor_loss(actor, kl, case, TokenScores(logps=case.logps))
        gradients = [torch.autograd.grad(x, case.logps)[0] for x in (actual, expected)]
        name = f"actor.loss={loss} actor.average={average}"
        where = f"{name}: {actual.item():.6g}, TRL {expected.item():.6g}"
        meaning = "the mean over tokens, a clip, or the KL term"
        ratio = (actual / expected - 1).abs().item()
        yield Difference("loss", ratio, LOSS_TOLERANCE, where, meaning)
        scale = gradients[1].abs().max()
        meaning = "few tokens: a clip; all of them: the mean over tokens"
        what = f"gradient of {name}"
        difference = compare_columns(gradients[0] / scale, gradients[1] / scale, meaning, what)
        yield difference._replace(limit=LOSS_TOLERANCE)


def _make_case() -> Any:
    """Columns [6, 7] of answers whose ratios are on both sides of the clips."""
    generator = torch.Generator().manual_seed(0)

    def noise(scale: float, *shape: int) -> torch.Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(7) < torch.tensor([7, 2, 4, 3, 6, 5])[:, None]).double()
    old_logps = -noise(1.0, 6, 7).abs()
    advantages = noise(1.0, 6, 1)
    return Stub(
        mask=mask,
        old_logps=old_logps,
        engine_logps=old_logps,
        logps=(old_logps + noise(0.4, 6, 7)).requires_grad_(),
        ref_logps=old_logps + noise(0.3, 6, 7),
        advantages=advantages * mask,
        sequence_advantages=advantages[:, 0],
        trajectory=torch.arange(6),
    )


def _trl_loss(actor: ActorConfig, beta: float, settings: dict[str, Any], case: Any) -> torch.Tensor:
    """The loss of a GRPOTrainer that has only what its loss reads. Skipped if it reads more."""
    clip_high = actor.clip_high or actor.clip
    trainer = Stub(
        args=Stub(delta=actor.dual_clip, steps_per_generation=1),
        model=torch.nn.Linear(1, 1),
        beta=beta,
        epsilon_low=actor.clip,
        epsilon_high=1 + clip_high if actor.loss == "cispo" else clip_high,
        top_entropy_quantile=1.0,
        max_completion_length=CONSTANT,
        current_gradient_accumulation_steps=1,
        accelerator=Stub(
            num_processes=1,
            gather=lambda tensor: tensor,
            reduce=lambda tensor, reduction: tensor,
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **options: (case.logps, case.mask, None),
        **{"importance_sampling_level": "token", **settings},
    )
    inputs = {
        "prompt_ids": torch.zeros(6, 1),
        "prompt_mask": torch.ones(6, 1),
        "completion_ids": case.mask,
        "completion_mask": case.mask,
        "advantages": case.sequence_advantages,
        "old_per_token_logps": case.old_logps,
        "ref_per_token_logps": case.ref_logps,
        "num_items_in_batch": case.mask.sum(),
    }
    try:
        trl: Any = importlib.import_module("trl.trainer.grpo_trainer")
        loss: torch.Tensor = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    except Exception as error:  # the insides of a package change
        raise Skipped(f"this release of TRL computes its loss in another way: {error}") from error
    return loss


def prove_template(subject: Subject) -> Iterator[Difference]:
    """Conversations that grow turn by turn as in a rollout, and the mask of their replies."""
    if not subject.template.tokenizer.chat_template:
        raise Skipped("the tokenizer has no chat template: set data.chat_template")
    for number, (messages, tools) in enumerate(subject.conversations):
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for i, following in pairwise([*ends, len(messages)]):
            for difference in _prove_turn(subject.template, messages, tools, i, following):
                place = f"conversation {number}, message {i} {difference.where}"
                yield difference._replace(where=place)


def _prove_turn(
    template: ChatTemplate, messages: list[dict], tools: list | None, i: int, following: int
) -> Iterator[Difference]:
    """Prompt and mask of the reply `messages[i]`, and the tokens up to the `following` reply."""
    prompt, whole = _reference(template, messages, tools, i)
    texts = template.render_reply(messages[:i], messages[i], tools)
    before, after = map(template.tokenize, texts)
    meaning = "the policy is trained on another text than it will be served with"
    yield _compare_texts(template, "prompt", before, prompt, meaning)
    [(tokens, mask)] = template.training_sequences([(before, after)])
    trained = [token for token, is_trained in zip(tokens, mask, strict=True) if is_trained]
    if whole.startswith(prompt):
        added = template.tokenizer.eos_token if tokens != after else ""
        reply = whole[len(prompt) :].rstrip() + added
        meaning = "the mask does not cover exactly the reply up to its end of turn"
        yield _compare_texts(template, "trained reply", trained, reply, meaning)
    if following == len(messages):
        return
    turn = tokens[: len(before) + len(trained)]
    new_messages = messages[i + 1 : following]
    new = template.extend(turn, len(trained), messages[: i + 1], new_messages, tools)
    expected, _ = _reference(template, messages, tools, following)
    if new is not None or expected.startswith(template.decode(turn)):
        grown = [*turn, *(new or [])]
        meaning = "a rollout of several turns leaves the template's text"
        yield _compare_texts(template, "next prompt, turn by turn,", grown, expected, meaning)


def _compare_texts(
    template: ChatTemplate, what: str, tokens: list[int], expected: str, meaning: str
) -> Difference:
    """How many characters are behind the first one that differs.

    Texts are compared as the tokenizer gives them back.
    """
    actual = template.decode(tokens)
    expected = template.decode(template.tokenize(expected))
    same = len(os.path.commonprefix([actual, expected]))
    where = ""
    if actual != expected:
        ours, theirs = actual[same:][:MOST_SHOWN], expected[same:][:MOST_SHOWN]
        where = f"goes on with {ours!r}, in transformers {theirs!r}"
    num_others = max(len(actual), len(expected)) - same
    return Difference(f"other characters in the {what}", num_others, 0, where, meaning)


def _reference(
    template: ChatTemplate, messages: list[dict], tools: list | None, i: int
) -> tuple[str, str]:
    """The conversation (up to the reply `messages[i]`, with it) as transformers renders it."""
    if template.system_prompt and messages[0]["role"] not in SYSTEM_ROLES:
        messages = [{"role": "system", "content": template.system_prompt}, *messages]
        i += 1
    texts = []
    for end, is_prompt in ((i, True), (i + 1, False)):
        text = template.tokenizer.apply_chat_template(
            messages[:end],
            tools=tools,
            add_generation_prompt=is_prompt,
            tokenize=False,
            **template.variables,
        )
        texts.append(str(text))
    return texts[0], texts[1]
