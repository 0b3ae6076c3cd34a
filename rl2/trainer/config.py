"""The config: typed sections, one dataclass each, every key explained beside it; Hydra's override grammar; and the
checks that find every problem before a model is loaded.

`parse(PPOConfig, argv, validate_ppo)` is the entry that all trainers share.
"""

import ast
import difflib
import inspect
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from yaml import YAMLError

from ..rollout.engine import installed, pick_engine

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def choice(*values: str):
    """A field that takes one of `values`; the first is the default."""
    return field(default=values[0], metadata={"choices": values})


@dataclass
class DataConfig:
    path: str = MISSING
    """training rows: a json, jsonl, csv, parquet or arrow file, a folder of them, or a Hugging Face dataset name"""
    test_path: str | None = None
    """rows to evaluate on, at the start, every trainer.test_freq steps and at the end"""
    max_length: int = 1024
    """longest prompt (PPO) or whole sequence that is kept, in tokens; longer ones are dropped and counted"""
    shuffle: bool = True
    """a new order every epoch, a function of data.seed"""
    seed: int = 0
    """of the order of the data"""


@dataclass
class PromptConfig(DataConfig):
    prompts_per_rollout: int = 32
    """prompts of one step"""
    responses_per_prompt: int = 8
    """answers sampled for each prompt: a group"""


@dataclass
class ExampleConfig(DataConfig):
    batch_size: int = 32
    """rows of one step"""


@dataclass
class SFTDataConfig(ExampleConfig):
    turns: str = choice("all", "last")
    """which of the assistant's turns are trained"""


@dataclass
class WorkerConfig:
    model_name: str = MISSING
    """a Hugging Face causal LM: a folder or a hub name"""
    optimizer_dir: str | None = None
    """a folder written by save_optimizer to start the optimizer from"""
    dtype: str = choice("auto", "float32", "bfloat16")
    """what is computed in; auto is bfloat16 where the machine is fast at it; the weights trained are always float32"""
    fsdp_size: int = 0
    """processes that share one copy of the model; 0 = all; fewer keeps several copies (hybrid sharding)"""
    sp_size: int = 1
    """processes that share each sequence (ring attention)"""
    tp_size: int = 1
    """processes that share each matrix (tensor parallelism)"""
    gradient_checkpointing: bool = True
    """recompute each layer in the backward pass: less memory, about a third more time"""
    max_length_per_device: int = 8192
    """tokens of one micro-batch on one process; also the longest sequence"""
    max_inference_length_per_device: int | None = None
    """the same for passes without a gradient; by default the same number"""
    lora_rank: int = 0
    """train adapters of this rank beside frozen weights (LoRA), which wants a higher lr; 0 = train the weights"""
    lora_alpha: float | None = None
    """adapters are scaled by lora_alpha / lora_rank; by default twice the rank"""
    lora_targets: list[str] = field(default_factory=list)
    """names of the linear layers that get adapters, e.g. [q_proj,v_proj]; by default all but the head"""
    share_prompts: bool = True
    """run the prompt of a group once for all its answers in a micro-batch; exact, up to rounding"""
    lr: float = 1e-6
    """learning rate of AdamW"""
    weight_decay: float = 0.0
    """of AdamW"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    warmup_ratio: float = 0.0
    """share of all updates in which the learning rate rises linearly"""
    scheduler: str = choice("constant", "linear", "cosine")
    """the learning rate after the warm-up: constant, or falling to 0"""
    offload_model: bool = False
    """keep the weights in host memory while they are not used (GPU)"""
    offload_optimizer: bool = False
    """keep the optimizer in host memory while it is not used (GPU)"""
    save_dir: str | None = None
    """export this worker as Hugging Face folders step_N here, for use elsewhere"""
    save_freq: int | None = None
    """steps between these exports"""
    save_optimizer: bool = False
    """export the optimizer with it"""


@dataclass
class SFTActorConfig(WorkerConfig):
    lr: float = 1e-5
    """learning rate of AdamW"""
    average: str = choice("token", "sequence")
    """the mean that the loss is: over all trained tokens of the step, or over rows of each one's token mean"""


@dataclass
class RewardModelConfig(WorkerConfig):
    lr: float = 1e-5
    """learning rate of AdamW"""


