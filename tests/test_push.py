"""The model of a run on the hub: what its card says and does not say, and a push to a fake hub."""

import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from common import make_model, write_jsonl
from huggingface_hub import ModelCard, constants

from rl2.config.schema import PPOConfig, RMConfig, SFTConfig, dump
from rl2.tools import push

TOKEN = "hf_0123456789abcdefghijkl"
LINES = [
    {"step": 0, "test/reward/mean": 0.5, "test/reward/std": 0.1, "test/avg@4": 0.25}
    | {"test/avg@4_stderr": 0.05, "test/rollout/length": 9, "test/hard/avg@4": 0.125},
    *({"step": step, "reward/mean": step / 100, "actor/grad_norm": 2.0} for step in range(1, 40)),
    {"step": 40, "reward/mean": 0.4, "actor/grad_norm": 1.5, "test/reward/mean": 0.75}
    | {"test/avg@4": 0.625, "test/avg@4_stderr": 0.025, "test/hard/avg@4": None},
    {"step": 41, "test/reward/mean": 0.9},  # after the export
]
START = {
    "time": "2026-11-22 10:00:00+0000",
    "step": 0,
    "command": ["/home/alice/rl2/trainer/ppo.py", "data.path=/home/alice/rows.jsonl"],
    "hosts": ["node17"],
    "world_size": 1,
    "seed": 0,
    "versions": {"python": "3.11.2", "torch": "2.13.0"},
    "commit": "0123abc",
    "launch": "",
}


def write_run(folder, keys, kind=PPOConfig, lines=LINES, **start):
    """A run folder with these keys, and a small model."""
    config = yaml.safe_load(dump(kind()))
    for key, value in keys.items():
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = section[part]
        section[name] = value
    make_model(folder / "model")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    identity = {"trainer": kind.__name__, "contents": {"data.path": "ab12"}}
    record = {"identity": identity, "date": "2026-11-22", "starts": [START | start]}
    (folder / "run.json").write_text(json.dumps(record | {"model_step": 40}))
    write_jsonl(folder / "metrics.jsonl", lines)
    return folder


KEYS = {
    "data.path": "openai/gsm8k@main",
    "actor.model_name": "Qwen/Qwen3-0.6B",
    "actor.lr": 4e-5,
    "trainer.experiment_name": "sums",
    "trainer.save_dir": "runs/sums",
}


def test_the_card_says_what_the_model_is(tmp_path):
    run = write_run(tmp_path, KEYS, world_size=16, hosts=["node17", "node18"])
    text = push.make_card(run, None, None)
    card = ModelCard(text)  # it checks the front matter
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": "openai/gsm8k",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rl2", "ppo"],
    }
    for line in (
        "# sums",
        "| base model | Qwen/Qwen3-0.6B |",
        "| data | openai/gsm8k@main |",
        "| trainer | ppo, 40 steps |",
        "| torch | 2.13.0 |",
        "| commit of rl2 | 0123abc |",
        "| test/reward/mean | 0.5 | 0.75 |",
        "| test/avg@4 | 0.25 ± 0.098 | 0.625 ± 0.049 |",
        "| test/hard/avg@4 | 0.125 |  |",
    ):
        assert line in text.splitlines(), line
    assert "test/rollout" not in text and "0.9" not in text


def test_the_hash_of_the_weights_is_that_of_the_run(tmp_path):
    run = write_run(tmp_path, KEYS, lines=[LINES[-2] | {"weights": {"actor": "cd34"}}])
    text = push.make_card(run, None, None)
    assert "| hash of the weights of the actor | cd34 |" in text


def test_the_card_of_a_reward_model_and_of_a_local_base_model(tmp_path):
    keys = {"critic.model_name": "runs/sft/model", "data.path": "rows.jsonl"}
    run = write_run(tmp_path / "rm", keys, RMConfig)
    text = push.make_card(run, "me/judge", None)
    data = ModelCard(text).data
    assert (data.base_model, data.pipeline_tag, data.datasets) == (
        None,
        "text-classification",
        None,
    )
    assert "# judge" in text and "| base model | model |" in text
    text = push.make_card(run, None, "Qwen/Qwen3-0.6B")
    assert ModelCard(text).data.base_model == "Qwen/Qwen3-0.6B"
    assert "| base model | Qwen/Qwen3-0.6B |" in text


