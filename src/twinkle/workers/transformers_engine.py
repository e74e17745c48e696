"""The engine on transformers: the training library's model and sampler behind the worker's protocol."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from twinkle.checkpoint_engine.peft import export_adapter, import_adapter
from twinkle.checkpoint_engine.snapshot import fingerprint, restore, script_of, snapshot
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.errors import ConfigError, InvalidInput, OutOfMemory, TwinkleError
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.core.slices import Slices, finished
from twinkle.hub.model_path import resolve_model_id
from twinkle.infra.platform import Platform
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.model.fused.batch_jobs import Work
from twinkle.model.fused.determinism import prepare_environment
from twinkle.model.fused.model import FusedLoraModel
from twinkle.model.fused.parameters import note_steps
from twinkle.model.fused.step import is_out_of_memory
from twinkle.model.fused.training import AdamParams, Datum, TrainJob, TrainOutcome
from twinkle.model.loading import decoder_of
from twinkle.model.pictures import Patches, Picture
from twinkle.model.script_state import Script
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.sampler.probe import SamplerProbe
from twinkle.sampler.request import DecodeText, TopLogprobs
from twinkle.sampler.request import SampleRequest as SamplerRequest
from twinkle.sampler.request import SampleResult as SamplerResult
from twinkle.sampler.stepped import SteppedSampler
from twinkle.sampler.torch_sampler import SteppedTorchSampler
from twinkle.sampler.vllm.sampler import SteppedVLLMSampler
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams as WireAdamParams
from twinkle.wire.calls import Call
from twinkle.wire.patches import WirePatches
from twinkle.wire.pictures import WirePicture
from twinkle.wire.sample_result import (
    PromptAltTokens,
    SampleResult,
    TopkLogprobs,
    WireSequence,
    encode_sample_response,
)
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.tensors import Array, CellBudget, Csr, densify
from twinkle.wire.training import ForwardBackwardBody, ForwardBackwardResult, elementwise_loss
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput
from twinkle.workers.script_passes import CalledPass, begin_pass
from twinkle.workers.scripts import Scripts, note_failure
from twinkle.workers.threads import kind_of_cpu, measure_threads, thread_limit

Trained = LoraAdapter | Script
"""An adapter as Tinker's operations train it, or with what a script has set for it."""

_MAX_TARGET_CELLS = 1 << 24
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_LONGEST_REASON = 300
_FEWEST_TIMED_TOKENS = 8
_MOST_TIMED_TOKENS = 256
_TIMED_PASS_S = 0.05

_log = structlog.get_logger()


