"""The sections of the config, one dataclass each. Everything about a key is beside its field.

`key` (in key.py) declares a key with its default, its help, its range, its choices and the keys
that it needs. A type such as PositiveInt has the range that it says. Hydra composes the config from
these classes, `help.py` prints the help, and `rules.py` checks the rest.
A subclass that only changes a default writes a plain `name: type = default`; the rest stays.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from omegaconf import MISSING, OmegaConf

from rl2.algorithms.names import (
    ADVANTAGE_ESTIMATOR_NAMES,
    IMPORTANCE_CORRECTION_NAMES,
    KL_ESTIMATOR_NAMES,
    POLICY_LOSS_NAMES,
    PREFERENCE_LOSS_NAMES,
    TOKEN_AVERAGES,
)
from rl2.config.engines import ENGINES
from rl2.config.key import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    follows,
    key,
    section,
)
from rl2.engine.sampling_params import SamplingParams

LARGEST_SEED = 2**31 - 1  # for every library that takes one


def named_paths(key: str, value: Any) -> dict[str, Any]:
    """The paths that a key names, by key: KEY of a single one, KEY.NAME of each, none of None."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        return {key: value}
    return {f"{key}.{name}": path for name, path in value.items()}


def source_name(key: str) -> str:
    """The NAME of a key of `named_paths`, such as data.path.NAME; "" if it has none."""
    return ".".join(key.split(".")[2:])


@dataclass
class DataConfig:
    path: Any = key(
        MISSING,
        "training rows (a file, a folder or a dataset name); json, jsonl, csv, parquet or arrow; a "
        "dataset of the Hugging Face hub is NAME or NAME@SPLIT; mix several sources with "
        "data.path.NAME=PATH",
        common=True,
        identity=True,
        types=(str, dict),  # OmegaConf has no union of them
    )
    weights: dict[str, float] = key(
        {},
        "relative share of each source: data.weights.NAME=WEIGHT; by default its number of rows",
        above=0,
        identity=True,
    )
    test_path: Any = key(
        None,
        "rows to evaluate on; at the start, every trainer.test_freq steps and at the end; name "
        "several sets with data.test_path.NAME=PATH",
        common=True,
        types=(str, dict, NoneType),
    )
    test_ratio: NonNegativeFloat = key(
        0.0,
        "fraction of the training rows to hold out as test rows, by a hash of the prompt",
        below=1,
        identity=True,
    )
    test_limit: PositiveInt | None = key(
        None, "number of rows to use from each test set; the first ones"
    )
    columns: dict[str, str] = key(
        {},
        "columns to rename: data.columns.OLD=NEW; e.g. data.columns.question=prompt",
        identity=True,
    )
    chat_template: str | None = key(
        None,
        "plain for a simple template, or the path of a Jinja file; by default the model's own; "
        "exports of the model include it",
        identity=True,
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "variables of the chat template; e.g. data.chat_template_kwargs.enable_thinking=false",
        identity=True,
    )
    system_prompt: str | None = key(
        None,
        "added to conversations that do not begin with a system message; a text, the path of a "
        ".txt or .md file, or one of rl2.rewards' prompts by name: boxed or think_answer",
        identity=True,
    )
    max_length: PositiveInt = key(
        1024,
        "longest prompt (PPO) or row, in tokens; longer ones are dropped and counted",
        common=True,
        identity=True,
    )
    shuffle: bool = key(
        True, "shuffle the rows in every epoch; the order depends only on data.seed", identity=True
    )
    seed: NonNegativeInt = key(
        0, "seed of the order of the rows", at_most=LARGEST_SEED, identity=True
    )

    @property
    def train_paths(self) -> dict[str, str]:
        """The paths of the training rows, by key: data.path, or data.path.NAME of each source."""
        return named_paths("data.path", self.path)

    @property
    def test_paths(self) -> dict[str, str]:
        """The paths of the test sets, by key: data.test_path, or data.test_path.NAME of each."""
        return named_paths("data.test_path", self.test_path)

    @property
    def test_names(self) -> list[str]:
        """The names of the test sets, "" for one without; data.test_ratio has one a source."""
        held_out = named_paths("data.path", self.path) if self.test_ratio else {}
        return [source_name(key) for key in held_out or self.test_paths]

    @property
    def system_prompt_file(self) -> Path | None:
        """The file that data.system_prompt names, which need not exist; None if it is a text."""
        value = self.system_prompt
        if value is None or not value.endswith((".txt", ".md")):
            return None
        path = Path(value).expanduser()
        is_one_word = len(value.split()) == 1  # a sentence may end with the name of a file
        return path if is_one_word or path.is_file() else None

    @property
    def has_test_rows(self) -> bool:
        return bool(self.test_path or self.test_ratio)


