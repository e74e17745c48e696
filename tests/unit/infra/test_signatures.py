"""What scripts may write of each call: its arguments, in the order and under the names of Twinkle's documents.

A row is a call and its arguments; those before the bar may come by position, in this order, all of them by name.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

TABLE = """
twinkle:initialize mode nproc_per_node ncpu_proc_per_node seed full_determinism groups global_device_mesh lazy_collect
    name notifier |
twinkle:DeviceGroup name ranks device_type gpus_per_worker visible_devices |
twinkle:DeviceMesh mesh mesh_dim_names |
twinkle:DeviceMesh.from_sizes | world_size dp_size fsdp_size tp_size pp_size ulysses_size cp_size ep_size etp_size
    ep_fsdp_size vpp_size device_type sequence_parallel
twinkle:remote_class execute |
twinkle:remote_function dispatch execute collect sync lazy_collect timeout |

twinkle.data_format:SamplingParams max_tokens seed stop temperature top_k top_p repetition_penalty logprobs
    prompt_logprobs num_samples |
twinkle.data_format:SampledSequence stop_reason tokens logprobs decoded new_input_feature routed_experts |
twinkle.data_format:SampleResponse sequences prompt_token_ids prompt_logprobs topk_prompt_logprobs |
twinkle.data_format:user_data_get items key default |

twinkle.dataset:DatasetMeta dataset_id subset_name split data_slice data |
twinkle.dataset:Dataset dataset_meta | streaming num_proc revision
twinkle.dataset:Dataset.add_dataset dataset_meta |
twinkle.dataset:Dataset.set_template template_func |
twinkle.dataset:Dataset.map preprocess_func dataset_meta init_args | load_from_cache_file
twinkle.dataset:Dataset.filter filter_func dataset_meta init_args |
twinkle.dataset:Dataset.mix_dataset interleave |
twinkle.dataset:Dataset.encode add_generation_prompt | batched load_from_cache_file
twinkle.dataset:Dataset.cast_column column decode |
twinkle.dataset:Dataset.save_as output_path format batch_size mode |
twinkle.dataset:Dataset.flush_save |
twinkle.dataset:PackingDataset dataset_meta packing_num_proc |
twinkle.dataset:IterablePackingDataset dataset_meta packing_interval packing_num_proc cyclic |
twinkle.dataloader:DataLoader dataset | batch_size min_batch_size device_mesh max_retries num_workers shuffle
    remote_group
twinkle.dataloader:DataLoader.set_processor processor_cls |
twinkle.dataloader:DataLoader.skip_consumed_samples consumed_train_samples |
twinkle.dataloader:DataLoader.resume_from_checkpoint consumed_train_samples |

twinkle.template:Template model_id use_chat_template max_length truncation_strategy default_system enable_thinking |
twinkle.template:Qwen3_5Template model_id use_chat_template max_length truncation_strategy default_system
    enable_thinking |
twinkle.template:DeepseekV4Template model_id use_chat_template max_length truncation_strategy default_system
    enable_thinking |
twinkle.template:Template.encode trajectory add_generation_prompt |
twinkle.template:Template.parse_tool_call text |
twinkle.template:Template.concat_input_feature prompt_feature new_tokens |

twinkle.preprocessor:SelfCognitionProcessor model_name model_author |
twinkle.preprocessor:GSM8KProcessor system add_assistant |
twinkle.preprocessor:EmojiDPOProcessor system chosen_key rejected_key prompt_key |
twinkle.preprocessor:CLEVRProcessor system |
twinkle.preprocessor:OlympiadBenchProcessor system language |
twinkle.preprocessor:Preprocessor.map_row_to_col rows keys |
twinkle.processor:InputProcessor device_mesh padding_free framework | padding_side

twinkle.model:TransformersModel | model_cls model_id config device_mesh mixed_precision strategy ddp_config fsdp_config
    grad_scaler_config memory_efficient_init
twinkle.model:MultiLoraTransformersModel | model_cls model_id config device_mesh mixed_precision strategy ddp_config
    fsdp_config lora_config grad_scaler_config memory_efficient_init max_loras max_r max_length target_modules
twinkle.model:MegatronModel model_id config ddp_config device_mesh mixed_precision load_weights recompute_granularity
    recompute_method recompute_num_layers recompute_modules |
twinkle.model:MegatronModel.save name output_dir interval save_optimizer | consumed_train_samples merge_lora
    adapter_name
twinkle.model:MultiLoraMegatronModel model_id config ddp_config device_mesh mixed_precision load_weights
    recompute_granularity recompute_method recompute_num_layers recompute_modules | max_loras max_r max_length
    target_modules