@dataclass
class TransformersEngine:
    """One frozen base model, its adapters, and one sampler on the same weights."""

    model: FusedLoraModel
    sampler: SteppedSampler
    capabilities: MeshCapabilities
    folder: str = ""
    """Where the base model lies, its tokenizer beside it."""

    def __post_init__(self) -> None:
        self.scripts = Scripts(self.model, folder=self.folder, served_name=self.capabilities.base_model)
        self._targets: dict[str, Array | Csr | None] = {}

    @classmethod
    def from_settings(cls, settings: Settings, ranks: RankGroup = ALONE) -> TransformersEngine:
        """Load the base model that the settings name; on several ranks, this one's part in it.

        Raises:
            ConfigError: No model was named, or it cannot be loaded.
        """
        if not settings.model:
            raise ConfigError("TWINKLE_MODEL: a worker needs the path or id of a base model")
        prepare_environment()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = _device_of(settings, ranks)
        Platform.named(settings.device_type).require(device)
        folder = resolve_model_id(settings.model, field="TWINKLE_MODEL")
        try:
            model = FusedLoraModel.from_pretrained(
                folder,
                device=device,
                dtype=_DTYPES[settings.dtype],
                tokens_per_pass=settings.tokens_per_pass or None,
                activation_bytes=settings.activation_bytes or None,
                ranks=ranks,
                shard=settings.shard == "fsdp",
                prepare=lambda model: None if settings.threads else _choose_threads(model, ranks),
                picture_cache_bytes=settings.picture_cache_bytes,
            )
            tokenizer = _load_tokenizer(folder)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(
                    f"TWINKLE_MODEL: {settings.model} does not fit into the memory of {device}"
                ) from error
            if not _is_of_the_model(error):
                raise
            reason = str(error).strip().partition("\n")[0][:_LONGEST_REASON]
            raise ConfigError(f"TWINKLE_MODEL: {settings.model} cannot be loaded: {reason}") from error
        capabilities = MeshCapabilities(
            base_model=settings.resolved_model_name,
            architecture=model.info.architecture,
            vocab_size=model.info.vocab_size,
            max_context_length=model.info.max_context_length,
            max_rank=min(settings.max_rank, model.info.max_rank),
            device=settings.device,
            determinism=model.determinism,
            sampler=settings.sampler,
            pictures=model.picture_rules,
            ranks=ranks.size,
            shard=settings.shard,
            threads=torch.get_num_threads(),
            tokenizer_path=_readable_tokenizer_path(folder),
            adapter_sizes=model.pool.sizes,
        )
        decode_text = None if tokenizer is None else _decoder_of(tokenizer)
        sampler = _make_sampler(settings, model, decode_text=decode_text)
        return cls(model=model, sampler=sampler, capabilities=capabilities, folder=folder)

    # -- training -----------------------------------------------------------------------------------------------------

    def create(self, config: AdapterConfig) -> Trained:
        """A fresh trainable adapter, wholly determined by ``config``."""
        if config.dialect is Dialect.TWINKLE:
            return self.scripts.create(config)
        return self.model.create_adapter(_lora_config(config), trainable=True)

    def run_passes(self, passes: Sequence[Pass[Trained]]) -> list[PassAnswer]:
        """Run all passes fused; see :class:`twinkle.workers.engine.Engine`."""
        return finished(self.start_passes(passes))

    def start_passes(self, passes: Sequence[Pass[Trained]]) -> Slices[list[PassAnswer]]:
        """The same slice by slice."""
        answers: dict[int, PassAnswer] = {}
        called: dict[int, CalledPass] = {}
        works: dict[int, Work] = {}
        for index, item in enumerate(passes):
            if isinstance(item.body, ForwardBackwardBody):
                works[index] = _train_job(item, item.body)
                continue
            try:
                called[index] = begin_pass(self.scripts, _script_of(item.state), item.body, item.cache_group)
                fused = called[index].fused
                if fused is not None:
                    works[index] = fused.work()
            except Exception as error:  # noqa: BLE001 - whatever one pass provokes must not reach its neighbours
                answers[index] = error
        found = (yield from self.model.passes(list(works.values()))) if works else []
        outcomes = dict(zip(works, found, strict=True))
        for index, item in enumerate(passes):
            outcome = outcomes.get(index)
            if isinstance(outcome, Exception):
                answers[index] = outcome
            elif isinstance(item.body, ForwardBackwardBody):
                assert outcome is not None
                answers[index] = _wire_result(outcome, item.body)
            elif index not in answers:
                answers[index] = called[index].finish(outcome)
        return [answers[index] for index in range(len(passes))]

    def call(self, state: Trained, call: Call) -> bytes:
        """By the code that a script's own process has for it."""
        return self.scripts.call(_script_of(state), call)

    def note_failure(self, state: Trained) -> None:
        """No later call is about the pass before it."""
        if isinstance(state, Script):
            note_failure(state)

    def load_into(self, state: Trained, files: dict[str, bytes], call: Call) -> tuple[Trained, bytes]:
        """What is loaded goes into a copy."""
        copy = _script_of(self.restore(self.snapshot(state)))
        body = self.scripts.load_into(copy, files, call)
        return copy, body

    def adopt(self, state: Trained, config: AdapterConfig) -> Trained:
        """The same adapter, with a script or without one as its new run is trained."""
        if config.dialect is Dialect.TWINKLE:
            if isinstance(state, Script):
                return state
            state.clear_gradients()
            return self.scripts.dress(state, config.gradient_accumulation_steps)
        if isinstance(state, Script):
            note_steps(state.group.optimizer, state.adapter)
            # A step of a script leaves its gradients where they are; those of a run's past are not its first batch's.
            state.adapter.clear_gradients()
            return state.adapter
        return state

    def optim_step(self, state: Trained, params: WireAdamParams) -> dict[str, float]:
        """One AdamW step on the adapter's flat buffer."""
        return self.model.optim_step(_lora(state), AdamParams(**params.model_dump()))

    def has_gradients(self, state: Trained) -> bool:
        """Whether gradients have been accumulated since the last step."""
        return _lora(state).has_gradients

    def clear_gradients(self, state: Trained) -> None:
        """Forget the accumulated gradients, and the window that they were of."""
        if isinstance(state, Script):
            self.scripts.clear_window(state)
        else:
            state.clear_gradients()

    # -- files --------------------------------------------------------------------------------------------------------

    def export(self, state: Trained, *, with_optimizer: bool) -> dict[str, bytes]:
        """PEFT files, and the optimizer's state beside them."""
        if isinstance(state, Script):
            return self.scripts.export(state, self.capabilities.base_model, with_optimizer=with_optimizer)
        return export_adapter(state, self.capabilities.base_model, with_optimizer=with_optimizer)

    def load(self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool) -> Trained:
        """An adapter from PEFT files that fit ``config``."""
        adapter = import_adapter(self.model.pool, files, with_optimizer=with_optimizer, trainable=trainable)
        if adapter.config.rank != config.rank:
            raise InvalidInput("path", f"its rank is {adapter.config.rank}, this adapter's is {config.rank}")
        return self.adopt(adapter, config) if trainable else adapter

    def freeze(self, state: Trained) -> LoraAdapter:
        """The parameters, copied on the device."""
        lora = _lora(state)
        copy = self.model.pool.create_empty(lora.config, trainable=False)
        copy.params.copy_(lora.params)
        copy.publish()
        return copy

    def weights_bytes(self, state: Trained) -> int:
        """The flat buffer of parameters."""
        return _lora(state).params.nbytes

    def snapshot(self, state: Trained) -> bytes:
        """Parameters, moments and step count, and all that a script has set."""
        script = state.pack() if isinstance(state, Script) else None
        return snapshot(_lora(state), self.model.determinism, num_ranks=self.model.ranks.size, script=script)

    def restore(self, data: bytes) -> Trained:
        """What ``snapshot`` wrote."""
        adapter = restore(self.model.pool, data, self.model.determinism, num_ranks=self.model.ranks.size)
        script = script_of(data)
        return adapter if script is None else self.scripts.restore(adapter, script)

    def fingerprint(self, state: Trained) -> str:
        """A hash of all that its next step depends on: equal on ranks that hold the same one."""
        position = repr((state.group.position(), state.group.learning_rates())) if isinstance(state, Script) else ""
        return fingerprint(_lora(state)) + position

    # -- sampling -----------------------------------------------------------------------------------------------------

    def add_sample(self, request_id: str, state: Trained | None, request: SampleRequest, *, cache_group: str) -> None:
        """Hand a sample to the sampler."""
        params = request.sampling_params
        assert params.seed is not None, "the API makes every seed definite"
        targets = request.targets()
        tokens, pictures = request.read_prompt(self.capabilities.pictures)
        self.sampler.add(
            SamplerRequest(
                key=request_id,
                adapter=None if state is None else _lora(state),
                prompt=tuple(tokens),
                pictures=_pictures(pictures, cache_group),
                seed=params.seed,
                num_samples=request.num_samples,
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                stop_token_ids=None if params.stops_at_end_of_text else frozenset(params.stop_tokens),
                stop_strings=tuple(params.stop_strings),
                prompt_logprobs=bool(request.prompt_logprobs),
                prompt_logprobs_last_n=request.prompt_logprobs_last_n,
                topk_prompt_logprobs=request.topk_prompt_logprobs,
                topk_sample_logprobs=request.topk_sample_logprobs,
                target_prompt_logprobs=None if targets is None else _dense(targets),
                prompt_alt_tokens_k=request.prompt_alt_tokens_k,
                cache_group=cache_group,
            )
        )
        self._targets[request_id] = targets

    def step_samples(self) -> list[SampleOutput]:
        """One prefill or decode step over everything under way."""
        outputs = []
        for ended in self.sampler.step():
            if isinstance(ended, SamplerResult):
                outputs.append(self._output_of(ended))
            else:
                key, error = ended
                self._targets.pop(key)
                outputs.append(SampleOutput(request_id=key, error=error))
        return outputs

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        """What the sampler has drawn beyond what is known."""
        return [
            TokenPiece(
                request_id=request_id,
                sample=stretch.sample,
                start=stretch.start,
                tokens=stretch.tokens,
                logprobs=stretch.logprobs,
                topk=stretch.topk,
            )
            for stretch in self.sampler.drawn_so_far(request_id, known)
        ]

    @property
    def num_samples_under_way(self) -> int:
        """Samples added and not yet returned."""
        return len(self._targets)

    def drop_sample(self, request_id: str) -> None:
        """Cancel one sample."""
        self.sampler.cancel(request_id)
        self._targets.pop(request_id, None)

    def drop_samples(self) -> None:
        """Cancel everything under way."""
        for key in list(self._targets):
            self.sampler.cancel(key)
        self._targets.clear()

    def close(self) -> None:
        """Nothing was started."""

    def _output_of(self, result: SamplerResult) -> SampleOutput:
        targets = self._targets.pop(result.key)
        alternatives = result.prompt_alt_tokens
        wire = SampleResult(
            sequences=tuple(
                WireSequence(
                    tokens=sequence.tokens,
                    logprobs=sequence.logprobs,
                    stop_reason=sequence.stop_reason,
                    topk=_wire_topk(sequence.topk),
                )
                for sequence in result.sequences
            ),
            prompt_logprobs=result.prompt_logprobs,
            topk_prompt_logprobs=_wire_topk(result.topk_prompt_logprobs),
            target_prompt_logprobs=_in_layout_of(targets, result.target_prompt_logprobs),
            prompt_alt_tokens=None
            if alternatives is None
            else PromptAltTokens(alternatives.token_ids, alternatives.logprobs),
            prompt_cache_hit_tokens=result.num_cached_tokens,
        )
        num_tokens = sum(len(sequence.tokens) for sequence in result.sequences)
        return SampleOutput(request_id=result.key, result=encode_sample_response(wire), num_tokens=num_tokens)


