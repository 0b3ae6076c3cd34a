"""Checkpoints: whole or absent, moved between layouts, and what a resumed run does next."""

import pytest
import torch
from common import make_model, torchrun
from transformers import AutoModelForCausalLM

from rl2.checkpoint import Checkpoints, find_checkpoint


def test_a_checkpoint_moves_between_layouts(tmp_path):
    name, folder = make_model(tmp_path / "model"), tmp_path / "run"
    torchrun(2, "tests/moves.py", "save", name, folder)
    assert [path.name for path in folder.glob("step_*")] == ["step_1"]
    saved = torch.load(folder / "save_2")
    assert saved["versions"] == [2, 2]
    for mode, world in (("load", 2), ("load", 1), ("load_hybrid", 2), ("load_sp", 2), ("load_tp", 2)):
        torchrun(world, "tests/moves.py", mode, name, folder)
        loaded = torch.load(folder / f"{mode}_{world}")
        assert loaded["versions"] == [2, 2]
        same = mode == "load" and world == 2
        for worker, told in saved["told"].items():
            for key, value in told.items():
                assert loaded["told"][worker][key] == (value if same else pytest.approx(value, abs=1e-6)), (
                    mode,
                    world,
                )
        for key, weight in saved["weights"].items():
            assert torch.equal(loaded["weights"][key], weight) or not same, key
            torch.testing.assert_close(loaded["weights"][key], weight, rtol=0, atol=5e-5)
        if same:
            assert torch.equal(loaded["drawn"], saved["drawn"])  # the random state went on
    exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    bf16 = AutoModelForCausalLM.from_pretrained(folder / "export_bf16", dtype="auto")
    assert {weight.dtype for weight in bf16.parameters()} == {torch.bfloat16}, "the dtype of the source is lost"
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(bf16.parameters(), exported.parameters(), strict=True))
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
