"""Trajectories: turns between the engine and the user's environment, and the training samples they become."""

from rl2.batch import Sample
from rl2.parallel.mesh import all_gather_objects
from rl2.rollout.trajectory import Trajectory


def gather_samples(trajectories: list[Trajectory]) -> list[Sample]:
    """The training samples of every process, on every process, in the order of the data."""
    parts = all_gather_objects(
        [sample for trajectory in trajectories for sample in trajectory.samples]
    )
    return sorted(
        (sample for part in parts for sample in part), key=lambda sample: sample.trajectory
    )


def summarise(trajectories: list[Trajectory], failures, version: int) -> dict[str, float]:
    """Rewards and lengths over the trajectories of every process; failed ones count as failed and nothing else, and stop
    the run when they are too many. Staleness: by how many updates the weights that sampled a token lag `version`."""
    told = [
        {k: v for k, v in trajectory.record().items() if k != "messages"}
        for trajectory in trajectories
    ]
    told = [record for part in all_gather_objects(told) for record in part]
    scored = [record for record in told if record["finish_reason"] != "failed"]
    failures.check(len(told) - len(scored), len(told))

    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else float("nan")

    reward = mean(r["reward"] for r in scored)
    lags = [(version - sampler) * num for r in told for sampler, num in r["versions"]]
    sampled = sum(r["length"] for r in told)
    parts = sorted({name for r in scored for name in r["rewards"]} - {"reward"})
    return {
        "reward/mean": reward,
        "reward/std": mean((r["reward"] - reward) ** 2 for r in scored) ** 0.5,
        **{f"reward/{name}": mean(r["rewards"].get(name, 0.0) for r in scored) for name in parts},
        "rollout/length": mean(r["length"] for r in told),
        "rollout/longest": max(r["length"] for r in told),
        "rollout/truncated": mean(r["finish_reason"] == "length" for r in told),
        "rollout/failed": mean(r["finish_reason"] == "failed" for r in told),
        "rollout/turns": mean(r["num_turns"] for r in told),
        "rollout/staleness": sum(lags) / max(1, sampled),
        "tokens/sampled": sampled,
    }
