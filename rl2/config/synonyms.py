"""The keys of other trainers, and what stands for them here.

An answer is a key of rl2, with a remark where its meaning differs; " | " separates answers for
different trainers. In ABSENT a reason has the names of the keys that do not exist here. A name that
ends with a dot means all keys below it. docs/coming_from.md shows the most used ones in a table.
"""

import re
from collections.abc import Collection

STEPS = "data.prompts_per_rollout x data.responses_per_prompt / actor.update_per_rollout"
TRAIN = "rollout.train_sampling_params"
TEST = "rollout.test_sampling_params"
BATCH = "data.batch_size (rows of one optimizer step over all processes)"
BUDGET = "actor.max_length_per_device (tokens of a micro-batch, which is packed)"
INFERENCE_BUDGET = "actor.max_inference_length_per_device (tokens of a micro-batch)"
CORRECTION = "actor.correction (token_tis, token_mask, sequence_mask or geometric_mask)"
STEP_BATCH = f"actor.update_per_rollout (an update has {STEPS} answers) | {BATCH}"
LOSS = "actor.loss (ppo, gspo, cispo) | actor.average (the mean)"
SHARDING = "actor.fsdp_size (processes that share one copy of the model; 0 = all)"

# ChenmienTan/RL2: its first releases, and its newest commit.
RL2 = {
    "train_data.path": "data.path",
    "train_data.prompts_per_rollout": "data.prompts_per_rollout",
    "train_data.responses_per_prompt": "data.responses_per_prompt",
    "train_data.max_length": "data.max_length",
    "train_data.batch_size": "data.batch_size",
    "train_data.experience.responses_per_prompt": "data.responses_per_prompt",
    "train_data.experience.max_new_tokens": f"{TRAIN}.max_new_tokens",
    "train_data.experience.max_turns": "rollout.max_turns",
    "test_data.path": "data.test_path",
    "data.train.path": "data.path",
    "data.train.max_length": "data.max_length",
    "data.train.batch_size": "data.batch_size",
    "data.train.prompt_key": "data.columns (a map of your columns)",
    "data.train.messages_key": "data.columns (a map of your columns)",
    "data.train.response_key": "data.columns (a map of your columns)",
    "data.train.chosen_key": "data.columns (a map of your columns)",
    "data.train.rejected_key": "data.columns (a map of your columns)",
    "data.test.path": "data.test_path",
    "actor.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "actor.ddp_size": "actor.fsdp_size (processes / ddp_size, or 0 for ddp_size=1)",
    "actor.cp_size": "actor.sp_size",
    "actor.optimizer.lr": "actor.lr",
    "actor.optimizer.weight_decay": "actor.weight_decay",
    "actor.optimizer.clip_grad": "actor.max_grad_norm",
    "actor.scheduler.name": "actor.scheduler",
    "actor.scheduler.warmup_ratio": "actor.warmup_ratio",
    "actor.scheduler.lr_decay_style": "actor.scheduler",
    "actor.temperature": f"{TRAIN}.temperature",
    "actor.tis_coef": "actor.correction_cap (with actor.correction=token_tis)",
    "actor.avg_level": "actor.average",
    "actor.adv_estimator": "adv.estimator",
    "actor.beta": "dpo.beta",
    "actor.kl.coef": "kl.coef",
    "actor.kl.type": "kl.type",
    "actor.kl.reward_estimator": "kl.reward_estimator",
    "actor.kl.loss_estimator": "kl.loss_estimator",
    "actor.entropy.coef": "actor.entropy",
    "rollout.server_args.tp_size": "rollout.tp_size",
    "rollout.server_args.mem_fraction_static": "rollout.gpu_memory_utilization",
    "rollout.server_args.": "rollout.engine_args (as rollout.engine_args.NAME=VALUE)",
    "rollout.model_name": "actor.model_name (the engine always has the actor's model)",
    "rollout.dtype": "actor.dtype (the engine always has the actor's)",
    "rollout.train_prompts_per_rollout": "data.prompts_per_rollout",
    "rollout.train.path": "data.path",
    "rollout.train.prompt_key": "data.columns (a map of your columns)",
    "rollout.train.messages_key": "data.columns (a map of your columns)",
    "rollout.train.prompts_per_rollout": "data.prompts_per_rollout",
    "rollout.train.responses_per_prompt": "data.responses_per_prompt",
    "rollout.train.sampling_params.temperature": f"{TRAIN}.temperature",
    "rollout.train.sampling_params.max_new_tokens": f"{TRAIN}.max_new_tokens",
    "rollout.train.sampling_params.stop": f"{TRAIN}.stop",
    "rollout.train.partial_rollout": "rollout.partial",
    "rollout.partial_rollout": "rollout.partial",
    "rollout.test.path": "data.test_path",
    "rollout.test.sampling_params.temperature": f"{TEST}.temperature",
    "rollout.test.sampling_params.max_new_tokens": f"{TEST}.max_new_tokens",
    "rollout.test.sampling_params.stop": f"{TEST}.stop",
    "trainer.load_ckpt_from": "trainer.resume",
    "trainer.total_steps": "trainer.max_steps",
    "trainer.use_wandb": "trainer.disable_wandb (the opposite)",
}
# Names leave out `actor_rollout_ref.` at the start.
VERL = {
    "actor.ppo_mini_batch_size": "actor.update_per_rollout "
    "(data.train_batch_size / ppo_mini_batch_size)",
    "actor.ppo_max_token_len_per_gpu": BUDGET,
    "actor.ppo_micro_batch_size": BUDGET,
    "actor.ppo_micro_batch_size_per_gpu": BUDGET,
    "actor.forward_max_token_len_per_gpu": INFERENCE_BUDGET,
    "actor.forward_micro_batch_size": INFERENCE_BUDGET,
    "actor.forward_micro_batch_size_per_gpu": INFERENCE_BUDGET,
    "actor.clip_ratio": "actor.clip",
    "actor.clip_ratio_low": "actor.clip",
    "actor.clip_ratio_high": "actor.clip_high",
    "actor.clip_ratio_c": "actor.dual_clip",
    "critic.cliprange_value": "critic.clip",
    "actor.policy_loss.loss_mode": "actor.loss",
    "actor.loss_agg_mode": "actor.average (token, sequence or constant)",
    "actor.entropy_coeff": "actor.entropy",
    "actor.use_kl_loss": "kl.type (loss)",
    "actor.kl_loss_coef": "kl.coef (with kl.type=loss)",
    "actor.kl_loss_type": "kl.loss_estimator",
    "actor.optim.lr": "actor.lr",
    "actor.optim.weight_decay": "actor.weight_decay",
    "actor.optim.lr_warmup_steps_ratio": "actor.warmup_ratio",
    "actor.optim.lr_warmup_steps": "actor.warmup_ratio (a fraction of the updates)",
    "actor.optim.warmup_style": "actor.scheduler",
    "actor.optim.lr_scheduler_type": "actor.scheduler",
    "actor.optim.clip_grad": "actor.max_grad_norm",
    "actor.optim.total_training_steps": "trainer.max_steps",
    "actor.grad_clip": "actor.max_grad_norm",
    "actor.use_torch_compile": "actor.compile",
    "actor.ulysses_sequence_parallel_size": "actor.sp_size",
    "actor.fsdp_config.fsdp_size": "actor.fsdp_size",
    "actor.fsdp_config.param_offload": "actor.offload_model",
    "actor.fsdp_config.optimizer_offload": "actor.offload_optimizer",
    "actor.checkpoint.save_contents": "actor.save_optimizer",
    "model.path": "actor.model_name",
    "model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "model.lora_rank": "actor.lora_rank",
    "model.lora_alpha": "actor.lora_alpha",
    "model.target_modules": "actor.lora_targets",
    "actor.model.path": "actor.model_name",
    "actor.model.enable_gradient_checkpointing": "actor.gradient_checkpointing",
    "actor.model.lora_rank": "actor.lora_rank",
    "actor.model.lora_alpha": "actor.lora_alpha",
    "actor.model.target_modules": "actor.lora_targets",
    "actor.model.fsdp_config.fsdp_size": "actor.fsdp_size",
    "actor.model.fsdp_config.param_offload": "actor.offload_model",
    "actor.model.fsdp_config.optimizer_offload": "actor.offload_optimizer",
    "rollout.name": "rollout.engine",
    "rollout.temperature": f"{TRAIN}.temperature",
    "rollout.top_k": f"{TRAIN}.top_k",
    "rollout.top_p": f"{TRAIN}.top_p",
    "rollout.prompt_length": "data.max_length",
    "rollout.response_length": f"{TRAIN}.max_new_tokens",
    "rollout.n": "data.responses_per_prompt",
    "rollout.tensor_model_parallel_size": "rollout.tp_size",
    "rollout.max_num_seqs": "rollout.max_running",
    "rollout.engine_kwargs.": "rollout.engine_args (as rollout.engine_args.NAME=VALUE)",
    "rollout.log_prob_max_token_len_per_gpu": INFERENCE_BUDGET,
    "rollout.log_prob_micro_batch_size": INFERENCE_BUDGET,
    "rollout.log_prob_micro_batch_size_per_gpu": INFERENCE_BUDGET,
    "rollout.val_kwargs.temperature": f"{TEST}.temperature",
    "rollout.val_kwargs.top_k": f"{TEST}.top_k",
    "rollout.val_kwargs.top_p": f"{TEST}.top_p",
    "rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "rollout.multi_turn.max_user_turns": "rollout.max_turns",
    "rollout.multi_turn.enable": "rollout.max_turns (more than 1)",
    "data.train_files": "data.path",
    "data.val_files": "data.test_path",
    "data.prompt_key": "data.columns (a map of your columns)",
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "model.custom_chat_template": "data.chat_template (the path of a Jinja file)",
    "data.max_prompt_length": "data.max_length",
    "data.max_response_length": f"{TRAIN}.max_new_tokens",
    "data.train_batch_size": f"data.prompts_per_rollout | {BATCH}",
    "data.micro_batch_size_per_gpu": BUDGET,
    "custom_reward_function.path": "rollout.env_path",
    "reward.custom_reward_function.path": "rollout.env_path",
    "algorithm.gamma": "adv.gamma",
    "algorithm.lam": "adv.lamda",
    "algorithm.adv_estimator": "adv.estimator (grpo: reinforce with adv.norm_var=true)",
    "algorithm.norm_adv_by_std_in_grpo": "adv.norm_var",
    "algorithm.use_kl_in_reward": "kl.type (reward)",
    "algorithm.kl_penalty": "kl.reward_estimator",
    "algorithm.kl_ctrl.kl_coef": "kl.coef (with kl.type=reward)",
    "algorithm.rollout_correction.rollout_is": CORRECTION,
    "algorithm.rollout_correction.rollout_rs": CORRECTION,
    "algorithm.rollout_correction.rollout_is_threshold": "actor.correction_cap",
    "trainer.total_epochs": "trainer.n_epochs",
    "trainer.total_training_steps": "trainer.max_steps",
    "trainer.project_name": "trainer.project",
    "trainer.logger": "trainer.disable_wandb (metrics.jsonl is always written)",
    "trainer.resume_mode": "trainer.resume",
    "trainer.resume_from_path": "trainer.resume",
    "trainer.critic_warmup": "actor.freeze_steps",
    "trainer.default_local_dir": "trainer.save_dir",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_checkpoints",
    "trainer.max_critic_ckpt_to_keep": "trainer.keep_checkpoints",
}
# GRPOConfig, SFTConfig, DPOConfig and RewardConfig of TRL 1.16, with what they inherit.
TRL = {
    "model_name_or_path": "actor.model_name | critic.model_name",
    "model": "actor.model_name | critic.model_name",
    "dtype": "actor.dtype | critic.dtype",
    "attn_implementation": "rollout.engine (attention is always packed; no choice in training)",
    "dataset_name": "data.path",
    "train_dataset": "data.path",
    "eval_dataset": "data.test_path",
    "reward_funcs": "rollout.env_path",
    "learning_rate": "actor.lr | critic.lr",
    "lr_scheduler_type": "actor.scheduler | critic.scheduler",
    "warmup_ratio": "actor.warmup_ratio | critic.warmup_ratio",
    "warmup_steps": "actor.warmup_ratio (a fraction of the updates) | critic.warmup_ratio",
    "weight_decay": "actor.weight_decay | critic.weight_decay",
    "max_grad_norm": "actor.max_grad_norm | critic.max_grad_norm",
    "per_device_train_batch_size": f"{BUDGET} | {BATCH}",
    "gradient_accumulation_steps": STEP_BATCH,
    "auto_find_batch_size": BUDGET,
    "per_device_eval_batch_size": INFERENCE_BUDGET,
    "precompute_ref_batch_size": INFERENCE_BUDGET,
    "gradient_checkpointing": "actor.gradient_checkpointing | critic.gradient_checkpointing",
    "bf16": "actor.dtype (auto is bf16 where the machine is fast at it) | critic.dtype",
    "num_train_epochs": "trainer.n_epochs",
    "max_steps": "trainer.max_steps",
    "output_dir": "trainer.save_dir",
    "save_steps": "trainer.save_freq",
    "save_strategy": "trainer.save_freq",
    "save_total_limit": "trainer.keep_checkpoints",
    "resume_from_checkpoint": "trainer.resume",
    "eval_steps": "trainer.test_freq",
    "eval_strategy": "trainer.test_freq",
    "eval_on_start": "data.test_path (it is always evaluated before the first step)",
    "seed": "trainer.seed (sampling) or data.seed (order of rows)",
    "data_seed": "data.seed",
    "full_determinism": "trainer.deterministic",
    "run_name": "trainer.experiment_name",
    "project": "trainer.project",
    "report_to": "trainer.disable_wandb",
    "fsdp": SHARDING,
    "fsdp_config": SHARDING,
    "deepspeed": SHARDING,
    "ddp_timeout": "trainer.watchdog (seconds)",
    "shuffle_dataset": "data.shuffle",
    "max_length": "data.max_length",
    "max_prompt_length": "data.max_length",
    "max_completion_length": f"{TRAIN}.max_new_tokens",
    "max_new_tokens": f"{TRAIN}.max_new_tokens",
    "num_generations": "data.responses_per_prompt",
    "generation_batch_size": "data.prompts_per_rollout (x data.responses_per_prompt)",
    "steps_per_generation": "actor.update_per_rollout",
    "temperature": f"{TRAIN}.temperature",
    "top_p": f"{TRAIN}.top_p",
    "top_k": f"{TRAIN}.top_k",
    "use_vllm": "rollout.engine (sglang)",
    "vllm_mode": "rollout.engine (it always runs in the trainer's processes)",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tp_size",
    "vllm_model_impl": "rollout.engine_args (as rollout.engine_args.NAME=VALUE)",
    "use_transformers_continuous_batching": "rollout.engine (local)",
    "use_transformers_paged": "rollout.engine (local)",
    "vllm_importance_sampling_correction": CORRECTION,
    "vllm_importance_sampling_mode": CORRECTION,
    "vllm_importance_sampling_clip_max": "actor.correction_cap",
    "vllm_importance_sampling_cap": "actor.correction_cap",
    "beta": "kl.coef (with kl.type=loss) | dpo.beta",
    "epsilon": "actor.clip",
    "epsilon_high": "actor.clip_high",
    "delta": "actor.dual_clip",
    "cliprange": "actor.clip",
    "cliprange_value": "critic.clip",
    "vf_coef": "critic.lr (the critic has an optimizer of its own)",
    "gamma": "adv.gamma",
    "lam": "adv.lamda",
    "kl_coef": "kl.coef",
    "kl_estimator": "kl.reward_estimator",
    "whiten_rewards": "adv.norm_var (whitens advantages)",
    "num_mini_batches": "actor.update_per_rollout",
    "importance_sampling_level": "actor.loss (sequence: gspo)",
    "scale_rewards": "adv.norm_var (group)",
    "loss_type": f"{LOSS} | dpo.loss (sigmoid, ipo, hinge)",
    "entropy_coef": "actor.entropy",
    "max_tool_calling_iterations": "rollout.max_turns",
    "torch_compile": "actor.compile (elementwise parts of layers and head)",
    "cast_lm_head_to_fp32": "actor.head_dtype (float32 is the default)",
    "label_smoothing": "dpo.label_smoothing",
    "center_rewards_coefficient": "rm.center",
    "assistant_only_loss": "data.turns (assistant turns alone are trained)",
    "completion_only_loss": "data.turns (assistant turns alone are trained)",
    "dataset_text_field": "data.columns (a map of your columns)",
    "chat_template_path": "data.chat_template",
    "chat_template_kwargs": "data.chat_template_kwargs",
    "use_peft": "actor.lora_rank | critic.lora_rank",
    "activation_checkpointing": "actor.gradient_checkpointing | critic.gradient_checkpointing",
    "lora_r": "actor.lora_rank | critic.lora_rank",
    "lora_alpha": "actor.lora_alpha | critic.lora_alpha",
    "lora_target_modules": "actor.lora_targets | critic.lora_targets",
}
EQUIVALENTS = {"RL2": RL2, "verl": VERL, "TRL": TRL}
ABSENT = {
    "messages always get the chat template, and plain text never does": """apply_chat_template
        train_data.apply_chat_template test_data.apply_chat_template
        data.train.apply_chat_template data.test.apply_chat_template
        rollout.train.apply_chat_template rollout.test.apply_chat_template""",
    "tokens come from the tokenizer of the model": """eos_token pad_token data.tokenizer
        critic.model.tokenizer_path""",
    "remote code is not run and models are not patched": """trust_remote_code model_init_kwargs
        model.trust_remote_code data.trust_remote_code actor.use_liger_kernel use_liger_kernel
        liger_kernel_config model.use_liger model.use_fused_kernels model.external_lib
        model.override_config neftune_noise_alpha""",
    "sequences are always packed without padding, within actor.max_length_per_device": """packing
        packing_strategy padding_free eval_packing pad_to_multiple_of model.use_remove_padding
        actor.use_dynamic_bsz actor.use_remove_padding group_by_length trainer.balance_batch
        rollout.log_prob_use_dynamic_bsz truncation_mode data.truncation train_sampling_strategy
        data.filter_overlong_prompts length_column_name""",
    "data is read and prepared in the trainer's processes": """dataset_num_proc dataset_kwargs
        dataloader_num_workers dataloader_drop_last dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order
        dataloader_multiprocessing_context remove_unused_columns
        data.dataloader_num_workers data.use_shm rollout.train.dataloader_num_workers
        accelerator_config label_names ignore_data_skip""",
    "it is not built in; a loss or estimator of your own is actor.loss=file.py:function or "
    "adv.estimator=file.py:function": """sapo_temperature_neg sapo_temperature_pos vespo_k_pos
        vespo_lambda_pos vespo_k_neg vespo_lambda_neg top_entropy_quantile use_adaptive_entropy
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target
        use_bias_correction_kl off_policy_mask_threshold vllm_importance_sampling_clip_min
        loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau
        router_aux_loss_coef label_smoothing_factor adv.global_norm algorithm.use_pf_ppo
        algorithm.pf_ppo. actor.policy_loss. algorithm.kl_ctrl. algorithm.rollout_correction.
        critic.loss_agg_mode critic.avg_level multi_objective_aggregation""",
    "a rollout is passed over once; actor.update_per_rollout splits it": """num_iterations
        actor.ppo_epochs num_ppo_epochs actor.shuffle""",
    "the reference is the model that the run starts from": """sync_ref_model
        ref_model_mixup_alpha ref_model_sync_steps precompute_ref_log_probs ref_actor. ref.""",
    "one reward function gives the reward; it may add up several": """reward_weights
        reward_model_path custom_reward_function.name reward_model. reward.""",
    "answers that were cut are trained, and groups without variance are not run": """
        mask_truncated_completions rollout.dynamic_filtering algorithm.filter_groups.
        rollout.train.dynamic_filtering rollout.over_sample_rate""",
    "an answer is sampled by temperature, top_p and top_k alone": """min_p generation_kwargs
        repetition_penalty cache_implementation rollout.do_sample rollout.ignore_eos
        vllm_structured_outputs_regex transformers_continuous_batching_config
        rollout.val_kwargs.do_sample""",
    "each test prompt has one answer": """num_generations_eval rollout.val_kwargs.n
        test_data.response_per_prompt test_data.responses_per_prompt
        rollout.test.responses_per_prompt rollout.test.prompts_per_rollout
        data.val_batch_size""",
    "give a file of its own as data.test_path": "data.test_ratio rollout.test_ratio test_ratio",
    "the engine lives in the trainer's processes, there is no server": """vllm_server_base_url
        vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port
        vllm_enable_sleep_mode vllm_max_model_length ds3_gather_for_generation rollout.mode
        rollout.free_cache_engine rollout.load_format rollout.enforce_eager
        rollout.max_num_batched_tokens rollout.max_model_len rollout.enable_chunked_prefill
        rollout.bucket_size rollout.update_weights_bucket_megabytes rollout.calculate_log_probs
        rollout.layered_summon rollout.multi_stage_wake_up rollout.agent. rollout.disable_log_stats
        rollout.cudagraph_capture_sizes hybrid_engine nccl_timeout""",
    "rollouts are written to the folder trainer.save_dir": """log_completions log_multimodal
        num_completions_to_print log_unique_prompts log_completions_hub_repo
        trainer.log_val_generations trainer.rollout_data_dir trainer.validation_data_dir
        rollout.train.save_dir rollout.test.save_dir rollout.trace. rollout.skip_rollout
        rollout.skip_dump_dir""",
    "metrics are written in every step": """logging_dir logging_first_step logging_steps
        logging_strategy logging_nan_inf_filter log_level log_level_replica log_on_each_node
        disable_tqdm trackio_space_id include_num_input_tokens_seen include_for_metrics
        trackio_bucket_id trackio_static_space_id""",
    "a checkpoint holds all that a run resumes from": """save_only_model
        save_on_each_node restore_callback_states_from_checkpoint load_best_model_at_end
        metric_for_best_model greater_is_better enable_jit_checkpoint actor.checkpoint.
        critic.checkpoint. trainer.del_local_ckpt_after_load trainer.default_hdfs_dir
        trainer.esi_redundant_time""",
    "a run trains, and evaluates at the start, every trainer.test_freq steps and at the end": """
        do_train do_eval do_predict eval_delay eval_accumulation_steps eval_do_concat_batches
        batch_eval_metrics prediction_loss_only eval_use_gather_object trainer.eval_only
        trainer.val_before_train trainer.val_only""",
    "AdamW with its usual betas is the optimizer, and its rate ends at 0": """optim optim_args
        optim_target_modules adam_beta1 adam_beta2 adam_epsilon lr_scheduler_kwargs
        actor.scheduler.min_lr actor.optim. actor.optimizer. actor.scheduler.""",
    "adapters of all linear layers have one rank and no dropout": """lora_dropout
        model.exclude_modules
        lora_modules_to_save lora_task_type use_rslora use_dora""",
    "dropout is off in training": "disable_dropout",
    "memory is saved by actor.gradient_checkpointing and actor.offload_model": """use_cache
        activation_offloading gradient_checkpointing_kwargs activation_checkpointing_kwargs
        model.enable_activation_offload
        torch_empty_cache_steps model.use_shm actor.fsdp_config. ref.fsdp_config.
        actor.model.fsdp_config.""",
    "bf16 or fp32 is chosen by actor.dtype": """fp16 fp16_full_eval bf16_full_eval tf32
        half_precision_backend fp16_opt_level""",
    "kernels are chosen by torch": """torch_compile_backend torch_compile_mode use_cpu
        jit_mode_eval actor.use_fused_kernels
        actor.entropy_from_logits_with_chunking actor.entropy_checkpointing actor.strategy
        critic.strategy trainer.device model.fused_kernel_options. parallelism_config""",
    "torchrun starts the processes": """trainer.nnodes trainer.n_gpus_per_node local_rank
        ddp_backend ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers
        ddp_static_graph
        average_tokens_across_devices ray_kwargs. ray_init.
        trainer.ray_wait_register_center_timeout
        trainer.use_legacy_worker_impl resource_pool""",
    "Megatron is not supported": "actor.tf_config. actor.ddp_config. actor.megatron.",
    "nothing is uploaded": """push_to_hub hub_model_id hub_strategy hub_token hub_private_repo
        hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization
        push_to_hub_token""",
    "profilers and debuggers are started from outside": """debug skip_memory_metrics
        use_legacy_prediction_loop global_profiler. actor.profiler. rollout.profiler. past_index
        critic.profiler. ref.profiler.""",
    "an env file plays the turns": """rollout.multi_turn. data.custom_cls. data.sampler.
        data.datagen. rollout.use_tool""",
    "rows are texts": "data.image_key data.video_key data.return_multi_modal_inputs",
    "rows have messages": "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt",
}


