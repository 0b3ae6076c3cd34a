"""Where metrics go: file, console and services. What is said of a run that goes wrong."""

import errno
import json
import math
import re
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
from common import read_cases, run_main, write_jsonl

from rl2.config.schema import PPOConfig, RMConfig, SFTConfig
from rl2.report import loggers, page
from rl2.report.console import Console
from rl2.report.health import Health, find_problems
from rl2.report.loggers import MetricsLog, start_wandb
from rl2.report.page import find_headlines, write_page
from rl2.run.records import MetricsFile
from rl2.tools import report as report_command

# A healthy step of GRPO.
STEP = {
    "step": 3,
    "reward/mean": 0.5125,
    "reward/std": 0.4,
    "reward/right": 0.45,
    "reward/short": 0.0625,
    "rollout/length": 212.7,
    "rollout/truncated": 0.03,
    "rollout/failed": 0.0,
    "rollout/zero_variance": 0.25,
    "tokens/sampled": 54000,
    "actor/loss": 0.0,
    "actor/lr": 1e-6,
    "actor/grad_norm": 0.4567,
    "actor/skipped": 0.0,
    "actor/approx_kl": 0.0,
    "actor/kl": 0.0012,
    "time/rollout": 4.3,
    "time/update": 4.4,
    "time/sync": 0.2,
    "time/other": 0.1,
    "time/step": 9.0,
    "tokens/per_second": 6000.0,
}
METRICS = {name: value for name, value in STEP.items() if name != "step"}
SAME = {"reward/std": 0.0, "reward/mean": 0.0, "rollout/zero_variance": 1.0, "actor/grad_norm": 0.0}


def make_config(config_class=PPOConfig, **trainer):
    config = config_class()
    vars(config.trainer).update(trainer)
    return config


@pytest.fixture
def one_process(monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)


def test_a_full_disk_is_named_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(RuntimeError, match=f"{tmp_path}/metrics.jsonl could not be written"):
        MetricsFile(tmp_path).write({"step": 1}, {})


def test_a_service_that_is_asked_for_is_started_unless_it_cannot_be_used(monkeypatch, one_process):
    def names(service, **keys):
        monkeypatch.setattr(loggers, "start_wandb", lambda folder, config: service)
        log = MetricsLog(Path("runs/x"), make_config(**keys), 3, num_steps=5)
        return [logger if logger is service else type(logger) for logger in log.loggers]

    assert names("service", loggers=["wandb"]) == ["service", Console]
    assert names(None, loggers=["wandb"]) == [Console]  # it says why
    assert names("service", loggers=["wandb"], disable_wandb=True) == [Console]
    assert names("service") == [Console], "the metrics leave the machine"


