"""The sections of the config, one dataclass each.

`key` (in key.py) declares a key with its default, its help, its range and its choices. A type such
as PositiveInt has the range that it says. Hydra composes the config from these classes, `help.py`
prints the help, and `rules.py` has what keys need and exclude.
A subclass that only changes a default writes a plain `name: type = default`; the rest stays.
"""

from dataclasses import dataclass, fields
from pathlib import Path
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
    Penalty,
    PositiveFloat,
    PositiveInt,
    Ratio,
    follows,
    key,
    section,
)
from rl2.engine.sampling_params import SamplingParams

LARGEST_SEED = 2**31 - 1  # for every library that takes one


def named_paths(key: str, value: Any) -> dict[str, str]:
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
    path: Any = key(  # OmegaConf has no union of texts and dicts
        MISSING,
        "training rows (a file, a folder or a dataset name); a dataset of the hub is NAME or "
        "NAME@SPLIT; mix several sources with data.path.NAME=PATH",
    )
    test_path: Any = key(None, "rows to evaluate on; several sets are data.test_path.NAME=PATH")
    test_ratio: NonNegativeFloat = key(
        0.0, "fraction of the training rows to hold out as test rows", below=1
    )
    columns: dict[str, str] = key(
        {}, "columns to rename: data.columns.OLD=NEW; e.g. data.columns.question=prompt"
    )
    chat_template: str | None = key(
        None, "plain for a simple template, or the path of a Jinja file; by default the model's"
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "variables of the chat template; e.g. data.chat_template_kwargs.enable_thinking=false"
    )
    system_prompt: str | None = key(
        None,
        "put before conversations without one; a text, a .txt or .md file, boxed, think_answer",
    )
    max_length: PositiveInt = key(
        1024, "longest prompt (PPO) or row, in tokens; longer ones are dropped and counted"
    )
    shuffle: bool = key(
        True, "shuffle the rows in every epoch; the order depends only on data.seed"
    )
    seed: NonNegativeInt = key(0, "seed of the order of the rows", at_most=LARGEST_SEED)

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


@dataclass
class PromptConfig(DataConfig):
    system_prompt: str | None = key(
        None,
        "put before conversations without one; a text, a .txt or .md file, boxed, think_answer; "
        "by default the env file's SYSTEM_PROMPT, and data.system_prompt= leaves that out",
        may_be_empty=True,
    )
    prompts_per_rollout: PositiveInt = key(32, "prompts per step")
    responses_per_prompt: PositiveInt = key(8, "answers sampled per prompt, which form a group")
    batch_size: PositiveInt | None = key(
        None,
        "trajectories (PPO) or rows per optimizer step; PPO: sets update_per_rollout",
    )
    responses_per_test_prompt: PositiveInt = key(
        1, "answers sampled per test prompt; more than one gives pass@k"
    )

    @property
    def trajectories_per_rollout(self) -> int:
        """The trajectories of a step, unless rollout.filter finds too few."""
        return self.prompts_per_rollout * self.responses_per_prompt


@dataclass
class ExampleConfig(DataConfig):
    batch_size: PositiveInt = key(32, "rows per optimizer step")


@dataclass
class ModelConfig:
    """A model and how it is spread over the processes."""

    model_name: str = key(MISSING, "a Hugging Face causal LM; a folder or a name on the hub")
    dtype: str = key(
        "auto",
        "dtype of the computation; auto: bfloat16 where it is fast; weights are float32",
        choices=("auto", "float32", "bfloat16"),
    )
    compile: bool = key(False, "compile whole layers; not recurrent ones, nor with tp_size above 1")
    fsdp_size: NonNegativeInt = key(
        0, "processes that share one copy of the model, 0 = all; fewer keep several copies"
    )
    sp_size: PositiveInt = key(1, "processes that share each sequence (ring attention)")
    tp_size: PositiveInt = key(1, "processes that share each matrix (tensor parallelism)")
    max_length_per_device: PositiveInt | str = key(
        "auto",
        "tokens of a micro-batch per process; also limits the longest sequence; auto: 8192, on a "
        "GPU up to 32768 if no layer runs again",
        choices=("auto",),
    )
    max_inference_length_per_device: PositiveInt | None = key(
        None, "the same for passes without gradients; by default max_length_per_device"
    )
    share_prompts: bool = key(
        True, "run the prompt of a group once for all its answers; exact up to rounding"
    )
    offload_model: bool = key(False, "keep unused weights in host memory, on a GPU")