@dataclass
class PromptConfig(DataConfig):
    prompts_per_rollout: PositiveInt = key(32, "prompts per step", common=True)
    responses_per_prompt: PositiveInt = key(
        8, "answers sampled per prompt, which form a group", common=True
    )
    responses_per_test_prompt: PositiveInt = key(
        1, "answers sampled per test prompt; more than one gives pass@k and majority votes"
    )
    few_shot: str | None = key(
        None,
        "rows of solved examples to put in front of every prompt; conversations that end with "
        "the reply, as for SFT",
        identity=True,
    )


@dataclass
class ExampleConfig(DataConfig):
    batch_size: PositiveInt = key(32, "rows per step", common=True)


@dataclass
class SFTDataConfig(ExampleConfig):
    turns: str = key("all", "assistant turns to train on", choices=("all", "last"), identity=True)
    truncate: bool = key(
        False,
        "cut rows longer than data.max_length instead of dropping them; their end is lost",
        identity=True,
    )


@dataclass
class ModelConfig:
    """A model and how it is spread over the processes."""

    model_name: str = key(
        MISSING,
        "a Hugging Face causal LM; a folder or a name on the hub",
        common=True,
        identity=True,
    )
    dtype: str = key(
        "auto",
        "dtype of the computation; auto: bfloat16 where the machine is fast at it, else float32; "
        "the trained weights are always float32",
        choices=("auto", "float32", "bfloat16"),
    )
    head_dtype: str = key(
        "float32",
        "dtype of the logits, in training and in the engine; bfloat16 rounds them, which is "
        "faster on a CPU",
        choices=("float32", "bfloat16"),
    )
    compile: bool = key(
        False, "compile whole layers but for attention with torch.compile; not with tp_size above 1"
    )
    fsdp_size: NonNegativeInt = key(
        0,
        "processes that share one copy of the model, 0 = all; fewer keep several copies",
        common=True,
    )
    sp_size: PositiveInt = key(
        1, "processes that share each sequence (ring attention)", common=True
    )
    tp_size: PositiveInt = key(1, "processes that share each matrix (tensor parallelism)")
    max_length_per_device: PositiveInt = key(
        8192, "tokens of a micro-batch per process; also limits the longest sequence", common=True
    )
    max_inference_length_per_device: PositiveInt | None = key(
        None, "the same for passes without gradients; by default max_length_per_device"
    )
    share_prompts: bool = key(
        True,
        "run the prompt of a group once for all its answers in a micro-batch; exact up to rounding",
    )
    offload_model: bool = key(
        False, "keep the weights in host memory while they are not in use, on a GPU"
    )


