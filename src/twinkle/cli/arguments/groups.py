"""The arguments of training scripts by group, with their defaults. Names are those of upstream's command lines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal

PRIMARY = "primary"
"""Of a field that several groups have: the one that its plain name means; the others are named with their group."""
ALIASES = "aliases"


@dataclass
class ModelArgs:
    """Which model, and how it is loaded."""

    model_id: str | None = field(default=None, metadata={PRIMARY: True})
    model_cls: str | None = None
    tokenizer_id: str | None = None
    mixed_precision: Literal["no", "fp8", "fp16", "bf16"] = "bf16"
    strategy: Literal["accelerate", "native_fsdp"] = "accelerate"
    memory_efficient_init: bool = False
    gradient_checkpointing: bool = True
    trust_remote_code: bool = True
    load_weights: bool = True
    recompute_granularity: str | None = "full"
    recompute_method: str | None = "uniform"
    recompute_num_layers: int | None = 1
    recompute_modules: list[str] | None = None
    use_distributed_optimizer: bool = True
    variable_seq_lengths: bool = True
    ddp_config: dict[str, Any] | None = None
    fsdp_config: dict[str, Any] | None = None
    grad_scaler_config: dict[str, Any] | None = None
    enable_liger: bool = False
    enable_fused_ce: bool = True


@dataclass
class LoraArgs:
    """The adapter."""

    use_lora: bool = False
    lora_r: int = 8
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    adapter_name: str = "default"
    lora_path: str | None = None


@dataclass
class DatasetArgs:
    """Which rows."""

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    streaming: bool = False
    num_proc: int | None = None
    data_slice: str | None = None
    revision: str | None = None


@dataclass
class TemplateArgs:
    """How conversations become tokens."""

    template_cls: str | None = None
    model_id: str | None = None
    max_length: int = 8192
    truncation_strategy: Literal["raise", "left", "right", "split", "delete"] = "raise"
    use_chat_template: bool = True
    enable_thinking: bool = True
    default_system: str | None = None


@dataclass
class TrainingArgs:
    """The loop."""

    max_steps: int = 200
    num_train_epochs: int | None = None
    batch_size: int = 8
    mini_batch_size: int | None = None
    micro_batch_size: int = 2
    gradient_accumulation_steps: int = 1
    output_dir: str = "./output"
    save_steps: int = 50
    save_total_limit: int | None = None
    log_interval: int = 10
    eval_interval: int | None = None
    eval_samples: int | None = None
    train_samples: int | None = None
    resume_from_checkpoint: str | None = None
    resume_only_model: bool = False
    ignore_data_skip: bool = False
    seed: int = field(default=42, metadata={PRIMARY: True})
    full_determinism: bool = False
    padding_free: bool = False


@dataclass
class OptimizerArgs:
    """The optimizer."""

    optimizer_cls: str = "AdamW"
    learning_rate: float = field(default=1e-5, metadata={ALIASES: ("lr",)})
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0


@dataclass
class SchedulerArgs:
    """The learning rate's course."""

    scheduler_cls: str = "CosineAnnealingLR"
    num_warmup_steps: int = 0
    num_training_steps: int | None = None
    t_max: int | None = None
    eta_min: float = 0.0
    lr_decay_steps: int | None = None
    max_lr: float | None = None


@dataclass
class LossArgs:
    """The loss."""

    loss_cls: str = "CrossEntropyLoss"
    loss_type: str = "sigmoid"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.1
    sft_weight: float = 1.0
    entropy_coef: float = 0.0
    ignore_index: int = -100


@dataclass
class SamplerArgs:
    """What samples."""

    sampler_type: str = "vLLMSampler"
    gpu_memory_utilization: float = 0.8
    max_model_len: int | None = None
    tensor_parallel_size: int | None = None
    enable_lora: bool = False
    max_lora_rank: int = 32
    enforce_eager: bool = False


@dataclass
class SamplingArgs:
    """How it samples."""

    max_tokens: int | None = field(default=None, metadata={ALIASES: ("max_new_tokens",)})
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    num_samples: int = 1
    logprobs: int | None = None
    seed: int | None = None
    stop: str | None = None


@dataclass
class InfraArgs:
    """Devices and their layout."""

    mode: Literal["local", "ray"] = "local"
    nproc_per_node: int = field(default=8, metadata={ALIASES: ("num_gpus",)})
    ncpu_proc_per_node: int = 8
    model_gpus: int | None = None
    sampler_gpus: int | None = None
    ref_model_gpus: int | None = None
    critic_model_gpus: int | None = None
    world_size: int | None = None
    dp_size: int | None = None
    fsdp_size: int | None = None
    tp_size: int | None = None
    pp_size: int | None = None
    cp_size: int | None = None
    ep_size: int | None = None
    etp_size: int | None = None
    ep_fsdp_size: int | None = None
    vpp_size: int | None = None
    ulysses_size: int | None = None
    sequence_parallel: bool = False
    lazy_collect: bool = True


@dataclass
class ServerArgs:
    """A server that a script starts."""

    config: str | None = None
    ray_namespace: str = "twinkle_cluster"
    host: str = "0.0.0.0"
    port: int = 8000
    log_level: str = "INFO"


@dataclass
class RLArgs:
    """Reinforcement learning and distillation."""

    num_generations: int = 8
    advantage_type: str = "GRPOAdvantage"
    advantage_scale: Literal["group", "batch", "none"] = "group"
    reward_fns: list[str] | None = None
    student_model_id: str | None = None
    teacher_model_id: str | None = None
    gkd_beta: float = 0.5
    gkd_temperature: float = 1.0
    gkd_topk: int = 64
    router_replay_mode: Literal["disabled", "R2", "R3"] = "disabled"
    value_clip: float = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    kl_coef: float = 0.0
    normalize_advantages: bool = True
    critic_learning_rate: float = 1e-5


@dataclass
class CheckpointArgs:
    """What is saved, and brought to samplers."""

    save_optimizer: bool = True
    merge_and_sync: bool = True
    platform: str = "GPU"
    lora_sync_dir: str | None = None


def stated(group: Any) -> dict[str, Any]:
    """The fields of a group that have a value."""
    pairs = ((item.name, vars(group)[item.name]) for item in fields(group))
    return {name: value for name, value in pairs if value is not None}