def test_a_step_lasts_until_the_next_line_and_the_rest_of_its_phases_is_other(
    tmp_path, monkeypatch, one_process
):
    """The clock of this test: a save of 2 s after the first line counts to the second one."""
    clock = iter([100.0, 101.0, 104.0, 107.0, 108.0, 110.0, 110.25, 113.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    config = make_config(SFTConfig, disable_wandb=True)
    log = MetricsLog(tmp_path, config, 0, 2)  # at 100
    with log.phase("update"):  # 101 to 104
        pass
    log.write(1, {"tokens/total": 70, "actor/grad_norm": 1.0})  # at 107
    with log.phase("save"):  # 108 to 110
        pass
    log.write(2, {"tokens/total": 65, "actor/grad_norm": 1.0})  # at 110.25
    first, second = [json.loads(line) for line in log.file.path.read_text().splitlines()]
    assert (first["time/step"], first["time/update"], first["time/other"]) == (7, 3, 4)
    assert (second["time/step"], second["time/save"], second["time/other"]) == (3.25, 2, 1.25)
    assert (first["tokens/per_second"], second["tokens/per_second"]) == (10, 20)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # it counts KiB
    assert second["memory/peak_gib"] == pytest.approx(peak_bytes / 2**30, rel=0.01)


def test_the_warnings_of_a_step_are_in_its_line_told_once_and_counted(
    tmp_path, one_process, capsys
):
    log = MetricsLog(tmp_path, make_config(disable_wandb=True), 0, 3)
    for step, same in enumerate(({}, SAME | {"actor/kl": math.inf}, {}, SAME), 1):
        log.write(step, METRICS | same)
    log.complete(2, {"test/reward/mean": math.nan})
    first, second, third, fourth = MetricsFile(tmp_path).read()
    assert second["actor/kl"] is second["test/reward/mean"] is None, "JSON has no such numbers"
    assert "warnings" not in first and "warnings" not in third
    [(name, reason)] = second["warnings"].items()
    assert fourth["warnings"].keys() == {name}
    log.close()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if name in line] == [
        f"step 2 {name}: {reason}",
        f"2 of 4 steps {name}",
    ]


def console_lines(capsys, steps, config=None, num_steps=100):
    """What the console prints of `steps`, the metrics of each step."""
    console = Console(config or make_config(), num_steps)
    for metrics in steps:
        console.log(metrics["step"], metrics)
    console.close()
    return capsys.readouterr().out.strip().splitlines()


@pytest.mark.parametrize("case", read_cases("console").values(), ids=read_cases("console"))
def test_the_line_of_a_step(capsys, case):
    is_ppo = case.get("healthy", False)
    config = make_config(PPOConfig if is_ppo else SFTConfig)
    if "estimator" in case:
        config.adv.estimator = case["estimator"]
    if is_ppo:
        config.rollout.score = case.get("score")
    times = {"time/step": 2.0, "time/update": 1.9, "tokens/per_second": 10.0}
    metrics = (STEP if is_ppo else times) | case.get("metrics", {})
    [line] = console_lines(capsys, [metrics], config)
    fields = line.split("  ")
    assert set(case["shown"]) <= set(fields)
    names = {re.split(r" [\d(]", field)[0] for field in fields}
    assert not names & set(case["hidden"]) and len(fields) == len(set(fields))


def test_the_time_left_is_that_of_the_steps_until_now(capsys):
    """Steps take 2 s, and that of an evaluation 62 s. The evaluation before training is over."""
    steps = [{"step": 0, "time/step": 60.5, "time/test": 60.0, "test/loss": 1.0}]
    for step, seconds in enumerate((2.0, 2.0, 62.0), 1):
        steps.append({"step": step, "time/step": seconds, "time/data": 1.0})
    lines = console_lines(capsys, steps, num_steps=10)
    assert "left" not in lines[0]
    left = [line.split("  ")[-1] for line in lines[1:]]
    assert left == ["0:00:18 left", "0:00:16 left", "0:02:34 left"]


@pytest.mark.parametrize("case", read_cases("health"), ids=str)
def test_what_is_said_of_a_step(case):
    config = make_config()
    for key, value in case.get("config", {}).items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
    metrics = STEP | (SAME if "same" in case else {}) | case.get("metrics", {})
    problems = find_problems({k: v for k, v in metrics.items() if v is not None}, config)
    expected = [case["problem"]] if "problem" in case else []
    assert [problem.name for problem in problems] == expected
    for problem in problems:
        assert re.search(case["reason"], problem.reason)


def test_a_step_whose_answers_were_all_cut_and_masked():
    config = make_config()
    config.rollout.mask_truncated = True
    cut = STEP | {"rollout/truncated": 1.0, "actor/grad_norm": 0.0}
    problems = find_problems(cut, config)
    assert [problem.name for problem in problems] == ["taught nothing", "had most answers cut"]
    assert "rollout.mask_truncated=true" in problems[0].reason


def test_an_evaluation_and_an_offline_step():
    evaluation = {"step": 0, "test/reward/mean": 0.0, "time/step": 1.0}
    assert find_problems(evaluation, make_config()) == []
    sft = {"step": 1, "actor/grad_norm": 0.5, "actor/skipped": 0.0}
    assert find_problems(sft, make_config(SFTConfig)) == []
    [problem] = find_problems(sft | {"actor/grad_norm": 0.0}, make_config(SFTConfig))
    assert problem.name == "taught nothing" and "no token" in problem.reason


def skip_updates(health, first_step, num_steps, fraction=1.0):
    """Skips updates in some steps. Returns what the console prints about them."""
    printed = []
    for step in range(first_step, first_step + num_steps):
        bad = {"step": step, "actor/grad_norm": math.nan, "actor/skipped": fraction}
        printed += health.describe(step, health.check(STEP | bad))
        health.stop_if_diverged()
    return printed


def losses(*values, name="test/loss", **others):
    return [{"step": step, name: value, **others} for step, value in enumerate(values)]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (losses(0.6931, 0.6, 0.6932), ["test/loss"]),  # it fell in between
        (losses(2.0, 2.0), ["test/loss"]),
        (losses(2.0, 3.0, 1.9), []),
        (losses(2.0, None), []),
        (losses(1.0, 2.0, name="test/news/loss"), ["test/news/loss"]),
        (losses(1.0, 2.0, name="test/reward/loss"), []),  # a part of PPO's reward
        (losses(0.5, 0.375, name="test/accuracy", **{"test/accuracy_stderr": 0.18}), ["accuracy"]),
        (losses(0.1, 0.6, name="test/accuracy", **{"test/accuracy_stderr": 0.11}), ["accuracy"]),
        (losses(0.1, 0.6, name="test/accuracy", **{"test/accuracy_stderr": 0.09}), []),
        (losses(0.5, 0.1, name="test/accuracy"), []),  # of KTO, which has no pairs
    ],
)
def test_a_run_that_learned_nothing(tmp_path, lines, found):
    told = Health(tmp_path, make_config(RMConfig), 0).summary(lines)
    assert len(told) == len(found)
    assert all(name in text for name, text in zip(found, told, strict=True))


