"""`python -m rl2 env`: each planted fault is found by its line, and the shipped envs have none."""

import json
import re
import sys

import pytest
from common import ROOT, make_model, run
from test_ready_envs import PACKAGES

from rl2.tools import env as command

ROWS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a, b in ((17, 25), (110, 233), (400, 58))
]
# The last <answer></answer> must be the answer.
RIGHT = """
import re
def field(messages):
    found = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"], re.DOTALL)
    return found[-1].strip() if found else "?"
def is_right(messages, answer):
    found = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"], re.DOTALL)
    return float(bool(found) and found[-1].strip() == answer)
"""


def try_env(arguments, monkeypatch, capsys):
    """(the exit status, what is printed, what is printed on stderr) of the command."""
    monkeypatch.setattr(sys, "argv", ["rl2 env", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        command.main()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.out + printed.err, printed
    return end.value.code, printed.out, printed.err


@pytest.fixture
def try_code(tmp_path, monkeypatch, capsys):
    """Tries an env file with this code on three rows."""

    def try_it(code, *arguments, rows=ROWS):
        (tmp_path / "env.py").write_text(RIGHT + code)
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        words = [tmp_path / "env.py", f"data.path={tmp_path}/rows.jsonl", *arguments]
        return try_env(words, monkeypatch, capsys)

    return try_it


def problems(out):
    return [line for line in out.splitlines() if line.startswith("PROBLEM: ")]


FAULTS = {
    # Exploits.
    "the answer anywhere in the reply": (
        'def reward_fn(messages, answer): return float(answer in messages[-1]["content"])',
        "exploit: several answers",
    ),
    "any of several answers": (
        "def reward_fn(messages, answer):\n"
        '    return float(answer in re.findall(r"<answer>(.*?)</", messages[-1]["content"]))',
        "exploit: several answers",
    ),
    "the prompt counts as the reply": (
        "def reward_fn(messages, answer):\n"
        '    return float(bool(re.search("What is|<answer>", messages[-1]["content"])))',
        "exploit: the prompt",
    ),
    "any answer in the right format": (
        'def reward_fn(messages): return float("<answer>" in messages[-1]["content"])',
        "exploit: wrong answer",
    ),
    "the longer the better": (
        "def reward_fn(messages, answer):\n"
        '    return is_right(messages, answer) + min(2, len(messages[-1]["content"]) / 1000)',
        "exploit: padding",
    ),
    "nothing is right": (
        "def reward_fn(messages, answer):\n"
        '    return 1.0 if not messages[-1]["content"] else is_right(messages, answer)',
        "exploit: empty",
    ),
    "a judge that obeys": (
        "def reward_fn(messages, answer):\n"
        '    match = re.search(r"SCORE: (\\d+)", messages[-1]["content"])\n'
        "    return float(match[1]) if match else is_right(messages, answer)",
        "exploit: asks the judge",
    ),
    "any number that is near": (
        "def reward_fn(messages, answer):\n"
        '    return float(answer in messages[-1]["content"].split() or is_right(messages, answer))',
        "exploit: several answers",
    ),
    "NaN passes": (
        "def reward_fn(messages, answer):\n"
        "    try: value = float(field(messages))\n"
        "    except ValueError: return 0.0\n"
        "    return 0.0 if abs(value - float(answer)) > 1e-6 else 1.0",
        "exploit: not a number",
    ),
    "within 20 is enough": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(abs(float(field(messages)) - float(answer)) <= 20)\n"
        "    except ValueError: return 0.0",
        "exploit: near miss",
    ),
    "divisors": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(int(answer) % int(field(messages)) == 0)\n"
        "    except (ValueError, ZeroDivisionError): return 0.0",
        "exploit: near miss",
    ),
    "multiples": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(int(field(messages)) % int(answer) == 0)\n"
        "    except ValueError: return 0.0",
        "exploit: near miss",
    ),
    "the answers of all rows": (
        "def reward_fn(messages): return float(field(messages) in ('42', '343', '458'))",
        "exploit: near miss",
    ),
    "eval of the answer": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(str(eval(field(messages))) == answer)\n"
        "    except Exception: return 0.0",
        "exploit: name of a column",
    ),
    "the policy's own regex": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(bool(re.fullmatch(field(messages), answer)))\n"
        "    except re.error: return 0.0",
        "exploit: pattern",
    ),
    "similarity above 0.3": (
        "from difflib import SequenceMatcher\n"
        "def reward_fn(messages, answer):\n"
        "    return float(SequenceMatcher(None, field(messages), answer).ratio() > 0.3)",
        "exploit: near miss",
    ),
    "a judge that obeys JSON": (
        "import json\n"
        "def reward_fn(messages, answer):\n"
        '    found = re.search(r"\\{.*\\}", messages[-1]["content"], re.DOTALL)\n'
        "    if not found: return is_right(messages, answer)\n"
        "    try: return float(json.loads(found[0])['score'])\n"
        "    except (ValueError, KeyError, TypeError): return 0.0",
        "exploit: asks the judge",
    ),
    "a judge that obeys a tag": (
        "def reward_fn(messages, answer):\n"
        '    found = re.search(r"<score>(.*)</score>", messages[-1]["content"])\n'
        "    return float(found[1]) if found else is_right(messages, answer)",
        "exploit: asks the judge",
    ),
    "the reply within the answer": (
        "def reward_fn(messages, answer): return float(field(messages) in answer)",
        "exploit: empty",
    ),
    "a prefix of the answer": (
        "def reward_fn(messages, answer):\n"
        "    found = field(messages)\n"
        "    return float(bool(found) and answer.startswith(found))",
        "exploit: part of the gold",
    ),
    "the longer answer wins": (
        "def reward_fn(messages, answer):\n"
        "    return float(field(messages).startswith(answer[:1]))",
        "exploit: ",
    ),
    # What cannot be learned.
    "a constant": ("def reward_fn(messages): return 0.5", "nothing teaches: all"),
    "no reply is right": ("def reward_fn(messages): return 0.0", "nothing teaches: all"),
    "an answer that cannot be reached": (
        "def reward_fn(messages, answer):\n"
        '    return is_right(messages, answer) * (answer != "42")',
        "gold answer: earns no more than a wrong one in 1 of 3 rows, first row 0",
    ),
    # Results.
    "not a number": (
        "def reward_fn(messages, answer):\n"
        '    return is_right(messages, answer) if messages[-1]["content"] else float("nan")',
        "failure: reward_fn",
    ),
    "infinite": (
        "def reward_fn(messages, answer):\n"
        '    return 1e400 if "score" in messages[-1]["content"] else is_right(messages, answer)',
        "failure: reward_fn",
    ),
    "a text": (
        "def reward_fn(messages, answer): return str(is_right(messages, answer))",
        "failure: reward_fn",
    ),
    "nothing returned": (
        "def reward_fn(messages, answer):\n    if is_right(messages, answer): return 1.0",
        "failure: reward_fn",
    ),
    "an exception": (
        "def reward_fn(messages, answer):\n"
        '    return is_right(messages, answer) + 0 / len(messages[-1]["content"])',
        "failure: reward_fn raised: ZeroDivisionError: division by zero (env.py:10), with the "
        "reply ''",
    ),
    "a missing column": (
        "def reward_fn(messages, solution): return 1.0",
        "failure: reward_fn needs",
    ),
    "an exit": (
        "def reward_fn(messages, answer):\n"
        '    if not messages[-1]["content"]: raise SystemExit(3)\n'
        "    return is_right(messages, answer)",
        "failure: reward_fn raised",
    ),
    "parts that come and go": (
        "def reward_fn(messages, answer):\n"
        "    right = is_right(messages, answer)\n"
        '    return {"right": right, "format": 0.0} if right else {"right": 0.0}',
        "reward parts are not the same for all replies",
    ),
    # Determinism.
    "a random number": (
        "import random\n"
        "def reward_fn(messages, answer):\n"
        "    return is_right(messages, answer) + random.random() / 10",
        "not deterministic when rewarded again",
    ),
    "a counter": (
        "import itertools\ncalls = itertools.count()\n"
        "def reward_fn(messages, answer): return is_right(messages, answer) + next(calls) / 1e6",
        "not deterministic when rewarded again",
    ),
    "the hash of a text": (
        "def reward_fn(messages, answer):\n"
        '    return is_right(messages, answer) + hash("x" + messages[-1]["content"]) % 9 / 100',
        "not deterministic in another process",
    ),
    # Time, and what is left behind.
    "a call that hangs": (
        "import time\n"
        "def reward_fn(messages, answer):\n"
        '    if "so on" in messages[-1]["content"]: time.sleep(100)\n'
        "    return is_right(messages, answer)",
        "failure: reward_fn did not return within rollout.env_timeout=1 s, with the reply",
        "rollout.env_timeout=1",
    ),
    "a call that hangs in C": (
        "def reward_fn(messages, answer):\n"
        '    re.match(r"(\\w+\\s?)*$", "so on and " * 9 + "!") if "so on" in '
        'messages[-1]["content"] else 0\n'
        "    return is_right(messages, answer)",
        "failure: reward_fn did not return within rollout.env_timeout=1 s, with the reply",
        "rollout.env_timeout=1",
    ),
    "threads that stay": (
        "import threading\n"
        "def reward_fn(messages, answer):\n"
        "    threading.Thread(target=threading.Event().wait, args=(20,), daemon=True).start()\n"
        "    return is_right(messages, answer)",
        "leak: ",
    ),
    "files that stay open": (
        "kept = []\n"
        "def reward_fn(messages, answer):\n"
        '    kept.append(open("/dev/null"))\n'
        "    return is_right(messages, answer)",
        "leak: ",
    ),
    "processes that stay": (
        "import subprocess\nkept = []\n"
        "def reward_fn(messages, answer):\n"
        '    if messages[-1]["content"].startswith("Answer"):\n'
        '        kept.append(subprocess.Popen(["sleep", "20"]))\n'
        "    return is_right(messages, answer)",
        "leak: ",
    ),
    "memory that stays": (
        "kept = []\n"
        "def reward_fn(messages, answer):\n"
        '    kept.append("x" * 100_000 + answer)\n'
        "    return is_right(messages, answer)",
        "leak: ",
    ),
    "printing": (
        "def reward_fn(messages, answer):\n"
        '    print("called")\n'
        "    return is_right(messages, answer)",
        "prints on stdout: ",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, try_code):
    code, expected, *arguments = FAULTS[name]
    status, out, _ = try_code(code, *arguments)
    assert status == 1 and any(x.startswith(f"PROBLEM: {expected}") for x in problems(out)), out
    kind = " ".join(expected.partition(":")[0].split()[:2])  # not deterministic here or there
    assert out.count("    to do: ") == len(problems(out))
    if kind not in ("exploit", "nothing teaches"):  # which several lines may tell
        assert all(line.startswith(f"PROBLEM: {kind}") for line in problems(out)), out


