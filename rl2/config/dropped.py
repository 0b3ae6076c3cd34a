"""What an earlier release had, and what to use instead. Each entry stays for one release."""

import re

EVALUATE = (
    "python -m rl2.trainer.ppo trainer.eval_only=true actor.model_name=RUN/model "
    "data.test_path=... rollout.env_path=..."
)
AS_ACTOR = (
    "dtype",
    "compile",
    "fsdp_size",
    "sp_size",
    "tp_size",
    "max_length_per_device",
    "max_inference_length_per_device",
    "share_prompts",
    "offload_model",
)
DROPPED = {
    "rl2 push": "hf upload OWNER/NAME RUN/model",
    "rl2 prove": "rl2 as it is: every start compares model and engine (docs/proofs.md)",
    "rl2 diff": "rl2 replay RUN --step N, or diff on the config.yaml and metrics.jsonl of two runs",
    "rl2 replay --rollouts": "trainer.rollouts_from=RUN, which trains on the tokens that RUN saved",
    "rl2 env --attack": "a part of the reward with weight 0 in the run itself (docs/rewards.md)",
    "rl2 ls --json": "rl2.Run(FOLDER).metrics, or metrics.jsonl and run.json of the run",
    "rl2 env actor.model_name": EVALUATE,
    "rl2 chat --alone": "rl2 chat RUN: only the model of the run answers",
    "rl2 chat --best": "rl2 chat RUN/best_model",
    "rl2 chat --max-new-tokens": "transformers chat RUN/model",
    "rl2 chat --temperature": "transformers chat RUN/model",
    "--plan": "rl2 plan TRAINER key=value ...",
    "rl2 plan --prompt-tokens": "time/wait and time/step of a short run",
    "rl2 plan --answer-tokens": "time/wait and time/step of a short run",
    "loggers=[tensorboard]": "[wandb], or the run's metrics.jsonl and report.html",
    "optimizer=adamw_8bit": "muon, which has one moment, or adamw with offload_optimizer=true",
    "/v1/responses": "chat/completions, as agents.OpenAIChatCompletionsModel does",
    "sft rollout.*": EVALUATE,
    "dpo rollout.*": EVALUATE,
    "adapter": "model_name=RUN/model, which has the adapters merged in (peft: merge_and_unload)",
    "rollout.lora": "rl2 as it is: the embedded engine applies adapters where it can",
    "report_freq": "rl2 report RUN, also while it runs",
    "drop_solved": "rollout.filter=[0,1], which replaces solved prompts after they are sampled",
    "data.curriculum": "rollout.filter=[0,1], which replaces prompts that teach nothing",
    "data.curriculum_interval": "rollout.filter=[0,1], which replaces prompts that teach nothing",
    "rm.center": "the rewards as they are: a pair trains their difference, which no mean changes",
    "kl.importance_weights": "rl2 as it is: the weights are on with several updates a rollout",
    "rollout.length_penalty": "a part of the reward that reward_fn(messages, num_tokens) returns",
    "actor.skip": "actor.skip_threshold, which skips whole updates, or actor.off_policy_mask",
    "data.few_shot": "the solved examples in the `messages` of the rows, before the question",
    "data.num_few_shot": "the solved examples in the `messages` of the rows, before the question",
    "teacher.protocol": "teacher.base_url of a server with OpenAI's completions and echo, as vLLM",
    "teacher.hint": "teacher.model_name or teacher.base_url: it reads the prompts of the policy",
    "trainer.max_skipped_updates": "rl2 as it is: 10 skipped updates in a row end the run",
    "trainer.patience": "trainer.save_best=auto, which keeps the best model, and trainer.max_steps",
    "head_dtype": "rl2 as it is: logits are computed in float32",
    "extract": "rollouts/test/*.jsonl of the run, which has the answers that maj@N compared",
    "data.truncate": "a larger data.max_length, or rows that are cut where their text allows it",
    "data.weights": "rl2 as it is: a source has the share of its rows; repeat or sample them",
    "data.turns": '"weight": 0 in the replies that are not trained, or prompt and completion',
    "data.test_limit": "a smaller file of test rows, or a smaller data.test_ratio",
}
for _key in AS_ACTOR:
    DROPPED[f"teacher.{_key}"] = f"actor.{_key}, as the actor has, or teacher.base_url"


def explain_dropped(name: str) -> str:
    """Says that this is gone; "" if it never was.

    `name` is a command, a command with an option, an option of the trainers, a path, a key, a
    KEY=VALUE or TRAINER SECTION.*, a whole section. A key may be in any section, or be followed by
    the NAME of an entry.
    """
    for dropped, instead in DROPPED.items():
        if re.fullmatch(rf"(\w+\.)*{re.escape(dropped)}(\.\w+)?", name):
            return f"{name} is no longer in rl2: use {instead}"
    return ""
