"""Verdicts of rl2.rewards.code on programs that are known to be right or wrong, and their speed.

    python benchmarks/lab/code_rewards.py ROWS.jsonl [--programs 500] [--mutants 2] [--threads 8]

Each row has `test_cases` and `reference`, a program that passes them. Mutants are references with
one operator, comparison, constant or condition changed. Some of them still pass their tests: a
plain run without a sandbox decides which verdict is right, so all rows must be trusted.
Every verdict that differs is printed, and the counts as JSON in the last line.
"""

import argparse
import ast
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rl2.rewards import code, sandbox

PLAIN_SECONDS = 20.0  # after which a plain run counts as wrong
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Lt: ast.GtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def find_mutations(tree):
    """(node, attribute, new value) of every change that makes a mutant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
            yield node, "op", OPERATORS[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
            yield node, "ops", [OPERATORS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value", node.value + 1
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield node, "test", ast.UnaryOp(ast.Not(), node.test)


def make_mutants(program, count, rng):
    """Up to `count` different programs with one change each."""
    mutants = set()
    for i in rng.sample(range(10_000), 10 * count):
        tree = ast.parse(program)
        mutations = list(find_mutations(tree))
        if not mutations or len(mutants) == count:
            break
        node, attribute, value = mutations[i % len(mutations)]
        setattr(node, attribute, value)
        mutants.add(ast.unparse(ast.fix_missing_locations(tree)))
    return sorted(mutants)


def passes_plainly(program, test_cases):
    """The verdict of plain runs, each without a sandbox."""
    function = test_cases.get("fn_name")
    if function:
        program += (
            "\nimport json, sys\n"
            f"print(json.dumps({function}(*map(json.loads, sys.stdin.read().splitlines()))))"
        )
    for text, output in zip(test_cases["inputs"], test_cases["outputs"], strict=True):
        try:
            result = subprocess.run(
                [sys.executable, "-I", "-c", program],
                input=text,
                capture_output=True,
                text=True,
                timeout=PLAIN_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return False
        if result.returncode != 0:
            return False
        if function:
            if json.loads(result.stdout.splitlines()[-1]) != json.loads(output):
                return False
        elif result.stdout.split() != output.split():
            return False
    return True


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("rows", type=Path)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--mutants", type=int, default=2, help="of each program")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    rows = rng.sample(rows, min(arguments.programs, len(rows)))
    jobs = []  # (kind, task, program, test cases)
    for row in rows:
        jobs.append(("reference", row["task_id"], row["reference"], row["test_cases"]))
        for mutant in make_mutants(row["reference"], arguments.mutants, rng):
            jobs.append(("mutant", row["task_id"], mutant, row["test_cases"]))
    sandbox.require("process")
    with ThreadPoolExecutor(arguments.threads) as pool:
        truths = list(pool.map(lambda job: passes_plainly(job[2], job[3]), jobs))
        start = time.perf_counter()
        verdicts = list(pool.map(lambda job: code.judge(job[2], job[3]), jobs))
        seconds = time.perf_counter() - start
    counts = {"seconds": round(seconds, 1), "verdicts_per_second": round(len(jobs) / seconds, 2)}
    counts |= {"strength": sandbox.best_strength(), "threads": arguments.threads}
    for (kind, task, program, _), is_right, verdict in zip(jobs, truths, verdicts, strict=True):
        name = f"{'right' if is_right else 'wrong'} {kind}s"
        counts.setdefault(name, 0)
        counts.setdefault(f"{name}, judged so", 0)
        counts[name] += 1
        counts[f"{name}, judged so"] += verdict.is_right == is_right
        if verdict.is_right != is_right:
            print(f"{kind} of {task} is {name.split()[0]}: {verdict}\n{program}\n")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
