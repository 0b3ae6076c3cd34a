"""Checkpoints: whole or absent, moved between layouts, and what a resumed run does next."""

import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import check_adapter, make_model, torchrun
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.parallel.mesh import init_distributed
from rl2.run_folder import Checkpoints, find_checkpoint
from rl2.signals import user_errors


def test_a_checkpoint_moves_between_layouts(tmp_path):
    name, folder = make_model(tmp_path / "model"), tmp_path / "run"
    torchrun(2, "tests/moves.py", "save", name, folder)
    assert [path.name for path in folder.glob("step_*")] == ["step_1"]
    saved = torch.load(folder / "save_2")
    assert saved["versions"] == [2, 2, 2]
    for mode, world in (
        ("load", 2),
        ("load", 1),
        ("load_hybrid", 2),
        ("load_sp", 2),
        ("load_tp", 2),
    ):
        torchrun(world, "tests/moves.py", mode, name, folder)
        loaded = torch.load(folder / f"{mode}_{world}")
        assert loaded["versions"] == [2, 2, 2][: len(loaded["told"])]
        same = mode == "load" and world == 2
        assert loaded["told"].keys() == saved["told"].keys() - (
            {"lora"} if mode == "load_tp" else set()
        )
        for worker, told in loaded["told"].items():
            for key, value in saved["told"][worker].items():
                assert told[key] == (value if same else pytest.approx(value, abs=1e-6)), (
                    mode,
                    world,
                )
        for key, weight in loaded["weights"].items():
            assert torch.equal(saved["weights"][key], weight) or not same, key
            torch.testing.assert_close(saved["weights"][key], weight, rtol=0, atol=5e-5)
        if same:
            assert torch.equal(loaded["drawn"], saved["drawn"])  # the random state went on
    held = FileSystemReader(folder / "step_1").read_metadata().state_dict_metadata
    names = {key.removeprefix("lora.model.") for key in held if key.startswith("lora.model.")}
    assert len(names) == 1 + 2 * 7 * 2 and all(".lora_" in key or "score" in key for key in names)
    check_adapter(AutoModelForSequenceClassification, name, folder / "lora")
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    bf16 = AutoModelForCausalLM.from_pretrained(folder / "export_bf16", dtype="auto")
    assert {weight.dtype for weight in bf16.parameters()} == {torch.bfloat16}, (
        "the dtype of the source is lost"
    )
    assert all(
        torch.equal(a, b.bfloat16())
        for a, b in zip(bf16.parameters(), exported.parameters(), strict=True)
    )
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    for key, weight in exported.named_parameters():
        assert torch.equal(weight, saved["exported"][key]), key


def test_what_is_not_whole_is_not_found(tmp_path):
    (tmp_path / "step_9.partial").mkdir()
    (tmp_path / "step_9.partial" / "run.json").write_text("{}")
    assert Checkpoints(tmp_path).steps() == []
    assert find_checkpoint("auto", tmp_path) is None
    for step in (2, 10):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / "run.json").write_text("{}")
    assert find_checkpoint("auto", tmp_path).name == "step_10"
    assert find_checkpoint("off", tmp_path) is None
    assert find_checkpoint(str(tmp_path / "step_2"), "elsewhere").name == "step_2"
    assert find_checkpoint(str(tmp_path), "elsewhere").name == "step_10"
    with pytest.raises(ValueError, match="no complete checkpoint"):
        find_checkpoint(str(tmp_path / "step_9.partial"), "elsewhere")


def test_a_full_disk_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    """What another process of the run says does not drown it, and the checkpoint before stands."""
    init_distributed()
    (tmp_path / "step_2").mkdir()

    def fail(*_, **__):
        raise CheckpointException("write", {1: (OSError(28, "No space left on device"), None)})

    monkeypatch.setattr(dcp, "save", fail)
    monkeypatch.setattr(time, "sleep", lambda seconds: capsys.readouterr())
    handler = signal.getsignal(signal.SIGTERM)
    for rank, begin in (("0", "error: "), ("1", "error on rank 1: ")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit), user_errors():
            Checkpoints(tmp_path).save(4, {}, "")
        words = (
            "the checkpoint of step 4 could not be written: [Errno 28] No space left on "
            "device; step_2 is the newest"
        )
        assert capsys.readouterr().err.startswith(begin + words)
    assert Checkpoints(tmp_path).steps() == [2]
    with pytest.raises(SystemExit), user_errors():
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:19374")
    assert "another process ended" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="not ours"), user_errors():
        raise RuntimeError("not ours")  # with its traceback
    signal.signal(signal.SIGTERM, handler)
    dist.destroy_process_group()
