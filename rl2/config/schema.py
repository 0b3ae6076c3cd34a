"""The sections of the config, one dataclass each. Everything about a key stands beside its field.

`key` (in key.py) declares a key with its default, its help, its range, its choices and the
condition under which it has an effect. A type such as PositiveInt has the range that it says.
`help.py` prints the help, and `rules.py` checks the rest.
A subclass that only changes a default writes a plain `name: type = default`; the rest stays.
"""

from dataclasses import dataclass
from types import NoneType
from typing import Any

from omegaconf import MISSING

from rl2.algorithms.find import (
    ESTIMATOR_CHOICES,
    POLICY_LOSS_CHOICES,
    PREFERENCE_LOSS_CHOICES,
)
from rl2.algorithms.losses import (
    IMPORTANCE_CORRECTIONS,
    KL_ESTIMATORS,
    TOKEN_AVERAGES,
)
from rl2.config.conditions import (
    WITH_CRITIC,
    WITH_FILTER,
    WITH_GPU,
    WITH_GROUPS,
    WITH_INFERENCE,
    WITH_LOGITS,
    WITH_LORA,
    WITH_RANDOMNESS,
    WITH_SAMPLING,
    WITH_SGLANG,
    WITH_TEST_DATA,
    WITH_TRAINING_ROWS,
    estimator_needs,
)
from rl2.config.engines import ENGINES
from rl2.config.key import (
    Condition,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    key,
    section,
)
from rl2.engine.base import SamplingParams

# A key that is not set has the value of another one. The critic and the teacher lie in memory, and
# the critic splits a rollout, as the actor does; its rates stay its own.
PLACEMENT = (
    "dtype",
    "compile",
    "fsdp_size",
    "sp_size",
    "tp_size",
    "max_length_per_device",
    "max_inference_length_per_device",
    "offload_model",
)
FOLLOWERS = {
    "critic": (
        *PLACEMENT,
        "gradient_checkpointing",
        "offload_optimizer",
        "update_per_rollout",
        "epochs_per_rollout",
    ),
    "teacher": (*PLACEMENT, "head_dtype", "share_prompts"),
}
FOLLOWED_KEYS = {
    f"{follower}.{name}": f"actor.{name}" for follower, names in FOLLOWERS.items() for name in names
}
for name in ("max_new_tokens", "stop"):
    FOLLOWED_KEYS[f"rollout.test_sampling_params.{name}"] = f"rollout.train_sampling_params.{name}"
LARGEST_SEED = 2**31 - 1  # for every library that takes one


@dataclass
class DataConfig:
    path: str = key(
        MISSING,
        "training rows, a file, folder or dataset name; json, jsonl, csv, parquet or arrow files, "
        "a folder of them, or a dataset of the Hugging Face hub, as NAME or NAME@SPLIT",
        common=True,
        identity=True,
        only_if=WITH_TRAINING_ROWS,
    )
    test_path: Any = key(
        None,
        "rows to evaluate on; at the start, every trainer.test_freq steps and at the end; several "
        "sets have names, as data.test_path.NAME=PATH",
        common=True,
        types=(str, dict, NoneType),  # OmegaConf has no union of them
    )
    test_ratio: NonNegativeFloat = key(
        0.0,
        "fraction of the training rows that become test rows in place of data.test_path; a hash of "
        "the prompts chooses them, so that no prompt is in both",
        below=1,
        identity=True,
    )
    test_limit: PositiveInt | None = key(
        None, "test rows that are used of each set, the first ones", only_if=WITH_TEST_DATA
    )
    columns: dict[str, str] = key(
        {},
        "columns of the rows to rename, as data.columns.OLD=NEW, e.g. data.columns.question=prompt",
        identity=True,
    )
    chat_template: str | None = key(
        None,
        "plain for a simple template, or the path of a Jinja file; by default the model's own; "
        "exports of the model carry it",
        identity=True,
    )
    chat_template_kwargs: dict[str, Any] = key(
        {},
        "variables of the chat template, e.g. data.chat_template_kwargs.enable_thinking=false",
        identity=True,
    )
    system_prompt: str | None = key(
        None, "shown before conversations that begin with no system message", identity=True
    )
    max_length: PositiveInt = key(
        1024,
        "longest prompt (PPO) or row, in tokens; longer ones are dropped and counted",
        common=True,
        identity=True,
    )
    shuffle: bool = key(
        True, "a new order in every epoch; it is a function of data.seed", identity=True
    )
    seed: NonNegativeInt = key(
        0, "seed of the order of the data", at_most=LARGEST_SEED, identity=True
    )

    @property
    def test_paths(self) -> dict[str, str]:
        """The paths of the test sets, by key: data.test_path, or data.test_path.NAME of each."""
        if not isinstance(self.test_path, dict):
            return {} if self.test_path is None else {"data.test_path": self.test_path}
        return {f"data.test_path.{name}": path for name, path in self.test_path.items()}

    @property
    def has_test_rows(self) -> bool:
        return bool(self.test_path or self.test_ratio)