def test_skipped_updates_are_told_counted_and_stop_the_run(tmp_path):
    config = make_config()
    config.actor.update_per_rollout = 2
    health = Health(tmp_path, config, start_step=0)
    for step in (2, 5, 6):
        (tmp_path / f"checkpoints/step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints/step_4.partial").mkdir()
    health.check(STEP | {"step": 5})
    printed = skip_updates(health, 6, 1)
    assert re.match("step 6 skipped updates of the actor: .* 2 of 2 .*actor.lr=1e-06$", printed[0])
    assert health.is_diverging
    skip_updates(health, 7, 5, fraction=0.5)  # half of the updates are good
    assert not health.is_diverging
    health.check(STEP | {"step": 12})
    [summary] = health.summary([])
    assert re.findall(r"\d+", summary) == ["6", "8"]
    # The weights of step 11 still gave a finite gradient, those of step 12 did not.
    resume = f"trainer.resume={tmp_path}/checkpoints/step_6"
    with pytest.raises(RuntimeError, match=f"last 10 updates.*actor.lr=1e-06(?s:.*){resume}$"):
        skip_updates(health, 13, 9)


def test_gradients_of_0_do_not_show_that_the_weights_are_good(tmp_path):
    """A policy that has diverged says what earns nothing: PPO then computes no gradient."""
    health = Health(tmp_path, make_config(), start_step=0)
    assert health.proven_step == math.inf, "nothing is trained"
    health.check(STEP | {"step": 1})
    assert health.proven_step == 1
    health.check(STEP | SAME | {"step": 2, "actor/grad_norm": 0.0})
    assert health.proven_step == 1 and not health.is_diverging
    skip_updates(health, 3, 1)
    health.check(STEP | SAME | {"step": 4, "actor/grad_norm": 0.0})
    assert health.proven_step == 1 and health.is_diverging
    health.check(STEP | {"step": 5})
    assert health.proven_step == 5 and not health.is_diverging


