"""The proofs of what surrounds the trainer: engine, exported folder, chat template."""

import contextlib
import os
from collections.abc import Generator, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from rl2.attention.pages import MIN_ROWS
from rl2.attention.ring import Ring
from rl2.batch import Batch, collate
from rl2.config.adapters import sends_adapters
from rl2.data.chat import SYSTEM_ROLES, ChatTemplate
from rl2.engine.base import EngineSettings, SamplingParams
from rl2.engine.local import STEP_ROWS_MULTIPLE, LocalEngine
from rl2.model.admission import SCORE_TOLERANCE, packed_columns
from rl2.model.exact import Exactness
from rl2.model.token_model import TokenModel
from rl2.model.towers import language_model_class
from rl2.tools.proofs import (
    CPU,
    Difference,
    Skipped,
    Subject,
    compare_columns,
    compare_named,
    make_sample,
    weighted_sum,
)

NEW_TOKENS = 12
OTHER_TEMPERATURE = 0.7
MOST_SHOWN = 60  # characters


def prove_engine(subject: Subject) -> Iterator[Difference]:
    """Compares answers of the embedded engine, which has the weights of a step, with the trainer.

    In float32, and in bfloat16 where the two can have equal bits, so that nothing is rounding.
    """
    has_equal_bits = yield from _prove_engine(subject, torch.float32)
    if has_equal_bits:
        yield from _prove_engine(subject, torch.bfloat16)


def _prove_engine(subject: Subject, dtype: torch.dtype) -> Generator[Difference, None, bool]:
    """Returns whether equal bits were asked for."""
    config = subject.config
    is_deterministic = config.trainer.deterministic is not False
    dtype_name = str(dtype).removeprefix("torch.")
    worker = subject.worker(exactness=Exactness.ASSUMED, dtype=dtype_name)
    worker.update(subject.batch(), weighted_sum)
    adapters = worker.lora_settings if sends_adapters(config) else None
    settings = EngineSettings(
        subject.small,
        dtype,
        CPU,
        adapters=adapters,
        max_running_requests=MIN_ROWS + STEP_ROWS_MULTIPLE,
        deterministic=is_deterministic,
        exact=is_deterministic,
    )
    engine = LocalEngine(settings)
    iterate = worker.iter_full_weights if adapters is None else worker.iter_unmerged_weights
    weights = dict(iterate(dtype))
    engine.load_weights(weights.items(), worker.version)
    held = {name: weight for name, weight in engine.model.state_dict().items() if name in weights}
    meaning = "load_weights did not replace every weight"
    yield compare_named("weights", held, weights, 0.0, meaning)
    obstacle = _obstacle_to_equal_bits(engine, worker)
    what = f"log-probability in {dtype_name}" + (f", not exact: {obstacle}" if obstacle else "")
    limit = SCORE_TOLERANCE if obstacle else 0.0
    prompts = [list(sample.tokens[: 4 * i + 3]) for i, sample in enumerate(subject.samples())]
    prompts *= 5  # more than there are slots
    usual = config.rollout.train_sampling_params.temperature
    meaning = ""
    for temperature in dict.fromkeys((0.0, usual, OTHER_TEMPERATURE)):
        batch = _answer(engine, prompts, temperature)
        expected = worker.infer(batch, temperature or 1.0).logps
        difference = compare_columns(
            batch.engine_logps, expected, meaning, f"{what} at temperature {temperature:g}", limit
        )
        if not meaning and not difference.is_ok:
            difference = difference._replace(meaning=_find_part(engine, worker, prompts[-1:]))
        yield difference
        if difference.is_ok:
            meaning = "at another temperature they agree: it divides the logits on one side only"
    engine.close()
    return not obstacle


def _obstacle_to_equal_bits(engine: LocalEngine, worker: Any) -> str:
    """Why the two cannot have equal bits; nothing if they can."""
    if not engine.exact:
        return "with trainer.deterministic=false"
    if not worker.model.exactness.is_on:
        return "the model divides its logits"
    if worker.lora_settings is not None and engine.adapters is None:
        return "the engine merges adapters"
    if engine.has_constant_shapes:
        return "kernels of this CPU sum other numbers of rows in another order"
    return ""


def _answer(engine: LocalEngine, prompts: list[list[int]], temperature: float) -> Batch:
    """Returns the answers to all prompts, NEW_TOKENS tokens each."""
    params = SamplingParams(temperature=temperature, max_new_tokens=NEW_TOKENS)
    calls = []
    for row, prompt in enumerate(prompts):
        calls.append(engine.loop.create_task(engine.generate(prompt, params, (0, row))))
    samples = []
    for row, prompt in enumerate(prompts):
        out = engine.loop.run_until_complete(calls[row])
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        logps = [0.0] * len(prompt) + out.logps
        samples.append(make_sample(prompt + out.tokens, mask, row, logps))
    return collate(samples)


class Records(dict[str, list[Tensor]]):
    """The first inputs ("name input") and outputs ("name output") of each module without parts.

    Names are in the order of the first calls. A tensor is [tokens, ...], of the first sequence;
    features that have no dimension for the sequence, such as those of experts, are left out.
    """

    def add(self, name: str, module: Any, inputs: Any, options: Any, outputs: Any) -> None:
        """Appends what a forward hook is given to the tokens of the calls before."""
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for kind, values in ("input", (*inputs, *options.values())), ("output", outputs):
            tensors = [value for value in values if torch.is_tensor(value)]
            new = [x[0].clone() for x in tensors if x.ndim > 2 or not x.is_floating_point()]
            old = self.get(f"{name} {kind}", [x[:0] for x in new])
            self[f"{name} {kind}"] = [torch.cat(pair) for pair in zip(old, new, strict=True)]


