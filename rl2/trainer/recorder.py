"""What the trainers share: the books of a run, and what a trainer without rollouts works with."""

import torch.distributed as dist

from rl2.config.parse import dump
from rl2.report.loggers import Metrics, prepare_folder
from rl2.run_folder import Checkpoints, find_checkpoint
from rl2.signals import StopSignal
from rl2.worker import Worker


class Recorder:
    """Metrics, checkpoints, exports and the wish to stop. Made when the workers (name -> Worker) are, which it resumes
    with whatever else is `held` (name -> something with a state_dict): `step` steps are done already."""

    def __init__(
        self, config, tokenizer, workers: dict, num_steps: int, device, held: dict | None = None
    ):
        self.config, self.tokenizer, self.workers, self.num_steps = (
            config,
            tokenizer,
            workers,
            num_steps,
        )
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
        self.metrics = Metrics(
            trainer.save_dir, self.step, num_steps, None if trainer.disable_wandb else wandb
        )
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
                if worker.config.save_freq and step % worker.config.save_freq == 0:
                    folder = f"{worker.config.save_dir}/step_{step}"
                    worker.export(folder, self.tokenizer, worker.config.save_optimizer)

    def finish(self, worker: Worker) -> None:
        """The final model, and a clean end."""
        folder = f"{self.config.trainer.save_dir}/model"
        worker.export(folder, self.tokenizer)
        self.metrics.say(f"model saved to {folder}")
        self.metrics.close()
        dist.destroy_process_group()