@dataclass
class WorkerConfig(ModelConfig):
    """A model that is trained."""

    optimizer_dir: str | None = key(
        None, "start with the optimizer state in this folder, which save_optimizer wrote"
    )
    gradient_checkpointing: bool | NonNegativeInt | str = key(
        "auto",
        "recompute all layers, or a number of them, in the backward pass; saves memory; auto: all, "
        "on a GPU as few as its memory allows",
        choices=("auto",),
    )
    keep_gathered: bool | str = key(
        "auto",
        "keep whole weights and gradients over the micro-batches of an update; faster, for 6 bytes "
        "a weight of the whole model (2 in one process); auto: in one process, on GPUs where they "
        "fit",
        choices=("auto",),
    )
    lora_rank: NonNegativeInt = key(
        0, "rank of LoRA adapters, 0 = train all weights; adapters need a higher lr"
    )
    lora_alpha: PositiveFloat = key(64.0, "adapters are scaled by lora_alpha / lora_rank")
    lora_targets: list[str] = key(
        [], "names of the linear layers with adapters, e.g. [q_proj,v_proj]; by default all"
    )
    quantize_base: str | None = key(
        None, "nf4: store the frozen linear layers in 4 bits (QLoRA)", choices=("nf4",)
    )
    freeze_router: bool = key(
        False, "do not train the routers of a mixture of experts; no adapters in them either"
    )
    router_aux_loss_coef: NonNegativeFloat | None = key(
        None, "coefficient of the load-balancing loss of experts; by default the model's"
    )
    dither_weights: bool = key(
        True, "start each weight at a random place among the numbers that round to it"
    )
    optimizer: str = key(
        "adamw", "muon is for the matrices of the layers only", choices=("adamw", "muon")
    )
    lr: PositiveFloat = key(1e-6, "learning rate; by default ten times as high with LoRA adapters")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay")
    betas: list[float] = key(
        [0.9, 0.999], "AdamW's decay rates, of the moments of the gradient", at_least=0, below=1
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
    min_lr_ratio: Ratio = key(0.0, "final learning rate, as a fraction of lr")
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
        "how the loss is averaged; over all trained tokens, or over the mean of each row",
        choices=("token", "sequence"),
    )


@dataclass
class RewardModelConfig(WorkerConfig):
    lr: float = 1e-5


@dataclass
class RolloutWorkerConfig(WorkerConfig):
    update_per_rollout: PositiveInt = key(1, "mini-batches per rollout, each an optimizer step")
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
        "policy loss; gspo: clipped sequence ratios; cispo: clipped importance weights",
        functions=POLICY_LOSS_NAMES,
    )
    clip: PositiveFloat = key(
        0.2, "how far the probability ratio may move in a step", may_be_infinite=True
    )
    clip_high: PositiveFloat | None = key(
        None, "upper clip, if it differs from clip (DAPO: 0.28)", may_be_infinite=True
    )
    dual_clip: float | None = key(
        None, "bounds the loss of a bad answer by this many times its advantage, e.g. 3", above=1
    )
    off_policy_mask: PositiveFloat | None = key(
        None, "leave out bad answers whose mean log-probability has fallen by this (DeepSeek-V3.2)"
    )
    average: str = key(
        "token",
        "how the loss is averaged; over tokens (DAPO), the means of trajectories (GRPO) or "
        "prompts (ScaleRL), or constant (Dr. GRPO)",
        choices=TOKEN_AVERAGES,
    )
    average_constant: PositiveInt | None = key(
        None, "the length that average=constant divides by, in tokens"
    )
    correction: str | None = key(  # derive_keys fills it in
        None,
        "corrects for engine probabilities that differ from the trainer's; token_tis: "
        "truncated importance weights; the others mask; by default on where they differ",
        choices=("none", *IMPORTANCE_CORRECTION_NAMES),
    )
    correction_cap: float | None = key(
        None,
        "limit of the ratio in the correction; by default 3 with sequence_mask, else 2",
        at_least=1,  # the ratio is 1 where engine and trainer agree
        may_be_infinite=True,
    )
    routing_replay: bool = key(
        False, "train with the experts that the engine chose for each token (R3)"
    )
    skip_threshold: float | None = key(
        None, "skip an optimizer step if its mean ratio is above this, e.g. 10", above=1
    )
    entropy: NonNegativeFloat = key(0.0, "coefficient of an entropy bonus")
    log_entropy: bool = key(
        False, "log the policy's entropy; may need an extra pass over the answers"
    )