@contextlib.contextmanager
def _recording(model: Any) -> Iterator[Records]:
    """Fills the records while the model runs."""
    records = Records()
    handles = []
    for name, module in model.named_modules():
        if not next(module.children(), None):
            hook = partial(records.add, name)
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    yield records
    for handle in handles:
        handle.remove()


def _find_part(engine: LocalEngine, worker: Any, prompt: list[list[int]]) -> str:
    """Returns where the engine, as it answers, and the trainer, as it scores the answer, part."""
    with _recording(engine.model) as ours:
        batch = _answer(engine, prompt, 0.0)
    with _recording(worker.model.hf) as expected:
        worker.infer(batch)
    previous = "the tokens"
    for place in (place for place in expected if place in ours):
        for x, y in zip(ours[place], expected[place], strict=True):
            if not torch.equal(x, y[: len(x)]):
                return (
                    f"they part between {previous} and {place}: look at the weights of the module "
                    "if it is one, else at positions, cached keys and values, and windows"
                )
        previous = place
    return "all modules agree: look at the head, the temperature and the softmax"


def prove_export(subject: Subject) -> Iterator[Difference]:
    """Compares the exported folder, which transformers loads, with the worker after a step."""
    worker, batch = subject.worker(), subject.batch()
    worker.update(batch, weighted_sum)
    folder = f"{subject.folder}/export"
    worker.export(folder, subject.template.tokenizer)
    model_class = language_model_class(AutoConfig.from_pretrained(folder))
    hf = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="rl2")
    weights = dict(worker.iter_full_weights(torch.float32))
    held = {name: weight for name, weight in hf.state_dict().items() if name in weights}
    meaning = (
        "the weight is not in the folder, or not as it was trained; with LoRA: adapters are not "
        "merged into it"
    )
    yield compare_named("weights", held, weights, SCORE_TOLERANCE, meaning)
    with torch.no_grad():
        actual = packed_columns(TokenModel(hf, Ring()), batch)
    meaning += "; if the weights agree: config.json of the folder is another one"
    yield compare_columns(actual, worker.infer(batch).logps, meaning)


def prove_template(subject: Subject) -> Iterator[Difference]:
    """Checks conversations that grow turn by turn, as in a rollout, and the mask of replies."""
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
    """Checks prompt and mask of the reply `messages[i]`, and the tokens up to the next reply."""
    tokenizer = template.tokenizer

    def reference(end: int, is_prompt: bool) -> str:
        """Returns the first messages as transformers renders them."""
        shown = [*template.few_shot, *messages[:end]]
        if messages[0]["role"] in SYSTEM_ROLES:
            shown = [messages[0], *template.few_shot, *messages[1:end]]
        elif template.system_prompt:
            shown = [{"role": "system", "content": template.system_prompt}, *shown]
        variables = {**template.variables, "add_generation_prompt": is_prompt, "tokenize": False}
        return str(tokenizer.apply_chat_template(shown, tools, **variables))

    prompt, whole = reference(i, True), reference(i + 1, False)
    texts = template.render_reply(messages[:i], messages[i], tools)
    before, after = map(template.tokenize, texts)
    meaning = "the policy is trained on another text than it will be served with"
    yield _compare_texts(template, "prompt", before, prompt, meaning)
    [(tokens, mask)] = template.training_sequences([(before, after)])
    trained = [token for token, is_trained in zip(tokens, mask, strict=True) if is_trained]
    if whole.startswith(prompt):
        added = tokenizer.eos_token if tokens != after else ""
        reply = whole[len(prompt) :].rstrip() + added
        meaning = "the mask does not cover exactly the reply up to its end of turn"
        yield _compare_texts(template, "trained reply", trained, reply, meaning)
    if following == len(messages):
        return
    turn = tokens[: len(before) + len(trained)]
    new_messages = messages[i + 1 : following]
    new = template.extend(turn, len(trained), messages[: i + 1], new_messages, tools)
    expected = reference(following, True)
    if new is not None or expected.startswith(template.decode(turn)):
        grown = [*turn, *(new or [])]
        meaning = "a rollout of several turns leaves the template's text"
        yield _compare_texts(template, "next prompt, turn by turn,", grown, expected, meaning)


def _compare_texts(
    template: ChatTemplate, what: str, tokens: list[int], expected: str, meaning: str
) -> Difference:
    """Counts the characters from the first one that differs. Texts are those that ids decode to."""
    actual = template.decode(tokens)
    expected = template.decode(template.tokenize(expected))
    same = len(os.path.commonprefix([actual, expected]))
    where = ""
    if actual != expected:
        ours, theirs = actual[same:][:MOST_SHOWN], expected[same:][:MOST_SHOWN]
        where = f"continues with {ours!r}, in transformers {theirs!r}"
    num_others = max(len(actual), len(expected)) - same
    return Difference(f"other characters in the {what}", num_others, 0, where, meaning)