@dataclass
class WorkerConfig(ModelConfig):
    """A model that is trained."""

    optimizer_dir: str | None = key(
        None, "start with the optimizer state in this folder, which save_optimizer wrote"
    )
    gradient_checkpointing: bool | NonNegativeInt = key(
        True,
        "recompute layers in the backward pass: all, or a number of them; saves memory, takes "
        "about a third more time; rl2 plan says which number fits",
        common=True,
    )
    lora_rank: NonNegativeInt = key(
        0,
        "rank of LoRA adapters, 0 = train all weights; adapters need a higher lr",
        common=True,
        identity=True,
    )
    lora_alpha: PositiveFloat = key(
        64.0,
        "adapters are scaled by lora_alpha / lora_rank; so the best lr hardly depends on the rank",
        needs="lora_rank",
        identity=True,
    )
    lora_targets: list[str] = key(
        [],
        "names of the linear layers with adapters, e.g. [q_proj,v_proj]; by default all but the "
        "head",
        needs="lora_rank",
        identity=True,
    )
    adapter: str | None = key(
        None,
        "folder of LoRA adapters to train further, as peft and exports of rl2 write it",
        identity=True,
    )
    quantize_base: str | None = key(
        None,
        "nf4: store the frozen linear layers in 4 bits (QLoRA); needs bitsandbytes",
        needs="lora_rank",
        choices=("nf4",),
        identity=True,
    )
    freeze_router: bool = key(
        False,
        "do not train the routers of a mixture of experts; no adapters in them either",
        identity=True,
    )
    router_aux_loss_coef: NonNegativeFloat | None = key(
        None,
        "coefficient of the load-balancing loss of a mixture of experts; by default that of a "
        "model whose config asks for it (output_router_logits), else 0",
        identity=True,
    )
    dither_weights: bool = key(
        True,
        "start each weight at a random place among the numbers that round to it; so updates below "
        "the precision of bfloat16 have an effect at once",
    )
    optimizer: str = key(
        "adamw",
        "adamw or muon; muon: Muon for the matrices of the layers, AdamW for the rest",
        choices=("adamw", "muon"),
        identity=True,
    )
    lr: PositiveFloat = key(
        1e-6, "learning rate; by default ten times as high with LoRA adapters", common=True
    )
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay")
    betas: list[float] = key(
        [0.9, 0.999],
        "AdamW's decay rates, of its moving means of the gradient and of its square",
        at_least=0,
        below=1,
    )
    max_grad_norm: PositiveFloat = key(
        1.0, "clip the gradient to this norm; inf = never", may_be_infinite=True
    )
    warmup_ratio: Ratio = key(
        0.0, "fraction of the updates over which the learning rate rises linearly"
    )
    scheduler: str = key(
        "constant",
        "learning rate after the warmup; linear and cosine fall to min_lr_ratio x lr",
        choices=("constant", "linear", "cosine"),
    )
    min_lr_ratio: Ratio = key(
        0.0,
        "final learning rate, as a fraction of lr",
        needs="scheduler=linear or scheduler=cosine",
    )
    offload_optimizer: bool = key(
        False, "keep the optimizer state in host memory while it is not in use, on a GPU"
    )
    save_dir: str | None = key(None, "also export this worker here, as Hugging Face folders step_N")
    save_freq: PositiveInt | None = key(None, "steps between these exports")
    save_optimizer: bool = key(False, "export the optimizer state too")


@dataclass
class SFTActorConfig(WorkerConfig):
    lr: float = 1e-5
    average: str = key(
        "token",
        "how the loss is averaged; token: over all trained tokens of the step; sequence: over the "
        "mean of each row",
        choices=("token", "sequence"),
    )


@dataclass
class RewardModelConfig(WorkerConfig):
    lr: float = 1e-5


@dataclass
class RolloutWorkerConfig(WorkerConfig):
    update_per_rollout: PositiveInt = key(
        1, "mini-batches per rollout, each an optimizer step", common=True
    )
    epochs_per_rollout: PositiveInt = key(1, "passes over a rollout; each has its own mini-batches")
    freeze_steps: NonNegativeInt = key(
        0, "number of first steps in which this worker is not updated"
    )

    @property
    def updates_per_step(self) -> int:
        """The optimizer steps in a step."""
        return self.update_per_rollout * self.epochs_per_rollout


