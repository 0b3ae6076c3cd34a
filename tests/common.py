"""Helpers of several tests: tiny random models, a tokenizer, samples, and launches of processes."""

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import transformers
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    PreTrainedTokenizerFast,
)

from rl2.algorithms.advantages import AdvantageInputs
from rl2.algorithms.losses import PolicyInputs, PreferenceInputs
from rl2.batch import Sample
from rl2.data.rows import Rows, check_rows
from rl2.data.store import make_table
from rl2.run.signals import STOP_SIGNALS
from rl2.tools.replay import TIMED

ROOT = Path(__file__).resolve().parent.parent
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n"
    "' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# How a tokenizer of transformers 5.15 says that calls of tools are JSON between marks.
RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}
# Overrides of `make_model` for vLLM, whose attention on a CPU takes no smaller heads.
VLLM_SIZES = {"hidden_size": 128, "head_dim": 32}
# Small models with sliding windows: overrides of `make_model` by family. The windows are shorter
# than the rows of `make_samples`, and two families mix layers with and without a window.
WINDOWED = {
    "mistral": {"sliding_window": 6},
    "phi3": {"sliding_window": 6},
    "starcoder2": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}
WINDOW_THEN_FULL = WINDOWED["gemma3_text"]
# Small models with sinks (gpt_oss, granite_swa), capped logits (gemma2), a biased head (phi).
SPECIAL = {
    "gemma2": {
        **WINDOW_THEN_FULL,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 8,
    },
    "gpt_oss": {**WINDOW_THEN_FULL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite_swa": {**WINDOW_THEN_FULL, "logits_scaling": 1.0},
    "phi": {"tied": False},
}
if "granite_swa" not in CONFIG_MAPPING:  # newer than the oldest transformers of the suite
    del SPECIAL["granite_swa"]
GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Small mixtures of experts whose routers have a softmax and one torch.topk.
MIXTURES = {
    "gpt_oss": LOCAL_EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1},
}
# As above; a buffer that the files hold is the bias of its router, see `make_routed`.
GLM4_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
}
ROUTING_BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
# Small models with recurrent layers: gated delta rules, state spaces of two kinds, convolutions.
RECURRENT = {
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "num_experts": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "time_step_min": 0.5,  # above most time steps
    },
    "qwen3_5_text": GATED_DELTA,
    "qwen3_next": {**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
}
if not hasattr(transformers.Cache, "get_conv_state"):  # the oldest transformers of the suite
    RECURRENT.clear()


@cache
def read_cases(name: str):
    """The cases of a test in cases/NAME.yaml."""
    return yaml.safe_load((ROOT / f"tests/cases/{name}.yaml").read_text(encoding="utf-8"))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of 98 tokens: three for ChatML, a newline, 94 printable characters."""
    specials = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*specials, "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML
    return fast


def make_model(folder, family="llama", tied=True, seed=0, **overrides) -> str:
    """Saves a random causal LM with the tokenizer above in `folder` and returns its path."""
    settings = {
        "vocab_size": 98,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "eos_token_id": 2,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.2,
        "head_dim": 8,
    }
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**{**settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family in SPECIAL:
        for parameter in model.parameters():
            if parameter.dim() == 1:  # sinks and biases, which may begin as 0
                parameter.data.add_(0.5 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def make_routed(folder) -> str:
    """As `make_model`: a GLM-4.5 with random biases of its routers."""
    name = make_model(folder, "glm4_moe", tied=False, **GLM4_MOE)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    model.save_pretrained(name)
    return name


def make_gpt2(folder) -> str:
    """As `make_model`: a GPT-2, with Conv1D in the place of linear layers, and dropout."""
    name = make_model(folder)  # its tokenizer
    config = GPT2Config(vocab_size=98, n_embd=32, n_layer=2, n_head=4, n_positions=512)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(name)
    return name


# The reward is the fraction of letters of the reply that are in the answer. A random policy starts
# near 8/98 and learns it in a few steps.
LETTER_ENV = """
def reward_fn(messages, answer):
    reply = messages[-1]["content"]
    return sum(letter in answer for letter in reply) / max(len(reply), 1)