@dataclass
class CriticConfig(RolloutWorkerConfig):
    """Lies in memory and splits a rollout as the actor does; its rates are its own."""

    model_name: str | None = key(  # type: ignore[assignment]
        None, "model that the critic starts from; by default the actor's"
    )
    dtype: str = follows("actor.dtype")
    compile: bool = follows("actor.compile")
    fsdp_size: int = follows("actor.fsdp_size")
    sp_size: int = follows("actor.sp_size")
    tp_size: int = follows("actor.tp_size")
    max_length_per_device: int | str = follows("actor.max_length_per_device")
    max_inference_length_per_device: int | None = follows("actor.max_inference_length_per_device")
    gradient_checkpointing: bool | int | str = follows("actor.gradient_checkpointing")
    keep_gathered: bool | str = follows("actor.keep_gathered")
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
        None, "model to distill from; it has the actor's tokenizer; with base_url its name there"
    )
    base_url: str | None = key(
        None, "URL of a server with OpenAI's completions and `echo`; TEACHER_API_KEY is its key"
    )
    kl: str = key(
        "sampled",
        "how KL(policy || teacher) is learned; sampled: in the advantage; full: in the loss",
        choices=("sampled", "full"),
    )
    coef: PositiveFloat = key(
        1.0, "weight of the KL divergence; in the advantage of each token or in the loss"
    )


