#!/usr/bin/env bash
# GRPO on GSM8K with QLoRA: adapters of Qwen3-4B, whose base the trainer stores in 4 bits. SGLang has
# the merged weights in bfloat16, 8 GiB.
# Needs one GPU of 24 GB, sglang, peft, bitsandbytes, and a network for the model and the data. If
# all layers run again, `rl2 plan` predicts 7 GiB for the trainer in the update, and 3 GiB while
# SGLang generates. Not run yet, so neither its time nor its result is known.
set -euo pipefail
cd "$(dirname "$0")/.."
python examples/data.py gsm8k runs/data/gsm8k
torchrun --standalone --nproc_per_node="${NUM_GPUS:-1}" -m rl2.trainer.ppo \
    data.path=runs/data/gsm8k/train.jsonl data.test_path=runs/data/gsm8k/test.jsonl data.max_length=512 \
    data.chat_template_kwargs.enable_thinking=false \
    data.prompts_per_rollout=32 data.responses_per_prompt=8 \
    actor.model_name="${MODEL:-Qwen/Qwen3-4B}" actor.lora_rank=32 actor.quantize_base=nf4 \
    actor.lr=1e-5 actor.max_length_per_device=4096 \
    actor.average=sequence adv.norm_var=true kl.coef=0.001 kl.type=loss \
    rollout.env_path=envs/gsm8k.py rollout.max_running=128 \
    rollout.train_sampling_params.max_new_tokens=1024 rollout.test_sampling_params.max_new_tokens=1024 \
    trainer.experiment_name=gsm8k-qlora trainer.n_epochs=2 trainer.test_freq=20 trainer.save_freq=20 "$@"
