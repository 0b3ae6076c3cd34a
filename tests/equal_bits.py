"""Compares two checkouts to the bit: the same short runs in both, on this machine.

    python tests/equal_bits.py OLD_CHECKOUT [NEW_CHECKOUT] [--only NAME ...] [--record FOLDER]
        [--ignore PLACE ...]

Each run trains a tiny random model for a few steps; the quickstart trains its own model. Compared
are every metric of metrics.jsonl except times and memory, the SHA-256 of every tensor of the
exported models and the checkpoints, the records of the rollouts in the fields that both checkouts
write, and the names of the files. Each run prints a line: "equal" or the first difference. The exit
code is 1 after a difference or a crash.

--record keeps the data and the results of the old checkout in FOLDER. Later calls with this folder
read them instead of running the old checkout again. --only takes names of runs and shell patterns,
such as `ppo*`. --ignore takes shell patterns of places that changed on purpose, such as
`*record*advantage`. The quickstart needs rl2[quickstart] once, to prepare its data.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from common import (
    ROOT,
    conversation,
    launch,
    make_environment,
    make_model,
    preference,
    read_jsonl,
    read_untimed_metrics,
    write_jsonl,
)
from common import run as run_python
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

TIMEOUT = 600  # seconds of one command
SHOWN = 1500  # last characters of a crashed run's output
RECORD = " record "


COMMON = (
    "trainer.disable_wandb=true trainer.save_dir={run}/first trainer.keep_checkpoints=null"
    " trainer.max_steps=4 trainer.n_epochs=9 data.max_length=100"
)
ACTOR = "actor.model_name={data}/llama actor.dtype=float32 actor.max_length_per_device=250"
PPO = (
    f"ppo {COMMON} {ACTOR} actor.lr=0.01 data.path={{data}}/prompts.jsonl"
    " data.prompts_per_rollout=4 data.responses_per_prompt=6 rollout.env_path={data}/letters.py"
    " rollout.env_timeout=200 rollout.max_running=16"
    " rollout.train_sampling_params.max_new_tokens=12"
    " rollout.train_sampling_params.stop_token_ids=[10,20,30,40,50,60,70,80,90]"
)
CRITIC = (
    "adv.estimator=gae critic.lr=0.02 critic.dtype=float32 critic.max_length_per_device=250"
    " critic.save_dir={run}/critic critic.save_freq=4 critic.save_optimizer=true"
)
TEST = "data.test_path={data}/test_prompts.jsonl rollout.test_sampling_params.max_new_tokens=8"
TURNS = (
    "data.path={data}/chats.jsonl rollout.env_path={data}/tool.py rollout.max_turns=3"
    " actor.max_length_per_device=500"
)
FILTER = "rollout.filter=[0.05,0.3] rollout.max_refills=2"
EXAMPLES = f"{COMMON} data.batch_size=6 trainer.test_freq=2"
SFT = (
    f"sft {EXAMPLES} {ACTOR} actor.lr=0.01 actor.scheduler=linear actor.warmup_ratio=0.3"
    " data.path={data}/conversations.jsonl data.test_path={data}/test_conversations.jsonl"
)
PAIRS = "data.path={data}/pairs.jsonl data.test_path={data}/test_pairs.jsonl"
DPO = f"dpo {EXAMPLES} {ACTOR} {PAIRS} actor.lr=0.003"
RM = (
    f"rm {EXAMPLES} {PAIRS} critic.model_name={{data}}/llama critic.dtype=float32"
    " critic.max_length_per_device=250 critic.lr=0.01"
)


def and_resume(command: str) -> list[str]:
    """The command with checkpoints, and one that goes on from its second step in another folder."""
    command += " trainer.save_freq=2"
    places = "trainer.resume={run}/first/checkpoints/step_2 trainer.save_dir={run}/second"
    return [command, f"{command} {places}"]


# name -> commands that follow each other. A command is a trainer's name and its arguments, where
# {data} and {run} are the folders of the inputs and of the run.
RUNS: dict[str, list[str]] = {
    "quickstart": ["quickstart"],
    "ppo": [
        f"{PPO} {TEST} adv.norm_var=true trainer.test_freq=2 trainer.save_freq=2"
        " rollout.train_sampling_params.temperature=0.7 data.shuffle=false trainer.seed=3"
        " rollout.train_sampling_params.top_p=0.9 rollout.train_sampling_params.top_k=40"
        " rollout.test_sampling_params.temperature=0.5 rollout.test_sampling_params.top_p=0.8"
        " actor.model_name={data}/qwen3",
    ],
    "ppo_one_process": [f"{PPO} {TEST} adv.norm_var=true actor.gradient_checkpointing=false"],
    "ppo_critic": and_resume(
        f"{PPO} {CRITIC} adv.norm_var=true adv.gamma=0.99 adv.lamda=0.95 kl.coef=0.01"
        " kl.type=reward actor.update_per_rollout=2 critic.update_per_rollout=2"
        " actor.entropy=0.001 actor.correction=token_tis actor.correction_cap=1"
        " actor.scheduler=cosine actor.warmup_ratio=0.3 actor.weight_decay=0.01"
    ),
    "ppo_critic_freeze": [
        f"{PPO} {CRITIC} actor.freeze_steps=1 kl.coef=0.01 kl.type=reward"
        " kl.reward_estimator=k3 actor.log_entropy=true critic.model_name={data}/qwen3"
        " rollout.check_weights=true",
    ],
    "ppo_sp": [
        f"{PPO} {CRITIC} actor.sp_size=2 critic.fsdp_size=1 kl.coef=0.01 kl.type=loss"
        " actor.update_per_rollout=2 actor.share_prompts=false actor.loss=gspo"
        " actor.clip=0.01 actor.average=constant actor.average_constant=12",
    ],
    "ppo_tp": [
        f"{PPO} {CRITIC} actor.tp_size=2 critic.tp_size=1 critic.sp_size=2 kl.coef=0.01"
        " kl.type=loss kl.loss_estimator=k3 trainer.save_freq=4 actor.loss=cispo"
        " actor.update_per_rollout=2 actor.clip_high=0.1 actor.average=sequence"
        " actor.correction=sequence_mask",
    ],
    "ppo_lora": and_resume(
        f"{PPO} {CRITIC} actor.lora_rank=4 critic.lora_rank=2 critic.lora_alpha=8"
        " actor.lora_targets=[q_proj,v_proj] kl.coef=0.01 kl.type=reward adv.norm_var=true"
    ),
    "ppo_masks": [
        f"{PPO} actor.correction=token_mask actor.correction_cap=1.01 actor.dtype=bfloat16"
        " actor.update_per_rollout=2 actor.model_name={data}/qwen2",
        f"{PPO} actor.correction=geometric_mask actor.correction_cap=1.001 actor.dtype=bfloat16"
        " trainer.save_dir={run}/second actor.fsdp_size=1",
    ],
    "ppo_optimizer": [
        f"{PPO} actor.save_dir={{run}}/exports actor.save_freq=4 actor.save_optimizer=true",
        f"{PPO} actor.model_name={{run}}/exports/step_4 trainer.save_dir={{run}}/second"
        " actor.optimizer_dir={run}/exports/step_4",
    ],
    "ppo_turns": [
        f"{PPO} {TURNS} actor.dual_clip=1.05 actor.clip=0.05 actor.clip_high=0.1"
        " adv.norm_var=true actor.update_per_rollout=3 actor.average=sequence",
    ],
    "ppo_turns_rewritten": [
        f"{PPO} {CRITIC} {TURNS} actor.model_name={{data}}/forgetful"
        " critic.max_length_per_device=500 actor.update_per_rollout=2 adv.norm_var=true",
    ],
    "ppo_failures": [f"{PPO} rollout.env_path={{data}}/fails.py rollout.max_env_failures=1"],
    "ppo_free": [f"{PPO} trainer.deterministic=false rollout.max_running=64"],
    "ppo_filter": and_resume(
        f"{PPO} {TURNS} {FILTER} rollout.overlong_buffer=6"
        " rollout.mask_truncated=true trainer.save_tokens=true"
    ),
    "ppo_overlap": and_resume(f"{PPO} {FILTER} {TEST} rollout.num_processes=1 trainer.test_freq=2"),
    "sft": and_resume(SFT),
    "sft_one_process": [f"{SFT} actor.lora_rank=4"],
    "sft_sp": [f"{SFT} actor.sp_size=2 actor.average=sequence"],
    "sft_tp": [f"{SFT} actor.tp_size=2 actor.model_name={{data}}/qwen3"],
    "sft_bfloat16": [
        f"{SFT} actor.dtype=bfloat16 actor.sp_size=2",
        f"{SFT} actor.dtype=bfloat16 actor.tp_size=2 trainer.save_dir={{run}}/second",
    ],
    "dpo": [f"{DPO} dpo.label_smoothing=0.1 trainer.save_freq=2"],
    "dpo_ipo": [f"{DPO} dpo.loss=ipo dpo.beta=0.3 actor.sp_size=2"],
    "dpo_hinge_lora": [f"{DPO} dpo.loss=hinge actor.lora_rank=4 actor.lr=0.03"],
    "rm": [f"{RM} trainer.save_freq=2"],
    "rm_sp_lora": [f"{RM} critic.sp_size=2 critic.lora_rank=4"],
}
ONE_PROCESS = ("quickstart", "ppo_one_process", "ppo_free", "sft_one_process")

LETTERS = '''
def reward_fn(messages, answer):
    """Two parts: the share of the answer's letters in the reply, and its length."""
    reply = messages[-1]["content"]
    share = sum(letter in answer for letter in reply) / max(len(reply), 1)
    return {"share": share, "length": -0.01 * len(reply)}
