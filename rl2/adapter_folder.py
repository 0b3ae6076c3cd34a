"""What a folder of LoRA adapters, as peft writes it, has to hold to be trained further."""

import json
from pathlib import Path
from typing import Any

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

# Settings of peft that change what an adapted layer computes, or which weights are trained, each
# with the values that mean plain LoRA.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "lora_bias": (False,),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
    "modules_to_save": (None, [], ["score"]),
    # The others take something out of the base weights, which the folder does not say.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}


def read_adapter_config(folder: str) -> dict[str, Any]:
    """The settings of the adapters in `folder`, by peft's names.

    ValueError, in words that follow the name of the folder, if they cannot be trained further.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError("no such folder")
    if not (path / CONFIG).is_file():
        hint = "; it holds a whole model" if (path / "config.json").is_file() else ""
        raise ValueError(f"this folder holds no adapters (no {CONFIG}){hint}")
    if not (path / WEIGHTS).is_file():
        raise ValueError(f"it has no {WEIGHTS}; save the adapters as safetensors")
    try:
        config: dict[str, Any] = json.loads((path / CONFIG).read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{CONFIG} is no JSON: {error}") from error
    for name, values in PLAIN.items():
        if name in config and config[name] not in values:
            raise ValueError(f"{name}={config[name]} is not supported; rl2 trains plain LoRA")
    if type(config.get("r")) is not int:
        raise ValueError(f"{CONFIG} has no rank r")
    return config
