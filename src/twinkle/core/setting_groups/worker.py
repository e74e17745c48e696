"""A worker: its mesh, its model, its device, and what it holds at once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from twinkle.core.setting_groups import SettingsGroup


class WorkerSettings(SettingsGroup):
    """A worker: its mesh, its model, its device, and what it holds at once."""

    mesh: str = Field(default="default", description="the mesh this worker serves")
    model: str = Field(default="", description="path or id of the frozen base model")
    model_name: str = Field(default="", description="the name clients use for it; default: as given in model")
    device: str = Field(default="cpu", description="cpu, cuda, cuda:0, npu")
    engine: str = Field(
        default="transformers",
        description="transformers; megatron (training alone, tensors and layers spread over ranks by Megatron's core);"
        " or null (computes nothing; for benchmarks)",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, description="by megatron: over how many ranks every layer's tensors are split"
    )
    pipeline_parallel: int = Field(
        default=1, ge=1, description="by megatron: over how many ranks the layers are; times the one before, the ranks"
    )
    expert_parallel: int = Field(
        default=1,
        ge=1,
        description="by megatron: over how many times as many ranks the experts are; each of these groups of ranks also"
        " computes a part of every operation. Times the two before, the ranks",
    )
    sampler: Literal["torch", "vllm"] = Field(
        default="torch", description="torch: on the weights that train; vllm: a copy in vLLM, in the same process"
    )
    serves: Literal["everything", "samples", "training", "whole-model"] = Field(
        default="everything",
        description="what the mesh takes; `samples`: sessions that sample from its model or from checkpoints that other"
        " meshes wrote, and no runs; `training`: runs, of which nothing is sampled here; `whole-model`: one run at a"
        " time, which trains all of the model's weights and has the mesh to itself",
    )
    sampler_memory: float = Field(
        default=0.4, gt=0, lt=1, description="share of a GPU's memory for vLLM: its copy of the weights and its cache"
    )
    ranks: int = Field(
        default=1,
        ge=1,
        description="devices of the mesh, each with a process of its own on this machine; or `ray:8`: eight actors on"
        " whatever nodes of a Ray cluster have room",
    )
    ranks_on: Literal["machine", "ray"] = Field(
        default="machine", description="where those processes are; `ray:8` says both at once"
    )
    ray_address: str = Field(
        default="",
        description="HOST:PORT of the Ray cluster for ranks on it; default: `RAY_ADDRESS`, else the one that this"
        " machine is a node of",
    )
    rank_cpus: float = Field(
        default=1.0,
        gt=0,
        description="CPUs of the cluster that each rank on Ray takes, beside its device; on a CPU also its threads",
    )
    shard: Literal["replicate", "fsdp"] = Field(
        default="replicate",
        description="the base model on several ranks: whole on each (replicate), or its layers spread over them (fsdp)",
    )
    rank_timeout_s: float = Field(
        default=600.0, gt=0, description="how long ranks wait for each other before the worker gives up and starts anew"
    )
    replica_operations: int = Field(
        default=16,
        gt=0,
        description="of `--mesh ...,replicas=1-4`: so many meshes that each has about as many unfinished operations",
    )
    replica_grow_s: float = Field(
        default=30.0, ge=0, description="how long more of such meshes have to be wanted before they are started"
    )
    replica_shrink_s: float = Field(
        default=600.0, ge=0, description="how long fewer have to do before one is emptied and given back"
    )
    start_attempts: int = Field(
        default=5,
        gt=0,
        description="starts in a row that may come to nothing (a device that fails, too little memory), with growing"
        " pauses; then the worker ends with the reason",
    )
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="how long one of them may take until its model is loaded; one that hangs is ended, and counts among"
        " those that came to nothing. For models that load longer set more, on several ranks TWINKLE_RANK_TIMEOUT_S"
        " too",
    )
    restart_pause_s: float = Field(
        default=30.0,
        gt=0,
        description="the longest pause before serve starts a part again that ended: half a second the first time, twice"
        " as long each time that it had not lived for ten",
    )
    threads: int = Field(
        default=0,
        ge=0,
        description="intra-op threads of a rank; 0: the quickest number, measured at the first start of a mesh"
        " with its model on a kind of CPU, and kept",
    )
    measure_threads: bool = Field(default=False, description="measure that number anew at this start")
    tokens_per_pass: int = Field(default=0, ge=0, description="packed tokens per forward; 0: the engine's own choice")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="of the frozen weights; auto: float32 on a CPU, bfloat16 elsewhere. bfloat16 on a CPU takes half"
        " the memory, is rounded more and, where the CPU multiplies it (AMX, AVX512-BF16), may be quicker: measure it",
    )
    quantisation: Literal["none", "int8"] = Field(
        default="none",
        description="of the frozen weights of Linears: int8 keeps them in eight bits, by torchao, and unpacks one layer"
        " at a time; adapters are as ever. Takes `twinkle-queue[quantised]`, one rank or whole replicas, and the"
        " sampler on torch; models with fused experts are refused",
    )
    device_bytes: int = Field(
        default=0,
        ge=0,
        description="device memory that a rank may take for everything: base model, adapters, activations, what is"
        " sampled, and what is kept to be quick, which gives way to the others. 0: nine tenths of what is free on an"
        " accelerator at start; on a CPU four fifths of the machine's memory, or its control group's, for all ranks",
    )
    activation_bytes: int = Field(
        default=0,
        ge=0,
        description="device memory that a training pass may keep for its way back; the layers of a larger one are"
        " computed twice instead, to the same bits. 0: four fifths of what can be had of TWINKLE_DEVICE_BYTES",
    )
    max_rank: int = Field(default=128, gt=0)
    max_adapters_per_step: int = Field(default=64, gt=0)
    min_tokens_per_step: int = Field(
        default=0,
        ge=0,
        description="fill a step up to here even with work of tenants that are ahead of their share",
    )
    transfer_threads: int = Field(default=8, gt=0)
    transfer_bytes: int = Field(default=1 << 30, gt=0)
    max_resident_adapters: int = Field(default=64, gt=0)
    adapter_bytes: int = Field(
        default=0,
        ge=0,
        description="device memory for adapters: three quarters for those that train, with gradients and moments, a"
        " quarter for copies that are sampled from; beyond it they are parked before others come. 0: half of what"
        " the base model and what is sampled leave of TWINKLE_DEVICE_BYTES",
    )
    parked_adapter_bytes: int = Field(
        default=4 << 30,
        ge=0,
        description="host memory for adapters that had to leave the device; beyond it they are evicted",
    )
    picture_cache_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="device memory for what the vision tower has made of pictures, kept for each tenant by itself",
    )
    sample_slots: int = Field(default=32, gt=0)
    sampling_weight: float = Field(
        default=1.0,
        gt=0,
        le=1000.0,
        description="how many seconds of the device sampling gets for each that training has, while both have work",
    )
    sampler_state_bytes: int = Field(
        default=4 << 30,
        gt=0,
        description="device memory for what layers that carry a state (Qwen3.5, Nemotron-H) remember of the sequences"
        " sampled at once; fewer are, where it has no room for all",
    )
    sampler_graphs: bool = Field(
        default=True,
        description="on CUDA: passes that only decode are recorded as CUDA graphs where the model allows it, and run"
        " with one launch; false launches kernel by kernel, for finding out what a graph hides",
    )
    prompt_cache_groups: dict[str, list[str]] = Field(
        default={},
        description="tenants that share computed prompts and can tell what the others sent, like"
        ' {"research": ["alice", "bob"]}; everybody else shares with nobody',
    )
    lease_s: float = Field(default=15.0, gt=0)
    sweep_s: float = Field(default=1.0, gt=0)
    snapshot_every_ops: int = Field(default=50, gt=0)
    snapshot_every_bytes: int = Field(
        default=64 << 20, gt=0, description="or after operations with so many bytes of payload"
    )
    snapshot_every_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _read_place_of_ranks(cls, fields: Any) -> Any:
        ranks = fields.get("ranks") if isinstance(fields, dict) else None
        if not isinstance(ranks, str) or ranks.strip().isdecimal():
            return fields
        place, _, number = ranks.partition(":")
        if place != "ray" or not number.isdecimal():
            raise ValueError(f"ranks: a number, or ray:NUMBER for actors of a Ray cluster, not {ranks!r}")
        return {**fields, "ranks": int(number), "ranks_on": "ray"}

    @field_validator("prompt_cache_groups")
    @classmethod
    def _name_each_tenant_once(cls, groups: dict[str, list[str]]) -> dict[str, list[str]]:
        names = sorted(name for members in groups.values() for name in members)
        twice = [name for name, following in pairwise(names) if name == following]
        if twice:
            raise ValueError(f"{twice[0]} is named twice; a tenant shares with one group")
        return groups

    @property
    def device_type(self) -> str:
        """The kind of its devices, without a number."""
        return {"gpu": "cuda"}.get(kind := self.device.partition(":")[0].lower(), kind)

    @property
    def resolved_model_name(self) -> str:
        """The name under which clients ask for the base model."""
        return self.model_name or self.model
