"""Chat templates of 30 families times random conversations: what is trained is what was sampled.

templates/ has fixtures of our own that behave as the published templates of the families do. Their
tokenizers are small, byte by byte, with the special tokens of the family.
"""

import asyncio
import random
import re
from os.path import commonprefix
from types import SimpleNamespace
from unittest import mock

import pytest
from chat_families import BYTES, DATE, FAMILIES, TEMPLATES, TOOLS, make_template, write_calls
from env_helpers import env_of
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example, render_sft
from rl2.engine.base import Generation, SamplingParams
from rl2.env.contract import EnvFailures
from rl2.env.load import make_env
from rl2.rollout.player import Player
from rl2.rollout.trajectory import begin_group, place_reward

NUM_CONVERSATIONS = 25  # of each family, in each test


def test_every_template_has_a_family():
    assert sorted(FAMILIES) == sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
    assert len(FAMILIES) >= 20


def expected_text(template: ChatTemplate, messages: list, tools=None, next_reply=True) -> str:
    """The template's text of the messages, by transformers.

    Where it refuses or hides a message, the tools' messages are the user's; and where it still
    refuses, those of one role in a row are one.
    """
    as_user = [{**m, "role": "user"} if m["role"] == "tool" else m for m in messages]
    joined = []
    for message in as_user:
        if joined and joined[-1]["role"] == message["role"] == "user":
            content = f"{joined[-1]['content']}\n\n{message['content']}"
            joined[-1] = {**joined[-1], "content": content}
        else:
            joined.append(message)
    today = SimpleNamespace(now=lambda: DATE)
    hidden = [re.search(r"m\d+", m["content"])[0] for m in messages if m["role"] == "tool"]
    for attempt in (messages, as_user, joined):
        try:
            with mock.patch.object(chat_template_utils, "datetime", today):
                text = template.tokenizer.apply_chat_template(
                    attempt,
                    tools=tools,
                    add_generation_prompt=next_reply,
                    tokenize=False,
                    **template.variables,
                )
        except TemplateError:
            continue
        if all(marker in text for marker in hidden):
            return text
    raise AssertionError(f"the template refuses {messages}")


class Writer:
    """Random texts, replies and conversations. Each text has a marker, m and a number."""

    def __init__(self, name: str, template: ChatTemplate, seed: int):
        self.rng = random.Random(f"{name} {seed}")
        self.family = FAMILIES[name]
        self.template = template
        self.num_markers = 0

    def text(self) -> str:
        self.num_markers += 1
        words = ["the", " the", "other ", "é✓", "\n", "\n\n", "  ", '{"a": 1}', "'"]
        before, after = self.rng.choices(words, k=2)
        return f"{before} m{self.num_markers} {after}"

    def reply(self) -> str:
        reasoning = self.rng.choice(["", "", "", "<think>\nhm \n</think>\n\n", "hm</think>"])
        return reasoning + self.text()

    def sampled_reply(self) -> tuple[list[int], str]:
        """(tokens, finish reason) of a reply, in tokens that the tokenizer might not choose."""
        tokenizer = self.template.tokenizer
        inside = [*self.family.special.split(), *self.family.added.split()]
        inside = [token for token in inside if token not in self.family.ends]
        pieces = [self.rng.choice(["", "", " ", "\n"]), self.reply()]
        pieces += self.rng.choices(["", "", "", *inside], k=1) + [self.rng.choice(["", "x", "\n"])]
        tokens = []
        for piece in pieces:
            if piece in inside:
                tokens.append(tokenizer.convert_tokens_to_ids(piece))
            elif self.rng.random() < 0.5:
                tokens += self.template.tokenize(piece)
            else:
                tokens += tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in piece.encode()])
        if self.rng.random() < 0.1:
            tokens += tokenizer.convert_tokens_to_ids([BYTES[byte] for byte in "✓".encode()[:2]])
        # A turn that a stop string ends has no end of turn.
        end = self.rng.choice([*[self.family.eos] * 5, *self.family.ends, "", "length"])
        if end in self.family.ends:
            tokens.append(tokenizer.convert_tokens_to_ids(end))
        return tokens, "length" if end == "length" else "stop"

    def messages(self, roles: list[str]) -> list[dict]:
        return [{"role": role, "content": self.text()} for role in roles]

    def prompt(self) -> list[dict]:
        roles = ["system"] if self.family.has_system and self.rng.random() < 0.4 else []
        roles += ["user", "assistant"] * self.rng.choice([0, 0, 1])
        return self.messages([*roles, "user"])

    def tools(self) -> list | None:
        return self.rng.choice([None, TOOLS])

    def environment_messages(self) -> list[dict]:
        choices = [["user"]] * 3 + [["tool"]] * 3 + [["tool", "tool"], ["user", "user"], []]
        return self.messages(self.rng.choice(choices))