twinkle.sampler:Sampler.add_adapter_to_sampler adapter_name config |
twinkle.sampler:Sampler.encode_trajectory trajectory adapter_name add_generation_prompt |
twinkle.sampler:Sampler.decode_response token_ids adapter_name |
twinkle.sampler:vLLMSampler model_id engine_args device_mesh |
twinkle.sampler:vLLMSampler.sample inputs sampling_params adapter_name adapter_path | return_encoded use_base_model
    num_samples
twinkle.sampler:vLLMSampler.sleep level |
twinkle.sampler:vLLMSampler.wake_up tags |
twinkle.sampler:TorchSampler model_id device_mesh torch_dtype trust_remote_code model_cls |
twinkle.checkpoint_engine:CheckpointEngineManager model sampler platform |
twinkle.checkpoint_engine:CheckpointEngineManager.sync_weights merge_and_sync |

twinkle.loss:CrossEntropyLoss ignore_index reduction dft |
twinkle.loss:ChunkedCrossEntropyLoss chunk_size | ignore_index reduction
twinkle.loss:LigerFusedLinearCrossEntropyLoss ignore_index reduction label_smoothing softcap |
twinkle.loss:GKDLoss beta temperature ignore_index chunk_size |
twinkle.loss:GRPOLoss epsilon epsilon_high beta entropy_coef ignore_index |
twinkle.loss:GSPOLoss epsilon epsilon_high beta entropy_coef ignore_index |
twinkle.loss:SAPOLoss epsilon beta tau_pos tau_neg |
twinkle.loss:CISPOLoss epsilon | beta
twinkle.loss:BNPOLoss epsilon | beta
twinkle.loss:DRGRPOLoss epsilon beta max_completion_length |
twinkle.loss:DPOLoss beta label_smoothing ignore_index loss_type reference_free sft_weight |
twinkle.loss:SimPOLoss beta gamma |
twinkle.loss:CPOLoss beta bc_coef |
twinkle.loss:ORPOLoss lambda_orpo |
twinkle.loss:InfonceLoss temperature use_batch hard_negatives mask_fake_negative fake_neg_margin include_qq include_dd
    process_group |
twinkle.loss:PPOLoss | loss_agg_mode
twinkle.metric:Metric device_mesh process_group |
twinkle.metric:Metric.gather_results local_results |
twinkle.metric:CompletionRewardMetric.accumulate | rewards completion_lengths generate_time weight_sync_time
twinkle.metric:DPOMetric | beta
twinkle.metric:GRPOMetric device_mesh process_group ignore_index temperature epsilon epsilon_high top_k_kl |
twinkle.reward:MathReward ground_truth_key |
twinkle.advantage:GRPOAdvantage.__call__ rewards num_generations scale |
twinkle.advantage:RLOOAdvantage.__call__ rewards num_generations scale |
twinkle.advantage:GAEAdvantage gamma gae_lambda normalize |

twinkle.module.scheduler:CosineWarmupScheduler optimizer num_warmup_steps num_training_steps num_cycles last_epoch |
twinkle.module.scheduler:LinearWarmupScheduler optimizer num_warmup_steps num_training_steps last_epoch |
twinkle.kernel:kernelize model mapping |
twinkle.kernel:hub ref | revision version backend
twinkle.hub:HubOperation.push_to_hub repo_id folder_path path_in_repo commit_message commit_description token private
    revision ignore_patterns |
twinkle.hub:HubOperation.load_dataset dataset_id subset_name split streaming num_proc revision |
twinkle.hub:HubOperation.download_model model_id_or_path revision download_model ignore_patterns | token ignore_model
twinkle:Plugin.load_plugin plugin_id plugin_base |
twinkle.notifier:DingNotifier ding_url secret timeout |
twinkle.cli:CLI.from_args argv env_file config_file |

twinkle_agentic.preprocessor:HardFilter min_user_chars min_user_chars_cjk min_assistant_chars_2turn
    allow_incomplete_role | max_rounds agent_max_rounds min_characters
twinkle_agentic.preprocessor:FixUnicodeFilter normalization role |
twinkle_agentic.preprocessor:RemoveRepeatSentencesFilter lowercase ignore_special_character role | min_characters
twinkle_agentic.preprocessor:SpecialCharsFilter max_ratio role |
twinkle_agentic.preprocessor:TokenNumFilter hf_tokenizer min_num max_num role | count
twinkle_agentic.preprocessor:DedupFilter max_per_sig prefix_chars asst_chars state_file |
twinkle_agentic.preprocessor:DeadLoopFilter hesitation_density_threshold cascade_window cascade_threshold
    repetition_threshold ngram_size ngram_min_words think_hesitation_density_threshold think_cascade_threshold
    think_repetition_threshold | max_repeats min_characters