@dataclass
class PromptConfig(DataConfig):
    prompts_per_rollout: PositiveInt = key(32, "prompts in a step", common=True)
    responses_per_prompt: PositiveInt = key(
        8, "answers sampled for each prompt; together they are a group", common=True
    )
    responses_per_test_prompt: PositiveInt = key(
        1,
        "answers sampled for each test prompt; several give pass@k and a majority vote",
        only_if=WITH_TEST_DATA,
    )


@dataclass
class ExampleConfig(DataConfig):
    batch_size: PositiveInt = key(32, "rows in a step", common=True)


@dataclass
class SFTDataConfig(ExampleConfig):
    turns: str = key(
        "all", "which assistant turns are trained", choices=("all", "last"), identity=True
    )
    truncate: bool = key(
        False,
        "cut rows longer than data.max_length at the end instead of dropping them; a cut reply "
        "does not teach where to end",
        identity=True,
    )


@dataclass
class ModelConfig:
    """A model and how it lies on the processes."""

    model_name: str = key(
        MISSING,
        "a Hugging Face causal LM; a folder or a name on the hub",
        common=True,
        identity=True,
    )
    dtype: str = key(
        "auto",
        "type of the computation; auto is bfloat16 where the machine is fast at it, else float32; "
        "the trained weights are always float32",
        choices=("auto", "float32", "bfloat16"),
    )
    head_dtype: str = key(
        "float32",
        "type of the logits, in training and in the engine; bfloat16 rounds them, which is faster "
        "on a CPU",
        choices=("float32", "bfloat16"),
        only_if=WITH_LOGITS,
    )
    compile: bool = key(
        False,
        "compile the elementwise parts of the layers and of the head (torch.compile); the same up "
        "to rounding, and the first step waits for the compiler",
    )
    fsdp_size: NonNegativeInt = key(
        0,
        "processes that share one copy of the model, 0 = all; fewer keep several copies (hybrid "
        "sharding)",
        common=True,
    )
    sp_size: PositiveInt = key(
        1, "processes that share each sequence (ring attention)", common=True
    )
    tp_size: PositiveInt = key(1, "processes that share each matrix (tensor parallelism)")
    max_length_per_device: PositiveInt = key(
        8192,
        "tokens of one micro-batch on one process; also the longest sequence",
        common=True,
    )
    max_inference_length_per_device: PositiveInt | None = key(
        None,
        "the same for passes without a gradient; by default max_length_per_device",
        only_if=WITH_INFERENCE,
    )
    share_prompts: bool = key(
        True,
        "run the prompt of a group once for all its answers in a micro-batch; exact up to rounding",
        only_if=WITH_GROUPS,
    )
    offload_model: bool = key(
        False, "keep the weights in host memory while they are not used", only_if=WITH_GPU
    )