"""
LETTER_ROWS = [
    {"messages": [{"role": "user", "content": f"say a, {i}"}], "answer": "abcdefgh"}
    for i in range(24)
]


def write_letter_task(folder) -> list[str]:
    """Writes train.jsonl, of 24 rows, and env.py into `folder`. Returns the keys that name them."""
    write_jsonl(folder / "train.jsonl", LETTER_ROWS)
    (folder / "env.py").write_text(LETTER_ENV)
    return [f"data.path={folder / 'train.jsonl'}", f"rollout.env_path={folder / 'env.py'}"]


def letter_run(folder, model) -> list[str]:
    """The keys of a PPO run on the letter task in `folder`, of 12 steps, in which it learns."""
    return [
        f"actor.model_name={model}",
        *write_letter_task(folder),
        "data.prompts_per_rollout=4",
        "data.responses_per_prompt=8",
        "data.max_length=64",
        "actor.lr=0.02",
        "actor.dtype=float32",
        "rollout.max_running=32",
        "rollout.train_sampling_params.max_new_tokens=8",
        "actor.gradient_checkpointing=false",
        "trainer.n_epochs=2",
        "trainer.disable_wandb=true",
    ]


def conversation(i) -> list[dict]:
    """Two turns, in which the assistant repeats a letter."""
    letter = "abcd"[i % 4]
    return [
        {"role": "user", "content": f"say {letter}, {i}"},
        {"role": "assistant", "content": letter * (3 + i % 3)},
        {"role": "user", "content": "again" * (i % 3)},
        {"role": "assistant", "content": letter * 5},
    ]


def preference(i, **columns) -> dict:
    """A row with two replies to a prompt."""
    return {
        "messages": [{"role": "user", "content": f"pick, {i}"}],
        "chosen": "a" * (2 + i % 3),
        "rejected": "z" * (1 + i % 4),
        **columns,
    }


def make_critic(name) -> str:
    """Saves the body of the model `name` with a random value head and returns the new path."""
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_pretrained(name, num_labels=1).save_pretrained(
        f"{name}-critic"
    )
    return f"{name}-critic"


def pack_rows(rows) -> Rows:
    """Rows that Python code has made, as though they were those of a file called "the data"."""
    located_rows = ((f"the data, row {number}", row) for number, row in enumerate(rows, 1))
    checked = check_rows("the data", located_rows, None, {}, is_hub=False)
    return Rows(make_table(None, lambda: checked, "read"), "the data", None)


def check_adapter(model_class, name, folder):
    """Checks that the exported model in `folder` equals the model `name` with its adapter.

    transformers loads the exported model. peft loads the adapter from `folder`/adapter. The
    exported model must differ from the model `name` without the adapter.
    """
    from peft import PeftModel  # SGLang's environment lacks it

    tokens = torch.arange(3, 40)[None]
    labels = {"num_labels": 1} if model_class is AutoModelForSequenceClassification else {}
    base = model_class.from_pretrained(name, dtype=torch.float32, **labels)
    exported = model_class.from_pretrained(folder, dtype=torch.float32, **labels)
    base_logits = base(tokens).logits
    expected = exported(tokens).logits
    assert (base_logits - expected).abs().max() > 1e-3
    adapted = PeftModel.from_pretrained(base, f"{folder}/adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(name)
    torch.testing.assert_close(adapted(tokens).logits, expected, rtol=0, atol=1e-4)


def make_samples(seed=0, num_groups=4, group_size=3, longest=20) -> list[Sample]:
    """Returns groups of samples. Each group has one prompt and ragged, partly masked answers."""
    rng = random.Random(seed)
    samples = []
    for group in range(num_groups):
        prompt = [rng.randrange(3, 98) for _ in range(rng.randint(1, longest))]
        for _ in range(group_size):
            answer = [rng.randrange(3, 98) for _ in range(rng.randint(1, longest))]
            mask = [0] * len(prompt) + [1] + [int(rng.random() < 0.7) for _ in answer[1:]]
            logps = [-rng.random() if m else 0.0 for m in mask]
            rewards = [0.0] * len(mask)
            samples.append(Sample(prompt + answer, mask, logps, rewards, group, len(samples)))
    return samples


def advantage_inputs(mask, rewards=None, group=None, trajectory=None, **others) -> AdvantageInputs:
    """The inputs of an estimator. By default all rows are trajectories of one group."""
    rows = torch.arange(len(mask))
    return AdvantageInputs(
        rewards=torch.zeros_like(mask) if rewards is None else rewards,
        mask=mask,
        group=torch.zeros_like(rows) if group is None else group,
        trajectory=rows if trajectory is None else trajectory,
        **{"gamma": 1.0, "lamda": 1.0, "norm_var": False, "reward_parts": {}, **others},
    )


def policy_inputs(logps, old_logps, advantages, mask, **others) -> PolicyInputs:
    """The inputs of a policy loss. By default the engine computes what the trainer does."""
    rows = torch.arange(len(mask))
    defaults = {"engine_logps": old_logps, "clip": 0.2, "clip_high": 0.2}
    defaults |= {"group": torch.zeros_like(rows), "trajectory": rows}
    return PolicyInputs(
        logps=logps, old_logps=old_logps, advantages=advantages, mask=mask, **defaults | others
    )


def preference_inputs(gains, **others) -> PreferenceInputs:
    """The inputs of a preference loss, of replies of one token and log-probabilities of -3."""
    defaults = {"logps": torch.full_like(gains, -3), "lengths": torch.ones_like(gains)}
    defaults |= {"beta": 0.5, "label_smoothing": 0.0, "target_margin": 0.0}
    defaults |= {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    return PreferenceInputs(gains=gains, **defaults | others)


def make_environment(changes: dict | None = None, checkout=ROOT) -> dict:
    """The variables of a Python program that a test starts: one thread, rl2 on its path."""
    path = f"{checkout}{os.pathsep}{ROOT / 'tests'}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(changes or {})}


def check_status(done: subprocess.CompletedProcess) -> None:
    errors = done.stderr.split("Sending process")[0]  # without torchrun's long report
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{errors[-9000:]}"


def run(*command, check=True, env=None, cwd=None, timeout=300) -> subprocess.CompletedProcess:
    """Runs a Python program in its own process with one thread."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=make_environment(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if check:
        check_status(done)
    return done


