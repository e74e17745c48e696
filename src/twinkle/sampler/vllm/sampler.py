"""The sampler on vLLM's engine."""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from twinkle.core.errors import ConfigError, Conflict, InvalidInput, OutOfMemory
from twinkle.hub.model_path import resolve_model_id
from twinkle.sampler.places import most_of_group, with_guests
from twinkle.sampler.request import AdapterFiles, DecodeText, SampleRequest, check_request, not_finite
from twinkle.sampler.sequence import GrowingSequence, Stretch
from twinkle.sampler.stepped import Outcome, SteppedSampler
from twinkle.sampler.stops import stop_rule
from twinkle.sampler.vllm.adapters import AdapterFolder, AdapterFolders
from twinkle.sampler.vllm.progress import Advance, RunningSample, VLLMProgress

MAX_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The sizes of slots that vLLM knows."""


class SteppedVLLMSampler(SteppedSampler):
    """Samples with a copy of the base model in vLLM, which lives in this process, on one device.

    Adapters reach vLLM as files, named by their content. A request keeps the version it was added with. Its tokens are
    drawn as :class:`SteppedTorchSampler` draws them, so a seed means the same; the last bits of logits are vLLM's.

    Args:
        model_id: Folder or id of the base model.
        engine_args: vLLM's own arguments, above those chosen here.
        device: ``cpu`` or a CUDA device.
        slots: Sequences of one group of requests served at once; further ones wait. A quarter more is there for others.
        max_length: Prompt and output together; the model's context if omitted.
        max_rank: Of adapters.
        max_adapters_per_step: Different adapters in one pass; further ones wait.
        max_adapters: Versions of adapters kept in memory and on disk.
        memory_fraction: Of a GPU's memory, for weights and cache together.
        cache_gib: On a CPU, for the cache.
        decode_text: The tokenizer's decode, needed for stop strings.
        never_drawn: Tokens that stand for pictures, which no text may hold.
    """

    def __init__(
        self,
        model_id: str,
        engine_args: Mapping[str, Any] | None = None,
        *,
        device: str = "cpu",
        slots: int = 32,
        max_length: int | None = None,
        max_rank: int = 64,
        max_adapters_per_step: int = 8,
        max_adapters: int = 32,
        memory_fraction: float = 0.4,
        cache_gib: int = 1,
        decode_text: DecodeText | None = None,
        never_drawn: tuple[int, ...] = (),
    ) -> None:
        self._never_drawn = never_drawn
        self._decode_text = decode_text
        self._samples: dict[str, RunningSample] = {}
        self._waiting: deque[RunningSample] = deque()
        self._under_way: dict[str, VLLMProgress] = {}
        self._names = count()
        arguments = {
            "model": resolve_model_id(model_id),
            "dtype": "float32" if device == "cpu" else "bfloat16",
            "max_model_len": max_length,
            "max_num_seqs": with_guests(slots),
            "enable_lora": True,
            "max_lora_rank": next((rank for rank in MAX_RANKS if rank >= max_rank), MAX_RANKS[-1]),
            "max_loras": max_adapters_per_step + (device == "cpu"),
            "max_cpu_loras": max(max_adapters, max_adapters_per_step) + (device == "cpu"),
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "async_scheduling": False,
            "enforce_eager": device == "cpu",
            **({} if device == "cpu" else {"gpu_memory_utilization": memory_fraction}),
            **(engine_args or {}),
        }
        self._places = int(arguments["max_num_seqs"])
        self._slots = min(slots, self._places)
        self._engine = _start(arguments, self._samples.get, device=device, cache_gib=cache_gib)
        self._root = tempfile.TemporaryDirectory(prefix="twinkle-adapters-")
        self._adapters_on_disk = AdapterFolders(
            Path(self._root.name),
            limit=max_adapters + (device == "cpu"),
            base_model=model_id,
            load=self._engine.load,
            unload=self._engine.unload,
        )

        self._base = AdapterFiles(self._engine.zero_adapter()) if device == "cpu" else None
        if self._base is not None:
            self._adapters_on_disk.acquire(self._base)

    @property
    def has_work(self) -> bool:
        """See :class:`SteppedSampler`."""
        return bool(self._under_way)

    @property
    def num_requests(self) -> int:
        """See :class:`SteppedSampler`."""
        return len(self._under_way)

    @property
    def loaded_adapters(self) -> list[AdapterFolder]:
        """The versions of adapters kept now, the longest unused first."""
        return self._adapters_on_disk.loaded

    def load_adapter(self, files: Mapping[str, bytes]) -> AdapterFiles:
        """See :class:`SteppedSampler`. What vLLM says of them shows when they are first used."""
        return AdapterFiles(dict(files))

    def add(self, request: SampleRequest) -> None:
        """See :class:`SteppedSampler`."""
        engine = self._engine
        if request.pictures:
            raise InvalidInput("prompt", "holds a picture, but vLLM draws samples of text alone here")
        check_request(
            request,
            vocab_size=engine.vocab_size,
            max_length=engine.max_length,
            can_decode=self._decode_text is not None,
        )
        if len(request.prompt) == engine.max_length:
            raise InvalidInput(
                "prompt", f"has {len(request.prompt)} tokens and fills the context; vLLM needs room for one more"
            )
        if request.key in self._under_way:
            raise Conflict(f"sample request {request.key} is already under way", key=request.key)
        stop = stop_rule(request, eos_token_ids=engine.eos_token_ids, decode_text=self._decode_text)
        adapter = self._base if request.adapter is None else request.adapter
        folder = None if adapter is None else self._adapters_on_disk.acquire(adapter)
        progress = VLLMProgress(
            request,
            stop,
            folder,
            max_length=engine.max_length,
            vocab_size=engine.vocab_size,
            barred=self._never_drawn,
        )
        self._under_way[request.key] = progress
        self._queue(progress)

    def cancel(self, key: str) -> None:
        """See :class:`SteppedSampler`."""
        progress = self._under_way.pop(key, None)
        if progress is None:
            return
        self._forget_samples(progress)
        if progress.folder is not None:
            self._adapters_on_disk.release(progress.folder)

    def drawn_so_far(self, key: str, known: Sequence[int]) -> list[Stretch]:
        """See :class:`SteppedSampler`."""
        progress = self._under_way.get(key)
        if progress is None:
            return []
        growing = [sample.sequence for sample in self._samples.values() if sample.progress is progress]
        stretches = [sequence.beyond(known[sequence.sample]) for sequence in growing]
        return [stretch for stretch in stretches + progress.finished_beyond(known) if stretch.tokens]

    def step(self) -> list[Outcome]:
        """See :class:`SteppedSampler`."""
        failures: dict[str, Exception] = {}
        if not self._under_way:
            return []
        self._fill_places(failures)
        try:
            advances = self._engine.step()
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"a sampling pass over {len(self._samples)} sequences did not fit the device") from error
        self._restart_broken(failures)
        for advance in advances:
            sample = self._samples.get(advance.name)
            if sample is not None and advance.tokens and sample.progress.request.key not in failures:
                self._advance(sample, advance, failures)
        return self._collect(failures)

    def forget_prompts(self) -> None:
        """See :class:`SteppedSampler`."""
        self._engine.forget_cached()

    def weight_names(self) -> list[str]:
        """See :class:`SteppedSampler`: of vLLM's own model, which packs some of them."""
        return self._engine.weight_names()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """See :class:`SteppedSampler`. Not offered here: vLLM wraps its weights for adapters, and cannot fill them."""
        raise InvalidInput(
            "weights",
            "of the base model cannot be replaced in vLLM while it serves adapters; train a LoRA adapter and sync it,"
            " or sample with TorchSampler",
        )

    def shutdown(self) -> None:
        """Ends vLLM and removes the adapters' files. The sampler cannot be used after it."""
        self._engine.shutdown()
        self._root.cleanup()

    def _queue(self, progress: VLLMProgress) -> None:
        # A request that may not generate still has its prompt computed, once, and the token drawn is dropped.
        for index in range(progress.request.num_samples if progress.max_tokens else 1):
            self._waiting.append(RunningSample(str(next(self._names)), progress, GrowingSequence(sample=index)))

    def _fill_places(self, failures: dict[str, Exception]) -> None:
        """Hands sequences to vLLM, one by one in the order of their arrival, as far as their groups have places.

        vLLM serves in the order in which it was handed them: whoever is to join within a step must not stand behind
        what waits there for a place.
        """
        held = Counter(sample.group for sample in self._samples.values())
        held_back: list[RunningSample] = []
        for sample in self._waiting:
            others = held.total() - held[sample.group]
            if held[sample.group] >= most_of_group(slots=self._slots, places=self._places, others=others):
                held_back.append(sample)
                continue
            held[sample.group] += 1
            try:
                self._submit(sample)
            except Exception as error:  # noqa: BLE001 - what vLLM does not take is this request's failure alone
                failures[sample.progress.request.key] = error
        self._waiting = deque(held_back)

    def _submit(self, sample: RunningSample) -> None:
        self._samples[sample.name] = sample
        self._engine.add(sample)

    def _restart_broken(self, failures: dict[str, Exception]) -> None:
        """Lets requests whose logits were not finite start once more, on a clean cache: the NaN may be another's."""
        broken = {id(sample.progress): sample.progress for sample in self._samples.values() if sample.is_broken}
        for progress in broken.values():
            self._forget_samples(progress)
        if broken:
            self._engine.clear_not_finite()
        for progress in broken.values():
            if progress.was_restarted:
                failures[progress.request.key] = not_finite(progress.request)
            else:
                progress.restart()
                self._queue(progress)

    def _advance(self, sample: RunningSample, advance: Advance, failures: dict[str, Exception]) -> None:
        progress, drawn = sample.progress, sample.drawn
        if sample.sequence.sample == 0 and not sample.sequence.tokens and not progress.was_restarted:
            # What the others of the same request find is the first one's.
            progress.num_cached_tokens = advance.num_cached_tokens
        key = progress.request.key
        if progress.max_tokens == 0:
            for index in range(progress.request.num_samples):
                progress.finish(GrowingSequence(sample=index), "length")
            self._forget([sample.name])
            return
        if drawn is None or advance.tokens != [drawn.token]:
            raise RuntimeError(
                f"vLLM returned {advance.tokens} where {drawn} was drawn; this version of it is not supported"
            )
        sample.drawn = None
        sample.sequence.append(drawn)
        try:
            stopped = progress.stop.matches(sample.sequence.tokens)
        except Exception as error:  # noqa: BLE001 - the tokenizer is not ours; its failure is this request's alone
            failures[key] = error
            return
        if stopped or len(sample.sequence.tokens) >= progress.max_tokens:
            progress.finish(sample.sequence, "stop" if stopped else "length")
            self._forget([sample.name])

    def _forget_samples(self, progress: VLLMProgress) -> None:
        self._waiting = deque(sample for sample in self._waiting if sample.progress is not progress)
        self._forget([name for name, sample in self._samples.items() if sample.progress is progress])

    def _forget(self, names: list[str]) -> None:
        self._engine.abort(names)
        for name in names:
            del self._samples[name]

    def _collect(self, failures: dict[str, Exception]) -> list[Outcome]:
        outcomes: list[Outcome] = list(failures.items())
        outcomes += [progress.result() for progress in self._under_way.values() if progress.is_done]
        for outcome in outcomes:
            self.cancel(outcome[0] if isinstance(outcome, tuple) else outcome.key)
        return outcomes


def _start(arguments: Mapping[str, Any], find_sample: Any, *, device: str, cache_gib: int) -> Any:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise ConfigError("TWINKLE_SAMPLER: vllm serves meshes of one rank; use torch on a mesh of several")
    num_threads = torch.get_num_threads()
    try:
        # vLLM is heavy and optional; nothing else imports it.
        from twinkle.sampler.vllm.engine import VLLMEngine, prepare_environment  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"TWINKLE_SAMPLER: vllm is not installed ({error}); pip install 'twinkle-queue[vllm]', or use torch"
        ) from error
    prepare_environment(device=device, cache_gib=cache_gib)
    engine = VLLMEngine(arguments, find_sample)
    # The model that trains beside it keeps its threads: its bits depend on them.
    torch.set_num_threads(num_threads)
    return engine
