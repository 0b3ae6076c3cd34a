"""Models with towers: a text model that is trained, beside parts that see images or hear audio.

Prompts are text, so a tower takes no part in training. It is loaded in the dtype of the computation
and frozen, and goes to the engine and into the exported folder, which the original class loads.
"""

import shutil

from transformers import PreTrainedModel
from transformers.utils import cached_file

from rl2.model.attachment import Attachment, ModelSettings, Read
from rl2.model.classes import idle_parts, text_parts
from rl2.parallel.rank import is_first_rank

# What a processor of images or audio is read from.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


class Towers(Attachment):
    """Freezes all of a model but its text part, and keeps the towers in the computation's dtype."""

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "Towers | None":
        towers = idle_parts(hf)
        if not towers:
            return None
        text = {id(weight) for part in text_parts(hf) for weight in part.parameters()}
        for weight in hf.parameters():
            if id(weight) not in text:  # also a weight beside the towers (LLaVA-NeXT)
                weight.requires_grad_(False)
        for tower in towers:
            tower.to(settings.dtype)
        return cls()

    def save(self, hf: PreTrainedModel, folder: str, read: Read) -> None:
        """Copies the files of the model's processor of images or audio."""
        for file in PROCESSOR_FILES if is_first_rank() else ():
            path = cached_file(
                str(hf.config.name_or_path),
                file,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            if path is not None:
                shutil.copy(path, folder)
