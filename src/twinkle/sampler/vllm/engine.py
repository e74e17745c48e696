"""vLLM's engine, in this process. The one module that imports vLLM; tested with 0.32.

Two places of it are ours. A logits processor draws every token by this project's own rule and leaves vLLM, which is
told to be greedy, no other choice: a seed then gives the tokens it gives in every backend, and logprobs are those
before top-k and top-p, which vLLM's own are not. And the scores of prompts are computed from vLLM's hidden states,
request by request: where an adapter trains the output projection, vLLM scores prompts through its map of the rows that
draw tokens, which are other rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.sampler.drawing import draw_tokens
from twinkle.sampler.vllm.adapters import AdapterFolder, zero_files
from twinkle.sampler.vllm.progress import NAME, Advance, RunningSample

FindSample = Callable[[str], RunningSample | None]


class VLLMEngine:
    """Sequences by name in, tokens out.

    Args:
        engine_args: vLLM's own.
        find_sample: Finds the sample of a name; none for one that is not ours or no longer wanted.
    """

    def __init__(self, engine_args: Mapping[str, Any], find_sample: FindSample) -> None:
        try:
            self._engine = LLMEngine.from_engine_args(
                vllm.EngineArgs(**engine_args, logits_processors=[chooser(find_sample)])
            )
        except (ValueError, TypeError, OSError, RuntimeError) as error:
            raise ConfigError(f"TWINKLE_SAMPLER: vLLM cannot serve {engine_args.get('model')}: {error}") from error
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._runner = runner
        runner._get_prompt_logprobs_dict = PromptScoring(runner, find_sample)
        config = self._engine.vllm_config.model_config
        self.vocab_size: int = config.get_vocab_size()
        self.max_length: int = config.max_model_len
        eos = config.try_get_generation_config().get("eos_token_id", config.hf_text_config.eos_token_id)
        self._cache_generation = 0
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def add(self, sample: RunningSample) -> None:
        """Queues one sequence."""
        folder = sample.progress.folder
        self._engine.add_request(
            sample.name,
            sample.prompt(self._cache_generation),
            vllm.SamplingParams(**sample.sampling(), output_kind=RequestOutputKind.DELTA),
            lora_request=None if folder is None else _lora_request(folder),
        )

    def abort(self, names: Sequence[str]) -> None:
        """Forgets sequences; those that have ended are no error."""
        self._engine.abort_request(list(names))

    def step(self) -> list[Advance]:
        """Runs one pass; returns what is new of each sequence."""
        return [
            Advance(output.request_id, list(output.outputs[0].token_ids), output.num_cached_tokens or 0)
            for output in self._engine.step()
        ]

    def clear_not_finite(self) -> None:
        """Removes NaN and infinity from the cache of keys and values, and lets nobody find what was cached so far.

        vLLM gives blocks to the next sequence as they are and multiplies what lies beyond its end by zero, which leaves
        NaN what it is: one tenant's NaN would fail other tenants' requests. To be called once those who wrote it are
        aborted.
        """
        for cache in self._runner.kv_caches:
            cache.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        self._cache_generation += 1

    def forget_cached(self) -> None:
        """Lets nobody find what was cached so far."""
        self._cache_generation += 1

    def weight_names(self) -> list[str]:
        """What the weights are called in vLLM's model."""
        return [name for name, _ in self._runner.model.named_parameters()]

    def zero_adapter(self) -> dict[str, bytes]:
        """The files of an adapter that changes nothing, for one module of this model.

        vLLM's kernels for the CPU take the adapter in the last slot for rows that have none. Where they are used, the
        base model must therefore be sampled through an adapter of zeros.
        """
        for path, module in self._runner.lora_manager._adapter_manager.modules.items():
            stacked: Sequence[torch.Tensor] = getattr(module, "lora_a_stacked", ())
            if len(stacked) == 1 and path != "lm_head":
                in_features, out_features = stacked[0].shape[-1], module.lora_b_stacked[0].shape[-2]
                return zero_files(path, in_features, out_features)
        raise ConfigError("TWINKLE_SAMPLER: vLLM found no module of this model that takes an adapter")

    def load(self, folder: AdapterFolder) -> None:
        """Loads an adapter.

        Raises:
            InvalidInput: vLLM does not take it, or would leave some of it out.
        """
        try:
            self._engine.add_lora(_lora_request(folder))
        except Exception as error:
            raise InvalidInput("adapter", f"vLLM does not load it: {error}") from error
        manager = self._runner.lora_manager._adapter_manager
        lora = manager.get_adapter(folder.number)
        if lora is None:
            raise InvalidInput("adapter", "vLLM did not keep it after loading")
        left_out = sorted(set(lora.loras) - _served_modules(manager))
        if left_out:
            self._engine.remove_lora(folder.number)
            raise InvalidInput("adapter", f"trains {left_out[0]}, which vLLM would leave out for this model")

    def unload(self, folder: AdapterFolder) -> None:
        """Forgets an adapter."""
        self._engine.remove_lora(folder.number)

    def shutdown(self) -> None:
        """Frees what the engine holds."""
        self._engine.engine_core.shutdown()