@dataclass
class RolloutWorkerConfig(WorkerConfig):
    update_per_rollout: int = 1
    """optimizer steps (mini-batches) for each rollout"""
    clip: float = 0.2
    """how far the probability ratio (actor) or the value (critic) may move in one rollout"""
    freeze_steps: int = 0
    """first steps in which this worker is not updated"""


@dataclass
class ActorConfig(RolloutWorkerConfig):
    clip_high: float | None = None
    """the upper clip, if it differs from clip (DAPO: 0.28)"""
    dual_clip: float | None = None
    """bounds the loss of a bad answer by this times its advantage, e.g. 3"""
    loss: str = choice("ppo", "gspo", "cispo")
    """the policy loss: clipped token ratios, clipped sequence ratios, or clipped importance weights"""
    average: str = choice("token", "sequence", "constant")
    """the mean that the loss is: over tokens (DAPO), over sequences of token means (GRPO), or over a constant length"""
    average_constant: int | None = None
    """the length that average=constant divides by, in tokens (Dr. GRPO: the longest answer)"""
    correction: str = choice("none", "token_tis", "token_mask", "sequence_mask", "geometric_mask")
    """for the engine's probabilities differing from the trainer's: truncated importance weights, or masks"""
    correction_cap: float = 2.0
    """the cap of the correction's ratio"""
    entropy: float = 0.0
    """coefficient of an entropy bonus"""
    log_entropy: bool = False
    """log the policy's entropy; costs a little in the head"""


@dataclass
class CriticConfig(RolloutWorkerConfig):
    model_name: str | None = None
    """the model the critic starts from; by default the actor's"""
    lr: float = 5e-6
    """learning rate of AdamW"""


@dataclass
class SamplingParams:
    temperature: float = 1.0
    """the logits are divided by it, in the engine and in training; 0 (tests only) is greedy"""
    top_p: float = 1.0
    """sample from the most likely tokens that hold this much probability"""
    top_k: int = -1
    """sample from so many most likely tokens; -1 = all"""
    max_new_tokens: int = 512
    """longest answer of one turn"""
    stop_token_ids: list[int] = field(default_factory=list)
    """tokens that end a turn, besides the model's own"""


@dataclass
class TestSamplingParams(SamplingParams):
    temperature: float = 0.0
    """0 is greedy"""


@dataclass
class RolloutConfig:
    engine: str = choice("auto", "local", "sglang")
    """sglang, local (the embedded engine on plain torch), or auto: sglang where both it and a GPU are there, else local"""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """further arguments of SGLang's engine, as rollout.engine_args.NAME=VALUE"""
    tp_size: int = 1
    """GPUs of one SGLang engine"""
    gpu_memory_utilization: float = 0.6
    """share of the GPU's memory that SGLang may take"""
    max_running: int = 64
    """sequences that one engine decodes at a time"""
    check_weights: bool = False
    """compare the engine's weights with the trainer's, tensor by tensor, after every step; the start always does"""
    train_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    test_sampling_params: TestSamplingParams = field(default_factory=TestSamplingParams)
    max_turns: int = 1
    """most assistant turns of a trajectory; more than 1 calls the env's interact"""
    partial: bool = False
    """start the next step's prompts early, pause what is unfinished when a step has its groups, and go on with it after
    the update: long answers delay nobody. Wants actor.correction=token_tis"""
    env_path: str = MISSING
    """a Python file with reward_fn(messages, answer), and interact(messages) for several turns"""
    env_timeout: float = 30.0
    """seconds that one call of the env may take"""
    max_env_failures: float = 0.1
    """share of a step's trajectories whose env may fail; more stops the run"""


@dataclass
class KLConfig:
    coef: float = 0.0
    """weight of the KL divergence from the starting model; 0 loads no reference model"""
    type: str | None = field(default=None, metadata={"choices": ("reward", "loss")})
    """where it goes: subtracted from the reward, or added to the loss"""
    reward_estimator: str = choice("k1", "k2", "k3")
    """estimator with type=reward"""
    loss_estimator: str = field(default="k2", metadata={"choices": ("k1", "k2", "k3")})
    """estimator with type=loss; k2 has the gradient of the KL"""


@dataclass
class AdvConfig:
    estimator: str = choice("reinforce", "gae")
    """reinforce: the reward minus its group's mean, no critic (GRPO); gae: with a critic (PPO)"""
    gamma: float = 1.0
    """discount of gae"""
    lamda: float = 1.0
    """lambda of gae"""
    norm_var: bool = False
    """divide by the standard deviation: of the group (reinforce: GRPO; off: Dr. GRPO) or of the batch (gae)"""