def test_the_card_names_no_path_user_or_host(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice/model").mkdir(parents=True)
    keys = {
        "data.path": "/home/alice/my data/rows.jsonl",
        "actor.model_name": "alice/model",
        "rollout.engine_args": {"api_key": TOKEN},
        "trainer.experiment_name": "/home/alice/sums",
        "trainer.save_dir": "/scratch/alice/runs/x",
    }
    text = push.make_card(write_run(tmp_path / "run", keys), None, None)
    for secret in ("alice", "/home", "scratch", "node17", TOKEN, str(tmp_path)):
        assert secret not in text, secret
    for row in ("| base model | model |", "| data | rows.jsonl |", "# sums"):
        assert row in text.splitlines(), row


class Hub(BaseHTTPRequestHandler):
    """What the hub answers to a push. `server.files` has what it got, by path."""

    def do_POST(self):  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        server = self.server
        server.requests.append((self.path, self.headers["Authorization"]))
        if self.path == "/api/repos/create":
            server.created = json.loads(body)
            self.answer({"url": f"{server.address}/me/sums"}, server.status)
        elif self.path == "/api/validate-yaml":
            server.validated = json.loads(body)["content"]
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files.append(line["value"]["path"])
            self.answer(
                {
                    "success": True,
                    "commitOid": "1" * 40,
                    "commitUrl": f"{server.address}/me/sums/commit/1",
                }
            )

    def do_GET(self):  # noqa: N802
        self.answer({}, 404)

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *values):
        pass


@pytest.fixture
def hub(monkeypatch):
    """A hub on this machine, which huggingface_hub takes for the real one."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.requests, server.files, server.status = [], [], 200
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def start(monkeypatch, *words):
    """Runs the command."""
    monkeypatch.setattr(sys, "argv", ["rl2 push", *map(str, words)])
    push.main()


def test_a_push_creates_the_model_and_uploads_its_files_with_the_card(
    tmp_path, monkeypatch, capsys, hub
):
    run = write_run(tmp_path, KEYS)
    start(monkeypatch, run)
    assert "nothing is sent" in capsys.readouterr().out and not hub.requests
    card = run / "model/README.md"
    card.write_text(card.read_text().replace("# sums", "# My sums"))  # a person edits it
    start(monkeypatch, run, "me/sums", "--private")
    assert capsys.readouterr().out == f"{hub.address}/me/sums\n"
    assert (hub.created["name"], hub.created["organization"]) == ("sums", "me")
    created = hub.created  # the first is that of older releases
    assert created.get("private") or created["visibility"] == "private"
    assert set(hub.files) == {path.name for path in (run / "model").iterdir()}
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= set(hub.files)
    assert "# My sums" in hub.validated
    assert {token for _, token in hub.requests} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", "/home/alice/model"])
def test_an_adapter_goes_with_the_model_unless_it_names_a_local_base(
    tmp_path, monkeypatch, capsys, hub, base
):
    run = write_run(tmp_path, KEYS)
    (run / "model/adapter").mkdir()
    settings = json.dumps({"base_model_name_or_path": base})
    (run / "model/adapter/adapter_config.json").write_text(settings)
    start(monkeypatch, run, "me/sums")
    is_local = base.startswith("/")
    assert ("adapter/adapter_config.json" in hub.files) is not is_local
    assert ("adapter/ is left out" in capsys.readouterr().out) is is_local


@contextmanager
def refused(capsys, *texts):
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        yield
    error = capsys.readouterr().err
    for text in ("rl2 push: ", *texts):
        assert text in error, error
    assert len(error.splitlines()) == 1


def test_what_cannot_be_pushed_is_refused_in_words(tmp_path, monkeypatch, capsys, hub):
    with refused(capsys, f"{tmp_path} is not the folder of a run"):
        start(monkeypatch, tmp_path)
    run = write_run(tmp_path, KEYS)
    with refused(capsys, "me//x"):
        start(monkeypatch, run, "me//x")
    with refused(capsys, "sums has no owner: write OWNER/sums"):
        start(monkeypatch, run, "sums")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(push, "get_token", lambda: None)
    with refused(capsys, "not logged in to the hub: run `hf auth login`"):
        start(monkeypatch, run, "me/sums")
    assert not hub.requests
    (run / "model/README.md").unlink()
    (run / "metrics.jsonl").write_text("")
    with refused(capsys, "metrics.jsonl has no line"):
        start(monkeypatch, run)
    (run / "model/config.json").unlink()
    with refused(capsys, "has no model/ yet"):
        start(monkeypatch, run)


def test_a_hub_that_refuses_or_is_out_of_reach_is_named(tmp_path, monkeypatch, capsys, hub):
    run = write_run(tmp_path, KEYS)
    hub.status = 403
    with refused(capsys, "did not take me/sums: run `hf auth login` with a token that may write"):
        start(monkeypatch, run, "me/sums")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    with refused(capsys, "did not take me/sums: it may be unreachable"):
        start(monkeypatch, run, "me/sums")


def test_the_card_of_an_offline_run(tmp_path):
    keys = {"data.path": "rows.jsonl", "actor.model_name": "Qwen/Qwen3-0.6B"}
    lines = [{"step": 1, "actor/loss": 2.0, "test/loss": 2.5}, {"step": 2, "actor/loss": 1.0}]
    text = push.make_card(write_run(tmp_path, keys, SFTConfig, lines), None, None)
    assert "| trainer | sft, 40 steps |" in text and "| test/loss | 2.5 | 2.5 |" in text