class ScriptedEngine:
    """Samples the replies of a writer. Some requests are aborted, and the next one goes on."""

    version = 0
    max_running_requests = 1

    def __init__(self, writer: Writer):
        self.writer = writer
        self.trajectory = None
        self.calls: list[tuple[list[int], list[int]]] = []  # prompt and new tokens of each
        self.messages: list[list[dict] | None] = []  # before each; None: the request goes on
        self.turns: list[tuple[list[int], str]] = []  # tokens and finish reason of each turn
        self.rest: tuple[list[int], str] | None = None  # of an aborted reply

    async def generate(self, prompt, params, seed):
        self.messages.append(None if self.rest else list(self.trajectory.messages))
        tokens, reason = self.rest or self.writer.sampled_reply()
        if not self.rest:
            self.turns.append((tokens, reason))
        self.rest = None
        if len(tokens) > 1 and self.writer.rng.random() < 0.1:
            cut = self.writer.rng.randrange(len(tokens))
            self.rest = tokens[cut:], reason
            tokens, reason = tokens[:cut], "abort"
        self.calls.append((list(prompt), tokens))
        logps = [-len(self.calls) - i / 1000 for i in range(len(tokens))]
        return Generation(list(tokens), logps, reason, self.version)


def play(template: ChatTemplate, engine: ScriptedEngine, messages: list, tools=None, env=None):
    """The trajectory that begins with `messages`, played to its end.

    Without an env the writer of the engine gives the messages of the environment.
    """
    write = engine.writer.environment_messages
    env = env or env_of(lambda messages: 1.0, interact=lambda messages: write())
    ends = template.tokenizer.convert_tokens_to_ids(engine.writer.family.ends)
    params = SamplingParams(max_new_tokens=500, stop_token_ids=tuple(ends))
    templates = {"": template}
    player = Player(engine, {"": env}, templates, EnvFailures(0.0), max_turns=5, max_length=10**6)
    row = {"messages": messages, "tools": tools}
    group = begin_group(0, Example(0, row, [(template.encode_prompt(messages, tools), [])]), 1)
    engine.trajectory = group.trajectories[0]
    asyncio.run(player.play(engine.trajectory, params, (0,)))
    env.close()
    assert engine.trajectory.finish_reason in ("stop", "length"), player.failures.last
    place_reward(engine.trajectory)
    return engine.trajectory


@pytest.mark.parametrize("name", FAMILIES)
def test_every_sampled_token_is_trained_once_behind_what_the_policy_saw(name):
    template = make_template(name)
    num_turns = 0
    for seed in range(NUM_CONVERSATIONS):
        template.variables["enable_thinking"] = seed % 2 == 0
        writer = Writer(name, template, seed)
        engine = ScriptedEngine(writer)
        tools = writer.tools()
        trajectory = play(template, engine, writer.prompt(), tools)
        num_turns += trajectory.num_turns
        check_prompts(template, engine, tools)
        check_replies(template, trajectory, engine)
        check_training(trajectory, engine)
    assert num_turns > 2 * NUM_CONVERSATIONS


def check_prompts(template, engine, tools):
    """The policy saw the template's text of the conversation, as the tokenizer gives it back."""
    for (prompt, _), messages in zip(engine.calls, engine.messages, strict=True):
        if messages is not None:
            text = expected_text(template, messages, tools)
            assert template.decode(prompt) == template.decode(template.tokenize(text))