@dataclass
class ActorConfig(RolloutWorkerConfig):
    loss: str = key(
        "ppo",
        "policy loss; ppo: clipped token ratios; gspo: clipped sequence ratios; cispo: clipped "
        "importance weights; reinforce: no ratio",
        common=True,
        functions=POLICY_LOSS_NAMES,
        identity=True,
    )
    clip: PositiveFloat = key(
        0.2,
        "how far the probability ratio may move in a step; inf = any distance",
        common=True,
        may_be_infinite=True,
        setting_of="loss",
        default_of="clip_high",
    )
    clip_high: PositiveFloat | None = key(
        None,
        "upper clip, if it differs from clip (DAPO: 0.28)",
        may_be_infinite=True,
        setting_of="loss",
    )
    dual_clip: float | None = key(
        None,
        "bounds the loss of a bad answer by this many times its advantage, e.g. 3",
        above=1,  # the ratio is 1 on the policy, so a lower bound would drop every bad answer
        setting_of="loss",
    )
    off_policy_mask: PositiveFloat | None = key(
        None,
        "leave out bad answers that have become less likely by this (DeepSeek-V3.2); in the mean "
        "log-probability of their tokens",
    )
    average: str = key(
        "token",
        "how the loss is averaged; token: over tokens (DAPO); sequence: over the token mean of "
        "each trajectory (GRPO); prompt: over the token mean of each prompt (ScaleRL); constant: "
        "over a constant length (Dr. GRPO)",
        common=True,
        choices=TOKEN_AVERAGES,
    )
    average_constant: PositiveInt | None = key(
        None,
        "the length that average=constant divides by; in tokens; Dr. GRPO: the longest answer",
        needs="average=constant",
    )
    correction: str | None = key(  # derive_keys fills it in
        None,
        "corrects for engine probabilities that differ from the trainer's; token_tis: truncated "
        "importance weights; the others mask what differs too much; by default sequence_mask "
        "with SGLang and vLLM, token_tis with partial rollouts",
        choices=("none", *IMPORTANCE_CORRECTION_NAMES),
    )
    correction_cap: float | None = key(
        None,
        "limit of the ratio in the correction; by default 3 with sequence_mask, else 2",
        at_least=1,  # the ratio is 1 where engine and trainer agree
        may_be_infinite=True,
    )
    routing_replay: bool = key(
        False,
        "train with the experts that the engine chose for each token of a mixture of experts "
        "(R3); not with rollout.engine=vllm",
    )
    skip_threshold: float | None = key(
        None,
        "skip an optimizer step if its mean probability ratio is above this; with skip=sample "
        "single answers; PPO in TRL: 10",
        above=1,  # the ratio is 1 on the policy
    )
    skip: str = key(
        "update",
        "what skip_threshold skips; update: the optimizer step; sample: single answers, which "
        "needs an extra pass over the answers",
        choices=("update", "sample"),
        needs="skip_threshold",
    )
    entropy: NonNegativeFloat = key(0.0, "coefficient of an entropy bonus")
    log_entropy: bool = key(
        False, "log the policy's entropy; may need an extra pass over the answers"
    )


@dataclass
class CriticConfig(RolloutWorkerConfig):
    """Lies in memory and splits a rollout as the actor does; its rates are its own."""

    model_name: str | None = key(  # type: ignore[assignment]
        None, "model that the critic starts from; by default the actor's", identity=True
    )
    dtype: str = follows("actor.dtype")
    compile: bool = follows("actor.compile")
    fsdp_size: int = follows("actor.fsdp_size")
    sp_size: int = follows("actor.sp_size")
    tp_size: int = follows("actor.tp_size")
    max_length_per_device: int = follows("actor.max_length_per_device")
    max_inference_length_per_device: int | None = follows("actor.max_inference_length_per_device")
    gradient_checkpointing: bool | int = follows("actor.gradient_checkpointing")
    offload_model: bool = follows("actor.offload_model")
    offload_optimizer: bool = follows("actor.offload_optimizer")
    update_per_rollout: int = follows("actor.update_per_rollout")
    epochs_per_rollout: int = follows("actor.epochs_per_rollout")
    lr: float = 5e-6
    clip: PositiveFloat = key(
        0.2, "how far the value may move in a step; inf = any distance", may_be_infinite=True
    )


