"""A worker that gives an engine its weights, and the engine's answers as the worker's batch."""

import torch
from engine_contract import play
from parity import make_batch, policy_loss, worker_config

from rl2.batch import Sample, collate
from rl2.worker import Worker

PROMPTS = [[5], [7, 8, 9] * 15, list(range(3, 73)), [90] * 33]


def make_worker(name, **changes):
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "max_grad_norm": 1.0, **changes}
    return Worker(worker_config(name, **settings), torch.device("cpu"), num_updates=8)


def update(worker):
    worker.update(make_batch(), policy_loss, with_entropy=True)


def send(engine, weights, version):
    """As the trainer does after an update."""
    engine.sleep()
    engine.wake()
    engine.load_weights(weights, version)


def answer(engine, **params):
    """The answers to PROMPTS, as a batch with the engine's log-probabilities."""
    answers = play(engine, PROMPTS, max_new_tokens=12, **params)
    assert all(out.version == engine.version for out in answers)
    samples = []
    for i, (prompt, out) in enumerate(zip(PROMPTS, answers, strict=True)):
        mask = [0] * len(prompt) + [1] * len(out.tokens)
        logps = [0.0] * len(prompt) + out.logps
        samples.append(Sample(prompt + out.tokens, mask, logps, [0.0] * len(mask), i, i))
    return collate(samples)


def gap(worker, batch):
    """Mean difference of the engine's log-probabilities and the worker's."""
    difference = (worker.infer(batch).logps - batch.engine_logps).abs()
    return (difference * batch.mask).sum().item() / batch.mask.sum().item()
