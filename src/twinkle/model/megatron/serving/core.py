"""One frozen base model by Megatron's core, spread over ranks, that serves many tenants' adapters.

What the fused engine is to a mesh whose ranks hold layers whole, this is to one whose ranks share them. Every rank
makes the same calls in the same order, and ends each with the same adapters. A pass is one adapter's: those of several
go through the stages one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from twinkle.core.errors import ConfigError, InvalidInput, OutOfMemory
from twinkle.core.slices import Slices
from twinkle.hub.support import check_config
from twinkle.infra.device_memory import bytes_of
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.model.fused.adam import adam_step
from twinkle.model.fused.determinism import UNPADDED, strict_mode_in_force
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.independence import Independence
from twinkle.model.fused.job_run import JobRun
from twinkle.model.fused.model_info import model_info
from twinkle.model.fused.one_by_one import UNFUSED, OneByOne
from twinkle.model.fused.probe import TOLERANCE_FLOAT32, TOLERANCE_HALF
from twinkle.model.fused.step import OutOfStep
from twinkle.model.fused.training import AdamParams
from twinkle.model.loading import stored_paths
from twinkle.model.megatron.config import experts_of
from twinkle.model.megatron.lora.sites import Site, expert_layers
from twinkle.model.megatron.multi_lora import MultiLoraMegatronModel
from twinkle.model.megatron.serving.rounds import JobRound, MicroBatch, rounds_of
from twinkle.model.megatron.serving.shares import Borrowed, Shares, expert_site, head_site
from twinkle.module.adapter import StoredPaths
from twinkle.module.lora import LoraAdapter, LoraConfig, LoraPool
from twinkle.module.targets import Target, find_targets

MAX_RANK = 256
TOKENS_PER_PART = {"cpu": 1024}
TOKENS_PER_PART_ACCELERATOR = 8192


class ServedMegatronModel(OneByOne):
    """The jobs of :mod:`twinkle.model.fused.training`, run by Megatron's layers.

    Args:
        folder: Of the base model.
        name: What it is called.
        ranks: All that hold parts of it.
        tp_size, pp_size: Over how many of them tensors are split, and layers.
        ep_size: Over how many times as many the experts are, each of which also computes a part of every job; times
            the two before, all ranks.
        device_type: ``cpu``, ``cuda``.
        dtype: Of the frozen weights; by default float32 on a CPU, bfloat16 elsewhere.
        tokens_per_pass: About how many tokens a micro-batch has at most; what suits the device if omitted.

    Raises:
        ConfigError: Megatron does not have the model, or trains less of it than the fused engine does.
    """

    without_embeddings = "a mesh by Megatron has not; use one of the fused engine"
    picture_rules = None
    """It takes text."""

    def __init__(
        self,
        folder: str,
        *,
        name: str,
        ranks: RankGroup = ALONE,
        tp_size: int = 1,
        pp_size: int = 1,
        ep_size: int = 1,
        device_type: str = "cpu",
        dtype: torch.dtype | None = None,
        tokens_per_pass: int | None = None,
    ) -> None:
        num_experts = _experts(folder, name, ep_size)
        # Tensor ranks have whole experts, each some, where these divide.
        shares_out = num_experts > 0 and num_experts % (tp_size * ep_size) == 0
        mesh = DeviceMesh.from_sizes(
            tp_size=tp_size,
            pp_size=pp_size,
            dp_size=ep_size,
            ep_size=ep_size * tp_size if shares_out else ep_size,
            etp_size=tp_size if num_experts and not shares_out else 1,
            device_type=device_type,
        )
        precision: Any = {None: None, torch.float32: "no", torch.bfloat16: "bf16"}[dtype]
        self._megatron = MultiLoraMegatronModel(folder, device_mesh=mesh, mixed_precision=precision)
        check_config(name, self._megatron.hf_config.to_dict())
        self.ranks = ranks
        self.layout = self._megatron.layout
        self.device: torch.device = self.layout.device
        with torch.device("meta"):
            self.base: Any = AutoModelForCausalLM.from_config(
                self._megatron.hf_config.get_text_config(), dtype=torch.float32, trust_remote_code=False
            )
        self.info = model_info(self.base, name=name, max_rank=MAX_RANK)
        paths = stored_paths(folder)
        targets = find_targets(self.base, self.base.get_output_embeddings())
        self._adapters = self._megatron.adapters()
        own = self._add_experts({target.path: target for target in targets}, paths)
        sites = [*self._adapters.sites.values(), *(site for each in self.ranks.gather(own) for site in each)]
        _require_all(targets, {paths.within(part.path) for site in sites for part in site.parts})
        for stage in self._megatron.pipeline.stages:
            if stage.post_process:
                site = head_site(targets[-1], vocab_size=self.info.vocab_size)
                self._adapters.add_site(site, stage.output_layer)
        self.pool = LoraPool(self.base, targets, product=UNPADDED, max_rank=MAX_RANK, paths=paths, device=self.device)
        self._shares = Shares(self._adapters, self.layout, paths)
        self._tokens_per_part = tokens_per_pass or TOKENS_PER_PART.get(device_type, TOKENS_PER_PART_ACCELERATOR)
        self.determinism = self._measured()

    def _add_experts(self, targets: Mapping[str, Target], paths: StoredPaths) -> list[Site]:
        """Let adapters be on the experts that this rank has; where."""
        sites = []
        for name, module in expert_layers(self._megatron.pipeline.stages, self.layout).items():
            sites.append(expert_site(name, targets, paths))
            self._adapters.add_site(sites[-1], module)
        return sites

    def _measured(self) -> str:
        """What of a job's bits is shown to hold here, on every rank.

        Raises:
            ConfigError: One tenant's jobs change another's.
        """
        jobs = Independence(
            self.pool,
            self.forward_backward,
            vocab_size=self.info.vocab_size,
            context=self.info.max_context_length,
        )
        is_single = self._megatron.config.params_dtype == torch.float32
        keeps = jobs.keeps_bits(self.info.architecture, TOLERANCE_FLOAT32 if is_single else TOLERANCE_HALF)
        keeps &= is_single and self.device.type == "cpu"
        return UNFUSED if all(self.ranks.gather(keeps and strict_mode_in_force())) else "none"

    @property
    def base_bytes(self) -> int:
        """See :class:`LoraCore`."""
        return sum(map(bytes_of, self._megatron.pipeline.stages))

    def create_adapter(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A fresh adapter for one tenant, the same as on the fused engine."""
        return self.pool.create(config, trainable=trainable)

    def optim_step(self, adapter: LoraAdapter, params: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients of one adapter, on every rank."""
        if not adapter.trainable:
            raise InvalidInput("model_id", "this adapter was loaded for sampling only; create or load one to train")
        return adam_step(adapter, params)

    def _run_job(self, run: JobRun) -> Slices[None]:
        borrowed = self._shares.borrow(run.job.adapter)
        at_once = self.layout.pp_size * self.layout.groups.dp.size()
        rounds = list(rounds_of(run.job.data, tokens_per_part=self._tokens_per_part, at_once=at_once))
        for number, parts in enumerate(rounds):
            if number:
                yield
            self._run_round(run, parts, borrowed)
            if run.failure is not None:
                return
        if run.gradient is not None:
            self._gather(run, borrowed)

    def _run_round(self, run: JobRun, parts: Sequence[MicroBatch], borrowed: Borrowed) -> None:
        data = self.layout.groups.dp
        own = parts[data.rank() :: data.size()]
        turn = JobRound(run, own, self.device, num_idle=-(-len(parts) // data.size()) - len(own))
        pipeline = self._megatron.pipeline
        try:
            with self._adapters.active(borrowed.as_layers_have_it), torch.set_grad_enabled(run.job.backward):
                found = pipeline.of_all_data_ranks(pipeline.run(turn.sequences, turn.wanted, turn.objective()))
        except Exception as error:
            if self.ranks.size > 1:
                raise OutOfStep(f"a pass failed between the ranks: {error}") from error
            run.fail(OutOfMemory(f"the device ran out of memory: {error}") if is_out_of_memory(error) else error)
            return
        turn.record(parts, [found[number % data.size()][number // data.size()] for number in range(len(parts))])

    def _gather(self, run: JobRun, borrowed: Borrowed) -> None:
        """Let every rank have the gradient that all have found, each for its own layers, outputs and tokens."""
        assert run.gradient is not None
        found = torch.zeros_like(run.job.adapter.grad)
        views = run.job.adapter.layout.views(found)
        borrowed.add_gradients(views)
        self.ranks.sum_(found)
        for path, pair in run.gradient.items():
            pair.a.add_(views[path].a)
            pair.b.add_(views[path].b)


def _experts(folder: str, name: str, ep_size: int) -> int:
    """How many experts a layer of the model has; raises ``ConfigError`` where ranks are to share what it has not."""
    found = experts_of(AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config())
    if ep_size > 1 and not found:
        raise ConfigError(
            f"TWINKLE_EXPERT_PARALLEL: is {ep_size}, but {name} has no experts; leave it out and set"
            " TWINKLE_TENSOR_PARALLEL or TWINKLE_PIPELINE_PARALLEL"
        )
    return found


def _require_all(targets: Sequence[Target], paths: set[str]) -> None:
    """Refuse a model of which less would be trained here than elsewhere, without a word to its tenants."""
    missing = sorted({target.path for target in targets if target.kind != "unembed"} ^ paths)
    if missing:
        raise ConfigError(
            f"TWINKLE_ENGINE: megatron and transformers train different layers of this model ({missing[0]}); use"
            " transformers for it"
        )