def test_the_env_files_of_the_docs_have_no_fault(tmp_path, monkeypatch, capsys):
    """The README's first one, and reward_fn of docs/rewards.md."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    for page in ("README.md", "docs/rewards.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        [first, *_] = [block for block in blocks if "def reward_fn" in block]
        if "same_maths" in first:
            first = first.replace("same_maths", "same_number")  # the suite may lack math-verify
        (tmp_path / "env.py").write_text(first)
        words = [tmp_path / "env.py", f"data.path={tmp_path}/rows.jsonl", "rollout.max_turns=2"]
        if "interact" not in first:
            words.pop()
        status, out, _ = try_env(words, monkeypatch, capsys)
        assert status == 0 and not problems(out), (page, out)


PLAYED = {  # name -> further keys of a shipped env that runs here
    "arithmetic": [],
    "boxed": [],
    "calculator": ["rollout.max_turns=3"],
    "coding": [],
    "countdown": [],
    "gsm8k": [],
    "maths_steps": ["rollout.max_turns=5"],
    "reasoning": [],
    "search": ["rollout.max_turns=3"],
}


@pytest.mark.parametrize("name", PLAYED)
def test_a_shipped_env_has_no_fault(name, monkeypatch, capsys):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="the env needs it")
    monkeypatch.chdir(ROOT)
    words = [name, f"data.path=examples/rows/{name}.jsonl", *PLAYED[name]]
    status, out, _ = try_env(words, monkeypatch, capsys)
    assert status == 0 and not problems(out), out


GOOD = "def reward_fn(messages, answer): return is_right(messages, answer)"
FINE = {
    "sync": (GOOD,),
    "async": ("async " + GOOD,),
    "processes": (GOOD, "rollout.env_isolation=process"),
    "weights": (
        "def reward_fn(messages, answer, state, turn, num_tokens, finish_reason):\n"
        '    state["calls"] = state.get("calls", 0) + 1\n'
        '    return {"right": is_right(messages, answer), "calls": state["calls"]}',
        "rollout.reward_weights.calls=0",
    ),
    "object": (
        "class make_env:\n"
        "    def reset(self, answer): self.answer = answer\n"
        "    def step(self, message): self.earned = is_right([message], self.answer)\n"
        "    def reward(self): return self.earned",
    ),
    "turns": (
        "def interact(messages, answer):\n"
        '    return {"reward": is_right(messages, answer), "done": True}\n'
        "def reward_fn(messages): return 0.0",
        "rollout.max_turns=2",
    ),
    "minus one": ("def reward_fn(messages, answer): return 2 * is_right(messages, answer) - 1",),
    "form": (
        'def reward_fn(messages, answer): return messages[-1]["content"] == f"It is {answer}!"',
        "--form",
        "It is {}!",
    ),
    "a part for the format": (
        "def reward_fn(messages, answer):\n"
        '    is_read = field(messages) != "?"\n'
        '    return {"right": 0.8 * is_right(messages, answer), "format": 0.2 * is_read}',
    ),
    "similarity as partial credit": (
        "from difflib import SequenceMatcher\n"
        "def reward_fn(messages, answer):\n"
        "    return SequenceMatcher(None, field(messages), answer).ratio()",
    ),
    "distance as partial credit": (
        "from rl2.rewards.maths import number\n"
        "def reward_fn(messages, answer):\n"
        "    value = number(field(messages))\n"
        "    return 0.0 if value is None else float(1 / (1 + abs(value - int(answer))))",
    ),
    "a small tolerance": (
        "def reward_fn(messages, answer):\n"
        "    try: return float(abs(float(field(messages)) - float(answer)) < 1e-6)\n"
        "    except ValueError: return 0.0",
    ),
    "short replies": (
        "def reward_fn(messages, answer):\n"
        '    short = 0.1 * (len(messages[-1]["content"]) < 200)\n'
        '    return {"right": 0.9 * is_right(messages, answer), "short": short}',
    ),
    "TRL": (
        "def right(completions, answer, **columns):\n"
        "    return [is_right(c, a) for c, a in zip(completions, answer)]",
    ),
}


@pytest.mark.parametrize("name", FINE)
def test_an_env_without_fault_passes(name, try_code):
    code, *arguments = FINE[name]
    status, out, _ = try_code(code, *arguments)
    assert status == 0 and "1.000" in out and not problems(out), out


UNTRIED = {
    "an agent": (
        "async def run(row, base_url, model): return 1.0",
        "not tried: run",
    ),
    "a group": (
        "def group_reward_fn(trajectories): return [0.0 for _ in trajectories]",
        "not tried: group_reward_fn",
    ),
    "a server": (
        'import socket\ndef reward_fn(messages): socket.create_connection(("127.0.0.1", 9))',
        "not tried: reward_fn raised: ConnectionRefusedError",
    ),
    "a server that some replies need": (
        "import socket\n"
        "def reward_fn(messages):\n"
        '    if not messages[-1]["content"]: return 0.0\n'
        '    socket.create_connection(("127.0.0.1", 9))',
        "not tried: reward_fn raised: ConnectionRefusedError",
    ),
    "a package": (
        "def reward_fn(messages): import no_such_package",
        "not tried: reward_fn raised: ModuleNotFoundError",
    ),
}


@pytest.mark.parametrize("name", UNTRIED)
def test_what_cannot_be_tried_is_told(name, try_code):
    code, expected = UNTRIED[name]
    status, out, _ = try_code(code)
    assert status == 2 and expected in out and not problems(out), out


TEXTS = [
    {"messages": f"What is the capital of {country}?", "answer": city}
    for country, city in (("France", "Paris"), ("Spain", "Madrid"), ("Italy", "Rome"))
]
TEXT_FAULTS = {
    "similarity above 0.3": ("> 0.3", "exploit: part of the gold"),
    "similarity above 0.6": ("> 0.6", "exploit: "),
    "similarity": ("", ""),
}


@pytest.mark.parametrize("name", TEXT_FAULTS)
def test_texts_that_are_similar_to_the_answer(name, try_code):
    end, expected = TEXT_FAULTS[name]
    code = (
        "from difflib import SequenceMatcher\n"
        "def reward_fn(messages, answer):\n"
        f"    return float(SequenceMatcher(None, field(messages), answer).ratio() {end})"
    )
    status, out, _ = try_code(code, rows=TEXTS)
    assert status == bool(expected) and expected in out, out


def test_choices_that_rows_share_are_no_near_misses(try_code):
    rows = [{"messages": "A or B?", "answer": answer} for answer in "ABBA"]
    status, out, _ = try_code(GOOD, rows=rows)
    assert status == 0 and not problems(out), out


def test_rows_without_an_answer(try_code):
    code = 'def reward_fn(messages, goal): return float(messages[-1]["content"] == goal)'
    row = {"messages": "What is 1 + 1?", "goal": "two"}
    status, out, _ = try_code(code, rows=[row])
    assert status == 0 and "gold answer" not in out, out


MISTAKES = {
    "a typo": (["data.pth=x"], "unknown key data.pth=x: did you mean data.path"),
    "no data": (["data.path=/no/such.jsonl"], "no such file"),
    "no file": (["no_such_env", "data.path=/no/such.jsonl"], "no ready-made env of that name"),
    "no row": (["gsm8k", "data.path=EMPTY"], "has no rows"),
    "no code": (["SYNTAX", "data.path=examples/rows/gsm8k.jsonl"], "invalid syntax"),
    "no reward": (["NOTHING", "data.path=examples/rows/gsm8k.jsonl"], "found none"),
    "nothing to compare the reward with": (
        ["gsm8k", "data.path=examples/rows/gsm8k.jsonl", "--attack"],
        "--attack compares the trained reward with a part that is not trained",
    ),
    "no model": (
        ["gsm8k", "data.path=examples/rows/gsm8k.jsonl", "actor.model_name=/no/such"],
        "actor.model_name=/no/such",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_user_is_told_in_words(name, tmp_path, monkeypatch, capsys):
    files = {"EMPTY": "", "SYNTAX": "def reward_fn(:\n", "NOTHING": "x = 1\n"}
    words, expected = MISTAKES[name]
    for file, text in files.items():
        path = tmp_path / f"{file}.{'jsonl' if file == 'EMPTY' else 'py'}"
        path.write_text(text)
        words = [word.replace(file, str(path)) for word in words]
    monkeypatch.chdir(ROOT)
    status, _, err = try_env(words, monkeypatch, capsys)
    assert status == 2 and expected in err and "problem" in err, err


def test_a_model_answers(tmp_path):
    """Its answers stand in a table of reward against length."""
    model = make_model(tmp_path / "model")
    (tmp_path / "env.py").write_text(
        "def reward_fn(messages, answer):\n"
        '    return float(messages[-1]["content"].count("<answer>" + answer))\n'
        "async def group_reward_fn(trajectories):\n"
        '    return [t["length"] / 100 for t in trajectories]\n'
    )
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    words = ["-m", "rl2", "env", tmp_path / "env.py", f"data.path={tmp_path}/rows.jsonl"]
    words += [f"actor.model_name={model}", "data.responses_per_prompt=2", "--rows", "2"]
    words += ["rollout.train_sampling_params.max_new_tokens=8"]
    done = run(*words, check=False, cwd=tmp_path)
    table = done.stdout.partition("tokens answers  reward\n")[2]
    lines = re.findall(r"^ *(\d+)- *(\d+) +(\d+) +([\d.]+)$", table, re.M)
    assert sum(int(count) for _, _, count, _ in lines) == 4, done.stdout + done.stderr
    for shortest, longest, _, reward in lines:
        assert int(shortest) <= 100 * float(reward) + 0.1 <= int(longest) + 0.2
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


ATTACKED = {  # name -> trained part, gold
    "exploitable": ("min(len(text), 40) / 40", "text == answer"),
    "honest": (
        "sum(letter in answer for letter in text) / max(1, len(text))",
        "float(sum(letter in answer for letter in text) > len(text) / 2)",
    ),
}


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attack_tells_a_reward_that_rises_without_gold(name, tmp_path):
    trained, gold = ATTACKED[name]
    code = 'def reward_fn(messages, answer):\n    text = messages[-1]["content"]\n'
    code += f'    return {{"trained": {trained}, "gold": float({gold})}}\n'
    (tmp_path / "env.py").write_text(code)
    rows = [{"messages": f"Write a few of a to h, {i}.", "answer": "abcdefgh"} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["-m", "rl2", "env", tmp_path / "env.py", f"data.path={tmp_path}/rows.jsonl"]
    words += ["--attack", "rollout.reward_weights.gold=0", "trainer.max_steps=20"]
    words += ["rollout.train_sampling_params.max_new_tokens=12", "data.responses_per_prompt=6"]
    done = run(*words, check=False, cwd=tmp_path)
    assert "the model learned to earn more" in done.stdout, done.stdout + done.stderr
    _, found, text = done.stdout.partition("PROBLEM: attack: gold does not confirm the reward")
    if name == "exploitable":
        assert done.returncode == 1 and found and "earns 1, gold 0, " in text, done.stdout
    else:
        assert not found, done.stdout
    assert not (tmp_path / "runs").exists()
