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
    "twinkle.server.tinker.common": "input_feature_to_datum",
    "twinkle.template": "DeepseekV4Template Qwen3_5Template Template",
    "twinkle.template.base": "Template",
    "twinkle.utils": (
        "DeviceGroup DeviceMesh GPU NPU Platform Plugin check_unsafe construct_class exists find_free_port "
        "find_node_ip framework_util get_logger is_master requires torch_util trust_remote_code"
    ),
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
LEFT_OUT = {
    "twinkle:__release_datetime__": "twinkle.__version__",
    "twinkle.checkpoint_engine:HCCLCheckpointEngine": "a device that is not served",
    "twinkle.checkpoint_engine:NCCLCheckpointEngine": "CheckpointEngineManager chooses the way by itself",
    "twinkle.checkpoint_engine:TensorMeta": OF_ITS_OWN_LOOP,
    "twinkle.cli:ModelArgs": "the groups are read by CLI.from_args().get_model_args() and so on",
    "twinkle.dataloader:DeviceMeshIterableFetcher": OF_ITS_OWN_LOOP,
    "twinkle.dataloader:DeviceMeshSampler": OF_ITS_OWN_LOOP,
    "twinkle.dataloader:RetrySampler": OF_ITS_OWN_LOOP,
    "twinkle.hub:resolve_model_id_alias": "aliases are a setting: TWINKLE_MODEL_ID_ALIASES",
    "twinkle.infra:collect_tensor_dict": "remote_function(collect=...) takes a name or a function",
    "twinkle.kernel:ops": "kernels come from kernels and liger-kernel through kernelize",
    "twinkle.model.megatron:MegatronStrategy": OF_ITS_OWN_LOOP,
    "twinkle.model.transformers.strategy": "strategy= of the model",
    "twinkle.notifier:notify_exception": "initialize(notifier=...) does it",
    "twinkle.sampler:BaseSamplerEngine": "SteppedSampler",
    "twinkle_agentic.envs:OpenEnvClient": "OpenEnv takes the client that a server's package brings",
    "twinkle_agentic.preprocessor.hard_filter": "filters are imported from twinkle_agentic.preprocessor",
    "twinkle_agentic.preprocessor.score_filter:RoundContext": "Round, whose fields differ",
    "twinkle_agentic.preprocessor.score_filter:ScoreResult": "Score, whose fields differ",
    "twinkle_agentic.preprocessor.utils": OF_ITS_OWN_LOOP,
    "twinkle_client.auto": "a terminal program that writes scripts; not offered",
    "twinkle_client.http": "the client's own requests; twinkle.client is the typed one",
    "twinkle_client.types:ForwardRequest": "bodies of requests are in the service's OpenAPI document",
    "twinkle_client.skills": "part of the terminal program that is not offered",
}
"""Module, or module:name, of what upstream has and this project has not, and what takes its place."""