@dataclass
class WorkerConfig(ModelConfig):
    """A model that is trained."""

    optimizer_dir: str | None = key(
        None, "a folder, written by save_optimizer, from which the optimizer starts"
    )
    gradient_checkpointing: bool | NonNegativeInt | str = key(
        True,
        "recompute each layer in the backward pass; less memory, about a third more time; a number "
        "recomputes so many layers; auto: as many as the memory of a GPU asks, which is predicted "
        "at the start",
        common=True,
        choices=("auto",),
    )
    lora_rank: NonNegativeInt = key(
        0,
        "rank of LoRA adapters, 0 = train all weights; with adapters the weights are frozen, and a "
        "higher lr is needed",
        common=True,
        identity=True,
    )
    lora_alpha: PositiveFloat | None = key(
        None,
        "adapters are scaled by lora_alpha / lora_rank; by default twice the rank",
        only_if=WITH_LORA,
        identity=True,
    )
    lora_targets: list[str] = key(
        [],
        "names of the linear layers that get adapters, e.g. [q_proj,v_proj]; by default all but "
        "the head",
        only_if=WITH_LORA,
        identity=True,
    )
    lr: PositiveFloat = key(
        1e-6,
        "learning rate of AdamW",
        common=True,
        unusual_above=0.01,
        unusual_effect="an update of AdamW moves every weight by about this much",
    )
    weight_decay: NonNegativeFloat = key(
        0.0,
        "weight decay of AdamW",
        unusual_above=1,
        unusual_effect="each update multiplies the weights by 1 - lr x weight_decay",
    )
    max_grad_norm: PositiveFloat = key(
        1.0,
        "larger gradients are scaled down to this norm; inf = never",
        may_be_infinite=True,
    )
    warmup_ratio: Ratio = key(
        0.0,
        "fraction of the updates in which the learning rate rises linearly",
        unusual_above=0.5,
        unusual_effect="the learning rate is reached in the last part of the run only",
    )
    scheduler: str = key(
        "constant",
        "the learning rate after the warm-up; linear and cosine fall to min_lr_ratio x lr",
        choices=("constant", "linear", "cosine"),
    )
    min_lr_ratio: Ratio = key(
        0.0,
        "the learning rate at the end, as a fraction of lr",
        only_if=Condition(
            lambda config, section: section.scheduler != "constant",
            "with {path}.scheduler=constant",
        ),
    )
    offload_optimizer: bool = key(
        False, "keep the optimizer in host memory while it is not used", only_if=WITH_GPU
    )
    save_dir: str | None = key(
        None, "export this worker here as Hugging Face folders step_N, for use elsewhere"
    )
    save_freq: PositiveInt | None = key(None, "steps between these exports")
    save_optimizer: bool = key(
        False,
        "export the optimizer too",
        only_if=Condition(lambda config, section: section.save_dir, "without {path}.save_dir"),
    )


@dataclass
class SFTActorConfig(WorkerConfig):
    lr: float = 1e-5
    average: str = key(
        "token",
        "the mean that the loss is; token: over all trained tokens of the step; sequence: over the "
        "rows' token means",
        choices=("token", "sequence"),
    )


@dataclass
class RewardModelConfig(WorkerConfig):
    lr: float = 1e-5


