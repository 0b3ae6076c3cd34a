"""Tests LoRA's adapters in the real vLLM on a CPU: the trainer's answers, wrong adapters, runs."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm", reason="run by tests/vllm_cpu/run.sh, in an environment with vllm")
from common import VLLM_SIZES, letter_run, make_model, make_tokenizer, read_metrics, torchrun  # noqa: E402
from engine_contract import check_abort, check_stop_strings, play  # noqa: E402
from test_lora import save_with_peft  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from workers import PROMPTS, answer, gap, make_worker, send, update  # noqa: E402

from rl2.model.lora import LoraSettings  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")


def make_adapted(name, **changes):
    return make_worker(name, **{"lora_rank": 3, **changes})


def send_adapters(engine, worker):
    send(engine, worker.iter_adapters(worker.dtype), worker.version)


def verify(engine, worker):
    engine.verify_weights(worker.iter_unmerged_weights(worker.dtype), worker.version)


@pytest.mark.parametrize(
    ("family", "dtype", "changes"),
    [
        ("llama", "float32", {}),
        ("qwen3", "bfloat16", {"lora_rank": 16}),
        ("qwen2", "float32", {"lora_targets": ["q_proj", "layers.1.mlp.down_proj"]}),
        ("qwen3", "float32", {"lora_targets": ["up_proj"], "lora_alpha": 5.0, "lora_rank": 9}),
        ("phi3", "float32", {}),
        ("gemma3", "float32", {}),
        ("mistral", "float32", {}),
    ],
)
def test_log_probabilities_are_the_trainers(tmp_path, engine_of, family, dtype, changes):
    """Before and after updates, as near as those of merged weights, also to the same prompts."""
    name = make_model(tmp_path / family, family, tied=False, **VLLM_SIZES)
    worker = make_adapted(name, dtype=dtype, **changes)
    engine = engine_of(worker)
    assert engine.version is None, "new adapters have no values yet"
    send_adapters(engine, worker)
    verify(engine, worker)
    limit = 2e-5 if dtype == "float32" else 2e-2
    start = answer(engine)
    assert gap(worker, start) < limit
    for _ in range(2):
        update(worker)
        send_adapters(engine, worker)
        assert gap(worker, answer(engine)) < limit
    assert gap(worker, start) > 20 * limit, "the updates change nothing that could be seen"
    verify(engine, worker)
    adapted = gap(worker, answer(engine))
    merged = engine_of(worker, adapters=None)
    merged.load_weights(worker.iter_full_weights(worker.dtype), worker.version)
    merged_gap = gap(worker, answer(merged))
    print(f"{family} {dtype}: mean gap {adapted:.1e} with adapters, {merged_gap:.1e} merged")
    assert adapted < 2 * merged_gap + 1e-6


def test_wrong_and_missing_adapters_are_found(tied, engine_of):
    worker = make_adapted(tied, lora_targets=["q_proj", "down_proj"])
    update(worker)
    engine = engine_of(worker)
    with pytest.raises(RuntimeError, match="has no adapters"):
        verify(engine, worker)
    with pytest.raises(AssertionError, match="incomplete"):
        play(engine, [[5]], max_new_tokens=1)
    send_adapters(engine, worker)
    verify(engine, worker)
    old = answer(engine)
    update(worker)
    with pytest.raises(RuntimeError, match=r"4 weights of vLLM .*layers\.0\.mlp\.down_proj"):
        verify(engine, worker)  # the adapters before the update
    assert engine.version is None
    verify(engine, worker)  # it has loaded them
    assert engine.version == 2
    assert gap(worker, answer(engine)) < 2e-5 < gap(worker, old)

    layers = engine.adapters._layers()
    number = engine.adapters.request.lora_int_id
    for name, change in (
        ("model.layers.1.self_attn.q_proj", lambda a: a[0, 0, 2, 5].view(torch.int32)),
        ("model.layers.0.self_attn.v_proj", lambda a: a[0, 0, 2, 5].view(torch.int32)),
    ):
        change(layers[name][0]).bitwise_xor_(1)  # v_proj has no adapter
        with pytest.raises(RuntimeError, match=f"1 weights of vLLM .*{name}"):
            verify(engine, worker)
        layers = engine.adapters._layers()
    engine.engine.apply_model(lambda model: model.model.norm.weight.data.add_(1))
    with pytest.raises(RuntimeError, match=r"1 weights of vLLM .*model\.norm"):
        verify(engine, worker)

    assert number != engine.adapters.request.lora_int_id
    engine.engine.remove_lora(engine.adapters.request.lora_int_id)
    with pytest.raises(RuntimeError, match="lost the adapters"):
        engine.version = 2
        play(engine, PROMPTS, max_new_tokens=2)
    with pytest.raises(RuntimeError, match="has lost them"):
        verify(engine, worker)

    adapters = dict(worker.iter_adapters(torch.float32))
    last = max(adapters)
    for wrong, words in (
        (dict(worker.iter_full_weights(torch.float32)), "is unknown to"),
        ({**adapters, last: adapters[last][1:]}, f"weight {last} is"),
        ({name: x for name, x in adapters.items() if name != last}, f"1 .*{last}"),
        ({}, "weights did not arrive"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load_weights(wrong.items(), 3)
        assert engine.version is None
    send_adapters(engine, worker)
    verify(engine, worker)
    assert gap(worker, answer(engine)) < 2e-5


def test_prefixes_of_older_adapters_are_not_found(tied, engine_of):
    """Although none are thrown away here."""
    worker = make_adapted(tied)
    engine = engine_of(worker)
    send_adapters(engine, worker)
    cached = []
    schedule = engine.engine.engine_core.engine_core.scheduler.schedule

    def counting_schedule(*args, **kwargs):
        output = schedule(*args, **kwargs)
        cached.extend(request.num_computed_tokens for request in output.scheduled_new_reqs)
        return output

    engine.engine.engine_core.engine_core.scheduler.schedule = counting_schedule
    for expected in (0, 32 + 64 + 32):  # blocks of 32 tokens
        answer(engine, temperature=0.0)
        assert sum(cached) == expected
        cached.clear()
    for _ in range(2):
        update(worker)
        engine.adapters.load(dict(worker.iter_adapters(torch.float32)))
        assert gap(worker, answer(engine)) < 2e-5
        assert sum(cached) == 0
        cached.clear()


def test_answers_with_adapters_stop_and_are_aborted(tied, engine_of):
    worker = make_adapted(tied)
    for _ in range(2):
        update(worker)
    engine = engine_of(worker, stop=["some"], max_running_requests=16)
    send_adapters(engine, worker)
    model = AutoModelForCausalLM.from_pretrained(tied, dtype=torch.float32)
    model.load_state_dict(dict(worker.iter_full_weights(torch.float32)), strict=False)
    check_abort(engine, [*PROMPTS, [7, 5], [30] * 12], model)
    check_stop_strings(engine, PROMPTS, make_tokenizer())
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeping"):
        play(engine, [[5]], max_new_tokens=1)


def test_adapters_of_a_folder(tied, engine_of, tmp_path):
    """With other ranks and scales in single layers: from the start, and trained further."""
    patterns = {"rank_pattern": {"o_proj": 5}, "alpha_pattern": {"up_proj": 3}}
    folder = tmp_path / "adapter"
    save_with_peft(folder, tied, r=2, target_modules=["v_proj", "o_proj", "up_proj"], **patterns)
    worker = make_adapted(tied, adapter=str(folder), lora_rank=2)
    engine = engine_of(worker)
    assert engine.version == 0
    start = answer(engine)
    assert gap(worker, start) < 2e-5
    verify(engine, worker)
    update(worker)
    send_adapters(engine, worker)
    assert gap(worker, answer(engine)) < 2e-5 < gap(worker, start)


def test_what_vllm_cannot_adapt_is_refused(tied, engine_of):
    worker = make_adapted(tied)
    with pytest.raises(ValueError, match=r"4 layers .*mlp\.down_proj.* set rollout.lora=merged"):
        engine_of(worker, engine_args={"lora_target_modules": ["qkv_proj", "gate_up_proj"]})
    with pytest.raises(ValueError, match="actor.lora_rank=600: .* up to 512"):
        engine_of(worker, adapters=LoraSettings(600, 64.0))
    engine = engine_of(worker)  # after a start that has failed
    send_adapters(engine, worker)
    verify(engine, worker)


def test_a_run_trains_adapters_and_resumes(tied, tmp_path):
    """All weights are compared in every step. The last run samples on a process of its own."""
    command = [
        *["-m", "rl2.trainer.ppo", *letter_run(tmp_path, tied)],
        "rollout.engine=vllm",
        "rollout.check_weights=true",
        "rollout.lora=adapter",
        "actor.lora_rank=8",
        "actor.lr=0.03",
        "trainer.save_freq=6",
    ]
    torchrun(2, *command, f"trainer.save_dir={tmp_path / 'run'}")
    lines = read_metrics(tmp_path / "run")
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[0] < 0.25 and sum(rewards[-3:]) / 3 > 0.5
    assert all((line["actor/mismatch_logp_difference"] or 0) < 1e-4 for line in lines)
    resume = f"trainer.resume={tmp_path / 'run/checkpoints/step_6'}"
    torchrun(2, *command, resume, f"trainer.save_dir={tmp_path / 'resumed'}")
    resumed = [line["reward/mean"] for line in read_metrics(tmp_path / "resumed")]
    # Rounding may move a draw, and what follows it has another context.
    assert resumed == pytest.approx(rewards[6:], abs=0.05)
    apart = ["rollout.num_processes=1", "trainer.max_steps=3"]
    torchrun(2, *command, *apart, f"trainer.save_dir={tmp_path / 'apart'}")
    assert len(read_metrics(tmp_path / "apart")) == 3


def test_evaluations_of_adapters(tied, tmp_path):
    """Those of a folder, without training; and before training, where B = 0 changes nothing."""
    folder = tmp_path / "adapter"
    save_with_peft(folder, tied, r=4, target_modules=["q_proj", "up_proj"])
    common = [
        *["-m", "rl2.trainer.ppo", *letter_run(tmp_path, tied)],
        f"data.test_path={tmp_path / 'train.jsonl'}",
        "rollout.engine=vllm",
    ]
    adapter = "rollout.lora=adapter"
    variants = {
        "base": ["trainer.eval_only=true"],
        "folder": ["trainer.eval_only=true", f"actor.adapter={folder}", adapter],
        "new": ["actor.lora_rank=4", "trainer.max_steps=1", adapter],
        "further": [f"actor.adapter={folder}", "trainer.max_steps=1", adapter],
    }
    answers = {}
    for name, words in variants.items():
        torchrun(1, *common, *words, f"trainer.save_dir={tmp_path / name}")
        path = tmp_path / name / "rollouts/test/step_0.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        answers[name] = [record["messages"][-1]["content"] for record in records]
    assert answers["base"] == answers["new"] != answers["folder"] == answers["further"]
