"""The public names of Twinkle's own distribution (twinkle-kit 0.5.1, and what its documents and earlier versions name).

A name is added here when upstream's packages export it or its documents import it: to ``NAMES`` if it imports here,
else to ``LEFT_OUT`` with what to do instead. Modules that upstream keeps to itself are not counted.
"""

NAMES = {
    "twinkle": (
        "DeviceGroup DeviceMesh GPU NPU Platform Plugin check_unsafe exists find_free_port find_node_ip "
        "framework_util get_device_placement get_logger initialize is_master remote_class remote_function "
        "requires torch_util trust_remote_code"
    ),
    "twinkle.advantage": "Advantage GAEAdvantage GRPOAdvantage RLOOAdvantage",
    "twinkle.checkpoint_engine": "CheckpointEngine CheckpointEngineManager CheckpointEngineMixin",
    "twinkle.cli": "Args CLI",
    "twinkle.data_format": (
        "InputFeature LossOutput Message ModelOutput SampleResponse SampledSequence SamplingParams Tool "
        "ToolCall Trajectory pack_value user_data_get"
    ),
    "twinkle.dataloader": "DataLoader",
    "twinkle.dataset": "Dataset DatasetMeta IterableDataset IterablePackingDataset LazyDataset PackingDataset",
    "twinkle.dataset.base": "Dataset DatasetMeta",
    "twinkle.hub": "HFHub HubOperation MSHub",
    "twinkle.infra": (
        "DeviceGroup DeviceMesh Platform get_device_placement get_logger initialize is_master remote_class "
        "remote_function"
    ),
    "twinkle.kernel": "DEFAULT_KERNEL_CONFIG KernelChoice hub kernelize",
    "twinkle.loss": (
        "BNPOLoss CISPOLoss CPOLoss ChunkedCrossEntropyLoss CrossEntropyLoss DPOLoss DRGRPOLoss GKDLoss "
        "GRPOLoss GSPOLoss InfonceLoss LigerFusedLinearCrossEntropyLoss Loss MSELoss ORPOLoss PPOLoss "
        "PPOValueLoss PreferenceLossBase SAPOLoss SimPOLoss"
    ),
    "twinkle.metric": (
        "Accuracy CISPOMetric CompletionRewardMetric DPOMetric EmbeddingMetric GRPOMetric GSPOMetric "
        "LossMetric Metric PPOMetric PPOValueMetric TrainMetric"
    ),
    "twinkle.model": (
        "MegatronModel MultiLoraMegatronModel MultiLoraTransformersModel TransformersModel "
        "TransformersValueModel TwinkleModel"
    ),
    "twinkle.model.megatron": "MegatronModel MultiLoraMegatronModel",
    "twinkle.model.transformers": "MultiLoraTransformersModel TransformersModel TransformersValueModel",
    "twinkle.module": "CosineWarmupScheduler LinearWarmupScheduler",
    "twinkle.module.scheduler": "CosineWarmupScheduler LinearWarmupScheduler",
    "twinkle.notifier": "DingNotifier Notifier",
    "twinkle.patch": "Patch apply_context apply_patch",
    "twinkle.preprocessor": (
        "AlpacaProcessor CLEVRProcessor CompetitionMathGRPOProcessor CompetitionMathProcessor "
        "CountdownProcessor DataFilter EmojiDPOProcessor Filter GSM8KProcessor OlympiadBenchProcessor "
        "Preprocessor SelfCognitionProcessor"
    ),
    "twinkle.preprocessor.base": "DataFilter Preprocessor",
    "twinkle.preprocessor.dpo": "EmojiDPOProcessor",
    "twinkle.preprocessor.llm": (
        "AlpacaProcessor CompetitionMathGRPOProcessor CompetitionMathProcessor CountdownProcessor "
        "GSM8KProcessor SelfCognitionProcessor"
    ),
    "twinkle.preprocessor.mm": "CLEVRProcessor",
    "twinkle.preprocessor.olympiad_bench": "OlympiadBenchProcessor",
    "twinkle.processor": "InputProcessor",
    "twinkle.processor.base": "InputProcessor",
    "twinkle.reward": (
        "FormatReward GSM8KAccuracyReward GSM8KFormatReward MathReward MultiModalAccuracyReward "
        "OlympiadBenchAccuracyReward OlympiadBenchFormatReward OlympiadBenchQualityReward Reward"
    ),
    "twinkle.reward.base": "Reward",
    "twinkle.sampler": "Sampler TorchSampler vLLMSampler",
    "twinkle.sampler.base": "Sampler",
    "twinkle.server.common": "input_feature_to_datum",
    "twinkle.server.model.tinker_datum": "input_feature_to_datum",
    "twinkle.server.tinker.common": "input_feature_to_datum",
    "twinkle.template": "DeepseekV4Template Qwen3_5Template Template",
    "twinkle.template.base": "Template",
    "twinkle.utils": (
        "DeviceGroup DeviceMesh GPU NPU Platform Plugin check_unsafe construct_class exists find_free_port "
        "find_node_ip framework_util get_logger is_master is_torch_npu_available requires torch_util trust_remote_code"
    ),
    "twinkle.utils.framework": "Framework Torch",
    "twinkle_agentic.chunker": "Chunker NativeChunker",
    "twinkle_agentic.chunker.base": "Chunker",
    "twinkle_agentic.chunker.native": "NativeChunker",
    "twinkle_agentic.condenser": "Condenser KeywordCondenser ModelCondenser",
    "twinkle_agentic.condenser.base": "Condenser",
    "twinkle_agentic.condenser.keyword": "KeywordCondenser",
    "twinkle_agentic.condenser.model": "ModelCondenser",
    "twinkle_agentic.data_format": "Chunk Chunks",
    "twinkle_agentic.data_format.chunks": "Chunk Chunks",
    "twinkle_agentic.envs": "AgentEnv Env EnvPool EnvPoolAdapter EnvTool OpenEnv StepResult",
    "twinkle_agentic.envs.base": "Env StepResult",
    "twinkle_agentic.envs.env_tool": "EnvTool",
    "twinkle_agentic.envs.openenv": "OpenEnv",
    "twinkle_agentic.preprocessor": (
        "AgentTraceFilter AlphanumericFilter CharRepeatFilter DeadLoopFilter DedupFilter FixUnicodeFilter "
        "FlaggedWordsFilter HardFilter IFDFilter IntentClassifier JudgeFilter LLMBackend LanguageFilter "
        "MessageNormalizer MessageSanityFilter MinHashDedupFilter ModelFilter OpenAIBackend PIIPresidioFilter "
        "PerplexityFilter QualityPreprocessor RefuseFilter RemoveRepeatSentencesFilter ResponseRefiner "
        "SIFDScorer SamplerBackend ScoreFilter SpecialCharsFilter TokenNumFilter TokenSoupFilter "
        "ToolCallNormalizer WordRepeatFilter"
    ),
    "twinkle_agentic.preprocessor.llm_backend": "LLMBackend OpenAIBackend SamplerBackend",
    "twinkle_agentic.preprocessor.pii_presidio_filter": "PIIPresidioFilter Strategy",
    "twinkle_agentic.preprocessor.score_filter": (
        "ChrMinScorer ParaphraseScorer PassNScorer SIFDScorer ScoreFilter Scorer"
    ),
    "twinkle_agentic.protocol": "API OpenAI",
    "twinkle_agentic.protocol.base": "API",
    "twinkle_agentic.protocol.openai": "OpenAI",
    "twinkle_agentic.reward": "CoTReward F1Reward ToolExploreReward",
    "twinkle_agentic.rollout": (
        "APIMultiTurnRollout MultiTurnCondenseRollout MultiTurnRollout Rollout extend_with_bridge"
    ),
    "twinkle_agentic.rollout.api_multi_turn": "APIMultiTurnRollout",
    "twinkle_agentic.rollout.base": "Rollout",
    "twinkle_agentic.rollout.bridge": "extend_with_bridge",
    "twinkle_agentic.rollout.multi_turn": "MultiTurnRollout",
    "twinkle_agentic.rollout.multi_turn_condense": "MultiTurnCondenseRollout",
    "twinkle_agentic.sampler": "RouterSampler",
    "twinkle_agentic.tools": "ExtractCondensed Tool ToolManager",
    "twinkle_agentic.tools.base": "Tool",
    "twinkle_agentic.tools.extract_condensed": "ExtractCondensed",
    "twinkle_agentic.tools.tool_manager": "ToolManager",
    "twinkle_client": "TwinkleClient init_tinker_client init_tinker_compat_client init_twinkle_client",
    "twinkle_client.dataloader": "DataLoader",
    "twinkle_client.dataset": "Dataset IterableDataset IterablePackingDataset LazyDataset PackingDataset",
    "twinkle_client.model": "MultiLoraTransformersModel",
    "twinkle_client.processor": "InputProcessor",
    "twinkle_client.rollout": "ClientMultiTurnRollout",
    "twinkle_client.sampler": "vLLMSampler",
    "twinkle_client.types": (
        "CapacityInfoResponse Checkpoint CreateModelRequest Cursor DeleteCheckpointResponse LoraConfig "
        "ParsedCheckpointTwinklePath SupportedModel TrainingRun TrainingRunsResponse WeightsInfoResponse"
    ),
}
"""Module: its names."""