@dataclass
class RolloutWorkerConfig(WorkerConfig):
    update_per_rollout: PositiveInt = key(
        1, "mini-batches of a rollout; each is an optimizer step", common=True
    )
    epochs_per_rollout: PositiveInt = key(
        1, "passes over a rollout; each is cut into mini-batches anew"
    )
    freeze_steps: NonNegativeInt = key(0, "first steps in which this worker is not updated")

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
        functions=POLICY_LOSS_CHOICES,
        identity=True,
    )
    clip: PositiveFloat = key(
        0.2,
        "how far the probability ratio may move in one step; inf = any way",
        common=True,
        may_be_infinite=True,
        setting_of="loss",
        default_of="clip_high",
    )
    clip_high: PositiveFloat | None = key(
        None,
        "the upper clip, if it differs from clip (DAPO: 0.28)",
        may_be_infinite=True,
        setting_of="loss",
    )
    dual_clip: float | None = key(
        None,
        "bounds the loss of a bad answer by this times its advantage, e.g. 3",
        above=1,  # the ratio is 1 on the policy, so a lower bound would drop every bad answer
        setting_of="loss",
    )
    average: str = key(
        "token",
        "the mean that the loss is; token: over tokens (DAPO); sequence: over the trajectories' "
        "token means (GRPO); prompt: over the prompts' token means (ScaleRL); constant: over a "
        "constant length (Dr. GRPO)",
        common=True,
        choices=TOKEN_AVERAGES,
    )
    average_constant: PositiveInt | None = key(
        None,
        "the length that average=constant divides by, in tokens (Dr. GRPO: the longest answer)",
    )
    correction: str = key(
        "none",
        "corrects for engine probabilities that differ from the trainer's; token_tis: truncated "
        "importance weights; the others mask what differs too much",
        choices=("none", *IMPORTANCE_CORRECTIONS),
    )
    correction_cap: float = key(
        2.0,
        "the cap of the correction's ratio",
        at_least=1,  # the ratio is 1 where engine and trainer agree
        may_be_infinite=True,
        only_if=Condition(
            lambda config, section: section.correction != "none", "with actor.correction=none"
        ),
    )
    skip_threshold: float | None = key(
        None,
        "skip an optimizer step if its mean probability ratio is above this (PPO in TRL: 10)",
        above=1,  # the ratio is 1 on the policy
        only_if=Condition(
            lambda config, section: config.trainer.rollouts_from or section.updates_per_step > 1,
            "with one optimizer step a rollout, whose ratio is 1: raise {path}.update_per_rollout "
            "or {path}.epochs_per_rollout",
        ),
    )
    entropy: NonNegativeFloat = key(
        0.0,
        "coefficient of an entropy bonus",
        unusual_above=0.1,
        unusual_effect="a bonus above 0.01 often makes answers random",
    )
    log_entropy: bool = key(
        False,
        "log the policy's entropy; it costs a pass over the answers where no other is needed "
        "before the update",
    )


@dataclass
class CriticConfig(RolloutWorkerConfig):
    model_name: str | None = key(  # type: ignore[assignment]  # build.py fills it in
        None, "the model the critic starts from; by default the actor's", identity=True
    )
    lr: float = 5e-6
    clip: PositiveFloat = key(
        0.2, "how far the value may move in one step; inf = any way", may_be_infinite=True
    )


@dataclass
class TeacherConfig(ModelConfig):
    model_name: str | None = key(  # type: ignore[assignment]
        None,
        "a model to learn from (on-policy distillation); its log-probabilities of the answers are "
        "learned; it has the tokenizer of the actor",
        common=True,
        identity=True,
    )
    coef: PositiveFloat = key(
        1.0,
        "weight of the teacher's log-probability minus the policy's, which is added to the "
        "advantage of each token",
        only_if=Condition(
            lambda config, section: "teacher_logps" not in estimator_needs(config.adv.estimator),
            "with adv.estimator={config.adv.estimator}, whose advantage is that difference",
        ),
    )


@dataclass
class SamplingConfig:
    temperature: PositiveFloat = key(
        SamplingParams.temperature,
        "divides the logits, in the engine and in training",
        common=True,
        unusual_above=2,
        unusual_effect="answers are close to random tokens",
    )
    top_p: PositiveFloat = key(
        SamplingParams.top_p,
        "sample from the most likely tokens that hold this much probability",
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
        "tokens that end a turn, besides the model's own",
        at_least=0,
    )
    stop: list[str] = key(
        list(SamplingParams.stop),
        'texts that end a turn and stay in it, in quotes: ["</search>"]; test answers have those '
        "of training unless set",
    )


@dataclass
class TestSamplingConfig(SamplingConfig):
    temperature: NonNegativeFloat = key(0.0, "divides the logits; 0 is greedy")
    max_new_tokens: PositiveInt | None = key(  # type: ignore[assignment]  # follow_keys fills it in
        None, "longest answer of one turn, in tokens; by default that of training"
    )


