"""`rl2 chat RUN`: talk to the model of a run, beside the model that it started from."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl2.run.records import read_object

if TYPE_CHECKING:  # these take seconds, and --help does not need them
    from rl2.data.chat import ChatTemplate
    from rl2.model.lora import LoraSettings

NEW = "/new"


def main() -> None:
    """Reads questions and prints the answers until the input ends.

    Exits with status 2 if the run has no model to talk to.
    """
    parser = argparse.ArgumentParser(
        prog="rl2 chat",
        description="Answers what you type with the model of a run, beside the model that it "
        f"started from. Each remembers its own conversation; {NEW} begins another one, Ctrl-D "
        "ends. System prompt and solved examples are those of the run.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run")
    parser.add_argument(
        "--best", action="store_true", help="the model of the best evaluation (trainer.save_best)"
    )
    parser.add_argument("--alone", action="store_true", help="without the start model")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="divides the logits; 0, the default, is greedy",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, help="longest answer (%(default)s)"
    )
    arguments = parser.parse_args()
    try:
        speakers = load_speakers(arguments)
        for text in answer(read_questions(sys.stdin), speakers):
            print(text, flush=True)
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 chat: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\n")


@dataclass
class Speaker:
    """A model with its conversation so far."""

    name: str
    model: Any
    template: "ChatTemplate"
    temperature: float
    max_new_tokens: int
    messages: list[dict[str, Any]] = field(default_factory=list)

    def reply(self, question: str) -> str:
        """Samples the answer, which the conversation then holds. ValueError if it is too long."""
        import torch

        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = torch.tensor([self.template.encode_prompt(messages)])
        longest = getattr(self.model.config, "max_position_embeddings", None)
        if longest and prompt.shape[1] + self.max_new_tokens > longest:
            raise ValueError(
                f"the conversation has {prompt.shape[1]} tokens and the model {longest} positions: "
                f"begin another one with {NEW}, or lower --max-new-tokens"
            )
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0}
        tokens = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=self.max_new_tokens,
            pad_token_id=self.template.tokenizer.pad_token_id or 0,
            **sampling,
        )
        new = tokens[0, prompt.shape[1] :]
        text = str(self.template.tokenizer.decode(new, skip_special_tokens=True))
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text


def load_speakers(arguments: argparse.Namespace) -> list[Speaker]:
    """Loads the start model and that of the run. ValueError or OSError if there is none."""
    folder: Path = arguments.run
    config = read_object(folder / "config.yaml")
    if not config:
        raise ValueError(f"{folder} is no folder of a run: it has no config.yaml")
    if "rm" in config:
        raise ValueError(
            f"{folder} has trained a reward model, which scores answers and gives none"
        )
    name = "best_model" if arguments.best else "model"
    path = folder / name
    if not (path / "config.json").is_file():
        remedy = "trainer.save_best keeps one" if arguments.best else "a run exports it at its end"
        raise ValueError(f"{path}: there is no model; {remedy}")

    import transformers

    from rl2.model.lora import inject_for_engine
    from rl2.model.towers import language_model_class

    transformers.logging.disable_progress_bar()
    template = make_template(path, config["data"])
    actor = config["actor"]
    models = {str(path): path}
    if not arguments.alone:
        models = {"start": actor["model_name"], **models}
    speakers = []
    for name, model_name in models.items():
        model_class = language_model_class(transformers.AutoConfig.from_pretrained(model_name))
        model = model_class.from_pretrained(model_name, dtype="auto").eval()
        if name == "start" and actor.get("adapter"):
            inject_for_engine(model, read_settings(actor), model.dtype)
        speakers.append(
            Speaker(name, model, template, arguments.temperature, arguments.max_new_tokens)
        )
    return speakers


def read_settings(actor: dict[str, Any]) -> "LoraSettings":
    """The adapters that the run has trained further. `actor` is that section of its config."""
    from rl2.model.lora import LoraSettings

    return LoraSettings(actor["lora_rank"], actor["lora_alpha"], folder=actor["adapter"])


def make_template(path: Path, values: dict[str, Any]) -> "ChatTemplate":
    """The chat template of the exported model, with what the run put before its conversations."""
    import transformers

    from rl2.config.schema import PromptConfig
    from rl2.trainer.inputs import make_chat_template

    known = {item.name for item in fields(PromptConfig)} - {"chat_template"}  # it is in the export
    data = PromptConfig(**{name: value for name, value in values.items() if name in known})
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return make_chat_template(data, tokenizer, date.today().isoformat())


def read_questions(file: Any) -> Iterator[str]:
    """Yields the lines that are typed, without those that are empty."""
    if not file.isatty():
        yield from filter(None, map(str.strip, file))
        return
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            return
        if question:
            yield question


def answer(questions: Iterable[str], speakers: list[Speaker]) -> Iterator[str]:
    """Yields what each speaker says to each question."""
    for question in questions:
        for speaker in speakers:
            if question == NEW:
                speaker.messages = []
                continue
            try:
                yield f"{speaker.name}: {speaker.reply(question)}"
            except ValueError as error:
                yield f"{speaker.name}: ({error})"