def check_replies(template, trajectory, engine):
    """The env saw the text of the sampled tokens without the end of turn."""
    ends = template.tokenizer.convert_tokens_to_ids(engine.writer.family.ends)
    new_messages = trajectory.messages[len(trajectory.row["messages"]) :]
    replies = [m["content"] for m in new_messages if m["role"] == "assistant"]
    for reply, (tokens, _) in zip(replies, engine.turns, strict=True):
        tokens = tokens[:-1] if tokens[-1] in ends else tokens
        assert reply == template.tokenizer.decode(tokens)


def check_training(trajectory, engine):
    """Each call's tokens are trained once, at the place where they were sampled."""
    samples = iter(trajectory.samples)
    sample = next(samples)
    masks = [[0] * len(sample.tokens)]
    for prompt, tokens in engine.calls:
        end = len(prompt) + len(tokens)
        if sample.tokens[:end].tolist() != prompt + tokens:
            sample = next(samples)
            masks.append([0] * len(sample.tokens))
        assert sample.tokens[:end].tolist() == prompt + tokens
        assert masks[-1][len(prompt) : end] == [0] * len(tokens), "trained twice"
        masks[-1][len(prompt) : end] = [1] * len(tokens)
    assert [sample.mask.tolist() for sample in trajectory.samples] == masks
    logps = [logp for sample in trajectory.samples for logp in sample.logps if logp]
    assert len(logps) == sum(len(tokens) for _, tokens in engine.calls) == trajectory.length
    assert logps == sorted(logps, key=lambda logp: (-int(logp), -logp))
    assert sum(sum(sample.rewards) for sample in trajectory.samples) == 1.0


class Look:
    """An environment with a tool, whose results have markers."""

    num_looks = 0

    def look(self, place: str) -> str:
        """Looks at a place.

        Args:
            place: where to look
        """
        self.num_looks += 1
        return f'{{"seen": "m{self.num_looks} at {place}"}}'

    def reward(self):
        return 1.0


class Caller(Writer):
    """Calls tools in two turns, twice in the second one, and then answers."""

    def __init__(self, name, template):
        super().__init__(name, template, seed=0)
        self.rng.random = lambda: 1.0  # no request is aborted
        calls = [("look", {"place": place}) for place in ("here", "é✓")]
        calls.append(("look", {"place": "", "m7": 2}))
        first, *second = [write_calls(template, self.family, "", call) for call in calls]
        separator = "; " if name == "llama3_1" else ""
        texts = [first, separator.join(second), "done"]
        if name == "deepseek_r1":  # whose prompt begins the reasoning
            texts = [f"hm</think>{text}" for text in texts]
        self.turns = iter([template.tokenize(text + self.family.eos) for text in texts])

    def sampled_reply(self):
        return next(self.turns), "stop"


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_shown_called_and_answered_token_by_token(name):
    template = make_template(name)
    engine = ScriptedEngine(Caller(name, template))
    env = make_env({"make_env": Look})
    with mock.patch("rl2.rollout.player.find_unshown", return_value=[]):
        trajectory = play(template, engine, [{"role": "user", "content": "Where?"}], env=env)
    results = [m for m in trajectory.messages if m["role"] == "tool"]
    assert [m["name"] for m in results] == ["look"] * 3 and trajectory.num_turns == 3
    assert [m["content"] for m in results] == [
        '{"seen": "m1 at here"}',
        '{"seen": "m2 at é✓"}',
        "error: look: got an unexpected keyword argument 'm7'",
    ]
    check_prompts(template, engine, env.tools)
    check_replies(template, trajectory, engine)
    check_training(trajectory, engine)
    question = [{"role": "user", "content": "?"}]
    shows_tools = template.render(question, TOOLS) != template.render(question)
    assert ("Looks at a place." in template.decode(engine.calls[0][0])) == shows_tools


class CleanReplies(Writer):
    """Replies as the template writes them."""

    def sampled_reply(self):
        reply = self.family.clean_reply.format("the 4")
        return self.template.tokenize(reply + (self.family.clean_end or self.family.eos)), "stop"