OF_ITS_OWN_LOOP = "how upstream does it inside; nothing that scripts call"
FROM_THE_PACKAGE = "what it has is imported from the package above it"
LEFT_OUT = {
    "twinkle": (
        "__release_datetime__",
        "twinkle.__version__",
    ),
    "twinkle.checkpoint_engine": (
        "HCCLCheckpointEngine NCCLCheckpointEngine TensorMeta",
        "CheckpointEngineManager chooses the way by itself; there is none for NPUs",
    ),
    "twinkle.cli": (
        "CLISource CheckpointArgs ConfigResolver ConfigSource DatasetArgs DotEnvSource EnvVarSource "
        "InfraArgs LoraArgs LossArgs ModelArgs OptimizerArgs RLArgs SamplerArgs SamplingArgs "
        "SchedulerArgs ServerArgs TemplateArgs TrainingArgs ValueCaster YamlSource",
        "the groups are read by CLI.from_args().get_model_args() and its neighbours",
    ),
    "twinkle.dataloader": (
        "DeviceMeshIterableFetcher DeviceMeshSampler RetrySampler",
        OF_ITS_OWN_LOOP,
    ),
    "twinkle.hub": (
        "MODEL_ID_ALIASES_ENV build_model_alias_map load_model_alias_map resolve_model_id_alias",
        "aliases are a setting: TWINKLE_MODEL_ID_ALIASES",
    ),
    "twinkle.infra": (
        "collect_tensor_dict",
        "remote_function(collect=...) takes a name or a function",
    ),
    "twinkle.kernel": (
        "ops",
        "kernels come from kernels and liger-kernel through kernelize",
    ),
    "twinkle.model.megatron": (
        "MegatronStrategy",
        OF_ITS_OWN_LOOP,
    ),
    "twinkle.model.transformers.moe": (
        "ExpertShardingSpec apply_expert_parallel",
        "the mesh spreads experts: fsdp_config={'expert_parallel': ...}",
    ),
    "twinkle.model.transformers.strategy": (
        "",
        "strategy= of the model",
    ),
    "twinkle.notifier": (
        "notify_exception",
        "initialize(notifier=...) does it",
    ),
    "twinkle.sampler": (
        "BaseSamplerEngine",
        "SteppedSampler",
    ),
    "twinkle.sampler.vllm_sampler": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle.template": (
        "ClineParser HermesQwenParser ReActParser ToolCallParser ToolCallRegistry VCPParser",
        "a template of one's own overrides parse_tool_call and clean_tool_call; all known forms are read",
    ),
    "twinkle.template.tools": (
        "",
        "a template of one's own overrides parse_tool_call and clean_tool_call; all known forms are read",
    ),
    "twinkle.utils": (
        "Fp8Dequantizer LazyTensor MxFp4Dequantizer SafetensorLazyLoader StreamingSafetensorSaver "
        "clone_state_dict_to_cpu copy_files_by_pattern deep_getattr ensure_hccl_socket_env "
        "ensure_npu_backend find_all_linears find_layers get_modules_to_not_convert get_runtime_meta "
        "is_last_rank is_valid_ipv6_address load_image load_mm_file pad_and_stack_tensors "
        "pad_sequence_to_length processing_lock selective_log_softmax split_cp_inputs "
        "stateless_init_process_group to_device",
        OF_ITS_OWN_LOOP,
    ),
    "twinkle.utils.platforms": (
        "",
        OF_ITS_OWN_LOOP,
    ),
    "twinkle_agentic.envs": (
        "OpenEnvClient",
        "OpenEnv takes the client that a server's package brings",
    ),
    "twinkle_agentic.envs.agentenv": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.envs.openenv": (
        "EnvPool EnvPoolAdapter OpenEnvClient",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.data_juicer": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.dead_loop_filter": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.dedup_filter": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.hard_filter": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.intent_classifier": (
        "",
        "IntentClassifier is imported from the package; it takes patterns (intents=) where upstream takes detectors",
    ),
    "twinkle_agentic.preprocessor.message_normalizer": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.message_sanity": (
        "",
        "MessageSanityFilter is imported from the package; its checks are no functions of their own",
    ),
    "twinkle_agentic.preprocessor.model_filter": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.pii_presidio_filter": (
        "FakerProvider",
        "PIIPresidioFilter(finder=...) finds, its strategies replace",
    ),
    "twinkle_agentic.preprocessor.refuse_filter": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.score_filter": (
        "RoundContext ScoreResult",
        "Round and Score, whose fields differ",
    ),
    "twinkle_agentic.preprocessor.token_soup": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.preprocessor.utils": (
        "",
        OF_ITS_OWN_LOOP,
    ),
    "twinkle_agentic.reward.f1": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_agentic.sampler.router_sampler": (
        "",
        FROM_THE_PACKAGE,
    ),
    "twinkle_client.auto": (
        "",
        "a terminal program that writes scripts; not offered",
    ),
    "twinkle_client.http": (
        "",
        "the client's own requests; twinkle.client is the typed one",
    ),
    "twinkle_client.skills": (
        "",
        "a terminal program that writes scripts; not offered",
    ),
    "twinkle_client.types": (
        "AdapterRequest AddAdapterRequest AddAdapterResponse AddMetricRequest AddMetricResponse "
        "ApplyPatchRequest ApplyPatchResponse BackwardResponse CalculateLossResponse "
        "CalculateMetricRequest CalculateMetricResponse CheckpointPathResponse CheckpointsListResponse "
        "ClipGradAndStepRequest ClipGradAndStepResponse ClipGradNormResponse CreateRequest CreateResponse "
        "CreateSessionRequest CreateSessionResponse ErrorResponse ForwardBackwardResponse "
        "ForwardOnlyRequest ForwardRequest ForwardResponse GetServerCapabilitiesResponse "
        "GetStateDictRequest GetStateDictResponse GetTrainConfigsResponse HealthResponse LoadRequest "
        "LoadResponse LrStepResponse ModelResult OkResponse ProcessorCallRequest ProcessorCallResponse "
        "ProcessorCreateRequest ProcessorCreateResponse ProcessorHeartbeatRequest "
        "ProcessorHeartbeatResponse ResolvedLoadPath ResumeFromCheckpointRequest SampleRequest "
        "SampleResponseModel SampleResponseModelList SampledSequenceModel SamplerAddAdapterRequest "
        "SamplerCreateResponse SamplerSetTemplateRequest SamplerSetTemplateResponse SaveRequest "
        "SaveResponse ServerWeightsInfoResponse SessionHeartbeatRequest SessionHeartbeatResponse "
        "SetLossRequest SetLossResponse SetLrSchedulerRequest SetLrSchedulerResponse SetOptimizerRequest "
        "SetOptimizerResponse SetProcessorRequest SetProcessorResponse SetTemplateRequest "
        "SetTemplateResponse StepResponse TrainingProgressResponse UploadStatusResponse "
        "UploadToHubRequest UploadToHubResponse WeightsInfoRequest ZeroGradResponse",
        "bodies of requests and answers are in the service's OpenAPI document",
    ),
}
"""Module: those of its names that are not here, and what takes their place; without names it is not here at all."""
