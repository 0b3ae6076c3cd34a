"""Chat templates: milliseconds to extend a conversation by the environment's messages, by length.

    python benchmarks/lab/chat.py MODEL [--lengths 2048 8192 32768] [--repeats 5]

MODEL is a folder or a name of the hub; its tokenizer and chat template are used. A turn has 200
sampled tokens. "whole" renders, tokenises and decodes the whole conversation again; both must give
the same tokens. The engine's loop waits for an extension, so its time is lost to all requests.
"""

import argparse
import json
import random
import statistics
import time

from transformers import AutoTokenizer

from rl2.data.chat import ChatTemplate

TURN_TOKENS = 200


def extend_whole(template, tokens, messages, new_messages):
    """The extension by a comparison of whole texts."""
    old_text = template.decode(tokens)
    whole_text = template.decode(template.encode_prompt(messages + new_messages))
    new_tokens = template.tokenize(whole_text[len(old_text) :])
    return new_tokens if template.decode(tokens + new_tokens) == whole_text else None


def play(template: ChatTemplate, length: int) -> tuple[list[int], int, list[dict], list[dict]]:
    """A conversation of about `length` tokens, as `extend` takes it."""
    words = random.Random(0).choices("the sum of 12 and 30 is 42 . café ✓ not".split(), k=length)
    end = template.tokenizer.eos_token_id
    messages = [{"role": "user", "content": "What is the sum?"}]
    tokens = template.encode_prompt(messages)
    while True:
        start = len(tokens)
        text = " ".join(words[start : start + TURN_TOKENS])
        sampled = [*template.tokenize(text)[:TURN_TOKENS], end]
        messages.append({"role": "assistant", "content": template.decode_reply(sampled, [end])})
        tokens += sampled
        new_messages = [{"role": "user", "content": f"Turn {len(messages)}: and then?"}]
        if len(tokens) >= length:
            return tokens, len(sampled), messages, new_messages
        tokens += extend_whole(template, tokens, messages, new_messages)
        messages += new_messages


def milliseconds(repeats: int, function, *arguments) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(*arguments)
        times.append(time.perf_counter() - start)
    return round(1000 * statistics.median(times), 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    template = ChatTemplate(AutoTokenizer.from_pretrained(arguments.model))
    repeats = arguments.repeats
    for length in arguments.lengths:
        tokens, num_sampled, messages, new_messages = play(template, length)
        conversation = (tokens, num_sampled, messages, new_messages)
        whole = extend_whole(template, tokens, messages, new_messages)
        assert template.extend(*conversation) == whole is not None
        result = {
            "tokens": len(tokens),
            "messages": len(messages),
            "whole_ms": milliseconds(
                repeats, extend_whole, template, tokens, messages, new_messages
            ),
            "extend_ms": milliseconds(repeats, template.extend, *conversation),
            "render_ms": milliseconds(repeats, template.render, messages),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