@dataclass
class SamplingConfig:
    temperature: PositiveFloat = key(
        SamplingParams.temperature, "divides the logits, in the engine and in training"
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
    min_p: NonNegativeFloat = key(
        SamplingParams.min_p, "least probability, as a fraction of the largest; 0 = off", below=1
    )
    max_new_tokens: PositiveInt = key(
        SamplingParams.max_new_tokens, "longest answer of one turn, in tokens"
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
    repetition_penalty: PositiveFloat = key(
        SamplingParams.repetition_penalty,
        "divides the logits of tokens in prompt and answer (SGLang: in the answer); 1 = off",
        at_most=2,
    )
    frequency_penalty: Penalty = key(
        SamplingParams.frequency_penalty,
        "subtracted from a token's logit for each time that it is in the answer; 0 = off",
    )
    presence_penalty: Penalty = key(
        SamplingParams.presence_penalty,
        "subtracted from the logits of tokens that are in the answer; 0 = off",
    )


@dataclass
class RolloutConfig:
    env_path: Any = key(
        MISSING,
        "a Python file or the name of a ready-made env; the file defines reward_fn, interact, "
        "make_env, run or play; rollout.env_path.NAME=PATH for each of several sources",
    )
    max_turns: PositiveInt = key(
        1, "most assistant turns per trajectory, or requests per agent; more than 1 calls tools"
    )
    reward_weights: dict[str, float] = key(
        {}, "weights of reward parts: rollout.reward_weights.NAME=WEIGHT; 0 only logs the part"
    )
    score: str | None = key(
        None, "the reward part that is success, 1 or 0; by default the whole reward"
    )
    max_running: PositiveInt | None = key(
        None, "sequences that an engine decodes at a time; 64, or 256 with SGLang and vLLM on a GPU"
    )
    env_timeout: PositiveFloat = key(30.0, "time limit of one env call, in seconds")
    env_concurrency: PositiveInt = key(
        32, "env calls that a process runs at a time; the others wait"
    )
    env_isolation: str = key(
        "thread",
        "where env functions run; process: in processes, killed on timeout",
        choices=("thread", "process"),
    )
    endpoint_host: str = key(
        "127.0.0.1", "address of this machine where agents find the model; others may reach 0.0.0.0"
    )
    max_env_failures: Ratio = key(
        0.1, "stop the run if a larger fraction of a step's trajectories fails"
    )
    engine: str = key(
        "auto",
        "engine that generates; local: embedded, in plain torch; server: at server_urls; auto: "
        "sglang on a GPU, else local",
        choices=("auto", *ENGINES),
    )
    engine_args: dict[str, Any] = key(
        {}, "other arguments of SGLang or vLLM: rollout.engine_args.NAME=VALUE"
    )
    server_urls: list[str] = key(
        [], "servers of rl2.engine.serve that generate, as [http://host:port,http://other:port]"
    )
    shared_dir: str | None = key(
        None, "folder through which weights go to the servers; theirs may have another path"
    )
    num_processes: NonNegativeInt = key(
        0, "processes that only sample, while the others train on an earlier rollout; the last ones"
    )
    tp_size: PositiveInt = key(1, "GPUs that share an engine of SGLang")
    gpu_memory_utilization: Any = key(
        "auto",
        "fraction that SGLang or vLLM takes of the GPU memory that is free at its start; auto: "
        "0.6, or 0.85 with rollout.num_processes",
        choices=("auto",),
        above=0,
        at_most=1,
    )
    exact: bool | None = key(
        None, "equal log-probabilities in engine and trainer, to the bit; by default if possible"
    )
    check_weights: bool = key(
        False,
        "compare the engine's weights with the trainer's after every step, not the first",
    )
    train_sampling_params: SamplingConfig = section(SamplingConfig, "sampling of training answers")
    test_sampling_params: TestSamplingConfig = section(
        TestSamplingConfig, "sampling of answers on data.test_path"
    )
    partial: bool = key(
        False, "start the next step's prompts early; unfinished answers continue after the update"
    )
    max_staleness: PositiveInt | None = key(
        None, "how far rollouts run ahead, in steps; with partial the age of a token in updates"
    )
    filter: list[float] = key(
        [], "[LOW,HIGH]: replace prompts with a mean reward outside; [0,1] is dynamic sampling"
    )
    max_refills: PositiveInt = key(
        10, "most prompts that replace filtered ones, in multiples of prompts_per_rollout"
    )
    mask_truncated: bool = key(
        False, "do not train answers cut by a length limit (DAPO's overlong filtering)"
    )
    overlong_buffer: PositiveInt | str | None = key(
        None,
        "tokens before max_new_tokens over which the reward falls (DAPO); auto: a quarter of them, "
        "at most 1024",
        choices=("auto",),
    )
    overlong_penalty: PositiveFloat = key(1.0, "how much the reward has fallen at max_new_tokens")

    @property
    def env_paths(self) -> dict[str, str]:
        """The env files, by key: rollout.env_path, or rollout.env_path.NAME of each source."""
        return named_paths("rollout.env_path", self.env_path)


@dataclass
class KLConfig:
    coef: NonNegativeFloat = key(
        0.0, "weight of the KL divergence from the start model; 0 loads no reference model"
    )
    type: str | None = key(
        None,
        "where the KL term goes; subtracted from the reward or added to the loss",
        choices=("reward", "loss"),
    )
    update_freq: PositiveInt | None = key(
        None, "steps between copies of the actor into the reference; by default never"
    )
    reward_estimator: str = key(
        "k1",
        "estimator with kl.type=reward, and of the KL that is logged",
        choices=KL_ESTIMATOR_NAMES,
    )
    loss_estimator: str = key(
        "k2", "estimator with kl.type=loss; k2 has its gradient", choices=KL_ESTIMATOR_NAMES
    )


@dataclass
class AdvConfig:
    estimator: str = key(
        "reinforce",
        "advantage estimator; reinforce: reward minus the group's mean (GRPO); rloo: minus the "
        "mean of the others; gae: with a critic (PPO)",
        functions=ADVANTAGE_ESTIMATOR_NAMES,
    )
    gamma: Ratio = key(1.0, "discount of later rewards, per token")
    lamda: Ratio = key(1.0, "lambda of gae")
    bootstrap: bool = key(
        False, "the critic's value continues the return of an answer that a length limit cut"
    )
    norm_var: bool | None = key(  # derive_keys fills it in
        None, "divide advantages by their standard deviation; by default on with gae, else off"
    )


@dataclass
class DPOLossConfig:
    beta: PositiveFloat = key(
        0.1, "how strongly the policy is held to the start model; tau of ipo, lambda of orpo"
    )
    loss: str = key(
        "sigmoid",
        "preference loss; sigmoid: DPO's own; simpo, orpo: without a reference model; kto: of "
        "single replies",
        functions=PREFERENCE_LOSS_NAMES,
    )
    label_smoothing: NonNegativeFloat = key(
        0.0, "fraction of pairs assumed to be swapped (conservative DPO)", below=0.5
    )
    target_margin: NonNegativeFloat = key(
        0.5, "SimPO's gamma: by how much the scaled margin should be larger"
    )
    desirable_weight: NonNegativeFloat = key(1.0, "weight of desirable replies in kto")
    undesirable_weight: NonNegativeFloat = key(1.0, "weight of undesirable replies in kto")
    sft_coef: NonNegativeFloat = key(
        0.0, "weight of an SFT loss on the chosen replies, which keeps them likely; e.g. 0.2"
    )


@dataclass
class TrainerConfig:
    eval_only = False  # a key of PPO alone

    project: str = key("rl2", "project in wandb")
    experiment_name: str = key("default", "name of the run")
    n_epochs: PositiveInt = key(1, "passes over the training rows")
    max_steps: PositiveInt | None = key(None, "stop after this many steps at the latest")
    loggers: list[str] = key(
        [],
        "services that receive config and metrics, beside metrics.jsonl",
        choices=("wandb",),
    )
    disable_wandb: bool = key(False, "remove wandb from trainer.loggers")
    deterministic: bool | None = key(
        None, "rollouts repeat bit for bit on the same layout; by default on a CPU only"
    )
    save_dir: str = key("runs/${trainer.experiment_name}", "folder for everything the run writes")
    save_freq: PositiveInt | None = key(
        None, "steps between checkpoints, from which runs resume; Ctrl-C saves one too"
    )
    keep_checkpoints: PositiveInt | None = key(
        2, "number of newest checkpoints to keep; null = all"
    )
    resume: str = key(
        "auto",
        "auto, off, force or a checkpoint folder; force or force:FOLDER: also if the experiment "
        "differs",
    )
    test_freq: PositiveInt | None = key(
        None, "steps between evaluations; by default only before and after training"
    )
    save_best: str | None = key(
        None, "keep the best evaluation's model; by auto, a test set's name or a metric after test/"
    )
    watchdog: NonNegativeFloat = key(
        60.0, "seconds without progress until the ranks print their stacks; 0 = never"
    )
    seed: NonNegativeInt = key(0, "seed of sampling and of new weights", at_most=LARGEST_SEED)


@dataclass
class PPOTrainerConfig(TrainerConfig):
    """With the keys of the run that only PPO has."""

    save_tokens: bool = key(
        False, "keep tokens, log-probabilities and rewards of training answers beside the rollouts"
    )
    rollouts_from: str | None = key(
        None, "run folder with saved tokens to train on instead of sampling"
    )
    eval_only: bool = key(False, "evaluate actor.model_name on the test data and end")


@dataclass
class PPOConfig:
    data: PromptConfig = section(PromptConfig, "the rows")
    actor: ActorConfig = section(ActorConfig, "the policy that is trained")
    critic: CriticConfig = section(CriticConfig, "the value model of gae")
    rollout: RolloutConfig = section(RolloutConfig, "sampling of answers and their environment")
    kl: KLConfig = section(KLConfig, "the KL divergence from the starting model")
    adv: AdvConfig = section(AdvConfig, "advantages")
    teacher: TeacherConfig = section(TeacherConfig, "the teacher of on-policy distillation")
    trainer: PPOTrainerConfig = section(PPOTrainerConfig, "the run: length, folder, checkpoints")


@dataclass
class SFTConfig:
    data: ExampleConfig = section(ExampleConfig, "the rows")
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
    trainer: TrainerConfig = section(TrainerConfig, "the run: length, folder, checkpoints")


OfflineConfig = SFTConfig | DPOConfig | RMConfig
Config = PPOConfig | OfflineConfig
# The config class of each trainer, by its name on the command line.
TRAINER_CONFIGS: dict[str, type[Config]] = {
    "ppo": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "rm": RMConfig,
}


def teacher_model(config: PPOConfig) -> ModelConfig:
    """The teacher that the processes of the run load. It lies in memory as the actor."""
    values = {field.name: getattr(config.actor, field.name) for field in fields(ModelConfig)}
    return ModelConfig(**values | {"model_name": config.teacher.model_name})


def worker_names(config: Config) -> list[str]:
    """The sections of workers: actor, critic or both."""
    return [name for name in vars(config) if isinstance(getattr(config, name), WorkerConfig)]


def model_name(config: Config, worker: str) -> str:
    """The model that a worker starts from: PPO's critic from the actor's, unless it has its own."""
    name: str | None = getattr(config, worker).model_name
    return config.actor.model_name if name is None and isinstance(config, PPOConfig) else name or ""


def dump(config: Config) -> str:
    """The config as YAML that --config-name reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