@dataclass
class TeacherConfig:
    model_name: str | None = key(
        None,
        "model to distill from, on-policy; must have the actor's tokenizer, and lies in memory as "
        "the actor; with teacher.base_url its name on the server, by default the first one there",
        common=True,
        identity=True,
    )
    base_url: str | None = key(
        None,
        "URL of a server that runs the teacher; e.g. http://host:8000; the environment variable "
        "TEACHER_API_KEY is its key",
        identity=True,
    )
    protocol: str = key(
        "openai",
        "how the server is asked; openai: completions with echo, as of vLLM; sglang: /generate",
        choices=("openai", "sglang"),
    )
    hint: str | None = key(
        None,
        'text that only the teacher reads, after the prompt, with columns of the row, e.g. "The '
        'answer is {answer}."; without teacher.model_name the teacher is then the policy itself '
        "(self-distillation)",
        identity=True,
    )
    kl: str = key(
        "sampled",
        "how KL(policy || teacher) is learned; sampled: the difference of log-probabilities of the "
        "sampled token, in its advantage; full: the sum over the whole vocabulary, in the loss",
        choices=("sampled", "full"),
        identity=True,
    )
    coef: PositiveFloat = key(
        1.0, "weight of the KL divergence; in the advantage of each token or in the loss"
    )


@dataclass
class SamplingConfig:
    temperature: PositiveFloat = key(
        SamplingParams.temperature, "divides the logits, in the engine and in training", common=True
    )
    top_p: PositiveFloat = key(
        SamplingParams.top_p,
        "sample from the most likely tokens that together have this probability",
        at_most=1,
    )
    top_k: int = key(
        SamplingParams.top_k,
        "sample from this many of the most likely tokens; -1 = all",
        at_least=1,
    )
    max_new_tokens: PositiveInt = key(
        SamplingParams.max_new_tokens, "longest answer of one turn, in tokens", common=True
    )
    stop_token_ids: list[int] = key(
        list(SamplingParams.stop_token_ids),
        "tokens that end a turn, in addition to the model's own",
        at_least=0,
    )
    stop: list[str] = key(
        list(SamplingParams.stop), 'texts that end a turn and stay in it, in quotes: ["</search>"]'
    )


@dataclass
class TestSamplingConfig(SamplingConfig):
    temperature: NonNegativeFloat = key(0.0, "divides the logits; 0 is greedy")
    max_new_tokens: int = follows("rollout.train_sampling_params.max_new_tokens")
    stop: list[str] = follows("rollout.train_sampling_params.stop")