class _PassTimer:
    """Times a forward and backward pass of a plain model, on all ranks at once: the slowest counts."""

    def __init__(self, model: Any, ranks: RankGroup) -> None:
        model.eval().requires_grad_(False)
        self._decoder, self._embedding, self._ranks = decoder_of(model), model.get_input_embeddings(), ranks
        self._num_tokens = _FEWEST_TIMED_TOKENS

    def fit(self, threads: int) -> None:
        """Time passes of as many tokens as take a moment, and no more than a batch has."""
        self(threads)
        per_token_s = self(threads) / self._num_tokens
        self._num_tokens = min(max(int(_TIMED_PASS_S / per_token_s), _FEWEST_TIMED_TOKENS), _MOST_TIMED_TOKENS)

    def __call__(self, threads: int) -> float:
        """The seconds of one pass with so many threads, which stay set."""
        torch.set_num_threads(threads)
        token_ids = torch.arange(self._num_tokens) % self._embedding.num_embeddings
        embeddings = self._embedding(token_ids)[None].requires_grad_()
        started = time.perf_counter()
        self._decoder(inputs_embeds=embeddings, use_cache=False).last_hidden_state.sum().backward()
        return max(self._ranks.gather(time.perf_counter() - started))


def _choose_threads(model: Any, ranks: RankGroup) -> None:
    """Set the number of threads with which the model is quickest; on a GPU each rank has its share of the cores."""
    # All ranks go by the limit of the first: they must time the same numbers together.
    limit = ranks.gather(thread_limit(ranks.size))[0]
    if model.device.type != "cpu":
        torch.set_num_threads(min(limit, torch.get_num_threads()))
        return
    time_pass = _PassTimer(model, ranks)
    time_pass.fit(limit)
    times = measure_threads(time_pass, limit)
    torch.set_num_threads(times.threads)
    figures = ", ".join(f"{threads}: {1000 * seconds:.2f} ms" for threads, seconds in sorted(times.seconds.items()))
    _log.info("threads.measured", threads=times.threads, passes=figures, cpu=kind_of_cpu())