def test_what_to_do_about_a_run_that_diverged_from_its_start(tmp_path):
    for start_step, words in ((0, "actor.dtype=float32"), (8, "weights after step 8")):
        health = Health(tmp_path, make_config(), start_step)
        with pytest.raises(RuntimeError, match=words):
            skip_updates(health, start_step + 1, 10)
    health = Health(tmp_path, make_config(), 0)
    health.check(STEP | {"step": 1})
    with pytest.raises(RuntimeError, match="no checkpoint"):
        skip_updates(health, 2, 10)


def test_wandb_gets_the_config_and_an_id_that_resumes_and_its_errors_do_not_stop_a_run(
    tmp_path, monkeypatch, capsys
):
    wandb = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = asdict(make_config(project="mine", experiment_name="first"))
    wandb.login.return_value = False
    assert start_wandb(tmp_path, config) is None and "wandb login" in capsys.readouterr().out
    wandb.login.return_value = True
    for _ in range(2):  # the second one resumes the run folder
        start_wandb(tmp_path, config).log(4, {"step": 4, "reward/mean": 0.5})
    first, second = wandb.init.call_args_list
    assert first == second and first.kwargs["id"] and first.kwargs["resume"] == "allow"
    assert (first.kwargs["project"], first.kwargs["name"]) == ("mine", "first")
    assert first.kwargs["config"]["data"]["responses_per_prompt"] == 8
    assert wandb.init().log.call_args_list == [mock.call({"step": 4, "reward/mean": 0.5})] * 2
    wandb.init.side_effect = RuntimeError("the run was deleted")
    assert start_wandb(tmp_path, config) is None
    assert "the run was deleted" in capsys.readouterr().out


def answer(number, group, reward, text, **others):
    """A line of a transcript."""
    return {
        "id": number,
        "group": group,
        "row": {"answer": "42"},
        "messages": [{"role": "user", "content": f"question {group}"}, *replies(text)],
        "rewards": {"right": reward},
        "reward": reward,
        "length": 3,
        "num_turns": 1,
        "finish_reason": "stop",
        **others,
    }


def replies(*texts):
    return [{"role": "assistant", "content": text} for text in texts]


def write_run(folder, num_steps=2, rollouts=None, end=""):
    """A run folder with the metrics of some steps and transcripts {"train/step_1": records}."""
    folder.mkdir()
    lines = [json.dumps(STEP | {"step": step}) for step in range(1, num_steps + 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, end]))
    (folder / "config.yaml").write_text("actor: {lr: .nan, model_name: nowhere/nothing}")
    for name, records in (rollouts or {}).items():
        path = folder / f"rollouts/{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, records)
    return folder


def read_page(path):
    """The data of a report."""
    text = path.read_text()
    assert text.count("</script>") == 2
    return json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1], parse_constant=int)


def report(*folders):
    """The data of each run in a report of these folders."""
    path = folders[0].parent / "page.html"
    write_page([*folders], path)
    return read_page(path)["runs"]