@dataclass
class RolloutConfig:
    engine: str = key(
        "auto",
        "the engine that generates; local: the embedded one on plain torch; auto: sglang where it "
        "and a GPU are there, else local",
        common=True,
        choices=("auto", *ENGINES),
    )
    engine_args: dict[str, Any] = key(
        {},
        "further arguments of SGLang's engine, as rollout.engine_args.NAME=VALUE",
        only_if=WITH_SGLANG,
    )
    tp_size: PositiveInt = key(1, "GPUs of one SGLang engine", only_if=WITH_SGLANG)
    gpu_memory_utilization: PositiveFloat | str = key(
        "auto",
        "fraction of a GPU's free memory that SGLang may take; auto: what the trainer will not "
        "need, which is predicted at the start",
        choices=("auto",),
        at_most=1,
        unusual_above=0.9,
        unusual_effect="the trainer's processes need some of it while SGLang is awake",
        only_if=WITH_SGLANG,
    )
    max_running: PositiveInt | None = key(
        None,
        "sequences that one engine decodes at a time; by default 256 with SGLang on a GPU, else 64",
    )
    exact: bool | None = key(
        None,
        "engine and trainer give every sampled token the same log-probability, to the bit, which "
        "each step checks; true stops at a difference; by default on a CPU, where it can hold",
    )
    check_weights: bool = key(
        False,
        "compare the engine's weights with the trainer's after every step, tensor by tensor; the "
        "start always does",
    )
    train_sampling_params: SamplingConfig = section(SamplingConfig, "sampling of training answers")
    test_sampling_params: TestSamplingConfig = section(
        TestSamplingConfig,
        "sampling of answers on data.test_path",
        common=False,
        only_if=WITH_TEST_DATA,
    )
    max_turns: PositiveInt = key(
        1,
        "most assistant turns of a trajectory, or requests of an agent; more than 1 calls the "
        "env's interact, or its tools",
        common=True,
    )
    partial: bool = key(
        False,
        "start the next step's prompts early; when this step's are done, unfinished answers pause "
        "and continue after the update, so that long answers delay nobody; use it with "
        "actor.correction=token_tis",
    )
    max_staleness: PositiveInt | None = key(
        None,
        "with partial rollouts: how many updates older than the weights a token may be when its "
        "answer goes on or is trained; older answers are sampled anew",
        only_if=Condition(lambda config, section: section.partial, "with rollout.partial=false"),
    )
    filter: list[float] = key(
        [],
        "[LOW,HIGH]: train only prompts whose answers have a mean reward between the two, and "
        "replace the others by further prompts, [0,1] is DAPO's dynamic sampling; the mean is of "
        "the env's rewards, without the overlong penalty",
        common=True,
    )
    max_refills: PositiveInt = key(
        10,
        "prompts that a step may play to replace those outside rollout.filter, as a multiple of "
        "data.prompts_per_rollout; then it trains what it has",
        only_if=WITH_FILTER,
    )
    drop_solved: float | None = key(
        None,
        "leave out prompts whose answers once had at least this mean reward, e.g. 0.9 (ScaleRL)",
    )
    mask_truncated: bool = key(
        False,
        "do not train answers that a length limit cut (DAPO's overlong filtering); they count in "
        "the mean of their group",
    )
    overlong_buffer: PositiveInt | None = key(
        None,
        "tokens before max_new_tokens over which the reward falls (DAPO's soft overlong "
        "punishment), as the reward part overlong; in several turns for the longest one",
    )
    overlong_penalty: PositiveFloat = key(
        1.0,
        "by how much the reward has fallen at max_new_tokens",
        only_if=Condition(
            lambda config, section: section.overlong_buffer, "without rollout.overlong_buffer"
        ),
    )
    reward_weights: dict[str, float] = key(
        {},
        "weights of reward parts, as rollout.reward_weights.NAME=WEIGHT; 0 only logs the part, and "
        "parts without a weight have 1",
    )
    env_path: str = key(
        MISSING,
        "a Python file or the name of a ready-made env; the file has reward_fn(messages, answer) "
        "and for several turns interact(messages), or a class make_env with tools; or an agent, "
        "run(row, base_url, model)",
        common=True,
        identity=True,
    )
    env_timeout: PositiveFloat = key(30.0, "seconds that one call of the env may take")
    env_concurrency: PositiveInt = key(
        32, "calls of the env that one process makes at a time; the others wait"
    )
    env_isolation: str = key(
        "thread",
        "where functions of the env run that are not async; process: in env_concurrency processes, "
        "which are killed on timeout",
        choices=("thread", "process"),
    )
    max_env_failures: Ratio = key(
        0.1,
        "fraction of a step's trajectories whose env may fail; more stops the run",
    )


