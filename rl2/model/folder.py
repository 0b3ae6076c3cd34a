"""What a model folder or a model of the hub has to hold, checked before anything slow begins.

`key` is the key of the config that names the model: every message begins with it and its value.
"""

import json
import sys
from pathlib import Path

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from rl2.model.classes import is_language_model
from rl2.model.weight_files import INDEX, quantization_problem

HUB_TIMEOUT_SECONDS = 10.0
# Scalings of rotary positions that depend on the longest sequence of a forward pass.
SCALED_ROPE = ("dynamic", "longrope")


def load_tokenizer(key: str, name: str, critic: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model `name`, which is checked first. ValueError in words."""
    check_model(key, name, critic)
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises many types for a missing or a broken file
        raise ValueError(
            f"{key}={name}: its tokenizer cannot be read ({_first_line(error)}); copy "
            "tokenizer.json and tokenizer_config.json from the model that it was made of"
        ) from error


def check_model(key: str, name: str, critic: bool = False) -> None:
    """ValueError if there is no such model, if it is of another kind, or if files are not whole."""
    label = f"{key}={name}"
    folder = Path(name)
    if folder.exists():
        _check_files(label, folder)
    else:
        _check_hub(label, name)
    _check_kind(label, _read_config(label, name), critic)


def check_config(key: str, name: str) -> None:
    """ValueError if there is no such model. Its weights need not be there."""
    if not Path(name).exists():
        _check_hub(f"{key}={name}", name)
    _read_config(f"{key}={name}", name)


def check_tokens(key: str, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError unless the model `name` has the tokens of `tokenizer`, which is the actor's."""
    ids = load_tokenizer(key, name).get_vocab()
    actor_ids = tokenizer.get_vocab()
    if ids != actor_ids:
        token = min(set(ids.items()) ^ set(actor_ids.items()))[0]
        raise ValueError(
            f"{key}={name}: its tokens are not the actor's, so it cannot score the actor's "
            f"answers: {token!r} is number {ids.get(token)} there and {actor_ids.get(token)} in "
            "the actor; choose a model with the actor's tokenizer"
        )


def load_eos_token_ids(name: str) -> list[int]:
    """The end-of-sequence tokens of the generation config, else of the config."""
    try:
        eos = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # there is no generation_config.json
        eos = None
    if eos is None:
        eos = AutoConfig.from_pretrained(name).get_text_config().eos_token_id
    ids = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in ids if token_id is not None]


def check_length(key: str, name: str, num_tokens: int, problem: str) -> None:
    """ValueError with the problem if a sequence of `num_tokens` is too long for the model."""
    limit = max_positions(name)
    if num_tokens > limit:
        raise ValueError(
            f"{key}={name}: a sequence may have at most {limit} tokens (max_position_embeddings, "
            f"or where {' and '.join(SCALED_ROPE)} positions change), but {problem}"
        )


def max_positions(name: str) -> int:
    """The most tokens of a sequence of the model `name`; sys.maxsize if any number will do.

    Some scalings of rotary positions begin at a length: they would scale all sequences of a pack by
    the longest one. No sequence may reach that length.
    """
    text = AutoConfig.from_pretrained(name).get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    parameters = getattr(text, "rope_parameters", None) or {}
    for rope in [parameters] + list(parameters.values()):  # of all layers, or of each kind of layer
        if isinstance(rope, dict) and rope.get("rope_type") in SCALED_ROPE:
            limits.append(rope.get("original_max_position_embeddings"))
    return min(int(limit or sys.maxsize) for limit in limits)


def _check_hub(label: str, name: str) -> None:
    """One request instead of the library's retries, which take 24 to 48 seconds."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{label}: there is no such folder")
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            url = hf_hub_url(name, "config.json")
            get_hf_file_metadata(url, timeout=HUB_TIMEOUT_SECONDS)
    except GatedRepoError as error:
        raise ValueError(
            f"{label}: ask for access on the model's page of the hub, then run `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, EntryNotFoundError) as error:
        raise ValueError(
            f"{label}: there is no such folder, and the hub has no such model, or a private one "
            "(then run `hf auth login`)"
        ) from error
    except Exception as error:  # no network, a wrong name, offline mode
        raise ValueError(
            f"{label}: there is no such folder, and the hub at {constants.ENDPOINT} does not give "
            f"it ({_first_line(error)}); give the path of a folder"
        ) from error


def _check_files(label: str, folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise ValueError(f"{label}: this is not a model folder: it has no config.json")
    files = set(folder.glob("*.safetensors"))
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text())
        files |= {folder / file for file in index["weight_map"].values()}
    if not files and not list(folder.glob("*.bin")):
        raise ValueError(f"{label}: the folder has no weights (model.safetensors)")
    for file in sorted(files):
        if not file.exists():
            raise ValueError(f"{label}: {file.name} is missing, which {INDEX} names; copy it again")
        try:
            safe_open(file, "pt")  # it compares the size with the header
        except SafetensorError as error:
            raise ValueError(
                f"{label}: {file.name} is not whole ({file.stat().st_size:,} bytes); copy it again "
                "(or run `git lfs pull`)"
            ) from error


def _read_config(label: str, name: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{label}: its config cannot be read ({_first_line(error)})") from error


def _check_kind(label: str, config: PreTrainedConfig, critic: bool) -> None:
    """Whether it is a language model; for a critic, a model with one label does as well."""
    if problem := quantization_problem(config):
        raise ValueError(f"{label}: {problem}")
    [architecture] = (config.architectures or [""])[:1]
    is_classifier = "Classification" in architecture
    if critic:
        if is_classifier and config.num_labels != 1:
            raise ValueError(f"{label}: it scores {config.num_labels} labels; a critic has one")
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ValueError(
                f"{label}: transformers has no model of the type {config.model_type} with a value "
                "head (ForSequenceClassification); choose another one"
            )
    elif is_classifier:
        raise ValueError(
            f"{label}: this is a reward model or a classifier ({architecture}) without a language "
            "head; give a causal language model here, and this one as critic.model_name"
        )
    elif not is_language_model(config):
        raise ValueError(f"{label}: {config.model_type} is not a causal language model")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
