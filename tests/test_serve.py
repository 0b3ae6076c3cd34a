"""The server of engines: what it answers, what it refuses, and runs that sample with it.

The protocol of engines is tested with it in test_engine.py.
"""

import threading
import time

import pytest
import torch
from common import (
    launch,
    letter_run,
    make_model,
    make_tokenizer,
    read_metrics,
    read_untimed_metrics,
    run_main,
)
from engine_contract import play
from scripted import process_group  # noqa: F401
from serving import serving

from rl2.engine import serve
from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine
from rl2.engine.server import ServerEngine

CPU = torch.device("cpu")
TOKEN = {"Authorization": "Bearer the token"}
SHORT = {"max_new_tokens": 6}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Has the weights of another model, and links that lead outside."""
    folder = tmp_path_factory.mktemp("shared")
    make_model(folder / "other", seed=1)
    outside = make_model(tmp_path_factory.mktemp("outside") / "model", seed=2)
    (folder / "link").symlink_to(outside)
    (folder / "files").mkdir()
    (folder / "files/model.safetensors").symlink_to(f"{outside}/model.safetensors")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(llama, shared):
    words = (llama, f"shared_dir={shared}", "dtype=float32")
    with serving(*words, env={serve.TOKEN: "the token"}) as [server]:
        yield server


def generate(server, **body):
    status, value = server.ask("/generate", body, **TOKEN)
    assert status == 200, value
    return value["answers"]


def test_the_answers_are_those_of_the_engine_to_the_bit(llama, server):
    engine = LocalEngine(EngineSettings(llama, torch.float32, CPU, exact=True))
    prompts, seeds = [[5, 6, 7], [8]], [[1, 2**70], [3], [4], [5, 6]]
    asked = [prompt for prompt in prompts for _ in range(2)]
    expected = play(engine, asked, [tuple(seed) for seed in seeds], **SHORT)
    answers = generate(
        server, prompts=prompts, n=2, seeds=seeds, params={**SHORT, "stop_token_ids": []}
    )
    for answer, out in zip(answers, expected, strict=True):
        assert (answer["tokens"], answer["logps"]) == (out.tokens, out.logps)
        assert (answer["finish_reason"], answer["version"]) == ("length", 0)


def test_texts_and_conversations_get_texts_that_end_as_the_model_ends_them(server):
    """Token 2 is <|im_end|>, the end of sequence of the model."""
    tokenizer = make_tokenizer()
    greedy = {"temperature": 0, "max_new_tokens": 12}
    message = [{"role": "user", "content": "hi"}]
    prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    [of_message] = generate(server, messages=[message], params=greedy)
    [of_text] = generate(server, texts=[prompt], params=greedy)
    [of_ids] = generate(server, prompts=[tokenizer(prompt)["input_ids"]], params=greedy)
    text = tokenizer.decode(of_ids["tokens"], skip_special_tokens=True)
    assert of_message == of_text == {**of_ids, "text": text} and text
    many = generate(server, texts=["a"], n=64, params={"max_new_tokens": 40})
    ended = [out for out in many if out["finish_reason"] == "stop"]
    assert 0 < len(ended) < 64 and all(out["tokens"][-1] == 2 for out in ended)
    assert len({out["text"] for out in many}) > 60, "answers without a seed are the same"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/generate", b"{", 400, "JSON"),
        ("/generate", [], 400, "expected a JSON object"),
        ("/generate", {}, 400, "`prompts`"),
        ("/generate", {"prompts": [[5.0]]}, 400, "`prompts`"),
        ("/generate", {"texts": "a text"}, 400, "a list of `texts`"),
        ("/generate", {"messages": [{"role": "user", "content": "a"}]}, 400, "conversations"),
        ("/generate", {"prompts": [[5]], "params": {"stop": [5]}}, 400, "a list of texts"),
        ("/generate", {"prompts": [[98]]}, 400, "the vocabulary is 0 to 97"),
        ("/generate", {"prompts": [[5], [5] * 600]}, 400, "exceeds 512"),
        ("/generate", {"prompts": [[5]], "params": {"max_tokens": 5}}, 400, "max_tokens"),
        ("/generate", {"prompts": [[5]], "params": {"top_k": 1.5}}, 400, "params.top_k=1.5"),
        ("/generate", {"prompts": [[5]], "params": {"top_p": "1"}}, 400, "params.top_p='1'"),
        ("/generate", {"prompts": [[5]], "seeds": [[1], [2]]}, 400, "2 seeds"),
        ("/generate", {"prompts": [[5]], "n": 10**6}, 400, "4096 answers"),
        ("/generate", {"prompts": [[5]], "weights": {"version": 0, "hash": "x"}}, 409, "weights"),
        ("/generate", b" " * (serve.MAX_BODY_BYTES + 1), 413, str(serve.MAX_BODY_BYTES)),
        ("/generate", None, 405, "Method Not Allowed"),
        ("/v1/models", None, 404, "Not Found"),
        ("/reload_weights", {"folder": "/etc", "version": 1}, 403, "outside"),
        ("/reload_weights", {"folder": "../outside", "version": 1}, 403, "outside"),
        ("/reload_weights", {"folder": "link", "version": 1}, 403, "outside"),
        ("/reload_weights", {"folder": "files", "version": 1}, 403, "outside"),
        ("/reload_weights", {"folder": "empty", "version": 1}, 400, "has no safetensors"),
        ("/reload_weights", {"folder": "other"}, 400, "version"),
    ],
)
def test_what_is_refused(server, path, body, status, words):
    """In words, and the server goes on with the weights that it has."""
    told, value = server.ask(path, body, **TOKEN)
    assert told == status and words in value["error"], value
    assert len(generate(server, prompts=[[5]], params=SHORT)) == 1


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer the toke"}])
def test_without_the_token_nothing_is_told(server, headers):
    for path, body in (("/health", None), ("/generate", {}), ("/abort", {}), ("/nothing", None)):
        status, value = server.ask(path, body, **headers)
        assert status == 401 and "Authorization: Bearer TOKEN" in value["error"]


def test_weights_are_loaded_and_compared(server, shared):
    """With another hash they are not used; a load ends what is in flight."""
    before = generate(server, prompts=[[5, 6]], seeds=[[1]], params=SHORT)
    status, loaded = server.ask("/reload_weights", {"folder": "other", "version": 7}, **TOKEN)
    assert status == 200 and loaded["version"] == 7
    assert server.ask("/health", **TOKEN)[1]["weights"] == loaded
    [after] = generate(server, prompts=[[5, 6]], seeds=[[1]], params=SHORT, weights=loaded)
    assert after["version"] == 7 and after["tokens"] != before[0]["tokens"]

    answers = []
    long = {"prompts": [[5]] * 80, "params": {"max_new_tokens": 500, "stop_token_ids": []}}
    asking = threading.Thread(target=lambda: answers.extend(generate(server, **long)))
    asking.start()
    time.sleep(0.5)
    wrong = {"folder": "other", "version": 8, "hash": "0" * 64}
    status, value = server.ask("/reload_weights", wrong, **TOKEN)
    asking.join()
    assert status == 409 and "hash" in value["error"]
    assert {out["finish_reason"] for out in answers} == {"abort"}
    status, value = server.ask("/generate", {"prompts": [[5]]}, **TOKEN)
    assert status == 409 and "the last load failed" in value["error"]
    again = {"folder": "other", "version": 7, "hash": loaded["hash"]}
    assert server.ask("/reload_weights", again, **TOKEN) == (200, loaded)
    assert generate(server, prompts=[[5, 6]], seeds=[[1]], params=SHORT) == [after]


def test_a_server_without_a_shared_folder_loads_nothing_and_a_signal_ends_it(llama):
    with serving(llama) as [server]:
        status, value = server.ask("/reload_weights", {"folder": "x", "version": 1})
        assert status == 403 and "shared_dir=FOLDER" in value["error"]
        assert server.end() == 0


def test_the_arguments_of_the_server_are_checked(capsys):
    assert run_main(serve.main, "modl_name=x", "port=99999") == 2
    assert "did you mean model_name?" in capsys.readouterr().err
    assert run_main(serve.main, "model_name=x", "port=99999", "engine=server") == 2
    errors = capsys.readouterr().err
    assert "port=99999: it must be below 65536" in errors and "engine=server: choose" in errors
    assert run_main(serve.main, "--help") == 0
    assert "shared_dir=null" in capsys.readouterr().out


def test_a_server_that_dies_is_replaced_and_comes_back_with_the_weights(
    llama, shared, monkeypatch, capsys
):
    monkeypatch.delenv(serve.TOKEN, raising=False)
    words = (llama, f"shared_dir={shared}", "dtype=float32")
    local = LocalEngine(EngineSettings(llama, torch.float32, CPU))
    prompts = [[5, 6, n] for n in range(3, 43)]
    expected = [out.tokens for out in play(local, prompts, max_new_tokens=300)]
    with serving(*words, count=2) as [first, second]:
        options = {"server_urls": [first.url, second.url], "shared_dir": str(shared)}
        wrong = EngineSettings(llama, torch.bfloat16, CPU, **options)
        with pytest.raises(RuntimeError, match="has dtype=torch.float32, and this run needs"):
            ServerEngine(wrong)
        engine = ServerEngine(EngineSettings(llama, torch.float32, CPU, **options))
        stranger = threading.Timer(0.3, lambda: [s.ask("/abort", {}) for s in (first, second)])
        stranger.start()
        answers = play(engine, prompts, max_new_tokens=300)
        assert [out.tokens for out in answers] == expected, "cut by another client's abort"
        stranger.join()
        killer = threading.Timer(0.3, first.process.kill)
        killer.start()
        answers = play(engine, prompts, max_new_tokens=300)
        assert [out.tokens for out in answers] == expected
        killer.join()
        first.process.wait()
        assert [out.tokens for out in play(engine, prompts, max_new_tokens=300)] == expected
        assert capsys.readouterr().out.count("is left out until the next step") == 1

        port = first.url.rpartition(":")[2]
        with serving(*words, port=port) as [restarted]:
            # It has the model of the start, as its version says, but not from this run.
            refused = {"prompts": [[5]], "weights": engine.weights}
            assert restarted.ask("/generate", refused)[0] == 409
            engine.load_weights(local.model.named_parameters(), 1)
            for server in (restarted, second):
                assert server.ask("/health")[1]["weights"] == engine.weights
            second.process.kill()
            second.process.wait()
            assert [out.tokens for out in play(engine, prompts, max_new_tokens=300)] == expected
        with pytest.raises(RuntimeError, match="no server is left"):
            play(engine, prompts, max_new_tokens=300)
        engine.close()


def test_a_run_with_servers_has_the_bits_of_one_without(llama, tmp_path):
    """Of two servers, one is killed in the third step."""
    common = [*letter_run(tmp_path, llama), "rollout.exact=true"]
    common += ["trainer.max_steps=6", "trainer.save_dir={}"]
    command = ("-m", "rl2.trainer.ppo", *common)
    launch(2, *[word.format(tmp_path / "local") for word in command])
    shared, run = tmp_path / "shared", tmp_path / "server"
    shared.mkdir()
    with serving(llama, f"shared_dir={shared}", "dtype=float32", count=2) as servers:
        urls = ",".join(server.url for server in servers)
        keys = [
            "rollout.engine=server",
            f"rollout.server_urls=[{urls}]",
            f"rollout.shared_dir={shared}",
        ]

        def kill_one():
            while not (run / "metrics.jsonl").exists() or len(read_metrics(run)) < 2:
                time.sleep(0.01)
            servers[0].process.kill()

        killing = threading.Thread(target=kill_one, daemon=True)
        killing.start()
        done = launch(2, *[word.format(run) for word in command], *keys)
        killing.join()
        assert servers[1].ask("/health")[1]["weights"]["version"] == 6
    assert f"left out until the next step: {servers[0].url}" in done.stdout
    assert read_untimed_metrics(run) == read_untimed_metrics(tmp_path / "local")
    assert not list(shared.iterdir()), "weights are left behind"