twinkle_agentic.preprocessor:TokenSoupFilter replacement_char_ratio control_char_ratio private_use_ratio
    special_token_count script_chaos_threshold script_chaos_min_chars | max_chars min_variety max_mixed
twinkle_agentic.preprocessor:RefuseFilter patterns | check_window
twinkle_agentic.preprocessor:MessageSanityFilter sensitive_words | check_role_order check_tool_matching
    check_content_integrity trim_to_assistant filter_sensitive sensitive_words_file extra_sensitive_words min_turns
    max_msg_chars
twinkle_agentic.preprocessor:MessageNormalizer normalize_tool_calls |
twinkle_agentic.preprocessor:ModelFilter patterns field |
twinkle_agentic.preprocessor:IntentClassifier intents | detectors intent_field
twinkle_agentic.preprocessor:LanguageFilter lang min_score role | allowed
twinkle_agentic.preprocessor:QualityPreprocessor | pipeline dropped_log_path backend fix_unicode
    remove_repeat_sentences message_sanity_filter sensitive_words_file extra_sensitive_words hard_filter refuse_filter
    dead_loop_filter allow_incomplete_role token_soup_filter word_repeat_max_ratio char_repeat_max_ratio
    special_chars_filter special_chars_max_ratio alphanumeric_min_ratio token_num_filter token_num_min token_num_max
    hf_tokenizer language language_min_score minhash_dedup jaccard_threshold ppl_api_endpoint ppl_model ppl_tokenizer
    ppl_min ppl_max

twinkle_client:init_twinkle_client base_url api_key |
twinkle_client.model:MultiLoraTransformersModel.add_adapter_to_model adapter_name config gradient_accumulation_steps |
"""

METHODS = """
forward | inputs temperature return_logits task router_replay_action
forward_only | inputs disable_lora temperature return_logits task
forward_backward | inputs micro_batch_size gradient_accumulation_steps
calculate_loss |
backward |
clip_grad_norm max_grad_norm norm_type | gradient_accumulation_steps
step optim_params | gradient_accumulation_steps
zero_grad | gradient_accumulation_steps
lr_step | gradient_accumulation_steps
clip_grad_and_step max_grad_norm norm_type | gradient_accumulation_steps
set_loss loss_cls |
set_optimizer optimizer_cls | lr weight_decay
set_lr_scheduler scheduler_cls |
set_grad_scaler |
set_template template_cls |
set_processor processor_cls |
add_metric metric_cls is_training |
apply_patch patch_cls |
calculate_metric is_training |
save name output_dir interval save_optimizer | consumed_train_samples
load name output_dir load_optimizer | token
resume_from_checkpoint checkpoint_dir | resume_only_model
get_state_dict |
get_peft_config_dict |
get_train_configs |
"""
"""Of every model; all take ``adapter_name`` too."""
MODELS = ("TransformersModel", "MultiLoraTransformersModel", "MegatronModel")
NOT_OF = {("MegatronModel", "set_grad_scaler")}
"""Megatron has no fp16 here."""


def read(table: str) -> list[str]:
    """Its rows, each in one line."""
    rows: list[str] = []
    for line in filter(None, table.splitlines()):
        if line.startswith(" "):
            rows[-1] += line
        else:
            rows.append(line)
    return rows


def methods_of_models() -> list[str]:
    shared = [
        f"twinkle.model:{model}.{row} adapter_name"
        for model in MODELS
        for row in read(METHODS)
        if (model, row.split()[0]) not in NOT_OF
    ]
    named = [f"twinkle.model:{model}.add_adapter_to_model" for model in MODELS]
    arguments = "adapter_name config_or_dir gradient_accumulation_steps is_trainable |"
    pushes = "checkpoint_dir hub_model_id hub_token async_upload |"
    return [*shared, *(f"{name} {arguments}" for name in named), f"twinkle.model:{MODELS[0]}.upload_to_hub {pushes}"]


def found(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("row", [*read(TABLE), *methods_of_models()], ids=lambda row: row.split()[0])
def test_every_argument_of_the_documents_is_an_argument_here(row: str) -> None:
    (path, *by_position), by_name = (part.split() for part in row.split("|"))
    call = found(path)
    signature = inspect.signature(call.__init__ if inspect.isclass(call) else call)
    given: dict[str, Any] = signature.parameters  # type: ignore[assignment]
    taken = [name for name, each in given.items() if each.kind is not each.KEYWORD_ONLY and name not in ("self", "_")]

    unknown = [name for name in (*by_position, *by_name) if name not in given]
    assert not unknown, f"{path} takes {', '.join(given)}"
    assert taken[: len(by_position)] == by_position