def run_main(main, *words) -> int:
    """Runs the `main` of a command or a trainer in this process. Returns its status."""
    with mock.patch.object(sys, "argv", ["rl2", *map(str, words)]):
        try:
            main()
        except SystemExit as ended:
            return ended.code or 0
    return 0


def before_each_call(monkeypatch, owner, name, action):
    """Has `action` run, with the same arguments, before each call of `name` of `owner`."""
    function = getattr(owner, name)

    def changed(*arguments, **options):
        action(*arguments, **options)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, changed)


@contextmanager
def keep_process():
    """What a run changes in this process is as before afterwards."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    folder, path = os.getcwd(), list(sys.path)
    try:
        yield
    finally:
        os.chdir(folder)
        sys.path[:] = path
        if dist.is_initialized():
            dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def torchrun(world, *command, **options) -> subprocess.CompletedProcess:
    """Runs a Python program under torchrun with `world` processes on a free port."""
    return run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={world}",
        *command,
        **options,
    )


@cache
def start_server(checkout) -> subprocess.Popen:
    """The process of launch.py, with rl2 of the checkout. It ends with this one."""
    server = subprocess.Popen(
        [sys.executable, ROOT / "tests/launch.py"],
        env=make_environment(checkout=checkout),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server


def launch(
    world, *command, check=True, timeout=300, checkout=ROOT, changes=None
) -> subprocess.CompletedProcess:
    """The same with ranks that are forked after the imports, see launch.py.

    After `timeout` seconds the ranks are killed, the status is -9, and stderr says so.
    """
    server = start_server(checkout)
    command = [*map(str, command)]
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        request = {
            "world": world,
            "command": command,
            "environment": make_environment(checkout=checkout),
            "folder": os.getcwd(),
            "stdout": stdout.name,
            "stderr": stderr.name,
            "changes": changes or {},
        }
        print(json.dumps(request), file=server.stdin, flush=True)
        process_id = int(server.stdout.readline())
        killer = threading.Timer(timeout, os.killpg, (process_id, signal.SIGKILL))
        killer.start()
        status = int(server.stdout.readline())
        was_killed = killer.finished.is_set()
        killer.cancel()
        errors = stderr.read()
        if was_killed:
            errors += f"killed after {timeout} seconds\n"
        done = subprocess.CompletedProcess(command, status, stdout.read(), errors)
    if check:
        check_status(done)
    return done


def launch_runs(world, runs) -> subprocess.CompletedProcess:
    """Runs each list of words, [kill=N] [sgd] TRAINER key=value ..., one after the other.

    kill=N kills the last rank in its N-th update. The other ranks must end because of it.
    """
    stdout, stderr = "", ""
    for words in map(list, runs):
        changes = {}
        while words[0] == "sgd" or words[0].startswith("kill="):
            name, _, value = words.pop(0).partition("=")
            changes[name] = int(value or 0)
        command = ("-m", f"rl2.trainer.{words[0]}", *words[1:])
        done = launch(world, *command, check="kill" not in changes, changes=changes)
        assert done.returncode == int("kill" in changes), done.stdout
        stdout, stderr = stdout + done.stdout, stderr + done.stderr
    return subprocess.CompletedProcess(runs, 0, stdout, stderr)


@contextmanager
def serve_json(answer):
    """Serves JSON in a thread. Yields (URL, requests), a list with (headers, body) of each request.

    `answer(path, body)` returns (status, value), and headers if it likes. The body of a GET is
    None. A value of bytes is sent as it is.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body):
            requests.append((dict(self.headers), body))
            status, value, headers = (*answer(self.path, body), {})[:3]
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            for name, text in {"Content-Length": len(data), **headers}.items():
                self.send_header(name, str(text))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    server.server_close()
    thread.join()


def same_weights(folder, other) -> bool:
    """Whether two folders of models have the same weights to the bit."""
    weights, others = (load_file(Path(each) / "model.safetensors") for each in (folder, other))
    return weights.keys() == others.keys() and all(weights[k].equal(others[k]) for k in weights)


def write_jsonl(path, objects) -> None:
    Path(path).write_text("".join(json.dumps(each) + "\n" for each in objects))


def read_jsonl(path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_metrics(folder) -> list[dict]:
    """The lines of metrics.jsonl in a run folder."""
    return read_jsonl(folder / "metrics.jsonl")


def read_untimed_metrics(folder) -> list[dict]:
    """The same without times and memory: equal for runs that compute the same."""
    lines = read_metrics(folder)
    return [{k: v for k, v in line.items() if not k.startswith(TIMED)} for line in lines]