@pytest.mark.parametrize("name", FAMILIES)
def test_turns_share_a_sequence_where_the_template_keeps_the_text_before(name):
    template = make_template(name)
    family = FAMILIES[name]
    question = {"role": "user", "content": "Sure?"}
    for with_system, expected in zip((False, True), family.num_sequences, strict=True):
        if with_system and not family.has_system:
            continue
        system = [{"role": "system", "content": "Be brief."}] if with_system else []
        writer = CleanReplies(name, template, 0)
        writer.rng.random = lambda: 1.0  # no request is aborted
        writer.environment_messages = iter([[question], [question], []]).__next__
        trajectory = play(template, ScriptedEngine(writer), [*system, question])
        assert trajectory.num_turns == 3 and len(trajectory.samples) == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_sft_trains_every_reply_once_and_nothing_else(name):
    template = make_template(name)
    for seed in range(NUM_CONVERSATIONS):
        template.variables["enable_thinking"] = seed % 2 == 0
        writer = Writer(name, template, seed)
        row = {"messages": conversation(writer), "tools": writer.tools()}
        replies = []
        for before, whole in render_sft(template, row):
            replies.append((template.tokenize(before), template.tokenize(whole)))
        sequences = template.training_sequences(replies)
        trained = ""
        for tokens, mask in sequences:
            pairs = zip(tokens, mask, strict=True)
            trained += template.decode([token for token, trains in pairs if trains])
        parts = [
            expected_parts(template, row, writer.family, i)
            for i, message in enumerate(row["messages"])
            if message["role"] == "assistant"
        ]
        check_sequences(template, parts, sequences)
        check_trained_text(template, parts, writer.family, trained)
        for message in row["messages"]:
            markers = re.findall(r"m\d+", str(message))
            is_reply = message["role"] == "assistant"
            for marker in markers:
                assert len(re.findall(rf"{marker}\b", trained)) == is_reply, marker


def conversation(writer: Writer) -> list[dict]:
    """Messages that end with a reply, with calls of tools where the template has them."""
    messages = writer.prompt()
    for _ in range(writer.rng.randint(1, 3)):
        if writer.family.has_calls and writer.rng.random() < 0.4:
            function = {"name": "calc", "arguments": {"x": writer.text()}}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            result = {"role": "tool", "content": writer.text(), "tool_call_id": "abcdefghi"}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        messages += [{"role": "assistant", "content": writer.reply()}, *writer.messages(["user"])]
    return messages[:-1]


def check_sequences(template, parts, sequences):
    """Each sequence is the conversation up to a reply, and the last one that up to the last.

    `parts` has the text before each reply, and the reply.
    """
    wholes = [template.tokenize(before + reply) for before, reply in parts]
    eos = template.tokenizer.eos_token_id
    for tokens, _ in sequences:
        assert any(tokens in (whole, [*whole, eos]) for whole in wholes)
    assert sequences[-1][0] in (wholes[-1], [*wholes[-1], eos])


def expected_parts(template, row, family, i) -> tuple[str, str]:
    """The text of the conversation up to reply number `i` of the row, and of the reply."""
    before = expected_text(template, row["messages"][:i], row["tools"])
    whole = expected_text(template, row["messages"][: i + 1], row["tools"], next_reply=False)
    if family.moves_system and row["messages"][0]["role"] == "system":
        # The text with the reply lacks the system prompt, which its prompt has.
        return before, re.split(r"\[/INST\]|\[/TOOL_RESULTS\]", whole)[-1]
    common = commonprefix([before, whole])
    content = row["messages"][i]["content"]
    if "hm" in content and "hm" not in whole[len(common) - 1 :]:
        # DeepSeek's template cuts the reasoning, but the whole reply is trained.
        return before, content.removeprefix("<think>\n") + family.eos
    return common, whole[len(common) :]


def check_trained_text(template, parts, family, trained):
    """The replies as the template writes them, up to the end of turn, or the end of sequence."""
    special = "|".join(re.escape(template.decode([token])) for token in template.special_ids)
    for _, reply in parts:
        match = re.fullmatch(rf"(.*(?:{special}))\s*", reply, re.DOTALL)
        reply = match[1] if match else reply + template.tokenizer.eos_token
        if family.strips_right:  # the header takes the white space behind it
            reply = reply.lstrip()
        reply = template.decode(template.tokenize(reply))
        if trained.startswith(f"\n{reply}"):  # a newline before it is in one token with its first
            reply = f"\n{reply}"
        assert trained.startswith(reply), (trained, reply)
        trained = trained.removeprefix(reply)
    assert not trained