@dataclass
class KLConfig:
    coef: NonNegativeFloat = key(
        0.0,
        "weight of the KL divergence from the start model; 0 loads no reference model",
        common=True,
        unusual_above=1,
        unusual_effect="the KL term outweighs a reward of 1",
    )
    type: str | None = key(
        None,
        "where the KL goes; reward: subtracted from the reward; loss: added to the loss",
        common=True,
        choices=("reward", "loss"),
        identity=True,
    )
    update_freq: PositiveInt | None = key(
        None,
        "steps after which the reference becomes the current actor, again and again; by default it "
        "stays the start model",
        only_if=Condition(lambda config, section: section.coef, "with kl.coef=0"),
        identity=True,
    )
    reward_estimator: str = key(
        "k1",
        "estimator with kl.type=reward",
        choices=KL_ESTIMATORS,
        only_if=Condition(
            lambda config, section: section.type == "reward", "with kl.type={section.type}"
        ),
    )
    loss_estimator: str = key(
        "k2",
        "estimator with kl.type=loss; k2 has the gradient of the KL divergence",
        choices=KL_ESTIMATORS,
        only_if=Condition(
            lambda config, section: section.type == "loss", "with kl.type={section.type}"
        ),
    )


@dataclass
class AdvConfig:
    estimator: str = key(
        "reinforce",
        "advantage estimator; reinforce: the reward minus its group's mean (GRPO with norm_var); "
        "rloo: minus the mean of the others; reinforce_plus_plus: the reward, whitened over the "
        "batch; reinforce_plus_plus_baseline: reinforce, whitened; distillation: log-probability "
        "of the teacher minus the policy's; gae: with a critic (PPO)",
        common=True,
        functions=ESTIMATOR_CHOICES,
        identity=True,
    )
    gamma: Ratio = key(
        1.0,
        "discount of later rewards, a token",
        unusual_below=0.9,
        unusual_effect="a reward that comes 50 tokens later counts less than 1%",
        setting_of="estimator",
    )
    lamda: Ratio = key(1.0, "lambda of gae", setting_of="estimator")
    norm_var: bool | None = key(  # follow_keys fills it in
        None,
        "divide advantages by their standard deviation; reinforce: of the group (on: GRPO; off: "
        "Dr. GRPO); gae: of the batch; by default on with gae and off elsewhere",
        common=True,
        setting_of="estimator",
    )


@dataclass
class DPOLossConfig:
    beta: PositiveFloat = key(
        0.1,
        "how strongly the policy is held to the model it starts from; with dpo.loss=ipo the "
        "regularisation tau",
        common=True,
        unusual_above=5,
        unusual_effect="the policy hardly leaves the model it starts from",
    )
    loss: str = key(
        "sigmoid",
        "preference loss; sigmoid: DPO's own; ipo: IPO's squared error; hinge: SLiC's hinge",
        common=True,
        functions=PREFERENCE_LOSS_CHOICES,
        identity=True,
    )
    label_smoothing: NonNegativeFloat = key(
        0.0,
        "fraction of the pairs taken to be the wrong way round (conservative DPO)",
        below=0.5,
        setting_of="loss",
    )


@dataclass
class RewardLossConfig:
    center: NonNegativeFloat = key(
        0.0,
        "weight of a squared error that holds the mean of chosen and rejected rewards near 0, e.g. "
        "0.01",
        common=True,
        unusual_above=1,
        unusual_effect="holding the mean near 0 outweighs the order of the pairs",
    )


