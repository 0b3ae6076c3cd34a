"""What the trainers share: the books of a run, and what a trainer without rollouts works with."""

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from ..batch import Batch, spans
from ..checkpoint import Checkpoints, StopSignal, find_checkpoint
from ..data import Examples
from ..metrics import Metrics, prepare_folder
from ..parallel.mesh import init
from ..worker import Worker
from .config import dump


class Books:
    """Metrics, checkpoints, exports and the wish to stop. Made when the workers (name -> Worker) are, which it resumes
    with whatever else is `held` (name -> something with a state_dict): `step` steps are done already."""

    def __init__(self, config, tokenizer, workers: dict, num_steps: int, device, held: dict | None = None):
        self.config, self.tokenizer, self.workers, self.num_steps = config, tokenizer, workers, num_steps
        self.held = {**workers, **(held or {})}
        self.stop = StopSignal(device)
        trainer = config.trainer
        self.checkpoints = Checkpoints(f"{trainer.save_dir}/checkpoints", trainer.keep_checkpoints)
        found = find_checkpoint(trainer.resume, self.checkpoints.folder)
        self.step = self.checkpoints.load(found, self.held) if found else 0
        if dist.get_rank() == 0:
            prepare_folder(trainer.save_dir, self.step)
            with open(f"{trainer.save_dir}/config.yaml", "w") as file:
                file.write(dump(config))
        dist.barrier()
        wandb = {"project": trainer.project, "name": trainer.experiment_name}
        self.metrics = Metrics(trainer.save_dir, self.step, num_steps, None if trainer.disable_wandb else wandb)
        if found:
            self.metrics.say(f"resumed from {found}: {self.step} of {num_steps} steps are done")

    def tests_at(self, step: int, last: bool) -> bool:
        """Whether to evaluate: once at the start, every `test_freq` steps and at the end."""
        every = self.config.trainer.test_freq
        return last or step == 0 or bool(every and step % every == 0)

    def finish_step(self, step: int, logged: dict[str, float], stopping: bool) -> None:
        """Metrics to disk, then the checkpoints and exports that are due."""
        # In this order: a kill in between repeats the step and its line, the other way round would lose the line.
        self.metrics.log(step, logged)
        with self.metrics.phase("save"):
            every = self.config.trainer.save_freq
            if stopping or (every and step % every == 0):
                self.checkpoints.save(step, self.held, dump(self.config))
            for worker in self.workers.values():
                if worker.section.save_freq and step % worker.section.save_freq == 0:
                    folder = f"{worker.section.save_dir}/step_{step}"
                    worker.export(folder, self.tokenizer, worker.section.save_optimizer)

    def finish(self, worker: Worker) -> None:
        """The final model, and a clean end."""
        folder = f"{self.config.trainer.save_dir}/model"
        worker.export(folder, self.tokenizer)
        self.metrics.say(f"model saved to {folder}")
        self.metrics.close()
        dist.destroy_process_group()


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
        self.device, first = init(), dist.get_rank() == 0
        self.tokenizer = AutoTokenizer.from_pretrained(section.model_name)
        order = (data.max_length, data.shuffle, data.seed, data.batch_size, first)
        self.examples = Examples(data.path, "train", self.tokenizer, render, *order)
        self.num_steps = count_steps(self.examples, config, "training rows")
        self.test_batch, longest = None, self.examples.longest
        if data.test_path:
            test = Examples(data.test_path, "test", self.tokenizer, render, data.max_length, False, 0, 1, first)
            count_steps(test, config, "test rows")
            self.test_batch, longest = make_batch(self, list(test)), max(longest, test.longest)
        self._check_positions(longest)
        start_loading(section.model_name, config.trainer.seed)
        self.worker = Worker(section, self.device, name == "critic", self.num_steps)
        self.books = Books(config, self.tokenizer, {name: self.worker}, self.num_steps, self.device)
        self.step, self.phase = self.books.step, self.books.metrics.phase

    def _check_positions(self, longest):
        name = getattr(self.config, self.name).model_name
        positions = getattr(AutoConfig.from_pretrained(name), "max_position_embeddings", None)
        if positions and longest > positions:
            raise ValueError(f"{name} has {positions} positions, but a row has {longest} tokens: lower data.max_length")

    def batch(self, step: int) -> Batch:
        """The rows of step 1, 2, ..."""
        with self.phase("data"):
            return self.make_batch(self, self.examples.batch(step - 1))

    def begin(self, evaluate) -> None:
        """The first evaluation, unless the run goes on from a checkpoint."""
        if self.step == 0 and (logged := self._test(0, evaluate, False)):
            self.books.metrics.log(0, logged)

    def finish_step(self, step: int, told: dict[str, float], batch: Batch, evaluate) -> bool:
        """Evaluates if that is due and keeps the books. Whether the run is to stop here."""
        logged = {f"{self.name}/{key}": value for key, value in told.items()}
        total = sum(end for _, end in spans(batch))
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
