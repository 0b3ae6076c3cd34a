"""Direct preference optimization: `torchrun --nproc_per_node=N -m rl2.trainer.dpo key=value`.

`train` is the whole algorithm; read it first.
"""

from rl2.config.early import answer_trainer

if __name__ == "__main__":
    answer_trainer("dpo")  # --help, before the imports below, which take seconds

from functools import partial

import torch

from rl2.algorithms import losses
from rl2.algorithms.find import find_preference_loss
from rl2.batch import Batch, collate
from rl2.config.schema import DPOConfig, DPOLossConfig
from rl2.data.examples import PAIR_ROWS, Example, to_samples
from rl2.model.token_model import TokenScores
from rl2.trainer.inputs import find_row_problems
from rl2.trainer.launch import Trainer, launch, train_and_finish
from rl2.trainer.offline_run import OfflineRun
from rl2.trainer.recorder import Replay


def train(run: OfflineRun) -> None:
    """The whole algorithm.

    Every process holds the same `batch` and runs the same lines. The workers split the work of
    `update` and `infer`.
    """
    loss_fn = partial(preference_loss, run.config.dpo)
    reference = run.worker.reference() if needs_reference(run.config.dpo) else None
    if reference is not None:
        for test in run.test_batches.values():
            test.ref_logps = reference.infer(test).logps
    run.recorder.begin()
    for step in run.recorder.remaining_steps():
        batch = run.next_batch()
        if reference is not None:
            with run.recorder.phase("reference"):
                batch.ref_logps = reference.infer(batch).logps
        with run.recorder.phase("update"):
            result = run.worker.update(batch, loss_fn, keep_groups_together=True)
        if run.finish_step(step, batch, result):
            break


def preference_loss(
    config: DPOLossConfig, batch: Batch, scores: TokenScores
) -> losses.LossAndMetrics:
    """DPO's loss on whole sequences [b, T], where the rejected reply follows the chosen one."""
    return losses.dpo_loss(
        find_preference_loss(config.loss).compute,
        scores.logps,
        batch.ref_logps,
        batch.mask,
        batch.token_weights,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        target_margin=config.target_margin,
        sft_coef=config.sft_coef,
    )


def needs_reference(config: DPOLossConfig) -> bool:
    """Whether the loss compares with the start model. If not, none is loaded."""
    return "ref_logps" in find_preference_loss(config.loss).needs


def make_batch(run: OfflineRun, examples: list[Example]) -> Batch:
    """Two rows for each example, the chosen and the rejected reply, which weigh the same."""
    batch = collate(to_samples(examples))
    batch.trajectory = torch.arange(len(batch.mask))
    batch.token_weights = losses.token_weights(batch.mask, batch.trajectory, "sequence")
    return batch


def measure(run: OfflineRun, test: Batch) -> dict[str, float]:
    """Returns the loss on test rows, and its metrics."""
    return run.measure_loss(partial(preference_loss, run.config.dpo), test)


def make_run(config: DPOConfig, replay: Replay | None = None) -> OfflineRun:
    return OfflineRun(config, PAIR_ROWS, make_batch, measure, replay)


def start(config: DPOConfig) -> None:
    train_and_finish(make_run(config), train)


TRAINER = Trainer(DPOConfig, start, partial(find_row_problems, PAIR_ROWS))


def main() -> None:
    launch(TRAINER.config_class, TRAINER.start, TRAINER.find_problems)


if __name__ == "__main__":
    main()