def all_answers() -> dict[str, str]:
    """Name -> what to say about it, of every key of other trainers."""
    answers: dict[str, str] = {}
    for reason, names in ABSENT.items():
        answers |= dict.fromkeys(names.split(), f"there is no such key here: {reason}")
    for project, equivalents in EQUIVALENTS.items():
        for name, answer in equivalents.items():
            answers[name] = f"this is {project}'s; here {answer}"
    return answers


def find_synonym(key: str, known: Collection[str]) -> tuple[str, list[str]]:
    """What to say about a key that is not among the `known` ones, and the keys that stand for it.

    The text is "" if no other trainer has such a key. A key with a remark does not stand for it.
    """
    answers = all_answers()
    name = key.removeprefix("actor_rollout_ref.")
    as_actor = re.sub("^critic[.]", "actor.", name)
    parts = as_actor.split(".")
    sections = [".".join(parts[:length]) + "." for length in range(len(parts) - 1, 0, -1)]
    last_part = [] if any(other.endswith("." + parts[-1]) for other in known) else [parts[-1]]
    for candidate in (name, as_actor, *sections, *last_part):
        if candidate in answers:
            is_critics = candidate not in (name, *last_part) and as_actor != name
            answer = answers[candidate]
            return choose_answers(
                answer.replace("actor.", "critic.") if is_critics else answer, known
            )
    return "", []


def choose_answers(text: str, known: Collection[str]) -> tuple[str, list[str]]:
    """The answers of the text whose key this trainer has, and the first of them if it is bare."""
    owner, separator, alternatives = text.partition("; here ")
    if not separator:
        return text, []
    wanted = [answer for answer in alternatives.split(" | ") if answer.split()[0] in known]
    if not wanted:
        return f"{owner}; here {alternatives}, which this trainer does not have", []
    bare = [answer for answer in wanted[:1] if answer in known]
    return f"{owner}; here set {' or '.join(wanted)}", bare