@dataclass
class RolloutConfig:
    env_path: Any = key(
        MISSING,
        "a Python file or the name of a ready-made env; the file defines reward_fn(messages, "
        "answer), for several turns also interact(messages) or a class make_env with tools, or an "
        "agent run(row, base_url, model) or a loop play(row, generate); rollout.env_path.NAME=PATH "
        "for each of several sources",
        common=True,
        identity=True,
        types=(str, dict),
    )
    max_turns: PositiveInt = key(
        1,
        "most assistant turns per trajectory, or requests per agent; more than 1 calls the "
        "env's interact or tools",
        common=True,
    )
    reward_weights: dict[str, float] = key(
        {},
        "weights of reward parts: rollout.reward_weights.NAME=WEIGHT; default 1; 0 only logs the "
        "part",
    )
    score: str | None = key(
        None,
        "the reward part that is success, 1 or 0; for evaluations, save_best and "
        "filter; by default the whole reward",
    )
    max_running: PositiveInt | None = key(
        None,
        "sequences that an engine decodes at a time; by default 256 with SGLang and vLLM on a GPU, "
        "else 64",
    )
    env_timeout: PositiveFloat = key(30.0, "time limit of one env call, in seconds")
    env_concurrency: PositiveInt = key(
        32, "env calls that a process runs at a time; the others wait"
    )
    env_isolation: str = key(
        "thread",
        "where sync env functions run; process: in processes, killed on timeout",
        choices=("thread", "process"),
    )
    endpoint_host: str = key(
        "127.0.0.1",
        "address of this machine where agents find the model; with one that others reach, such as "
        "0.0.0.0, run() must ask for api_key",
    )
    max_env_failures: Ratio = key(
        0.1, "stop the run if a larger fraction of a step's trajectories fails"
    )
    engine: str = key(
        "auto",
        "engine that generates; local: embedded, in plain torch; auto: sglang if it is installed "
        "and there is a GPU, else local; vllm has been run on CPUs only",
        common=True,
        choices=("auto", *ENGINES),
    )
    engine_args: dict[str, Any] = key(
        {}, "other arguments of the engine of SGLang or vLLM: rollout.engine_args.NAME=VALUE"
    )
    num_processes: NonNegativeInt = key(
        0,
        "processes that only sample, while the others train on an earlier rollout; the last ones "
        "of the job; 0: all processes do both",
        common=True,
        identity=True,
    )
    lora: str = key(
        "auto",
        "what the engine is sent of LoRA; merged: whole weights; adapter: the adapters alone, "
        "which the embedded engine applies; auto: adapter with it on a CPU or on processes of "
        "its own",
        choices=("auto", "merged", "adapter"),
    )
    tp_size: PositiveInt = key(1, "GPUs that share an engine of SGLang")
    gpu_memory_utilization: Any = key(
        "auto",
        "fraction that SGLang or vLLM takes of the GPU memory that is free at its start; auto: "
        "0.6, or 0.85 with rollout.num_processes",
        choices=("auto",),
        above=0,
        at_most=1,
        types=(float, str),
    )
    exact: bool | None = key(
        None,
        "equal log-probabilities in engine and trainer, to the bit; true stops at a difference; "
        "by default on where a CPU can do it",
    )
    check_weights: bool = key(
        False, "compare the engine's weights with the trainer's after every step"
    )
    train_sampling_params: SamplingConfig = section(SamplingConfig, "sampling of training answers")
    test_sampling_params: TestSamplingConfig = section(
        TestSamplingConfig, "sampling of answers on data.test_path", common=False
    )
    partial: bool = key(
        False,
        "start the next step's prompts early; unfinished answers pause and continue after the "
        "update, so long answers do not stall a step",
    )
    max_staleness: PositiveInt | None = key(
        None,
        "how far rollouts run ahead; with rollout.num_processes in steps, 1 if unset; with "
        "partial rollouts the largest age of a token in updates, and older answers are sampled "
        "again",
        needs="partial or num_processes",
    )
    filter: list[float] = key(
        [],
        "[LOW,HIGH]: train only prompts with a mean reward between the two, and replace the "
        "others; [0,1] is DAPO's dynamic sampling; of rollout.score if set",
        common=True,
    )
    max_refills: PositiveInt = key(
        10, "most prompts that replace filtered ones in a step, in multiples of prompts_per_rollout"
    )
    mask_truncated: bool = key(
        False, "do not train answers cut by a length limit (DAPO's overlong filtering)"
    )
    overlong_buffer: PositiveInt | None = key(
        None,
        "tokens before max_new_tokens over which the reward falls; DAPO's soft overlong "
        "punishment; the longest turn counts",
    )
    overlong_penalty: PositiveFloat = key(
        1.0, "how much the reward has fallen at max_new_tokens", needs="overlong_buffer"
    )
    length_penalty: NonNegativeFloat = key(
        0.0,
        "what a training answer of max_new_tokens loses where all answers to its prompt succeed; "
        "less where fewer do; e.g. 0.1 (ALP)",
    )

    @property
    def env_paths(self) -> dict[str, str]:
        """The env files, by key: rollout.env_path, or rollout.env_path.NAME of each source."""
        return named_paths("rollout.env_path", self.env_path)


@dataclass
class KLConfig:
    coef: NonNegativeFloat = key(
        0.0,
        "weight of the KL divergence from the start model; 0 loads no reference model",
        common=True,
    )
    type: str | None = key(
        None,
        "where the KL term goes; reward: subtracted from the reward; loss: added to the loss",
        common=True,
        choices=("reward", "loss"),
        identity=True,
    )
    update_freq: PositiveInt | None = key(
        None,
        "steps between copies of the actor into the reference; by default it stays the start model",
        identity=True,
    )
    reward_estimator: str = key(
        "k1", "estimator with kl.type=reward", choices=KL_ESTIMATOR_NAMES, needs="type=reward"
    )
    loss_estimator: str = key(
        "k2",
        "estimator with kl.type=loss; k2 has the gradient of the KL divergence",
        choices=KL_ESTIMATOR_NAMES,
        needs="type=loss",
    )
    importance_weights: bool | None = key(
        None,
        "weight the KL term in the loss by the ratio of the current to the sampling policy; by "
        "default on with several updates per step",
        needs="type=loss",
    )


