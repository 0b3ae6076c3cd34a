"""`rl2 env FILE data.path=ROWS [--rows N] [--form TEXT] key=value ...` tries an env.

The keys are those of the PPO trainer.
"""

import argparse
import sys

# Keys of layouts, which are those of the run and not of this process.
ELSEWHERE = (
    "actor.model_name",
    "actor.fsdp_size",
    "actor.sp_size",
    "actor.tp_size",
    "rollout.tp_size",
)


def main() -> None:
    """Prints the faults. Exits with status 1 if there are some, 2 if too little could be tried."""
    parser = argparse.ArgumentParser(
        usage="rl2 env FILE data.path=ROWS [--rows N] [--form TEXT] key=value ...",
        description="Tries a file or a ready-made env; the keys are those of PPO. "
        "See docs/environments.md.",
    )
    parser.add_argument("--rows", type=int, default=8, help="how many rows to use, the first (8)")
    form = "one more form of an answer, such as 'Result: {}'"
    parser.add_argument("--form", action="append", default=[], help=form)
    options, words = parser.parse_known_args()
    if options.rows < 1:
        parser.error(f"argument --rows: {options.rows} is not above 0")
    # These take seconds, and --help does not need them.
    from rl2.config.parse import parse
    from rl2.config.problem import Problem, refuse
    from rl2.config.schema import PPOConfig
    from rl2.data.examples import PROMPT_ROWS
    from rl2.data.rows import load_rows
    from rl2.env.gold import FORMS
    from rl2.tools.exploits import STOPPED, find_faults, make_cases

    if words and "=" not in words[0]:
        words[0] = f"rollout.env_path={words[0]}"
    config = parse(PPOConfig, words, elsewhere=ELSEWHERE)
    data = config.data
    try:
        if isinstance(data.path, dict):
            raise ValueError("data.path has several sources: give the rows of one, data.path=ROWS")
        if isinstance(config.rollout.env_path, dict):
            raise ValueError("rollout.env_path has several envs: give one, rl2 env FILE")
        try:
            all_rows = load_rows(data.path, "train", PROMPT_ROWS.read, data.columns)
        except ValueError as error:
            raise ValueError(f"data.path: {error}") from error
        rows = [all_rows[i] for i in range(min(options.rows, len(all_rows)))]
        cases = make_cases(rows, FORMS + options.form)
        findings = list(find_faults(config.rollout, rows, cases))
    except (ValueError, RuntimeError, OSError) as error:
        refuse([Problem("", str(error))])
    print("\n".join(map(str, findings)) or "no fault found")
    if any(finding.advice for finding in findings):
        sys.exit(1)
    sys.exit(2 if any(finding.text == STOPPED for finding in findings) else 0)