def test_a_report_has_the_metrics_and_answers_of_all_runs(tmp_path):
    records = [answer(i, i // 2, i / 4, f"text {i}") for i in range(4)]
    first = write_run(tmp_path / "a", 3, {"train/step_2": records, "test/step_0": records[:2]})
    runs = report(first, write_run(tmp_path / "b", 1))
    assert [run["metrics"]["step"] for run in runs] == [[1, 2, 3], [1]]
    assert runs[0]["metrics"]["reward/mean"] == [STEP["reward/mean"]] * 3
    assert runs[0]["config"]["actor"] == {"lr": None, "model_name": "nowhere/nothing"}
    assert runs[0]["num_rollouts"] == {"test": 1, "train": 1}
    assert runs[1]["rollouts"] == []
    step = runs[0]["rollouts"][1]
    assert (step["split"], step["step"], step["num_answers"]) == ("train", 2, 4)
    group = step["groups"][0]  # of the best answer
    assert (group["group"], group["size"], group["row"]) == (1, 2, {"answer": "42"})
    assert group["prompt"] == [{"role": "user", "content": "question 1"}]
    assert [a["reward"] for a in group["answers"]] == [0.75, 0.5]
    assert group["answers"][0]["messages"] == replies("text 3")


def test_texts_of_a_model_cannot_leave_the_data_of_a_report(tmp_path):
    evil = "</script><script>alert(1)</script><!-- /* page.js */ \ud800 \u2028"
    [run] = report(write_run(tmp_path / "a", 1, {"train/step_1": [answer(0, 0, 1.0, evil)]}))
    [group] = run["rollouts"][0]["groups"]
    assert group["answers"][0]["messages"][0]["content"] == evil


def test_broken_lines_and_missing_columns_are_no_obstacle(tmp_path):
    odd = [{}, answer(1, 0, math.nan, "x"), answer(2, 0, None, None)]
    [run] = report(write_run(tmp_path / "a", 2, {"train/step_1": odd}, end='7\n{"step": 3, "rew'))
    assert run["metrics"]["step"] == [1, 2] and run["num_broken"] == 2
    rewards = {}
    for group in run["rollouts"][0]["groups"]:
        rewards[group["group"]] = [answer.get("reward") for answer in group["answers"]]
    assert rewards == {None: [None], 0: [None, None]}


def test_a_report_has_a_sample_with_the_best_and_the_worst_answer(tmp_path, monkeypatch):
    limits = {"ROLLOUT_BYTES": 60_000, "MAX_STEPS": 3, "MAX_LINES": 5}
    for name, value in {**limits, "MAX_ANSWERS": 4, "MAX_CHARACTERS": 1000}.items():
        monkeypatch.setattr(page, name, value)
    records = [answer(i, i // 8, 0.5, f"{i:04}" * 1250) for i in range(80)]
    records[20]["reward"], records[60]["reward"] = 0.0, 1.0
    [run] = report(write_run(tmp_path / "a", 9, {f"train/step_{i}": records for i in range(1, 10)}))
    assert run["num_steps"] == 9 and run["metrics"]["step"] == [1, 3, 5, 7, 9]
    assert run["num_rollouts"] == {"train": 9}
    assert [step["step"] for step in run["rollouts"]] == [1, 5, 9]
    for step in run["rollouts"]:
        groups = step["groups"]
        assert [group["group"] for group in groups] == [60 // 8, 20 // 8, 0, 1]
        assert [a["reward"] for a in groups[0]["answers"]][0] == 1.0
        assert [a["reward"] for a in groups[1]["answers"]][-1] == 0.0
        text = groups[0]["answers"][0]["messages"][0]["content"]
        assert len(text) < 1100 and "4,000 characters left out" in text
    assert 30_000 < len(json.dumps(run["rollouts"])) < 62_000


def test_conversations_share_only_what_comes_before_the_first_reply(tmp_path):
    """A prompt may have turns of the assistant, as the quickstart's."""
    question = {"role": "user", "content": "question 0"}
    prompt = [{"role": "user", "content": "example"}, *replies("its answer"), question]
    turns = [*replies("same"), {"role": "tool", "content": "1"}, *replies("same again")]
    records = [answer(i, 0, 1.0, "", num_turns=2, messages=[*prompt, *turns]) for i in range(2)]
    [run] = report(write_run(tmp_path / "a", 1, {"train/step_1": records}))
    [group] = run["rollouts"][0]["groups"]
    assert group["prompt"] == prompt
    assert [(a["messages"], a["count"]) for a in group["answers"]] == [(turns, 2)]
    # An agent may have asked with more messages.
    records[1]["messages"].insert(-3, {"role": "tool", "content": "1"})
    [run] = report(write_run(tmp_path / "b", 1, {"train/step_1": records}))
    assert run["rollouts"][0]["groups"][0]["prompt"] == prompt


def test_equal_answers_are_there_once_with_their_count(tmp_path):
    texts = ["a", "b", "a", "a", "b", "c"]
    records = [answer(i, 0, 1.0, text, versions=[[i, 3]]) for i, text in enumerate(texts)]
    records[3]["reward"] = 0.5
    [run] = report(write_run(tmp_path / "a", 1, {"train/step_1": records}))
    [group] = run["rollouts"][0]["groups"]
    counts = [(a["messages"][0]["content"], a["reward"], a["count"]) for a in group["answers"]]
    assert counts == [("a", 1.0, 2), ("b", 1.0, 2), ("c", 1.0, 1), ("a", 0.5, 1)]
    assert group["size"] == 6


def test_the_warnings_of_a_run_are_in_its_report(tmp_path):
    folder = write_run(tmp_path / "a", 0)
    file = MetricsFile(folder)
    for step, *names in ((1,), (2, "idle"), (3, "idle", "waited"), (4, "idle")):
        file.write({"step": step}, {}, {name: f"reason {step}" for name in names})
    [run] = report(folder)
    assert run["warnings"] == [
        {"name": "idle", "reason": "reason 2", "steps": [2, 3, 4]},
        {"name": "waited", "reason": "reason 3", "steps": [3]},
    ]
    assert "warnings" not in run["metrics"]


EVALUATED = {"test/reward/mean": 0.25, "test/avg@4": 0.5, "test/avg@4_stderr": 0.1}
REWARDED = {"step": 1, "reward/mean": 0.5, "reward/right": 0.125, **EVALUATED}


@pytest.mark.parametrize(
    ("line", "score", "large"),
    [
        (REWARDED, "right", ["reward/right", "test/avg@4"]),
        ({"step": 0} | EVALUATED, None, ["test/reward/mean"]),
        (
            {"actor/loss": 2.0, "test/a/loss": 1.0, "test/b/loss": None},
            None,
            ["actor/loss", "test/a/loss"],
        ),
    ],
)
def test_what_the_user_calls_success_is_large(line, score, large):
    assert list(find_headlines([{"step": 0}, line], score)) == large


def test_many_test_sets_are_not_all_large():
    names = {f"test/set_{i}/reward/mean": 0.5 for i in range(20)}
    headlines = find_headlines([REWARDED | names], None)
    assert len(headlines) == page.MAX_HEADLINES
    assert headlines["test/set_0/reward/mean"] == "on set_0"


def test_what_is_no_run_is_refused_in_words(tmp_path, capsys):
    def refuse(*arguments):
        assert run_main(report_command.main, *arguments) == 2
        return capsys.readouterr().err

    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        assert f"{tmp_path / name} is not the folder of a run" in refuse(tmp_path / name)
    run = write_run(tmp_path / "run", 0)  # it has just begun
    assert "No such file" in refuse(run, "--out", tmp_path / "no/x.html")
    assert run_main(report_command.main, run) == 0
    assert capsys.readouterr().out.startswith(f"{run}/report.html (")
    [data] = read_page(run / "report.html")["runs"]
    assert data["num_steps"] == 0 and data["rollouts"] == []


def test_a_run_writes_its_report_and_a_failure_is_a_warning(
    tmp_path, one_process, capsys, monkeypatch
):
    def close(step):
        log = MetricsLog(tmp_path, make_config(), 0, 2)
        log.write(step, METRICS)
        log.close()
        return "warning: report.html could not be written: ZeroDiv" in capsys.readouterr().out

    assert not close(1) and (tmp_path / "report.html").exists()
    monkeypatch.setattr("rl2.report.loggers.write_page", lambda *paths: 1 / 0)
    assert close(2)