@dataclass
class AdvConfig:
    estimator: str = key(
        "reinforce",
        "advantage estimator; reinforce: reward minus the group's mean (GRPO with norm_var); "
        "rloo: minus the mean of the others; reinforce_plus_plus: reward, whitened over the "
        "batch; reinforce_plus_plus_baseline: reinforce, whitened; distillation: the teacher's "
        "minus the policy's log-probability; gae: with a critic (PPO)",
        common=True,
        functions=ADVANTAGE_ESTIMATOR_NAMES,
        identity=True,
    )
    gamma: Ratio = key(1.0, "discount of later rewards, per token", setting_of="estimator")
    lamda: Ratio = key(1.0, "lambda of gae", setting_of="estimator")
    norm_var: bool | None = key(  # derive_keys fills it in
        None,
        "divide advantages by their standard deviation; reinforce: of the group (on: GRPO; off: "
        "Dr. GRPO); gae: of the batch; by default on with gae, else off",
        common=True,
        setting_of="estimator",
    )


@dataclass
class DPOLossConfig:
    beta: PositiveFloat = key(
        0.1,
        "how strongly the policy is held to the start model; tau of ipo; in simpo the scale of the "
        "margin, e.g. 2; in orpo lambda; in kto how fast the value of a reply saturates",
        common=True,
    )
    loss: str = key(
        "sigmoid",
        "preference loss; sigmoid: DPO's own; ipo: IPO's squared error; hinge: SLiC's hinge; "
        "simpo, orpo: without a reference model; kto: of single replies with a label",
        common=True,
        functions=PREFERENCE_LOSS_NAMES,
        identity=True,
    )
    label_smoothing: NonNegativeFloat = key(
        0.0,
        "fraction of pairs assumed to be swapped (conservative DPO)",
        below=0.5,
        setting_of="loss",
    )
    target_margin: NonNegativeFloat = key(
        0.5,
        "SimPO's gamma; by how much beta times the chosen reply's mean log-probability should be "
        "larger",
        setting_of="loss",
    )
    desirable_weight: NonNegativeFloat = key(
        1.0,
        "weight of desirable replies in kto; it times their number, over undesirable_weight times "
        "theirs, should be between 1 and 1.5",
        setting_of="loss",
    )
    undesirable_weight: NonNegativeFloat = key(
        1.0, "weight of undesirable replies in kto", setting_of="loss"
    )
    sft_coef: NonNegativeFloat = key(
        0.0,
        "weight of an SFT loss on the chosen replies, which keeps them likely; e.g. 0.2 (Llama 3)",
    )


@dataclass
class RewardLossConfig:
    center: NonNegativeFloat = key(
        0.0,
        "weight of a squared error that keeps the mean reward of pairs near 0; e.g. 0.01",
        common=True,
    )


@dataclass
class TrainerConfig:
    eval_only = False  # a key of PPO alone

    project: str = key("rl2", "project in wandb and trackio")
    experiment_name: str = key("default", "name of the run", common=True)
    n_epochs: PositiveInt = key(1, "passes over the training rows", common=True)
    max_steps: PositiveInt | None = key(
        None, "stop after this many steps at the latest", common=True
    )
    loggers: list[str] = key(
        [],
        "services that receive config and metrics; metrics.jsonl is always "
        "written; wandb is skipped if it is not installed or not logged in",
        choices=("wandb", "tensorboard", "trackio"),
    )
    disable_wandb: bool = key(False, "remove wandb from trainer.loggers")
    deterministic: bool | None = key(
        None, "rollouts repeat bit for bit on the same layout; by default on a CPU only"
    )
    save_dir: str = key(
        "runs/${trainer.experiment_name}", "folder for everything the run writes", common=True
    )
    save_freq: PositiveInt | None = key(
        None, "steps between checkpoints, from which runs resume; Ctrl-C saves one too", common=True
    )
    keep_checkpoints: PositiveInt | None = key(
        2, "number of newest checkpoints to keep; null = all"
    )
    max_skipped_updates: PositiveInt | None = key(
        10,
        "stop with an error after this many updates in a row without a finite gradient; null = "
        "never",
    )
    resume: str = key(
        "auto",
        "auto, off, force or a checkpoint folder; auto: from the newest checkpoint in save_dir, "
        "if any; off: start over; force or force:FOLDER: resume even if the experiment differs",
        common=True,
    )
    test_freq: PositiveInt | None = key(
        None, "steps between evaluations; by default only before and after training", common=True
    )
    save_best: str | None = key(
        None,
        "keep the best evaluation: its checkpoint, and its model in best_model/; auto: by the "
        "mean reward or score of sampled answers, without any by the loss; else the name of a "
        "test set, or a metric after test/",
    )
    patience: PositiveInt | None = key(
        None, "end the run after this many evaluations in a row without a better one"
    )
    watchdog: NonNegativeFloat = key(
        60.0, "seconds without progress until the ranks print their stacks; 0 = never"
    )
    seed: NonNegativeInt = key(0, "seed of sampling and of new weights", at_most=LARGEST_SEED)


