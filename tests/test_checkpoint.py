"""Tests of checkpoints: layouts, resumed runs, incomplete checkpoints, errors while saving."""

import signal
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from common import check_adapter, launch, make_tokenizer
from parity import make_batch, policy_loss, worker_config
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.run.checkpoints import Checkpoints
from rl2.run.signals import user_errors
from rl2.run.weights_hash import hash_states
from rl2.worker import Worker


def test_a_checkpoint_moves_between_layouts(model, tmp_path):
    folder = tmp_path / "run"
    # Sequence parallelism shards as "load" does.
    two_ranks = ["load", "load_hybrid", "load_tp"]
    launch(2, "tests/moves.py", model, folder, "save", *two_ranks)
    assert [path.name for path in folder.glob("step_*")] == ["step_1"]
    saved = torch.load(folder / "save_2")
    assert saved["versions"] == [2] * 3
    launch(1, "tests/moves.py", model, folder, "load")
    for mode, world in [("load", 1), *((mode, 2) for mode in two_ranks)]:
        loaded = torch.load(folder / f"{mode}_{world}")
        assert loaded["versions"] == [2] * len(saved["metrics"])
        is_same_layout = mode == "load" and world == 2
        assert loaded["hashes"].items() <= saved["hashes"].items(), "the layout is hashed too"
        assert loaded["state_hashes"].items() <= saved["state_hashes"].items()
        assert loaded["metrics"].keys() == saved["metrics"].keys()
        for worker, metrics in loaded["metrics"].items():
            for key, value in saved["metrics"][worker].items():
                expected = value if is_same_layout else pytest.approx(value, rel=1e-6, abs=1e-6)
                assert metrics[key] == expected, (mode, world)
        for key, weight in loaded["weights"].items():
            assert torch.equal(saved["weights"][key], weight) or not is_same_layout, key
            torch.testing.assert_close(saved["weights"][key], weight, rtol=0, atol=5e-5)
        if is_same_layout:
            # The state of the random number generator is in the checkpoint.
            assert torch.equal(loaded["random_numbers"], saved["random_numbers"])
    keys = FileSystemReader(folder / "step_1").read_metadata().state_dict_metadata
    names = {key.removeprefix("lora.model.") for key in keys if key.startswith("lora.model.")}
    assert len(names) == 1 + 2 * 7 * 2 and all(".lora_" in key or "score" in key for key in names)
    check_adapter(AutoModelForSequenceClassification, model, folder / "lora")
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    bf16 = AutoModelForCausalLM.from_pretrained(folder / "export_bf16", dtype="auto")
    dtypes = {weight.dtype for weight in bf16.parameters()}
    assert dtypes == {torch.bfloat16}, "the dtype of the policy is lost"
    for weight, fp32_weight in zip(bf16.parameters(), exported.parameters(), strict=True):
        assert torch.equal(weight, fp32_weight.bfloat16())
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    for key, weight in exported.named_parameters():
        assert torch.equal(weight, saved["exported"][key]), key


def test_an_exported_optimizer_goes_on(model, tmp_path, device):
    worker = Worker(worker_config(model, lr=1e-3), device, False, 8)
    worker.update(make_batch(), policy_loss, with_entropy=True)
    export = str(tmp_path / "export")
    worker.export(export, make_tokenizer(), with_optimizer=True)
    config = worker_config(model, lr=1e-3, optimizer_dir=export)
    hashes = []
    for each in (worker, Worker(config, device, False, 8)):
        hashes.append(hash_states({"actor": each}, {"actor": each.optimizer.state_dict()}))
    assert hashes[0] == hashes[1]


def test_a_full_disk_gives_an_error_of_one_line(tmp_path, monkeypatch, capsys, device):
    """The previous checkpoint remains. Every rank prints an error, rank 0 first."""
    (tmp_path / "step_2").mkdir()

    def fail(*_, **__):
        raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(dcp, "save", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: capsys.readouterr())
    handler = signal.getsignal(signal.SIGTERM)
    for rank, prefix in (("0", "error: "), ("1", "error on rank 1: ")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit), user_errors():
            Checkpoints(tmp_path).save(4, {}, {})
        error = capsys.readouterr().err
        assert error.startswith(
            f"{prefix}the checkpoint {tmp_path / 'step_4'} could not be written ("
        )
        assert "GiB are free there): " in error
        assert f"No space left on device; {tmp_path / 'step_2'} is the newest" in error
    assert not (tmp_path / "step_4.partial").exists(), "it takes the space that is missing"
    assert Checkpoints(tmp_path).steps() == [2]
    signal.signal(signal.SIGTERM, handler)