'''
TOOL = """
def interact(messages):
    turns = sum(message["role"] == "assistant" for message in messages)
    return [{"role": "tool", "content": f"go on {turns}"}] if turns < 3 else []
"""
FAILS = '''
def reward_fn(messages, answer):
    """Fails where the reply has an even length, but for the replies of the trial at the start."""
    reply = messages[-1]["content"]
    is_trial = answer in reply or "31415926" in reply or "`" in reply
    if reply and len(reply) % 2 == 0 and not is_trial:
        raise RuntimeError("even")
    return sum(letter in answer for letter in reply) / max(len(reply), 1)
'''
# Cuts what the assistant said in all turns but the last message.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{{ m['content'][:2] if m['role'] == 'assistant' and not loop.last else m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def pair(i: int) -> dict:
    return preference(i, margin=0.1 * i) if i % 2 else preference(i)


def prompt(i: int) -> dict:
    text = f"say {'a' * (i % 7)}, {i}"
    chat = [{"role": "user", "content": text}]
    return {"messages": text if i % 5 == 0 else chat, "answer": "abcdefghijklm"[i % 4 :]}


def make_data(folder: Path) -> None:
    """Models, rows and environments of all runs except the quickstart, once."""
    if (folder / "fails.py").exists():
        return
    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    for family in ("llama", "qwen2", "qwen3"):
        make_model(folder / family, family, tied=family != "qwen2")
    make_model(folder / "forgetful")
    tokenizer = AutoTokenizer.from_pretrained(folder / "forgetful")
    tokenizer.chat_template = FORGETFUL
    tokenizer.save_pretrained(folder / "forgetful")
    text_rows = [{"text": "abcd" * 4}, {"messages": "dcba" * 3}, {"text": "x" * 200}]
    write_jsonl(folder / "prompts.jsonl", [prompt(i) for i in range(22)])
    write_jsonl(folder / "chats.jsonl", [prompt(i) for i in range(1, 30) if i % 5])
    write_jsonl(folder / "test_prompts.jsonl", [prompt(i) for i in range(30, 37)])
    chats = [{"messages": conversation(i)} for i in range(37)]
    write_jsonl(folder / "conversations.jsonl", chats[:20] + text_rows)
    write_jsonl(folder / "test_conversations.jsonl", chats[30:])
    write_jsonl(folder / "pairs.jsonl", [pair(i) for i in range(20)])
    write_jsonl(folder / "test_pairs.jsonl", [pair(i) for i in range(30, 37)])
    (folder / "letters.py").write_text(LETTERS)
    (folder / "tool.py").write_text(LETTERS + TOOL)
    (folder / "fails.py").write_text(FAILS)


def run_quickstart(checkout: Path, folder: Path, data: Path) -> str:
    """Three steps of this checkout's examples/quickstart.sh, without installation and report.

    Its task and its keys are those of this checkout, so that only the code of `checkout` differs.
    """
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = make_environment({"OMP_NUM_THREADS": "2", "PATH": programs}, checkout)
    source = data / "quickstart"
    if not (source / "model/config.json").exists():
        prepare = [sys.executable, "examples/quickstart.py", "prepare", str(source)]
        subprocess.run(prepare, cwd=ROOT, env=env, check=True)
    script = (ROOT / "examples/quickstart.sh").read_text().splitlines()
    start = next(i for i, line in enumerate(script) if line.startswith("source ")) + 1
    lines = [line for line in script[start:] if not line.startswith("python examples/")]
    words = [
        f"data.path={source}/train.jsonl",
        f"data.test_path={source}/test.jsonl",
        f"actor.model_name={source}/model",
        f"rollout.env_path={ROOT}/examples/quickstart_env.py",
        "trainer.max_steps=3",
    ]
    env["OUT"] = str(folder / "first")
    command = ["bash", "-c", "set -e\n" + "\n".join(lines), "quickstart.sh", *words]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=checkout, env=env, timeout=TIMEOUT, **output).stdout


def play(name: str, checkout: Path, folder: Path, data: Path) -> str:
    """Plays a run in a checkout. Its files are in `folder`. Returns what it prints."""
    folder.mkdir()
    if name == "quickstart":
        return run_quickstart(checkout, folder, data)
    output = ""
    for command in RUNS[name]:
        words = command.replace("{data}", str(data)).replace("{run}", str(folder)).split()
        module = ("-m", f"rl2.trainer.{words[0]}")
        options = {"check": False, "timeout": TIMEOUT, "checkout": checkout}
        done = launch(1 if name in ONE_PROCESS else 2, *module, *words[1:], **options)
        output += done.stdout + done.stderr
        if done.returncode:
            break
    return output


def read_results(folder: Path, num_commands: int, output: str) -> dict:
    """What is compared, as `values`: place -> value, metrics and records first. `crash` is None, or
    the end of the output of a run that left no final model."""
    for end in ("first", "second")[:num_commands]:
        if not (folder / end / "model/config.json").exists():
            return {"values": {}, "crash": output[-SHOWN:]}
    values: dict[str, object] = {}
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.suffix != ".jsonl", path)):
        name = path.relative_to(folder).as_posix()
        if path.name == "report.html":  # has dates, and nothing that is not in the other files
            continue
        values[f"{name} exists"] = True
        if path.name == "metrics.jsonl":
            for line in read_untimed_metrics(path.parent):
                values |= {f"{name} step {line['step']} {key}": line[key] for key in line}
        elif path.suffix == ".jsonl":
            records = read_jsonl(path)
            values[f"{name} number of records"] = len(records)
            for i, record in enumerate(records):
                values |= {f"{name}{RECORD}{i} {key}": record[key] for key in record}
        elif path.suffix == ".safetensors":
            values |= hash_tensors(load_file(path), name)
        elif path.name == ".metadata":
            values |= hash_tensors(load_checkpoint(path.parent), name)
    return {"values": values, "crash": None}


def load_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Whole tensors of a distributed checkpoint by their names."""
    state = {}
    for name, entry in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def hash_tensors(state: dict[str, torch.Tensor], name: str) -> dict[str, str]:
    """The SHA-256 of each tensor's type, shape and bytes."""
    digests = {}
    for key, value in state.items():
        digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy())
        digests[f"{name} tensor {key}"] = digest.hexdigest()
    return digests


def differences(old: dict, new: dict, ignored: list[str]) -> list[str]:
    """Each difference of two runs' results as a line of text. Places that
    match a pattern of `ignored` are left out."""
    for side, results in (("old", old), ("new", new)):
        if results["crash"] is not None:
            return [f"{side} crashed: {results['crash']}"]
    lines = []
    for place in dict.fromkeys([*old["values"], *new["values"]]):
        missing = place not in old["values"] or place not in new["values"]
        if missing and RECORD in place:
            continue  # records are compared in the fields that both have
        if any(fnmatch.fnmatch(place, pattern) for pattern in ignored):
            continue
        before, after = (results["values"].get(place, "absent") for results in (old, new))
        if before != after:
            lines.append(f"{place}: {before!r} != {after!r}")
    return lines


def read_or_record(checkout: Path, names: list[str], folder: Path) -> dict[str, dict]:
    """The old checkout's results by name: from `folder`, or played and recorded if they are
    missing."""
    paths = {name: folder / f"{name}.json" for name in names}
    missing = [name for name in names if not paths[name].exists()]
    results = play_and_read(checkout, missing, folder / "data")
    for name, result in results.items():
        if result["crash"] is None:
            paths[name].write_text(json.dumps(result))
    for name in paths.keys() - results.keys():
        results[name] = json.loads(paths[name].read_text())
    return results


def play_and_read(checkout: Path, names: list[str], data: Path) -> dict[str, dict]:
    """The results by name of the runs, played in a folder that is removed after."""
    env = make_environment(checkout=checkout)
    found = run_python("-c", "import rl2; print(rl2.__path__[0])", env=env, cwd=checkout)
    assert Path(found.stdout.strip()).parent == checkout, f"{found.stdout} is not in {checkout}"
    results = {}
    with tempfile.TemporaryDirectory(prefix="equal_bits_") as folder:
        for name in names:
            own = Path(folder, name)
            output = play(name, checkout, own, data)
            results[name] = read_results(own, len(RUNS[name]), output)
    return results


def choose(patterns: list[str]) -> list[str]:
    unknown = [pattern for pattern in patterns if not fnmatch.filter(RUNS, pattern)]
    if unknown:
        sys.exit(f"--only {' '.join(unknown)}: no such run; there are {[*RUNS]}")
    return [name for name in RUNS if any(fnmatch.fnmatch(name, p) for p in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path, nargs="?", default=Path("."))
    parser.add_argument("--only", nargs="+", metavar="NAME", default=["*"])
    parser.add_argument("--record", type=Path, metavar="FOLDER")
    parser.add_argument("--ignore", nargs="+", metavar="PLACE", default=[])
    arguments = parser.parse_args()
    names = choose(arguments.only)
    with tempfile.TemporaryDirectory(prefix="equal_bits_old_") as temporary:
        folder = (arguments.record or Path(temporary)).resolve()
        make_data(folder / "data")
        old = read_or_record(arguments.old.resolve(), names, folder)
        new = play_and_read(arguments.new.resolve(), names, folder / "data")
    num_different = 0
    for name in names:
        found = differences(old[name], new[name], arguments.ignore)
        num_different += bool(found)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        values = len(old[name]["values"])
        print(f"{name}: {found[0] + more if found else f'equal ({values} values)'}", flush=True)
    print(f"{len(names) - num_different} of {len(names)} runs are equal")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
