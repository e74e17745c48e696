"""One frozen base model that serves many tenants' adapters at once.

Shapes: T packed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, cast

import torch

from twinkle.core.errors import InvalidInput
from twinkle.core.pictures import PictureRules
from twinkle.core.process.events import event_log
from twinkle.core.slices import Slices, finished
from twinkle.hub.image_processor import load_image_processor, picture_rules
from twinkle.hub.support import WITH_PICTURES, check_config
from twinkle.infra.device_memory import DeviceMemory, bytes_of, unbounded
from twinkle.infra.device_mesh import DeviceMesh
from twinkle.infra.frameworks import Torch
from twinkle.infra.process_group import torch_mesh
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.loss import DatumLoss
from twinkle.model.device_traits import plain_dtype
from twinkle.model.fused.adam import adam_step
from twinkle.model.fused.base_loading import load_with_probe
from twinkle.model.fused.base_weights import BaseWeights
from twinkle.model.fused.batch_jobs import Work, run_with_batches
from twinkle.model.fused.determinism import agreed_product, measure_determinism
from twinkle.model.fused.embedding import FusedEmbedding
from twinkle.model.fused.embedding_jobs import run_embedding_job
from twinkle.model.fused.gradient_buffers import GradientBuffers
from twinkle.model.fused.independence import Independence
from twinkle.model.fused.job_run import JobRun, commit_all, settle, start_runs
from twinkle.model.fused.layers import prepare_layers
from twinkle.model.fused.logit_form import LogitForm
from twinkle.model.fused.loss_head import LossHead, rows_per_group
from twinkle.model.fused.model_info import model_info
from twinkle.model.fused.probe import PackedPath, Probe
from twinkle.model.fused.recomputation import MEASURED_TOKENS, ActivationSizes, Recomputation
from twinkle.model.fused.step import FusedStep
from twinkle.model.fused.training import AdamParams, TrainJob, TrainOutcome
from twinkle.model.fused.validation import JobRules
from twinkle.model.loading import decoder_of, stored_paths, takes_pictures
from twinkle.model.parallel.sharding import shard_decoder
from twinkle.model.pictures import PackedPictures, PictureEncoder
from twinkle.module.adapter import AS_LOADED, StoredPaths
from twinkle.module.lora import LoraAdapter, LoraConfig, LoraPool, Segment
from twinkle.module.packed_attention import CausalSpans, PackedAttention
from twinkle.module.tabled import FixedRoute
from twinkle.module.targets import find_targets
from twinkle.module.token_inputs import TokenInputs

log = event_log()

MAX_RANK = 256
TOKENS_PER_PASS = {"cpu": 1024}
TOKENS_PER_PASS_ACCELERATOR = 8192
PICTURE_CACHE_BYTES = 512 << 20


class FusedLoraModel:
    """A transformers causal language model, frozen, with a LoRA pool, a packed forward pass and a one-pass loss head.

    Not thread-safe: one pass at a time. On several ranks each holds such a model, and all make the same calls in the
    same order; a batch is shared out among them (``shares``), and every rank ends with the same adapters.

    Args:
        model: As transformers made it; it is taken over.
        name: What it is called.
        tokens_per_pass: About how many tokens a rank takes at once; what suits the device if omitted.
        ranks: Who shares the work.
        shard: Spread the layers' weights over the ranks instead of keeping them whole on each.
        image_processor: Of a model that takes pictures; without one it is served for text alone.
        picture_cache_bytes: Of the device's memory, for what its vision tower has made of pictures.
        activation_bytes: What a training pass may keep for its way back; layers of a larger one are computed twice.
            None: most of what is free on the device, half of the memory of a host.
        memory: Of its device, for everything that is on it; unbounded if omitted.
        paths: What its modules are called in the files of adapters.
        probe: What it computes untouched; found out if omitted.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        tokens_per_pass: int | None = None,
        ranks: RankGroup = ALONE,
        shard: bool = False,
        image_processor: Any = None,
        picture_cache_bytes: int = PICTURE_CACHE_BYTES,
        activation_bytes: int | None = None,
        memory: DeviceMemory | None = None,
        paths: StoredPaths = AS_LOADED,
        probe: Probe | None = None,
    ) -> None:
        config = model.config.get_text_config()
        check_config(name, model.config.to_dict())
        self._model = model.eval().requires_grad_(False)
        has_tower = model.config.model_type in WITH_PICTURES
        self._decoder = decoder_of(model)
        self._weights = BaseWeights(model)
        self._inputs = TokenInputs(model, self._decoder)
        self.pictures: PictureEncoder | None = None
        if has_tower and image_processor is not None:
            rules = picture_rules(model.config, image_processor)
            self.pictures = PictureEncoder(model, image_processor, rules, max_bytes=picture_cache_bytes)
        unembedding = model.get_output_embeddings()
        self.device: torch.device = unembedding.weight.device
        self.memory = memory or unbounded(self.device)
        if self.pictures is not None:
            self.memory.add_guest("pictures", self.pictures)
        self.ranks = ranks
        self.is_sharded = shard
        mode, product = measure_determinism(self.device, unembedding.weight.dtype)
        self.determinism, product = agreed_product(mode, product, ranks.gather(mode))
        probe = probe or Probe(model, self.device)
        self.tolerance = probe.tolerance
        served = self._decoder if has_tower else model
        self.state_bytes = prepare_layers(model, served, self.device, product, config.max_position_embeddings)
        """What layers that carry a state along a sequence remember of one; 0 if there are no such layers."""
        targets = find_targets(model, unembedding, served)
        self.pool = LoraPool(model, targets, product=product, max_rank=MAX_RANK, paths=paths, memory=self.memory)
        self._head = LossHead(
            unembedding.weight,
            self.pool.unembed_path,
            product,
            rows_per_group=rows_per_group(self.device, unembedding.weight.shape[0]),
            form=LogitForm.of(config),
            sums_together=self.pool.sums_neighbours,
        )
        self._gradients = GradientBuffers(self.memory)
        self._recomputation = Recomputation(self._decoder, self.memory)
        self.info = model_info(model, name=name, max_rank=MAX_RANK)
        self._rules = JobRules(
            vocab_size=self.info.vocab_size,
            max_context_length=self.info.max_context_length,
            picture_rules=self.picture_rules,
            refuse_oversized=self._recomputation.refuse_oversized,
        )
        num_tokens = tokens_per_pass or TOKENS_PER_PASS.get(self.device.type, TOKENS_PER_PASS_ACCELERATOR)
        if not shard:  # layers that ranks exchange are gathered for one pass through them
            self._recomputation.measure(
                self._idle_forward,
                (*model.parameters(), *model.buffers()),
                num_tokens=min(MEASURED_TOKENS, self.info.max_context_length),
                limit_bytes=activation_bytes,
            )
        self.embedding = FusedEmbedding(self._inputs, self._decode, tokens_per_pass=num_tokens, device=self.device)
        self._step = FusedStep(
            self._inputs,
            self._decode,
            self._head,
            tokens_per_pass=num_tokens,
            device=self.device,
            ranks=ranks,
            lockstep=ranks if shard else ALONE,
            encoder=self.pictures,
            recomputation=self._recomputation,
            release=self.give_back_memory,
        )
        if shard:
            self.pool.release_weights(model)
            mesh = torch_mesh(DeviceMesh.from_sizes(fsdp_size=ranks.size, device_type=self.device.type))
            shard_decoder(self._decoder, self._inputs.tables, mesh["fsdp"])
            # The buffers into which layers are gathered are made by the first pass; were that one of the sampler's,
            # in inference mode, no gradient could ever be computed with them.
            self._step.run_idle(backward=False)
        self._check(probe)

    def give_back_memory(self) -> None:
        """Give back what is kept of the device's memory to be quick: after a pass for which there was none."""
        self.pool.release_stacks()
        # torch's allocator keeps it in pieces that nothing else may fit into.
        Torch.empty_cache()

    def _idle_forward(self, num_tokens: int) -> torch.Tensor:
        """Hidden states of so many tokens that nobody owns, with their graph."""
        embeddings_TH = self._inputs(torch.zeros(num_tokens, dtype=torch.int64, device=self.device)).detach()
        positions_T = torch.arange(num_tokens, device=self.device)
        return self._decode(embeddings_TH.requires_grad_(True), positions_T, [], CausalSpans([(0, num_tokens)]))

    def _check(self, probe: Probe) -> None:
        """Raise ``ConfigError`` for a model that one tenant could use to see or to disturb another."""
        name = self.info.architecture
        path = PackedPath(self._inputs, self._decode, lambda hidden_NH: self.logits(hidden_NH, []))
        probe.compare(path, name)
        jobs = Independence(
            self.pool,
            self.forward_backward,
            vocab_size=self.info.vocab_size,
            context=self.info.max_context_length,
            kept_out=() if self.picture_rules is None else self.picture_rules.all_tokens,
        )
        if not jobs.keeps_bits(name, probe.tolerance) and self.determinism != "none":
            log.warning("model.determinism.not_kept", architecture=name, measured=self.determinism)
            self.determinism = "none"
        probe.isolate(path, name, exact=self.determinism != "none")

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        tokens_per_pass: int | None = None,
        name: str | None = None,
        ranks: RankGroup = ALONE,
        shard: bool = False,
        prepare: Callable[[Any], None] = lambda model: None,
        picture_cache_bytes: int = PICTURE_CACHE_BYTES,
        activation_bytes: int | None = None,
        memory: DeviceMemory | None = None,
        reduce: Callable[[Any], None] = lambda model: None,
    ) -> Self:
        """Load a base model: float32 on the CPU, bfloat16 elsewhere, unless ``dtype`` says otherwise.

        ``reduce`` gets it before it goes to its device, ``prepare`` when it is there, before anything is measured.
        """
        image_processor, name = load_image_processor(path) if takes_pictures(path) else None, name or path
        model, probe = load_with_probe(
            path,
            name=name,
            dtype=dtype or plain_dtype(torch.device(device).type),
            device=torch.device(device),
            with_tower=image_processor is not None,
            prepare=prepare,
            sharing=ranks if shard else None,
            reduce=reduce,
        )
        return cls(
            model,
            probe=probe,
            name=name,
            tokens_per_pass=tokens_per_pass,
            ranks=ranks,
            shard=shard,
            image_processor=image_processor,
            picture_cache_bytes=picture_cache_bytes,
            activation_bytes=activation_bytes,
            memory=memory,
            paths=stored_paths(path),
        )

    @property
    def base(self) -> Any:
        """The frozen base model."""
        return self._model

    @property
    def config(self) -> Any:
        """The text config of the base model, as transformers has it."""
        return self._model.config.get_text_config()

    @property
    def remembers(self) -> bool:
        """Whether some layers carry a state along the sequence."""
        return self.state_bytes > 0

    @property
    def base_bytes(self) -> int:
        """What the base model, or this rank's part of it, takes of the device's memory."""
        return bytes_of(self.module)

    @property
    def activation_sizes(self) -> ActivationSizes | None:
        """What training passes keep; None if their layers cannot be computed twice."""
        return self._recomputation.sizes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the base weights and of hidden states."""
        return self._head.weight_VH.dtype

    @property
    def picture_rules(self) -> PictureRules | None:
        """How it counts the tokens of pictures; None if it takes text alone."""
        return None if self.pictures is None else self.pictures.rules

    def base_weights(self) -> dict[str, torch.Tensor]:
        """The frozen weights by transformers' names, in their place."""
        return self._weights.by_name()

    def language_weights(self) -> list[str]:
        """The names of the frozen weights that text goes through, of those that have values of their own."""
        return self._weights.language_names(self._decoder)

    def own_name(self, name: str) -> str:
        """What a weight is called here that a class for text alone, or one for pictures too, calls ``name``."""
        return self._weights.own_name(name)

    @property
    def module(self) -> torch.nn.Module:
        """The base model as transformers has it, with this engine's layers in it."""
        return cast("torch.nn.Module", self._model)

    def load_base_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights over the frozen ones; what adapters were trained on is then another model.

        Raises:
            InvalidInput: A name or a shape is not this model's; weights before it are copied already.
        """
        self._weights.load(weights)
        if self.pictures is not None:
            # What the tower made of pictures was made with its old weights.
            self.pictures.clear()

    def create_adapter(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A fresh adapter for one tenant."""
        return self.pool.create(config, trainable=trainable)

    def validate(self, job: TrainJob) -> DatumLoss:
        """Raise ``InvalidInput`` for the first thing wrong with a job; return its loss."""
        return self._rules.loss_of(job)

    def forward_backward(self, jobs: Sequence[Work]) -> list[TrainOutcome | Exception]:
        """Run jobs of any adapters fused; one result each, in their order.

        A job that fails yields its exception and leaves its adapter's gradients as they were. On the CPU the bits of a
        job's result and gradient do not depend on the other jobs (see ``determinism``).
        """
        return finished(self.passes(jobs))

    def passes(self, jobs: Sequence[Work]) -> Slices[list[TrainOutcome | Exception]]:
        """The same a pass at a time. Between two others may be made, of other adapters: these must not be touched."""
        return run_with_batches(jobs, self._run_jobs, self._rules.judge_batch, self._run_embedded)

    def _run_embedded(self, job: TrainJob) -> Slices[TrainOutcome | Exception]:
        return run_embedding_job(job, self.embedding, self.ranks)

    def _run_jobs(self, jobs: Sequence[TrainJob]) -> Slices[list[TrainOutcome | Exception]]:
        losses = [self._rules.loss_or_refusal(job) for job in jobs]
        runs = start_runs(jobs, losses, self.ranks, zeros_like=self._gradients.zeros_like)
        valid = [run for run in runs if isinstance(run, JobRun)]
        yield from self._step.run(valid)
        settle(valid, self.ranks)
        return commit_all(runs)

    def optim_step(self, adapter: LoraAdapter, params: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients of one adapter."""
        if not adapter.trainable:
            raise InvalidInput("model_id", "this adapter was loaded for sampling only; create or load one to train")
        return adam_step(adapter, params)

    @torch.inference_mode()
    def run_packed(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        segments: Sequence[Segment] | FixedRoute,
        attention: PackedAttention,
        pictures: PackedPictures | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, H] of packed tokens, without gradients; ``attention`` is called in every layer."""
        embeddings_TH = self._inputs(token_ids)
        if pictures is not None:
            embeddings_TH = pictures.fill(embeddings_TH)
        return self._decode(embeddings_TH, position_ids, segments, attention, pictures)

    @torch.inference_mode()
    def logits(self, hidden_TH: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Float32 logits [T, V] of the given rows; the segments count within these rows."""
        return self._head.logits(hidden_TH, segments)

    def _decode(
        self,
        embeddings_TH: torch.Tensor,
        positions_T: torch.Tensor,
        segments: Sequence[Segment] | FixedRoute,
        attention: PackedAttention,
        pictures: PackedPictures | None = None,
    ) -> torch.Tensor:
        kept = self._recomputation.of_pass(embeddings_TH.shape[0])
        route = (
            segments
            if isinstance(segments, FixedRoute)
            else self.pool.route(segments, embeddings_TH.shape[0], beside_bytes=kept.num_bytes)
        )
        with self.pool.routed(route), self._recomputation.keeping(kept, lambda: self.pool.routed(route)):
            output = self._decoder(
                **self._inputs.arguments(embeddings_TH),
                # Of text [1, T]; of pictures [3, 1, T].
                position_ids=positions_T.unsqueeze(-2),
                use_cache=False,
                packed_attention=attention,
                packed_positions=positions_T.view(-1, positions_T.shape[-1])[:1],
                **({} if pictures is None else pictures.arguments),
            )
        hidden_TH: torch.Tensor = output.last_hidden_state.squeeze(0)
        return hidden_TH