@dataclass
class PPOTrainerConfig(TrainerConfig):
    """With the keys of the run that only PPO has."""

    save_tokens: bool = key(
        False, "keep tokens, log-probabilities and rewards of training answers, beside the rollouts"
    )
    rollouts_from: str | None = key(
        None,
        "run folder with saved tokens to train on instead of sampling, step by step",
        identity=True,
    )
    eval_only: bool = key(
        False, "evaluate actor.model_name on the test data and end", identity=True
    )


@dataclass
class PPOConfig:
    data: PromptConfig = section(PromptConfig, "the rows")
    actor: ActorConfig = section(ActorConfig, "the policy that is trained")
    critic: CriticConfig = section(CriticConfig, "the value model of gae", common=False)
    rollout: RolloutConfig = section(RolloutConfig, "sampling of answers and their environment")
    kl: KLConfig = section(KLConfig, "the KL divergence from the starting model")
    adv: AdvConfig = section(AdvConfig, "advantages")
    teacher: TeacherConfig = section(
        TeacherConfig,
        "the teacher of on-policy distillation",
        common=False,
        needs="teacher.model_name or teacher.base_url or teacher.hint",
    )
    trainer: PPOTrainerConfig = section(PPOTrainerConfig, "the run: length, folder, checkpoints")


@dataclass
class SFTConfig:
    data: SFTDataConfig = section(SFTDataConfig, "the rows")
    actor: SFTActorConfig = section(SFTActorConfig, "the model that is trained")
    trainer: TrainerConfig = section(TrainerConfig, "the run: length, folder, checkpoints")


@dataclass
class DPOConfig:
    data: ExampleConfig = section(ExampleConfig, "the rows")
    actor: WorkerConfig = section(WorkerConfig, "the policy that is trained")
    dpo: DPOLossConfig = section(DPOLossConfig, "the loss")
    trainer: TrainerConfig = section(TrainerConfig, "the run: length, folder, checkpoints")


@dataclass
class RMConfig:
    data: ExampleConfig = section(ExampleConfig, "the rows")
    critic: RewardModelConfig = section(RewardModelConfig, "the reward model that is trained")
    rm: RewardLossConfig = section(RewardLossConfig, "the loss")
    trainer: TrainerConfig = section(TrainerConfig, "the run: length, folder, checkpoints")


# The config class of each trainer, by its name on the command line.
TRAINER_CONFIGS: dict[str, type] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
}


def teacher_model(config: PPOConfig) -> ModelConfig:
    """The teacher that the processes of the run load. It lies in memory as the actor."""
    values = {field.name: getattr(config.actor, field.name) for field in fields(ModelConfig)}
    return ModelConfig(**{**values, "model_name": config.teacher.model_name})


def worker_names(config: Any) -> list[str]:
    """The sections of workers: actor, critic or both."""
    return [name for name in vars(config) if isinstance(getattr(config, name), WorkerConfig)]


def dump(config: Any) -> str:
    """The config as YAML that --config-name reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
