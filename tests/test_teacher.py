"""A teacher on a server: what it is asked, what its answers are worth, and what is told of it."""

import threading

import pytest
import torch
from common import launch_runs, letter_run, make_model, make_samples, read_metrics, serve_json
from scripted import process_group  # noqa: F401
from transformers import AutoModelForCausalLM

from rl2 import teacher
from rl2.batch import collate
from rl2.teacher import connect

CPU = torch.device("cpu")


def as_teacher(name, change=lambda scores: None):
    """The answers of a model. `change` may spoil the lists of a completion's log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    lock = threading.Lock()

    def score(tokens):
        with lock, torch.no_grad():
            log_p = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        picked = log_p.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
        return [None, *picked]

    def answer(path, body):
        if path == "/v1/models":
            value = {"data": [{"id": "the-teacher"}, {"id": "other"}]}
        else:
            assert path == "/v1/completions"
            assert (body["model"], body["echo"]) == ("the-teacher", True)
            scores = {
                "tokens": [f"token_id:{token}" for token in body["prompt"]] + ["token_id:7"],
                "token_logprobs": [*score(body["prompt"]), -0.5],  # and of a sampled token
            }
            change(scores)
            value = {"choices": [{"text": "", "logprobs": scores}]}
        return 200, value

    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("teacher") / "teacher", seed=1)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(teacher.time, "sleep", lambda seconds: None)


def test_the_trained_tokens_have_the_scores_of_the_model(model, monkeypatch):
    monkeypatch.setenv("TEACHER_API_KEY", "secret")
    batch = collate(make_samples(seed=1, num_groups=3, group_size=3))
    batch.mask[2] = 0  # nothing of this row is trained
    with serve_json(as_teacher(model)) as (url, requests):
        logps = connect(f"{url}/v1/", None, CPU).score(batch).logps
    assert all(headers["Authorization"] == "Bearer secret" for headers, _ in requests)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        log_p = plain(batch.inputs).logits.log_softmax(-1)
    expected = log_p.gather(2, batch.targets[..., None].long())[..., 0] * batch.mask
    torch.testing.assert_close(logps, expected, rtol=0, atol=2e-5)
    assert (logps[2] == 0).all() and (logps[0] != 0).any()


def test_a_server_that_is_busy_for_a_while_is_asked_again(model):
    teacher = as_teacher(model)
    calls = []

    def answer(path, body):
        calls.append(path)
        return (503, b"loading") if len(calls) in (1, 2, 4) else teacher(path, body)

    with serve_json(answer) as (url, _):
        assert len(connect(url, None, CPU).score_tokens([5, 6, 7])) == 2
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda scores: scores["tokens"].__setitem__(1, "token_id:3"),
            "2 tokens were sent, and 2 scored, 1 of them as other tokens",
        ),
        (
            lambda scores: [column.__delitem__(slice(1, None)) for column in scores.values()],
            "2 tokens were sent, and 1 scored",
        ),
        (
            lambda scores: scores["token_logprobs"].__setitem__(1, None),
            "1 without a finite log-probability",
        ),
        (dict.clear, "no log-probabilities"),
    ],
)
def test_answers_that_are_no_scores_of_the_tokens_are_refused(model, change, words):
    with serve_json(as_teacher(model, change)) as (url, _):
        with pytest.raises(RuntimeError, match=f"teacher.base_url={url}: .*{words}"):
            connect(url, None, CPU)


def test_a_server_that_refuses_or_is_not_there_is_named():
    with serve_json(lambda path, body: (404, b'{"error": "no such model"}')) as (url, requests):
        with pytest.raises(RuntimeError, match=f"{url}: /v1/completions failed.*no such model"):
            connect(url, "gone", CPU)
    assert len(requests) == 1, "a refusal is final"
    with pytest.raises(RuntimeError, match=f"{url}: /v1/models failed: .*refused"):
        connect(url, None, CPU)


def test_a_run_with_a_server_is_that_with_the_model(model, tmp_path):
    common = [
        "ppo",
        *letter_run(tmp_path, make_model(tmp_path / "tiny")),
        *("data.responses_per_prompt=4", "trainer.max_steps=2"),
        *("adv.estimator=distillation", "actor.loss=reinforce", "actor.update_per_rollout=2"),
    ]
    with serve_json(as_teacher(model)) as (url, _):
        in_process = [f"teacher.model_name={model}", f"trainer.save_dir={tmp_path / 'model'}"]
        on_server = [f"teacher.base_url={url}", f"trainer.save_dir={tmp_path / 'server'}"]
        launch_runs(2, [[*common, *in_process], [*common, *on_server]])
    expected, lines = read_metrics(tmp_path / "model"), read_metrics(tmp_path / "server")
    for name in ("actor/teacher_kl", "actor/grad_norm", "actor/loss"):
        values = [line[name] for line in lines]
        assert values == pytest.approx([line[name] for line in expected], rel=1e-3, abs=1e-5)
        assert all(values)
