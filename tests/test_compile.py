"""Compares models whose layers are compiled with the same models as they are."""

from common import launch, make_model


def test_layouts_train_the_same_with_compiled_layers(tmp_path):
    """FSDP, a ring with adapters, gradient checkpointing, packs of many lengths."""
    launch(2, "tests/compile_layouts.py", make_model(tmp_path, "qwen3", tied=False))
