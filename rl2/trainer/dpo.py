"""Preference optimization: `torchrun --nproc_per_node=N -m rl2.trainer.dpo key=value`.

DPO and its relatives compare the two replies of a pair, KTO takes replies one by one. `train` is
the whole algorithm; read it first.
"""

from rl2.config.help import answer_trainer

if __name__ == "__main__":
    answer_trainer("dpo")  # --help, before the imports below, which take seconds

from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from rl2.algorithms import losses
from rl2.algorithms.find import find_preference_loss
from rl2.batch import Batch, Sample, collate, scored_spans
from rl2.config.conditions import compares_pairs, needs_reference, needs_reference_point
from rl2.config.schema import DPOConfig, DPOLossConfig
from rl2.data.examples import LABELLED_ROWS, PAIR_ROWS, Example, to_samples
from rl2.data.formats import labels
from rl2.model.token_model import TokenScores
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.offline_run import OfflineRun


def train(run: OfflineRun) -> None:
    """The whole algorithm.

    Every process holds the same `batch` and runs the same lines. The workers split the work of
    `update` and `score`.
    """
    config = run.config.dpo
    loss_fn = partial(preference_loss, config)
    in_pairs = compares_pairs(run.config)
    if needs_reference(run.config):
        run.reference = run.worker.reference()
        for test in run.test_batches.values():
            test.ref_logps = run.reference.score(test).logps
    run.recorder.begin()
    for step in run.recorder.remaining_steps():
        batch = run.next_batch()
        if run.reference is not None:
            with run.recorder.phase("reference"):
                batch.ref_logps = run.reference.score(batch).logps
                if needs_reference_point(config.loss):
                    batch.reference_point = find_reference_point(run, batch)
        with run.recorder.phase("update"):
            result = run.worker.update(batch, loss_fn, keep_groups_together=in_pairs)
        if run.finish_step(step, batch, result):
            break


def preference_loss(
    config: DPOLossConfig, batch: Batch, scores: TokenScores
) -> losses.LossAndMetrics:
    """The loss on whole sequences [b, T]. In pairs the rejected reply follows the chosen one.

    Metrics: those of `pair_metrics` or `label_metrics` for the rewards beta * sum(logp - ref_logp),
    of single replies less beta * z0 where the loss needs the `reference_point` z0, which is logged
    too; kl, the k3 estimate of KL(reference || policy) on the tokens of the replies, as though the
    reference had written them. Without a reference the rewards are beta * mean(logp), and there is
    no kl. chosen_loss is the mean of -logp over the tokens of the chosen reply, which sft_coef
    weighs.
    """
    declared = find_preference_loss(config.loss)
    logps, ref_logps, weights = scores.logps, batch.ref_logps, batch.token_weights
    totals = losses.masked(batch.mask, logps).sum(1)
    lengths = batch.mask.sum(1).clamp(min=1)
    gains = labels = None
    rewards = config.beta * totals / lengths
    if ref_logps is not None:
        # A sum of differences: a difference of the sums of long replies would be less precise.
        gains = losses.masked(batch.mask, logps - ref_logps).sum(1)
        rewards = config.beta * gains
    if declared.in_pairs:
        loss_weights, metrics = losses.pair_metrics(rewards, weights)
    else:
        labels = batch.label > 0
        z0 = batch.reference_point
        if z0 is not None:
            rewards = rewards - config.beta * z0
        loss_weights, metrics = losses.label_metrics(rewards, weights, labels)
        if z0 is not None:
            metrics["reference_point"] = (z0 * loss_weights).sum()
    if ref_logps is not None:
        kl = losses.kl_estimate(ref_logps, logps.detach(), "k3")
        metrics["kl"] = (kl * weights).sum()
    inputs = losses.PreferenceInputs(
        logps=totals,
        lengths=lengths,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        target_margin=config.target_margin,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        labels=labels,
        gains=gains,
        reference_point=batch.reference_point,
    )
    loss = declared.compute(inputs)
    if config.sft_coef:
        # Keeps the probability of the chosen reply from falling (RPO, arXiv:2404.19733; Llama 3,
        # arXiv:2407.21783).
        metrics["chosen_loss"] = (-inputs.chosen_mean_logp * loss_weights).sum().detach()
        loss = loss - config.sft_coef * inputs.chosen_mean_logp
    return (loss * loss_weights).sum(), metrics


def find_reference_point(run: OfflineRun, batch: Batch) -> Tensor:
    """Returns KTO's z0 of the policy before the update, once for each row of the batch [B]."""
    assert run.reference is not None
    other = mismatch(batch, run.config.data.max_length)
    logps, ref_logps = run.worker.score(other).logps, run.reference.score(other).logps
    assert logps is not None and ref_logps is not None
    return losses.reference_point(logps, ref_logps, other.mask).expand(len(batch.mask))


def mismatch(batch: Batch, max_length: int) -> Batch:
    """The prompt of each row with a reply to the example before it, as in TRL.

    The first example gets a reply to the last one. Replies are cut where a row would be longer than
    `max_length` tokens.
    """
    spans, groups = scored_spans(batch), batch.group.tolist()
    rows_of_examples = [list(rows) for _, rows in groupby(range(len(groups)), groups.__getitem__)]
    samples: list[Sample] = []
    for i, rows in enumerate(rows_of_examples):
        others = rows_of_examples[i - 1]
        for j, row in enumerate(rows):
            other = others[j % len(others)]
            # As many tokens precede the first trained one as columns lead up to it.
            (prompt, _), (start, end) = spans[row], spans[other]
            reply = batch.tokens[other, start : end + 1].tolist()
            tokens = (batch.tokens[row, :prompt].tolist() + reply)[:max_length]
            mask = [0] * prompt + [1] * (len(tokens) - prompt)
            zeros = [0.0] * len(tokens)
            samples.append(Sample(tokens, mask, zeros, zeros, groups[row], len(samples)))
    return collate(samples)


def make_batch(run: OfflineRun, examples: list[Example]) -> Batch:
    """A row for each reply of the examples, which weigh the same.

    A pair has two, the chosen and the rejected one.
    """
    batch = collate(to_samples(examples))
    batch.trajectory = torch.arange(len(batch.mask))
    batch.token_weights = losses.token_weights(batch.mask, batch.trajectory, "sequence")
    if not compares_pairs(run.config):
        all_labels = [label for example in examples for label in labels(example.row)]
        batch.label = torch.tensor(all_labels).float()
    return batch


def measure(run: OfflineRun, test: Batch) -> dict[str, float]:
    """Returns the loss on test rows, and its metrics."""
    if needs_reference_point(run.config.dpo.loss):
        test.reference_point = find_reference_point(run, test)
    return run.measure_loss(partial(preference_loss, run.config.dpo), test)


def make_run(config: DPOConfig) -> OfflineRun:
    kind = PAIR_ROWS if compares_pairs(config) else LABELLED_ROWS
    return OfflineRun(config, kind, make_batch, measure)


def start(config: DPOConfig) -> None:
    train_and_finish(make_run(config), train)


def main() -> None:
    launch(DPOConfig, start)


if __name__ == "__main__":
    main()
