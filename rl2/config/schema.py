"""The config: typed sections, one dataclass each, every key explained beside it; Hydra's override grammar; and the
checks that find every problem before a model is loaded.

`parse(PPOConfig, argv, validate_ppo)` is the entry that all trainers share.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


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