class PromptScoring:
    """Stands in for the model runner's own computation of prompt logprobs (``_get_prompt_logprobs_dict``)."""

    def __init__(self, runner: Any, find_sample: FindSample) -> None:
        self._runner = runner
        self._find_sample = find_sample

    def __call__(self, hidden_states: torch.Tensor, num_scheduled_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Scores what this pass computed of each prompt that asks for it."""
        runner = self._runner
        for request_id, num_tokens in num_scheduled_tokens.items():
            state = runner.requests[request_id]
            sample = self._find_sample((state.sampling_params.extra_args or {}).get(NAME, ""))
            if sample is None or sample.sequence.sample or not sample.progress.scores_prompt:
                continue
            first_row = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
            rows_TH = hidden_states[first_row : first_row + num_tokens]

            def logits_of(rows: slice, rows_TH: torch.Tensor = rows_TH, lora: Any = state.lora_request) -> torch.Tensor:
                return self._logits(rows_TH[rows], lora)

            if not sample.progress.score(state.num_computed_tokens, num_tokens, logits_of):
                sample.is_broken = True
        return {}

    def _logits(self, rows_NH: torch.Tensor, lora: LoRARequest | None) -> torch.Tensor:
        """Logits [N, V] of some rows, all with the same adapter; vLLM sets its mapping anew before the next pass."""
        number, requests = (0, set()) if lora is None else (lora.lora_int_id, {lora})
        logits = []
        # The mapping of rows that need logits holds as many as there may be sequences.
        for piece_NH in rows_NH.split(self._runner.max_num_reqs):
            mapping = (number,) * piece_NH.shape[0]
            self._runner._set_active_loras(mapping, mapping, requests)
            logits.append(self._runner.model.compute_logits(piece_NH).float())
        return torch.cat(logits)


def chooser(find_sample: FindSample) -> type[LogitsProcessor]:
    """Returns the logits processor that draws tokens for the samples of one engine. vLLM makes the instance."""

    class Chooser(LogitsProcessor):
        """Follows which sequence is in which row, and leaves each row the one token that was drawn for it."""

        def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
            self._names: dict[int, str] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: BatchUpdate | None) -> None:
            if batch_update is not None:
                follow_rows(self._names, batch_update)

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            rows = [(row, find_sample(name)) for row, name in self._names.items() if row < logits.shape[0]]
            ours = [(row, sample) for row, sample in rows if sample is not None]
            if not ours:
                return logits
            draws = [sample.next_draw() for _, sample in ours]
            chosen = draw_tokens(logits[[row for row, _ in ours]], draws)
            for (_, sample), drawn in zip(ours, chosen, strict=True):
                sample.drawn, sample.is_broken = drawn, sample.is_broken or drawn is None
            indices = torch.tensor([row for row, _ in ours], device=logits.device)
            tokens = torch.tensor([0 if drawn is None else drawn.token for drawn in chosen], device=logits.device)
            logits[indices] = float("-inf")
            logits[indices, tokens] = 0.0
            return logits

    return Chooser


def follow_rows(names: dict[int, str], update: BatchUpdate) -> None:
    """Applies one change of vLLM's batch to the names by row: removals first, then additions, then moves."""
    for row in update.removed:
        names.pop(row, None)
    for row, params, _, _ in update.added:
        names[row] = (params.extra_args or {}).get(NAME, "")
    for source, target, direction in update.moved:
        moved, replaced = names.pop(source, None), names.pop(target, None)
        if moved is not None:
            names[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            names[source] = replaced


def prepare_environment(*, device: str, cache_gib: int) -> None:
    """Sets what vLLM reads from the environment, unless the user has set it. Must precede the first engine."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if device == "cpu":
        defaults |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _lora_request(folder: AdapterFolder) -> LoRARequest:
    return LoRARequest(folder.name, folder.number, str(folder.path))


def _served_modules(manager: Any) -> set[str]:
    """The modules whose update vLLM applies; it packs some of them (q, k and v) into one."""
    served = set(manager.modules)
    for packed, parts in manager.packed_modules.items():
        served.update(parts)
        served.add(packed)
    return served