@dataclass
class TrainerConfig:
    eval_only = False  # a key of PPO alone

    project: str = key("rl2", "project in wandb and trackio")
    experiment_name: str = key("default", "name of the run", common=True)
    n_epochs: PositiveInt = key(1, "passes over the training rows", common=True)
    max_steps: PositiveInt | None = key(
        None, "stop after this many steps, if that is sooner", common=True
    )
    loggers: list[str] = key(
        [],
        "services that get the config, the metrics and some transcripts, beside metrics.jsonl; by "
        "default none does; wandb is skipped where it is not installed or not logged in",
        choices=("wandb", "tensorboard", "trackio"),
    )
    disable_wandb: bool = key(False, "take wandb out of trainer.loggers")
    deterministic: bool | None = key(
        None,
        "rollouts that repeat bit for bit on the same layout; by default on a CPU only",
        only_if=WITH_SAMPLING,
    )
    save_dir: str = key(
        "runs/${trainer.experiment_name}", "folder of everything the run writes", common=True
    )
    save_freq: PositiveInt | None = key(
        None,
        "steps between checkpoints; a run resumes from them; Ctrl-C writes one too",
        common=True,
    )
    keep_checkpoints: PositiveInt | None = key(
        2, "how many of the newest checkpoints are kept; null = all"
    )
    max_skipped_updates: PositiveInt | None = key(
        10,
        "stop with an error after this many updates in a row whose gradient was not finite; null = "
        "never",
    )
    resume: str = key(
        "auto",
        "auto, off, force or a checkpoint's folder; auto: from the newest one in save_dir, if any; "
        "off: anew; force: like auto, or force:FOLDER, even if it was another experiment",
        common=True,
    )
    test_freq: PositiveInt | None = key(
        None,
        "steps between evaluations on data.test_path; by default only before and after",
        common=True,
        only_if=WITH_TEST_DATA,
    )
    report_freq: PositiveInt | None = key(
        None, "steps between refreshes of report.html in save_dir; by default only at the end"
    )
    watchdog: NonNegativeFloat = key(
        60.0,
        "seconds without progress after which the ranks print where they stand; 0 = never",
    )
    seed: NonNegativeInt = key(
        0,
        "seed of sampling and of new weights",
        at_most=LARGEST_SEED,
        only_if=WITH_RANDOMNESS,
    )


@dataclass
class PPOTrainerConfig(TrainerConfig):
    """With the keys of the run that only PPO has."""

    save_tokens: bool = key(
        False,
        "keep the tokens of the training answers, with log-probabilities, masks and rewards, in "
        "rollouts/train/step_N.safetensors",
    )
    rollouts_from: str | None = key(
        None,
        "train on the answers that a run kept with save_tokens, step by step, and sample none; its "
        "folder; to compare losses on the same data",
        identity=True,
    )
    eval_only: bool = key(
        False,
        "evaluate actor.model_name on the test data and end; no row is trained, and no optimizer, "
        "reference or critic is loaded",
        identity=True,
    )


@dataclass
class PPOConfig:
    data: PromptConfig = section(PromptConfig, "the rows")
    actor: ActorConfig = section(ActorConfig, "the policy that is trained")
    critic: CriticConfig = section(
        CriticConfig, "the value model of gae", common=False, only_if=WITH_CRITIC
    )
    rollout: RolloutConfig = section(RolloutConfig, "sampling of answers and their environment")
    kl: KLConfig = section(KLConfig, "the KL divergence from the starting model")
    adv: AdvConfig = section(AdvConfig, "advantages")
    teacher: TeacherConfig = section(
        TeacherConfig,
        "the teacher of on-policy distillation",
        common=False,
        only_if=Condition(
            lambda config, section: config.teacher.model_name, "without teacher.model_name"
        ),
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


def worker_names(config: Any) -> list[str]:
    """The sections of workers: actor, critic or both."""
    return [name for name in vars(config) if isinstance(getattr(config, name), WorkerConfig)]
