"""`rl2 chat FOLDER`: talk to the model of a run, or of any model folder."""

import argparse
import sys
from dataclasses import fields
from datetime import date
from pathlib import Path

from rl2.run.records import read_object

LONGEST_ANSWER = 512  # tokens


def main() -> None:
    """Answers questions until the input ends. Exits with status 2 if there is no model."""
    parser = argparse.ArgumentParser(
        prog="rl2 chat",
        description="Answers what you type with the model of a run, greedily, after the run's "
        "data.system_prompt. Ctrl-D ends. `transformers chat FOLDER` has options.",
    )
    about = "of a run, or of a model, such as RUN/best_model"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    folder = parser.parse_args().folder
    try:
        talk(folder if (folder / "config.json").is_file() else folder / "model")
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 chat: {error}\n")
    except (EOFError, KeyboardInterrupt):
        print()


def talk(path: Path) -> None:
    """Answers with the model in `path`. EOFError when the input ends, ValueError without one."""
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} holds no model; a run exports it at its end")
    import torch  # these take seconds, and --help does not need them
    from transformers import AutoConfig, AutoTokenizer, TextStreamer
    from transformers.utils.logging import disable_progress_bar

    from rl2.config.schema import PromptConfig
    from rl2.inputs import make_chat_template
    from rl2.model.classes import language_model_class

    disable_progress_bar()
    config = AutoConfig.from_pretrained(path)
    if "SequenceClassification" in str(config.architectures):
        raise ValueError(f"{path} is a reward model, which scores answers and gives none")
    model = language_model_class(config).from_pretrained(path, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    # The keys of data that shape a prompt; the SYSTEM_PROMPT of an env file is not among them. The
    # export has the chat template.
    keys = {field.name for field in fields(PromptConfig)} - {"chat_template"}
    given = read_object(path.parent / "config.yaml").get("data", {})
    data = PromptConfig(**{name: given[name] for name in keys & given.keys()})
    template = make_chat_template(data, tokenizer, date.today().isoformat())
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages: list[dict[str, str]] = []
    while True:
        question = input("\n> " if sys.stdin.isatty() else "").strip()
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        prompt = torch.tensor([template.encode_prompt(messages)])
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id or 0,
            streamer=streamer,
        )
        reply = str(tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": reply})