def _is_of_the_model(error: Exception) -> bool:
    """Whether an error at loading will come again, whoever tries, unlike one of the device or of the other ranks.

    transformers' classes are many, and what breaks in one that does not fit is of any type.
    """
    passes = (TwinkleError, torch.OutOfMemoryError, torch.AcceleratorError, torch.distributed.DistError, MemoryError)
    if isinstance(error, passes) or "allocate memory" in str(error):
        return False
    return not isinstance(error, ConnectionError | TimeoutError)


def _make_sampler(settings: Settings, model: FusedLoraModel, *, decode_text: DecodeText | None) -> SteppedSampler:
    if settings.sampler == "torch":
        SamplerProbe(model).check()
        return SteppedTorchSampler(
            model,
            slots=settings.sample_slots,
            state_bytes=settings.sampler_state_bytes,
            decode_text=decode_text,
        )
    return SteppedVLLMSampler(
        settings.model,
        device=settings.device,
        slots=settings.sample_slots,
        max_rank=min(settings.max_rank, model.info.max_rank),
        memory_fraction=settings.sampler_memory,
        decode_text=decode_text,
        never_drawn=() if model.picture_rules is None else model.picture_rules.all_tokens,
    )


def _device_of(settings: Settings, ranks: RankGroup) -> str:
    """The device of one rank: as named when there is no other, else the one that bears its number."""
    if ranks.size == 1:
        return settings.device
    number = ranks.rank if ranks.device_number is None else ranks.device_number
    return Platform.named(settings.device).device_of(number)


