"""What the trainers share: the books of a run, and what a trainer without rollouts works with."""

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from rl2.batch import Batch, scored_spans
from rl2.data.examples import Examples
from rl2.parallel.mesh import init_distributed
from rl2.trainer.recorder import Recorder
from rl2.worker import UpdateResult, Worker


def count_steps(items, config, what: str) -> int:
    """The steps of the run over `items`; tells how many of them were dropped."""
    if items.num_dropped and dist.get_rank() == 0:
        limit = f"data.max_length={config.data.max_length}"
        print(f"{items.num_dropped} {what} are longer than {limit} and dropped", flush=True)
    steps = items.num_steps(config.trainer.n_epochs)
    return min(steps, config.trainer.max_steps or steps)


def start_loading(name: str, seed: int) -> None:
    """Says that the model is being loaded; `seed` is that of the weights that are new."""
    torch.manual_seed(seed)
    if dist.get_rank() == 0:
        print(f"loading {name} ...", flush=True)
    else:
        disable_progress_bar()


class ExampleRun:
    """What `train` of SFT, DPO and the reward model works with: examples, the worker called `name`, and the books.

    `render(tokenizer, row)` gives the texts of a row's replies, `make_batch(run, examples)` columns with their weights;
    an `evaluate()` gives the metrics of `test_batch`.
    """

    def __init__(self, config, name: str, render, make_batch):
        self.config, self.name, self.make_batch = config, name, make_batch
        data, section = config.data, getattr(config, name)
        self.device, first = init_distributed(), dist.get_rank() == 0
        self.tokenizer = AutoTokenizer.from_pretrained(section.model_name)
        self.examples = Examples(
            data.path,
            "train",
            self.tokenizer,
            render,
            max_length=data.max_length,
            shuffle=data.shuffle,
            seed=data.seed,
            batch_size=data.batch_size,
            progress=first,
        )
        self.num_steps = count_steps(self.examples, config, "training rows")
        self.test_batch, longest = None, self.examples.longest
        if data.test_path:
            test = Examples(
                data.test_path,
                "test",
                self.tokenizer,
                render,
                max_length=data.max_length,
                shuffle=False,
                seed=0,
                batch_size=1,
                progress=first,
            )
            count_steps(test, config, "test rows")
            self.test_batch, longest = make_batch(self, list(test)), max(longest, test.longest)
        self._check_positions(longest)
        start_loading(section.model_name, config.trainer.seed)
        self.worker = Worker(section, self.device, name == "critic", self.num_steps)
        self.books = Recorder(
            config, self.tokenizer, {name: self.worker}, self.num_steps, self.device
        )
        self.step, self.phase = self.books.step, self.books.metrics.phase

    def _check_positions(self, longest):
        name = getattr(self.config, self.name).model_name
        positions = getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)
        if positions and longest > positions:
            raise ValueError(
                f"{name} has {positions} positions, but a row has {longest} tokens: lower data.max_length"
            )

    def batch(self, step: int) -> Batch:
        """The rows of step 1, 2, ..."""
        with self.phase("data"):
            return self.make_batch(self, self.examples.batch(step - 1))

    def begin(self, evaluate) -> None:
        """The first evaluation, unless the run goes on from a checkpoint."""
        if self.step == 0 and (logged := self._test(0, evaluate, False)):
            self.books.metrics.log(0, logged)

    def finish_step(self, step: int, result: UpdateResult, batch: Batch, evaluate) -> bool:
        """Evaluates if that is due and keeps the books. Whether the run is to stop here."""
        logged = {f"{self.name}/{key}": value for key, value in result.to_log().items()}
        total = sum(end for _, end in scored_spans(batch))
        logged |= {"tokens/trained": int(batch.mask.sum()), "tokens/total": total}
        stopping = bool(self.books.stop)
        logged |= self._test(step, evaluate, stopping or step == self.num_steps)
        self.books.finish_step(step, logged, stopping)
        return stopping

    def measure(self, loss_fn) -> dict[str, float]:
        """The loss and its metrics on the test rows."""
        loss, metrics = loss_fn(self.test_batch, self.worker.infer(self.test_batch))
        return {name: value.item() for name, value in {"loss": loss, **metrics}.items()}

    def _test(self, step, evaluate, last):
        if self.test_batch is None or not self.books.tests_at(step, last):
            return {}
        with self.phase("test"):
            return {f"test/{key}": value for key, value in evaluate().items()}