@dataclass
class DPOLossConfig:
    beta: float = 0.1
    """how strongly the policy is held to the model it starts from (ipo: the regularisation, tau)"""
    loss: str = choice("sigmoid", "ipo", "hinge")
    """DPO's own loss, IPO's squared error or SLiC's hinge"""
    label_smoothing: float = 0.0
    """share of the pairs taken to be the wrong way round (conservative DPO); below 0.5"""


@dataclass
class RewardLossConfig:
    center: float = 0.0
    """weight of a squared error that holds the mean of chosen and rejected rewards near 0, e.g. 0.01"""


@dataclass
class TrainerConfig:
    project: str = "rl2"
    """project in wandb"""
    experiment_name: str = "default"
    """name of the run"""
    n_epochs: int = 1
    """passes over the training rows"""
    max_steps: int | None = None
    """stop after so many steps, if that is sooner"""
    disable_wandb: bool = False
    """no wandb; it is skipped anyway where it is not installed or not logged in"""
    deterministic: bool | None = None
    """rollouts that repeat bit for bit on the same layout; by default on a CPU only"""
    save_dir: str = "runs/${trainer.experiment_name}"
    """everything the run writes"""
    save_freq: int | None = None
    """steps between checkpoints that a run resumes from; Ctrl-C writes one too"""
    keep_checkpoints: int | None = 2
    """how many of the newest are kept; null = all"""
    resume: str = "auto"
    """auto: go on from the newest checkpoint in save_dir, if any; off; or the folder of a checkpoint"""
    test_freq: int | None = None
    """steps between evaluations on data.test_path; by default only before and after"""
    seed: int = 0
    """of sampling and of new weights"""