def _lora_config(config: AdapterConfig) -> LoraConfig:
    return LoraConfig(
        rank=config.rank,
        alpha=config.alpha,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        seed=config.seed,
    )


def _lora(state: Trained) -> LoraAdapter:
    return state.adapter if isinstance(state, Script) else state


def _script_of(state: Trained) -> Script:
    if not isinstance(state, Script):
        raise InvalidInput("method", "this run is trained in Tinker's dialect; calls are for those of the other one")
    return state


def _train_job(item: Pass[Trained], body: ForwardBackwardBody) -> TrainJob:
    return TrainJob(
        adapter=_lora(item.state),
        data=tuple(
            Datum(datum.tokens, datum.inputs, _pictures(datum.pictures or datum.patches, item.cache_group))
            for datum in body.data
        ),
        loss=body.loss_fn,
        loss_config=body.loss_fn_config,
        backward=not body.forward_only,
        graph=body.loss_graph,
        is_again=item.is_again,
    )


def _pictures(pictures: Sequence[WirePicture | WirePatches], group: str) -> tuple[Picture, ...]:
    return tuple(Picture(picture.start, picture.num_tokens, _content(picture), group) for picture in pictures)


def _content(picture: WirePicture | WirePatches) -> bytes | Patches:
    return picture.data if isinstance(picture, WirePicture) else Patches(picture.pixel_values, picture.grid_thw)


def _wire_result(outcome: TrainOutcome, body: ForwardBackwardBody) -> ForwardBackwardResult:
    losses = elementwise_loss(body, outcome.logprobs)
    return ForwardBackwardResult(
        tuple(outcome.logprobs), dict(outcome.metrics), losses, embeddings=tuple(outcome.embeddings)
    )


def _wire_topk(topk: TopLogprobs | None) -> TopkLogprobs | None:
    return None if topk is None else TopkLogprobs(topk.token_ids, topk.logprobs)


def _dense(targets: Array | Csr) -> Array:
    return densify(targets, field="target_prompt_logprobs", budget=CellBudget(_MAX_TARGET_CELLS))


def _in_layout_of(targets: Array | Csr | None, logprobs: Array | None) -> Array | Csr | None:
    """Scores in the layout the targets came in: sparse for sparse."""
    if logprobs is None or not isinstance(targets, Csr):
        return logprobs
    rows = np.repeat(np.arange(targets.shape[0]), np.diff(targets.crow_indices))
    values = logprobs[rows, targets.col_indices]
    return Csr(values, targets.crow_indices, targets.col_indices, targets.shape)


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model, if there is one that needs no code of the model's own.

    Without it, stop strings cannot be matched.
    """
    if Path(model).is_dir() and not (Path(model) / "tokenizer_config.json").exists():
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (ValueError, ImportError):
        if "AutoTokenizer" not in (get_tokenizer_config(model).get("auto_map") or ()):
            raise
        _log.warning("tokenizer.is_code", model=model, next="stop strings are refused; send stop tokens")
        return None


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> DecodeText:
    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids)))

    return decode


def _readable_tokenizer_path(model: str) -> str | None:
    """Where a client on the same machine finds the tokenizer. The SDK cuts paths of fewer than three slashes."""
    folder = Path(model).absolute()
    is_usable = (folder / "tokenizer.json").exists() and str(folder).count("/") >= 3
    return str(folder) if is_usable else None
