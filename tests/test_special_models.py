"""Models with sinks, caps, a biased head, recurrent layers or towers: layouts, exports, whole runs.

test_windows.py compares their answers with transformers, the admission their log-probabilities and
gradients.
"""

import sys

import pytest
import torch
from common import (
    RECURRENT,
    SPECIAL,
    launch,
    launch_runs,
    letter_run,
    make_model,
    make_routed,
    make_tokenizer,
    read_metrics,
    read_untimed_metrics,
    same_weights,
)
from parity import (
    SMALL_BUDGET,
    assert_equal_steps,
    make_batch,
    plain_scores,
    policy_loss,
    save_layouts,
    two_steps,
    worker_config,
)
from test_towers import FAMILIES as TOWERS
from test_towers import load_plain, save_family
from transformers import AutoModelForCausalLM

from rl2.worker import Worker

FAMILIES = [*SPECIAL, *RECURRENT, *TOWERS, "glm4_moe"]


# Of two processes. Models with sinks have no plan of tensor parallelism that rl2 knows, and
# recurrent ones no ring.
LAYOUTS = {"fsdp": {}, "sp": {"sp_size": 2}, "tp": {"tp_size": 2}}


def families_of(layout):
    """Families whose layers differ in this layout."""
    if layout == "fsdp":
        return [*RECURRENT, *TOWERS, "glm4_moe"]
    return [*SPECIAL, *TOWERS] if layout == "sp" else ["gemma2", "phi"]


def two_updates(folder, families, **changes):
    """The results of two updates by the name of the family."""
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1, **changes}
    results = {}
    for family in families:
        name = f"{folder}/{family}"
        results[family] = two_steps(name, False, torch.device("cpu"), make_batch(), **settings)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family, overrides in (SPECIAL | RECURRENT).items():
        make_model(folder / family, family, **overrides)
    for family in TOWERS:
        save_family(family, folder / family)
    make_routed(folder / "glm4_moe")
    return folder


def test_layouts_give_the_updates_of_one_process(folder, device):
    """Their gradients are clipped, so that a wrong sum shows in the norm. Every process has the
    buffers.
    """
    launch(2, __file__, folder, folder / "out")
    expected = two_updates(folder, FAMILIES, share_prompts=False)
    starts = {}
    for family in FAMILIES:
        load = load_plain if family in TOWERS else AutoModelForCausalLM.from_pretrained
        starts[family] = load(folder / family).state_dict()
    for layout, results in torch.load(folder / "out").items():
        assert list(results) == families_of(layout)
        for family, result in results.items():
            assert_equal_steps(result, expected[family], (layout, family), 1e-4, 1e-3)
            for key, weight in expected[family]["weights"].items():
                error = (result["weights"][key] - weight).norm()
                moved = (weight - starts[family][key]).norm()  # small tensors move by little
                assert error <= 2e-3 * moved + 1e-7, (layout, family, key)


@pytest.mark.parametrize("family", SPECIAL)
def test_an_export_is_the_trained_model(folder, tmp_path, device, family):
    name = str(folder / family)
    batch = make_batch()
    worker = Worker(worker_config(name, lr=1e-2), device, False, 4)
    before = worker.score(batch).logps
    worker.update(batch, policy_loss, with_entropy=True)
    logps = worker.score(batch).logps
    assert (logps - before).abs().max() > 1e-3
    worker.export(str(tmp_path / "export"), make_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, attn_implementation="eager"
    )
    expected = plain_scores(plain, batch).logps
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
    stored = dict(AutoModelForCausalLM.from_pretrained(name).named_parameters())
    for key, weight in plain.named_parameters():  # sinks and biases are trained too
        if key.endswith(("sinks", "lm_head.bias")):
            assert not torch.equal(weight, stored[key])


RUNS = [(family, []) for family in RECURRENT if family in ("lfm2", "qwen3_next")]
QLORA = ["actor.lora_rank=4", "actor.quantize_base=nf4", "kl.coef=0.001", "kl.type=loss"]
RUNS.append(("llama", QLORA))


@pytest.mark.nightly
@pytest.mark.parametrize("family, keys", RUNS)
def test_grpo_runs_and_resumes_to_equal_bits(tmp_path, family, keys):
    """Three steps of two processes; the engine's log-probabilities are those of the trainer.

    The reference of a base in 4 bits is that base.
    """
    sizes = RECURRENT.get(family, {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16})
    name = make_model(tmp_path / "tiny", family, **sizes)
    arguments = ["ppo", *letter_run(tmp_path, name), *keys]
    arguments += ["trainer.max_steps=3", "trainer.save_freq=2"]
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    resume = [f"trainer.resume={run / 'checkpoints/step_2'}", f"trainer.save_dir={resumed}"]
    launch_runs(2, [[*arguments, f"trainer.save_dir={run}"], [*arguments, *resume]])
    lines = read_metrics(run)
    assert len(lines) == 3
    for line in lines:
        assert line["actor/grad_norm"] > 0
        assert abs(line["actor/mismatch_logp_difference"]) < 1e-4
    if keys:
        assert lines[0]["actor/kl"] == 0 and lines[-1]["actor/kl"] > 0
    last_lines = [line for line in read_untimed_metrics(run) if line["step"] > 2]
    assert read_untimed_metrics(resumed) == last_lines
    assert same_weights(run / "model", resumed / "model")
    assert not same_weights(run / "model", name)


if __name__ == "__main__":  # a process of the test of layouts
    settings = {key: {"families": families_of(key), **keys} for key, keys in LAYOUTS.items()}
    save_layouts(two_updates, settings, *sys.argv[1:])
