"""The keys of other trainers and the names of algorithms, and what stands for them here.

Each answer has the names that it is for. It is a key of rl2, with a remark where its meaning
differs; " | " separates answers for different trainers. In ABSENT it is the reason why there is no
such key here. A name that ends with a dot means all keys below it. docs/coming_from.md shows the
most used ones in a table.
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
LOSS = "actor.loss (ppo, gspo, cispo, reinforce) | actor.average (the mean)"
SHARDING = "actor.fsdp_size (processes that share one copy of the model; 0 = all)"

# ChenmienTan/RL2: its first releases, and its newest commit.
RL2 = {
    "data.path": "train_data.path data.train.path rollout.train.path",
    "data.prompts_per_rollout": """
        train_data.prompts_per_rollout rollout.train_prompts_per_rollout
        rollout.train.prompts_per_rollout""",
    "data.responses_per_prompt": """
        train_data.responses_per_prompt train_data.experience.responses_per_prompt
        rollout.train.responses_per_prompt""",
    "data.max_length": "train_data.max_length data.train.max_length",
    "data.batch_size": "train_data.batch_size data.train.batch_size",
    f"{TRAIN}.max_new_tokens": """
        train_data.experience.max_new_tokens rollout.train.sampling_params.max_new_tokens""",
    "rollout.max_turns": "train_data.experience.max_turns",
    "rollout.filter (as rollout.filter=[0,1])": """
        rollout.dynamic_filtering rollout.train.dynamic_filtering""",
    "data.test_path": "test_data.path data.test.path rollout.test.path",
    "data.responses_per_test_prompt": """test_data.response_per_prompt
        test_data.responses_per_prompt rollout.test.responses_per_prompt""",
    "data.columns (a map of your columns)": """
        data.train.prompt_key data.train.messages_key data.train.response_key data.train.chosen_key
        data.train.rejected_key rollout.train.prompt_key rollout.train.messages_key""",
    "actor.gradient_checkpointing": "actor.enable_gradient_checkpointing",
    "actor.fsdp_size (processes / ddp_size, or 0 for ddp_size=1)": "actor.ddp_size",
    "actor.sp_size": "actor.cp_size",
    "actor.lr": "actor.optimizer.lr",
    "actor.weight_decay": "actor.optimizer.weight_decay",
    "actor.max_grad_norm": "actor.optimizer.clip_grad",
    "actor.scheduler": "actor.scheduler.name actor.scheduler.lr_decay_style",
    "actor.warmup_ratio": "actor.scheduler.warmup_ratio",
    f"{TRAIN}.temperature": "actor.temperature rollout.train.sampling_params.temperature",
    "actor.correction_cap (with actor.correction=token_tis)": "actor.tis_coef",
    "actor.average": "actor.avg_level",
    "adv.estimator": "actor.adv_estimator",
    "adv.estimator (reinforce_plus_plus_baseline)": "adv.global_norm",
    "dpo.beta": "actor.beta",
    "kl.coef": "actor.kl.coef",
    "kl.type": "actor.kl.type",
    "kl.reward_estimator": "actor.kl.reward_estimator",
    "kl.loss_estimator": "actor.kl.loss_estimator",
    "actor.entropy": "actor.entropy.coef",
    "rollout.tp_size": "rollout.server_args.tp_size",
    "rollout.gpu_memory_utilization": "rollout.server_args.mem_fraction_static",
    "rollout.engine_args (as rollout.engine_args.NAME=VALUE)": "rollout.server_args.",
    "actor.model_name (the engine always has the actor's model)": "rollout.model_name",
    "actor.dtype (the engine always has the actor's)": "rollout.dtype",
    f"{TRAIN}.stop": "rollout.train.sampling_params.stop",
    "rollout.partial": "rollout.train.partial_rollout rollout.partial_rollout",
    f"{TEST}.temperature": "rollout.test.sampling_params.temperature",
    f"{TEST}.max_new_tokens": "rollout.test.sampling_params.max_new_tokens",
    f"{TEST}.stop": "rollout.test.sampling_params.stop",
    "trainer.resume": "trainer.load_ckpt_from",
    "trainer.max_steps": "trainer.total_steps",
    "trainer.disable_wandb (the opposite)": "trainer.use_wandb",
}
# Names leave out `actor_rollout_ref.` at the start.
VERL = {
    "actor.update_per_rollout (data.train_batch_size / ppo_mini_batch_size)": """
        actor.ppo_mini_batch_size""",
    BUDGET: """
        actor.ppo_max_token_len_per_gpu actor.ppo_micro_batch_size
        actor.ppo_micro_batch_size_per_gpu data.micro_batch_size_per_gpu""",
    INFERENCE_BUDGET: """
        actor.forward_max_token_len_per_gpu actor.forward_micro_batch_size
        actor.forward_micro_batch_size_per_gpu rollout.log_prob_max_token_len_per_gpu
        rollout.log_prob_micro_batch_size rollout.log_prob_micro_batch_size_per_gpu""",
    "actor.epochs_per_rollout": "actor.ppo_epochs",
    "actor.clip": "actor.clip_ratio actor.clip_ratio_low",
    "actor.clip_high": "actor.clip_ratio_high",
    "actor.dual_clip": "actor.clip_ratio_c",
    "critic.clip": "critic.cliprange_value",
    "actor.loss": "actor.policy_loss.loss_mode",
    "actor.average (token, sequence, prompt or constant)": "actor.loss_agg_mode",
    "actor.entropy": "actor.entropy_coeff",
    "kl.type (loss)": "actor.use_kl_loss",
    "kl.coef (with kl.type=loss)": "actor.kl_loss_coef",
    "kl.loss_estimator": "actor.kl_loss_type",
    "actor.lr": "actor.optim.lr",
    "actor.weight_decay": "actor.optim.weight_decay",
    "actor.warmup_ratio": "actor.optim.lr_warmup_steps_ratio",
    "actor.warmup_ratio (a fraction of the updates)": "actor.optim.lr_warmup_steps",
    "actor.scheduler": "actor.optim.warmup_style actor.optim.lr_scheduler_type",
    "actor.max_grad_norm": "actor.optim.clip_grad actor.grad_clip",
    "trainer.max_steps": "actor.optim.total_training_steps trainer.total_training_steps",
    "actor.compile": "actor.use_torch_compile",
    "actor.sp_size": "actor.ulysses_sequence_parallel_size",
    "actor.fsdp_size": "actor.fsdp_config.fsdp_size actor.model.fsdp_config.fsdp_size",
    "actor.offload_model": "actor.fsdp_config.param_offload actor.model.fsdp_config.param_offload",
    "actor.offload_optimizer": """
        actor.fsdp_config.optimizer_offload actor.model.fsdp_config.optimizer_offload""",
    "actor.save_optimizer": "actor.checkpoint.save_contents",
    "actor.model_name": "model.path actor.model.path",
    "actor.gradient_checkpointing": """
        model.enable_gradient_checkpointing actor.model.enable_gradient_checkpointing""",
    "actor.lora_rank": "model.lora_rank actor.model.lora_rank",
    "actor.lora_alpha": "model.lora_alpha actor.model.lora_alpha",
    "actor.lora_targets": "model.target_modules actor.model.target_modules",
    "rollout.engine": "rollout.name",
    f"{TRAIN}.temperature": "rollout.temperature",
    f"{TRAIN}.top_k": "rollout.top_k",
    f"{TRAIN}.top_p": "rollout.top_p",
    "data.max_length": "rollout.prompt_length data.max_prompt_length",
    f"{TRAIN}.max_new_tokens": "rollout.response_length data.max_response_length",
    "data.responses_per_prompt": "rollout.n n",
    "rollout.filter (as rollout.filter=[0,1])": "algorithm.filter_groups.",
    "rollout.max_refills": "algorithm.filter_groups.max_num_gen_batches",
    "rollout.overlong_buffer": """
        reward_model.overlong_buffer.len reward.reward_kwargs.overlong_buffer_cfg.len""",
    "rollout.overlong_penalty": """
        reward_model.overlong_buffer.penalty_factor
        reward.reward_kwargs.overlong_buffer_cfg.penalty_factor""",
    "rollout.tp_size": "rollout.tensor_model_parallel_size",
    "rollout.max_running": "rollout.max_num_seqs",
    "rollout.engine_args (as rollout.engine_args.NAME=VALUE)": "rollout.engine_kwargs.",
    f"{TEST}.temperature": "rollout.val_kwargs.temperature",
    f"{TEST}.top_k": "rollout.val_kwargs.top_k",
    "data.responses_per_test_prompt": "rollout.val_kwargs.n",
    "data.test_limit": "data.val_max_samples",
    "trainer.eval_only": "trainer.val_only",
    f"{TEST}.top_p": "rollout.val_kwargs.top_p",
    "rollout.max_turns": "rollout.multi_turn.max_assistant_turns rollout.multi_turn.max_user_turns",
    "rollout.max_turns (more than 1)": "rollout.multi_turn.enable",
    "data.path": "data.train_files",
    "data.test_path": "data.val_files",
    "data.columns (a map of your columns)": "data.prompt_key",
    "data.chat_template_kwargs": "data.apply_chat_template_kwargs",
    "data.chat_template (the path of a Jinja file)": "model.custom_chat_template",
    f"data.prompts_per_rollout | {BATCH}": "data.train_batch_size batch_size",
    "rollout.env_path": "custom_reward_function.path reward.custom_reward_function.path",
    "adv.gamma": "algorithm.gamma",
    "adv.lamda": "algorithm.lam",
    "adv.estimator (grpo: the default, with adv.norm_var=true)": "algorithm.adv_estimator",
    "adv.norm_var": "algorithm.norm_adv_by_std_in_grpo",
    "kl.type (reward)": "algorithm.use_kl_in_reward",
    "kl.reward_estimator": "algorithm.kl_penalty",
    "kl.coef (with kl.type=reward)": "algorithm.kl_ctrl.kl_coef",
    CORRECTION: "algorithm.rollout_correction.rollout_is algorithm.rollout_correction.rollout_rs",
    "actor.correction_cap": "algorithm.rollout_correction.rollout_is_threshold",
    "trainer.n_epochs": "trainer.total_epochs",
    "trainer.project": "trainer.project_name",
    "trainer.loggers (metrics.jsonl and the console are always written)": "trainer.logger",
    "trainer.resume": "trainer.resume_mode trainer.resume_from_path",
    "actor.freeze_steps": "trainer.critic_warmup",
    "trainer.save_dir": "trainer.default_local_dir",
    "trainer.keep_checkpoints": "trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep",
}
# GRPOConfig, RLOOConfig, DistillationConfig, SFTConfig, DPOConfig and RewardConfig of TRL 1.16,
# with what they inherit; and a key of its PPOConfig.
TRL = {
    "data.truncate (true cuts rows at the end)": "truncation_mode",
    "actor.model_name | critic.model_name": "model_name_or_path model",
    "actor.dtype | critic.dtype": "dtype",
    "rollout.engine (attention is always packed; no choice in training)": "attn_implementation",
    "data.path": "dataset_name train_dataset",
    "data.test_path": "eval_dataset",
    "data.responses_per_test_prompt": "num_generations_eval",
    "rollout.env_path": "reward_funcs environment_factory",
    "actor.lr | critic.lr": "learning_rate",
    "actor.scheduler | critic.scheduler": "lr_scheduler_type",
    "actor.warmup_ratio | critic.warmup_ratio": "warmup_ratio",
    "actor.warmup_ratio (a fraction of the updates) | critic.warmup_ratio": "warmup_steps",
    "actor.weight_decay | critic.weight_decay": "weight_decay",
    "actor.max_grad_norm | critic.max_grad_norm": "max_grad_norm",
    f"{BUDGET} | {BATCH}": "per_device_train_batch_size",
    STEP_BATCH: "gradient_accumulation_steps",
    BUDGET: "auto_find_batch_size",
    INFERENCE_BUDGET: "per_device_eval_batch_size precompute_ref_batch_size",
    "actor.gradient_checkpointing | critic.gradient_checkpointing": """
        gradient_checkpointing activation_checkpointing""",
    "actor.dtype (auto is bf16 where the machine is fast at it) | critic.dtype": "bf16",
    "trainer.n_epochs": "num_train_epochs",
    "trainer.max_steps": "max_steps",
    "trainer.save_dir": "output_dir",
    "trainer.save_freq": "save_steps save_strategy",
    "trainer.keep_checkpoints": "save_total_limit",
    "trainer.resume": "resume_from_checkpoint",
    "trainer.test_freq": "eval_steps eval_strategy",
    "data.test_path (it is always evaluated before the first step)": "eval_on_start",
    "trainer.seed (sampling) or data.seed (order of rows)": "seed",
    "data.seed": "data_seed",
    "trainer.deterministic": "full_determinism",
    "trainer.experiment_name": "run_name",
    "trainer.project": "project",
    "trainer.loggers": "report_to",
    SHARDING: "fsdp fsdp_config deepspeed",
    "trainer.watchdog (seconds)": "ddp_timeout",
    "data.shuffle": "shuffle_dataset",
    "data.max_length": "max_length max_prompt_length",
    f"{TRAIN}.max_new_tokens": "max_completion_length max_new_tokens",
    "data.responses_per_prompt": "num_generations",
    "data.prompts_per_rollout (x data.responses_per_prompt)": "generation_batch_size",
    "actor.update_per_rollout": "steps_per_generation num_mini_batches",
    "actor.epochs_per_rollout": "num_iterations num_ppo_epochs",
    "kl.update_freq": "sync_ref_model ref_model_sync_steps",
    f"{TRAIN}.temperature": "temperature",
    f"{TRAIN}.top_p": "top_p",
    f"{TRAIN}.top_k": "top_k",
    "rollout.engine (sglang)": "use_vllm",
    "rollout.engine (it always runs in the trainer's processes)": "vllm_mode",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.tp_size": "vllm_tensor_parallel_size",
    "rollout.engine_args (as rollout.engine_args.NAME=VALUE)": "vllm_model_impl",
    "rollout.engine (local)": "use_transformers_continuous_batching use_transformers_paged",
    CORRECTION: "vllm_importance_sampling_correction vllm_importance_sampling_mode",
    "actor.correction_cap": "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
    "kl.coef (with kl.type=loss) | dpo.beta": "beta",
    "actor.clip": "epsilon cliprange",
    "actor.clip_high": "epsilon_high",
    "actor.dual_clip": "delta",
    "rollout.mask_truncated": "mask_truncated_completions",
    "rollout.reward_weights (a map of the parts of the reward)": "reward_weights",
    "critic.clip": "cliprange_value",
    "critic.lr (the critic has an optimizer of its own)": "vf_coef",
    "adv.gamma": "gamma",
    "adv.lamda": "lam",
    "kl.coef": "kl_coef",
    "kl.reward_estimator": "kl_estimator",
    "adv.norm_var (whitens advantages)": "whiten_rewards",
    "actor.loss (sequence: gspo)": "importance_sampling_level",
    "adv.norm_var (group; batch: adv.estimator=reinforce_plus_plus_baseline)": "scale_rewards",
    "adv.estimator (reinforce_plus_plus_baseline)": "normalize_advantages",
    "teacher.model_name (with adv.estimator=distillation)": "teacher_model_name_or_path",
    "actor.skip_threshold": "ratio_threshold",
    f"{LOSS} | dpo.loss (sigmoid, ipo, hinge)": "loss_type",
    "actor.entropy": "entropy_coef",
    "rollout.max_turns": "max_tool_calling_iterations",
    "actor.compile (elementwise parts of layers and head)": "torch_compile",
    "actor.head_dtype (float32 is the default)": "cast_lm_head_to_fp32",
    "dpo.label_smoothing": "label_smoothing",
    "rm.center": "center_rewards_coefficient",
    "data.turns (assistant turns alone are trained)": "assistant_only_loss completion_only_loss",
    "data.columns (a map of your columns)": "dataset_text_field",
    "data.chat_template": "chat_template_path",
    "data.chat_template_kwargs": "chat_template_kwargs",
    "actor.lora_rank | critic.lora_rank": "use_peft lora_r",
    "actor.lora_alpha | critic.lora_alpha": "lora_alpha",
    "actor.lora_targets | critic.lora_targets": "lora_target_modules",
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
        teacher_model_init_kwargs teacher_model_revision
        model.trust_remote_code data.trust_remote_code actor.use_liger_kernel use_liger_kernel
        liger_kernel_config model.use_liger model.use_fused_kernels model.external_lib
        model.override_config neftune_noise_alpha""",
    "sequences are always packed without padding, within actor.max_length_per_device": """packing
        packing_strategy padding_free eval_packing pad_to_multiple_of model.use_remove_padding
        actor.use_dynamic_bsz actor.use_remove_padding group_by_length trainer.balance_batch
        rollout.log_prob_use_dynamic_bsz data.truncation train_sampling_strategy
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
        router_aux_loss_coef label_smoothing_factor algorithm.use_pf_ppo
        algorithm.pf_ppo. actor.policy_loss. algorithm.kl_ctrl. algorithm.rollout_correction.
        critic.loss_agg_mode critic.avg_level multi_objective_aggregation""",
    "mini-batches are always shuffled": "actor.shuffle",
    "the reference is the model that the run starts from, or with kl.update_freq the actor": """
        ref_model_mixup_alpha precompute_ref_log_probs ref_actor. ref.""",
    "one reward function gives the reward; it may add up several": """
        reward_model_path reward_clip_range custom_reward_function.name reward_model. reward.""",
    "an engine gets a few more requests than it has slots": "rollout.over_sample_rate",
    "an answer is sampled by temperature, top_p and top_k alone": """min_p generation_kwargs
        repetition_penalty cache_implementation rollout.do_sample rollout.ignore_eos
        vllm_structured_outputs_regex transformers_continuous_batching_config
        rollout.val_kwargs.do_sample""",
    "all test prompts are played together": """
        rollout.test.prompts_per_rollout data.val_batch_size""",
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
        batch_eval_metrics prediction_loss_only eval_use_gather_object
        trainer.val_before_train""",
    "AdamW with its usual betas is the optimizer, and its rate ends at 0": """optim optim_args
        optim_target_modules adam_beta1 adam_beta2 adam_epsilon lr_scheduler_kwargs
        actor.scheduler.min_lr actor.optim. actor.optimizer. actor.scheduler.""",
    "adapters of all linear layers have one rank and no dropout": """lora_dropout
        model.exclude_modules
        lora_modules_to_save lora_task_type use_rslora use_dora""",
    "dropout is off in training": "disable_dropout",
    "a cut prompt asks something else, cut replies may be equal, and a reward model reads the end; "
    "raise data.max_length": "data.truncate",
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


# The keys of a published algorithm that differ from the defaults, as docs/algorithms.md has them.
ALGORITHMS = {
    "PPO": "adv.estimator=gae adv.lamda=0.95 actor.epochs_per_rollout=4",
    "GRPO": "adv.norm_var=true actor.average=sequence",
    "Dr. GRPO": "actor.average=constant actor.average_constant=LONGEST_ANSWER",
    "RLOO": "adv.estimator=rloo actor.loss=reinforce",
    "REINFORCE": "actor.loss=reinforce",
    "REINFORCE++": "adv.estimator=reinforce_plus_plus",
    "DAPO": "adv.norm_var=true actor.update_per_rollout=16 actor.clip_high=0.28 "
    "rollout.filter=[0,1]",
    "GSPO": "adv.norm_var=true actor.loss=gspo actor.average=sequence actor.clip=3e-4 "
    "actor.clip_high=4e-4",
    "CISPO": "adv.norm_var=true actor.loss=cispo actor.clip_high=4",
    "On-policy distillation": "adv.estimator=distillation actor.loss=reinforce "
    "teacher.model_name=MODEL",
}
OTHER_TRAINERS = {"dpo": "dpo", "ipo": "dpo", "sft": "sft", "rm": "rm"}  # name -> command of rl2
# Under which one looks for a key that names the algorithm.
ALGORITHM_KEYS = ("algorithm", "algo", "alg", "method", "algorithm.name", "trainer.algorithm")


def explain_algorithm(name: str) -> str:
    """The keys that make the algorithm of this name, in words; "" if no algorithm has the name."""
    plain = _plain(name)
    for algorithm, keys in ALGORITHMS.items():
        if plain == _plain(algorithm):
            return f"{algorithm} is {keys}, see docs/algorithms.md"
    if plain in OTHER_TRAINERS:
        return f"it has a trainer of its own, python -m rl2 {OTHER_TRAINERS[plain]}"
    return ""


def _plain(name: str) -> str:
    """The name in lower case, without marks and spaces: "Dr. GRPO" is drgrpo."""
    return re.sub(r"[^\w]|_", "", name.lower().replace("++", "plusplus"))


def all_answers() -> dict[str, str]:
    """Name -> what to say about it, of every key of other trainers."""
    answers: dict[str, str] = {}
    for reason, names in ABSENT.items():
        answers |= dict.fromkeys(names.split(), f"there is no such key here: {reason}")
    for project, equivalents in EQUIVALENTS.items():
        for answer, names in equivalents.items():
            answers |= dict.fromkeys(names.split(), f"this is {project}'s; here {answer}")
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