@dataclass
class PPOConfig:
    data: PromptConfig = field(default_factory=PromptConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    adv: AdvConfig = field(default_factory=AdvConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class SFTConfig:
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    actor: SFTActorConfig = field(default_factory=SFTActorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class DPOConfig:
    data: ExampleConfig = field(default_factory=ExampleConfig)
    actor: WorkerConfig = field(default_factory=WorkerConfig)
    dpo: DPOLossConfig = field(default_factory=DPOLossConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


@dataclass
class RMConfig:
    data: ExampleConfig = field(default_factory=ExampleConfig)
    critic: RewardModelConfig = field(default_factory=RewardModelConfig)
    rm: RewardLossConfig = field(default_factory=RewardLossConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)


def parse(root: type, argv: list[str], validate, usage: str = "rl2.trainer.ppo"):
    """The config that the arguments ask for, as a `root`. `--help` and `--cfg job` print and exit; problems, all of
    them in one message, exit with 2. `validate(config, set_keys, world_size)` returns (problems, warnings)."""
    if {"-h", "--help"} & set(argv):
        print(explain(root, usage))
        sys.exit(0)
    options, overrides, problems = _options(argv)
    config = OmegaConf.structured(root)
    set_keys = set()
    for key, value, source in _recipe(options, problems) + _overrides(overrides, problems):
        meant, problem = _set(config, key, value)
        if meant:
            set_keys.add(meant)
        if problem:
            problems.append(problem + source)
    missing = sorted(OmegaConf.missing_keys(config))
    if "--cfg" not in options:
        problems += [f"{key} is missing: {_docs(root)[key]}" for key in missing]
    wrong = _choices(root, config)
    if "--cfg" in options and not problems + wrong:
        print(OmegaConf.to_yaml(config, resolve=True), end="")
        sys.exit(0)
    for key in missing:  # so that what there is can be checked
        OmegaConf.update(config, key, "")
    result = OmegaConf.to_object(config)
    # A wrong choice may be why other keys seem to have no effect.
    found, warnings = validate(result, set() if wrong else set_keys, int(os.environ.get("WORLD_SIZE", "1")))
    problems += wrong + found
    first = os.environ.get("RANK", "0") == "0"
    if problems and first:
        print(f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:", file=sys.stderr)
        print("\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
    if problems:
        sys.exit(2)
    for warning in warnings if first else []:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return result


@contextmanager
def user_errors():
    """Shows what rl2 itself refuses, and files and hubs that are out of reach, as one message; everything else with its
    traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = Path(__file__).parents[1] in Path(frames[-1].filename).parents
        if "by peer" in str(error):  # gloo's connection to a process that is gone
            error = "another process ended; if it said nothing above, it was killed, perhaps for its memory"
        elif not (ours or isinstance(error, OSError | SafetensorError)):
            raise
        rank = os.environ.get("RANK", "0")
        if rank != "0":  # most errors meet all ranks: the first one tells, and torchrun ends the others meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"error{'' if rank == '0' else f' on rank {rank}'}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def dump(config) -> str:
    """The config as YAML that --config-name reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _options(argv):
    """--cfg, --config-dir and --config-name (as `--name value` or `--name=value`), the overrides, and what is wrong."""
    options, overrides, problems, words = {}, [], [], list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--cfg", "--config-dir", "--config-name"):
            options[name] = value if equals else (words.pop(0) if words else "")
        elif word.startswith("-"):
            problems.append(
                f"{word} is no option: there are --help, --cfg job, --config-dir DIR and --config-name NAME"
            )
        else:
            overrides.append(word)
    if options.get("--cfg", "job") != "job":
        problems.append(f"--cfg {options['--cfg']}: the only choice is job")
    return options, overrides, problems


def _recipe(options, problems):
    """(key, value, where it was written) of each entry of the recipe file."""
    if "--config-name" not in options:
        if "--config-dir" in options:
            problems.append("--config-dir needs --config-name: the file in that folder, with or without .yaml")
        return []
    name = options["--config-name"]
    path = Path(options.get("--config-dir", "."), name if name.endswith((".yaml", ".yml")) else name + ".yaml")
    if not path.is_file():
        problems.append(f"--config-name {name}: there is no file {path}")
        return []
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path} is not readable YAML: {error}")
        return []
    return [(key, value, f" (in {path})") for key, value in _flatten(recipe or {})]


def _flatten(tree, prefix=""):
    for key, value in tree.items():
        deeper = isinstance(value, dict) and value and prefix + key != "rollout.engine_args"
        yield from _flatten(value, f"{prefix}{key}.") if deeper else [(prefix + str(key), value)]


def _overrides(words, problems):
    """(key, value, "") of each key=value argument."""
    found, parser = [], OverridesParser.create()
    for word in words:
        key, equals, text = word.partition("=")
        if key[:1] in "+~" or not equals:
            remedy = "write key=value; every key exists already, so + and ~ are not needed"
            problems.append(f"{word!r} sets no key: {remedy}")
            continue
        try:
            override = parser.parse_override(word)
        except HydraException:
            quoted = text.replace('"', '\\"')
            problems.append(f"{word} cannot be read: put quotes in quotes where a value has spaces, commas, "
                            f"parentheses or =, as in '{key}=\"{quoted}\"'")  # fmt: skip
            continue
        if override.is_sweep_override():
            problems.append(f"{word} names several values, and a run has one: for a list write {key}=[{text}]")
        else:
            found.append((override.key_or_group, override.value(), ""))
    return found


def _set(config, key, value) -> tuple[str | None, str | None]:
    """Sets one key, or the one that it is a slip of. Returns which that was, and what is wrong."""
    if key.startswith("rollout.engine_args."):
        OmegaConf.update(config, key, value, force_add=True)
        return key, None
    known = dict(_leaves(config))
    if key not in known:
        near = difflib.get_close_matches(key, known, 3, 0.75)
        last = key.rpartition(".")[2]
        near += [k for k in known if k.rpartition(".")[2] == last and k not in near]
        near = near or [k for k in known if difflib.get_close_matches(last, [k.rpartition(".")[2]], 1, 0.7)]
        hint = f": did you mean {' or '.join(near[:3])}?" if near else "; --help lists all"
        meant = _set(config, near[0], value)[0] if len(near) == 1 else None
        return meant, f"unknown key {key}={value}{hint}"
    if isinstance(value, bool) and isinstance(known[key], StringNode):
        return key, f"{key}={value}: this is text, so quote it: '{'off' if not value else 'on'}'"
    try:
        OmegaConf.update(config, key, value, force_add=False)
    except OmegaConfBaseException as error:
        return key, f"{key}={value}: {str(error).splitlines()[0]}"
    return key, None


def _leaves(config, prefix=""):
    """(dotted key, node) of everything that can be set."""
    for key in config:
        node = config._get_node(key)
        if OmegaConf.is_dict(node) and OmegaConf.get_type(node) is not dict:
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield prefix + key, node


def _walk(section, prefix=""):
    """(dotted key, field, the class it stands in) of all fields below a config class."""
    for entry in fields(section):
        kind = entry.default_factory if entry.default_factory is not NO_DEFAULT else None
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, entry, section


def _choices(root, config) -> list[str]:
    problems = []
    for key, entry, _ in _walk(root):
        value, choices = OmegaConf.select(config, key, throw_on_missing=False), entry.metadata.get("choices")
        if choices and value is not None and value not in choices:
            problems.append(f"{key}={value}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    return problems


def _docs(root) -> dict[str, str]:
    """Key -> the string under its field, read from the source; a class without one takes its parents'."""
    return {
        key: next(texts[entry.name] for texts in map(_class_docs, section.__mro__[:-1]) if entry.name in texts)
        for key, entry, section in _walk(root)
    }


@cache
def _class_docs(section) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    return {
        statement.target.id: following.value.value
        for statement, following in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }


def explain(root: type, usage: str) -> str:
    """The help: every key with its default, its choices and what it is."""
    width = min(120, shutil.get_terminal_size().columns)
    lines = [f"torchrun --nproc_per_node=N -m {usage} key=value ...     (python -m {usage} for one process)", ""]
    lines += ["--cfg job prints the resolved config; --config-dir DIR --config-name NAME starts from a YAML recipe;"]
    lines += ["values with spaces, commas, = or parentheses need quotes in quotes: 'key=\"a value\"'."]
    defaults, docs, section = OmegaConf.structured(root), _docs(root), None
    for key, entry, _ in _walk(root):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", section]
        value = OmegaConf.to_container(defaults)
        for part in key.split("."):
            value = value[part]
        shown = "(required)" if value == "???" else "(none)" if value is None else value
        choices = entry.metadata.get("choices")
        text = docs[key] + (f" [{' | '.join(choices)}]" if choices else "")
        lines += [f"  {key}={shown}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]
    return "\n".join(lines)


SGLANG = ("rollout.tp_size", "rollout.gpu_memory_utilization", "rollout.engine_args", "rollout.engine_args.")
# Ranges; a key that a config lacks is passed over.
WORKER_POSITIVE = ("max_length_per_device", "max_inference_length_per_device", "update_per_rollout", "clip", "lr",
                   "max_grad_norm", "save_freq", "sp_size", "tp_size", "lora_alpha")  # fmt: skip
WORKER_NOT_NEGATIVE = ("fsdp_size", "weight_decay", "freeze_steps", "warmup_ratio", "lora_rank")
POSITIVE = (
    "data.max_length", "data.prompts_per_rollout", "data.responses_per_prompt", "data.batch_size", "actor.clip_high",
    "actor.average_constant", "actor.dual_clip", "dpo.beta", "rollout.max_running", "rollout.max_turns",
    "rollout.env_timeout", "rollout.tp_size", "rollout.gpu_memory_utilization",
    "rollout.train_sampling_params.temperature", "rollout.train_sampling_params.max_new_tokens",
    "rollout.test_sampling_params.max_new_tokens", "trainer.n_epochs", "trainer.max_steps", "trainer.save_freq",
    "trainer.keep_checkpoints", "trainer.test_freq",
)  # fmt: skip
NOT_NEGATIVE = ("kl.coef", "actor.entropy", "dpo.label_smoothing", "rm.center", "rollout.max_env_failures",
                "adv.gamma", "adv.lamda", "data.seed", "rollout.test_sampling_params.temperature", "trainer.seed")  # fmt: skip
AT_MOST_ONE = ("rollout.max_env_failures", "rollout.gpu_memory_utilization", "adv.gamma", "adv.lamda",
               "rollout.train_sampling_params.top_p", "rollout.test_sampling_params.top_p", "actor.warmup_ratio",
               "critic.warmup_ratio")  # fmt: skip


def validate_ppo(config: PPOConfig, set_keys: set[str], world_size: int) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    workers = ["actor"] + ["critic"] * (config.adv.estimator == "gae")
    problems = check_numbers(config, POSITIVE, NOT_NEGATIVE, AT_MOST_ONE)
    for name in workers:
        problems += check_worker(config, name, world_size)
    problems += _check_paths(config, ("actor", "critic")) + _check_lengths(config, workers) + _check_sizes(config)
    env = Path(config.rollout.env_path).expanduser()
    if config.rollout.env_path and (not env.is_file() or env.suffix != ".py"):
        problems.append(f"rollout.env_path={env}: no such Python file; copy one of envs/ to start from")
    problems += _check_engine(config)
    problems += _in_vain(config, set_keys, [*_uses(config), *_common_uses(config, ("actor", "critic"))])
    return problems, _warnings(config, set_keys) + _idle(config, set_keys)


def validate_sft(config: SFTConfig, set_keys: set[str], world_size: int) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    return _validate_examples(config, "actor", set_keys, world_size, 1, [
        (False, ("actor.share_prompts",), "in SFT, where no rows share a prompt"),
        (config.data.test_path, ("actor.max_inference_length_per_device",), "without data.test_path"),
    ])  # fmt: skip


def validate_dpo(config: DPOConfig, set_keys: set[str], world_size: int) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    uses = [(config.dpo.loss == "sigmoid", ("dpo.label_smoothing",), f"with dpo.loss={config.dpo.loss}")]
    problems, warnings = _validate_examples(config, "actor", set_keys, world_size, 2, uses)
    if config.dpo.label_smoothing >= 0.5:
        problems.append(f"dpo.label_smoothing={config.dpo.label_smoothing}: it must be below 0.5, a coin's toss")
    return problems, warnings


def validate_rm(config: RMConfig, set_keys: set[str], world_size: int) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    uses = [(config.data.test_path, ("critic.max_inference_length_per_device",), "without data.test_path")]
    return _validate_examples(config, "critic", set_keys, world_size, 2, uses)


def _validate_examples(config, name, set_keys, world_size, group_size, uses):
    """The same for the trainers without rollouts, whose one trained worker is `name`; `group_size` sequences have to
    fit into one micro-batch."""
    worker, data = getattr(config, name), config.data
    problems = check_numbers(config, POSITIVE, NOT_NEGATIVE, AT_MOST_ONE) + check_worker(config, name, world_size)
    problems += _check_paths(config, (name,))
    for key in ("max_length_per_device", "max_inference_length_per_device"):
        limit, needed = getattr(worker, key), data.max_length * (group_size if key == "max_length_per_device" else 1)
        if limit and needed > limit * worker.sp_size:
            problems.append(f"{name}.{key}={limit} is shorter than a row may get: {needed} = data.max_length "
                            f"x {needed // data.max_length}; raise it, or lower data.max_length")  # fmt: skip
    uses = [*uses, (False, ("trainer.deterministic",), "where nothing is sampled")]
    uses += [(worker.lora_rank, ("trainer.seed",), f"where nothing is sampled and {name}.lora_rank=0")]
    problems += _in_vain(config, set_keys, [*uses, *_common_uses(config, (name,))])
    return problems, _idle(config, set_keys)


def _in_vain(config, set_keys, uses) -> list[str]:
    """The knobs that the user set to no effect; `uses` are (whether they matter, keys, why they do not)."""
    problems, told = [], _told(config, set_keys)
    for needed, keys, reason in uses:
        prefixes = tuple(key for key in keys if key.endswith("."))
        vain = sorted(key for key in told if not needed and (key in keys or key.startswith(prefixes)))
        problems += [f"{key}={_get(config, key)} has no effect {reason}" for key in vain]
    return problems


def _told(config, set_keys) -> set[str]:
    """The keys that say other than the default: what says no more is harmless, and a whole config.yaml can be read back."""
    defaults = type(config)()
    return {key for key in set_keys if key.startswith(SGLANG[-1]) or _get(config, key) != _get(defaults, key)}


def _get(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def check_numbers(config, positive, not_negative, at_most_one) -> list[str]:
    """What leaves its range; None is allowed."""
    known = {key for key, *_ in _walk(type(config))}
    found = [{key: _get(config, key) for key in keys if key in known} for keys in (positive, not_negative, at_most_one)]
    bad = [f"{key}={value}: it must be above 0" for key, value in found[0].items() if value is not None and value <= 0]
    bad += [f"{key}={value}: it must not be below 0" for key, value in found[1].items() if value < 0]
    return bad + [f"{key}={value}: it must not be above 1" for key, value in found[2].items() if value > 1]


def check_worker(config, name: str, world_size: int) -> list[str]:
    """What is wrong with one worker's section."""
    worker = getattr(config, name)
    problems = check_numbers(
        config, [f"{name}.{key}" for key in WORKER_POSITIVE], [f"{name}.{key}" for key in WORKER_NOT_NEGATIVE], ()
    )
    # Data and sequences are split over what tensor parallelism leaves, and so is the model.
    tp = worker.tp_size if worker.tp_size > 0 and world_size % worker.tp_size == 0 else 1
    for key, size, parts in (("tp_size", worker.tp_size, world_size), ("sp_size", worker.sp_size, world_size // tp),
                             ("fsdp_size", worker.fsdp_size, world_size // tp)):  # fmt: skip
        if size > 0 and parts % size:
            valid = ", ".join(str(n) for n in range(1, parts + 1) if parts % n == 0)
            left = f" that {name}.tp_size={tp} leaves" if parts < world_size else ""
            valid += " or 0" if key == "fsdp_size" else ""
            parts = f"{parts} process{'es' * (parts > 1)}"
            problems.append(f"{name}.{key}={size} does not divide the {parts}{left}: choose {valid}")
    if (worker.save_freq is None) != (worker.save_dir is None):
        problems.append(f"{name}.save_dir={worker.save_dir} and {name}.save_freq={worker.save_freq} need each other")
    if worker.lora_rank > 0 and worker.tp_size > 1:
        problems.append(f"{name}.lora_rank={worker.lora_rank} with {name}.tp_size={worker.tp_size}: adapters are not cut "
                        f"into parts; set {name}.tp_size=1, fsdp_size and sp_size divide the work as well")  # fmt: skip
    if worker.lora_rank > 0 and not installed("peft"):
        problems.append(f"{name}.lora_rank={worker.lora_rank} needs peft, which is not installed; pip install peft")
    return problems


def _check_paths(config, workers) -> list[str]:
    problems = []
    for key in ("data.path", "data.test_path"):
        path = _get(config, key)
        local = path and (path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~")))
        if local and not Path(path).expanduser().exists():
            problems.append(f"{key}={path}: no such file or folder")
    for key in [f"{name}.model_name" for name in workers]:
        name = _get(config, key)
        if name and Path(name).is_dir() and not Path(name, "config.json").exists():
            problems.append(f"{key}={name}: this folder holds no model (no config.json)")
        elif name and not Path(name).is_dir() and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
            problems.append(f"{key}={name}: no such folder; a model of the hub is owner/name")
    for key in [f"{name}.optimizer_dir" for name in workers]:
        if _get(config, key) and not Path(_get(config, key)).is_dir():
            problems.append(f"{key}={_get(config, key)}: no such folder")
    resume = config.trainer.resume
    if resume not in ("auto", "off") and not Path(resume).is_dir():
        problems.append(f"trainer.resume={resume}: choose auto, off or the folder of a checkpoint")
    return problems


def _check_lengths(config, workers) -> list[str]:
    turns, answer = config.rollout.max_turns, config.rollout.train_sampling_params.max_new_tokens
    longest, problems = config.data.max_length + turns * answer, []
    for name in workers:
        worker = getattr(config, name)
        for key in ("max_length_per_device", "max_inference_length_per_device"):
            limit = getattr(worker, key)
            if limit and longest > limit * worker.sp_size:
                problems.append(
                    f"{name}.{key}={limit} is shorter than a trajectory may get: data.max_length {config.data.max_length}"
                    f" + {turns} x max_new_tokens {answer} = {longest}; raise it, or lower the others"
                )
    return problems


def _check_sizes(config) -> list[str]:
    problems, data, actor = [], config.data, config.actor
    if config.adv.estimator == "reinforce" and data.responses_per_prompt == 1:
        problems.append("data.responses_per_prompt=1 leaves adv.estimator=reinforce no group to compare with: "
                        "every advantage would be 0; sample 2 or more, or use adv.estimator=gae")  # fmt: skip
    trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name in ("actor", "critic"):
        if getattr(config, name).update_per_rollout > trajectories:
            problems.append(f"{name}.update_per_rollout={getattr(config, name).update_per_rollout} is more than the "
                            f"{trajectories} trajectories of a step")  # fmt: skip
    if config.rollout.partial and config.trainer.deterministic:
        problems.append("trainer.deterministic=true: partial rollouts depend on time; leave it or rollout.partial out")
    if (config.kl.coef > 0) != (config.kl.type is not None):
        problems.append(f"kl.coef={config.kl.coef} and kl.type={config.kl.type} need each other: choose reward or loss")
    if (actor.average == "constant") != (actor.average_constant is not None):
        problems.append(
            f"actor.average={actor.average} and actor.average_constant={actor.average_constant} need each other"
        )
    for name in ("train", "test"):
        params = getattr(config.rollout, f"{name}_sampling_params")
        if params.top_p <= 0 or params.top_k == 0 or params.top_k < -1:
            problems.append(f"rollout.{name}_sampling_params: top_p={params.top_p}, top_k={params.top_k}: "
                            "top_p lies above 0 and up to 1, top_k is 1 or more, or -1 for all")  # fmt: skip
    return problems


def _check_engine(config) -> list[str]:
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if pick_engine(config.rollout.engine)[0] != "sglang":
        return []
    if not installed("sglang"):
        return ["rollout.engine=sglang: it is not installed; pip install sglang, or set rollout.engine=local"]
    if local_world % config.rollout.tp_size:
        valid = ", ".join(str(n) for n in range(1, local_world + 1) if local_world % n == 0)
        size = config.rollout.tp_size
        return [f"rollout.tp_size={size} does not divide the {local_world} processes of a node: choose {valid}"]
    return []


def _uses(config):
    """What `_in_vain` asks of PPO."""
    yield config.rollout.engine != "local", SGLANG, "with rollout.engine=local"
    gae, actor, kl = config.adv.estimator == "gae", config.actor, config.kl
    yield gae, ("critic.", "adv.gamma", "adv.lamda"), "with adv.estimator=reinforce: set adv.estimator=gae"
    yield kl.type == "reward", ("kl.reward_estimator",), f"with kl.type={kl.type}"
    yield kl.type == "loss", ("kl.loss_estimator",), f"with kl.type={kl.type}"
    yield actor.loss != "cispo", ("actor.clip", "actor.dual_clip"), "with actor.loss=cispo, which uses clip_high"
    yield actor.correction != "none", ("actor.correction_cap",), "with actor.correction=none"
    yield config.data.test_path, ("rollout.test_sampling_params.",), "without data.test_path"


def _common_uses(config, workers):
    yield config.data.test_path, ("trainer.test_freq",), "without data.test_path"
    for name in workers:
        worker, lora = getattr(config, name), (f"{name}.lora_alpha", f"{name}.lora_targets")
        yield worker.save_dir, (f"{name}.save_optimizer",), f"without {name}.save_dir"
        yield worker.lora_rank, lora, f"with {name}.lora_rank=0"


def _warnings(config, set_keys) -> list[str]:
    warnings, train = [], config.rollout.train_sampling_params
    if config.rollout.partial and config.actor.correction == "none":
        warnings.append("rollout.partial=true: tokens that older weights sampled are trained as if the current ones had; "
                        "actor.correction=token_tis weighs them by their recorded log-probabilities")  # fmt: skip
    if train.top_p < 1 or train.top_k != -1:
        warnings.append("rollout.train_sampling_params: the policy's log-probabilities are from before top_p, top_k: "
                        " the trainer does not see what these cut off")  # fmt: skip
    clips = {"actor.clip", "actor.clip_high", "actor.dual_clip"} & set_keys
    if clips and config.actor.update_per_rollout == 1 and config.actor.loss == "ppo":
        warnings.append(
            f"{', '.join(sorted(clips))}: with actor.update_per_rollout=1 the ratio is exactly 1 and never clipped"
        )
    if config.kl.type == "loss" and config.kl.loss_estimator == "k1":
        warnings.append("kl.loss_estimator=k1: the gradient of k1 in a loss is 0 on average; k2 has that of the KL")
    return warnings


def _idle(config, set_keys) -> list[str]:
    """What only the hardware makes idle."""
    warnings = []
    idle = [key for key in set_keys if key.endswith(("offload_model", "offload_optimizer")) and _get(config, key)]
    if idle and not torch.cuda.is_available():
        warnings.append(f"{', '.join(sorted(idle))}: nothing to do without a GPU")
    idle = [key for key in _told(config, set_keys) if key.startswith(SGLANG)]
    if idle and config.rollout.engine == "auto" and (picked := pick_engine("auto"))[0] == "local":
        warnings.append(f"{', '.join(sorted(idle))}: nothing to do with the local engine ({picked[1]})")
    return warnings
