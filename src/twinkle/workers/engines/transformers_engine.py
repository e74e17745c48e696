"""The engine on transformers or Megatron: the training library's model and sampler behind the worker's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle.checkpoint_engine.snapshot import StateCopy, copy_state, fingerprint, restore, script_of
from twinkle.core.adapter import AdapterConfig, Dialect
from twinkle.core.errors import InvalidInput
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.settings import Settings
from twinkle.core.slices import Slices, finished
from twinkle.infra.device_memory import DeviceMemory
from twinkle.infra.rank_group import ALONE, RankGroup
from twinkle.model.fused.batch_jobs import Work
from twinkle.model.fused.core import LoraCore
from twinkle.model.fused.parameters import note_steps
from twinkle.model.fused.training import AdamParams, TrainOutcome
from twinkle.model.script_state import Script
from twinkle.model.whole.core import WholeModelCore
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.sampler.request import SampleResult as SamplerResult
from twinkle.sampler.stepped import SteppedSampler
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams as WireAdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.tensors import Array, Csr
from twinkle.wire.training import ForwardBackwardBody
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput
from twinkle.workers.engines.loading import load_served
from twinkle.workers.engines.wire_forms import sample_output, sampler_request, train_job, wire_result
from twinkle.workers.scripts.passes import CalledPass, begin_pass, broken_off, in_callers_words
from twinkle.workers.scripts.scripts import Scripts, note_failure
from twinkle.workers.scripts.whole import WholeScripts

Trained = LoraAdapter | Script
"""An adapter as Tinker's operations train it, or with what a script has set for it."""


@dataclass
class TransformersEngine:
    """One frozen base model, its adapters, and one sampler on the same weights, unless it only trains."""

    model: LoraCore
    sampler: SteppedSampler
    capabilities: MeshCapabilities
    memory: DeviceMemory
    folder: str = ""
    """Where the base model lies, its tokenizer beside it."""

    def __post_init__(self) -> None:
        kind = WholeScripts if isinstance(self.model, WholeModelCore) else Scripts
        self.scripts = kind(self.model, folder=self.folder, served_name=self.capabilities.base_model)
        self._targets: dict[str, Array | Csr | None] = {}

    @classmethod
    def from_settings(cls, settings: Settings, ranks: RankGroup = ALONE) -> TransformersEngine:
        """Load the base model that the settings name; on several ranks, this one's part in it.

        Raises:
            ConfigError: No model was named, or it cannot be loaded.
        """
        loaded = load_served(settings, ranks)
        return cls(
            model=loaded.model,
            sampler=loaded.sampler,
            capabilities=loaded.capabilities,
            memory=loaded.memory,
            folder=loaded.folder,
        )

    def memory_held(self) -> dict[str, int]:
        """By what has made itself known."""
        return self.memory.held

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
            try:
                if isinstance(item.body, ForwardBackwardBody):
                    works[index] = train_job(item, _lora(item.state), item.body, base_adapter=self.scripts.base_adapter)
                    continue
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
                answers[index] = in_callers_words(outcome) if index in called else outcome
            elif index not in answers:
                answers[index] = _finished(outcome, item.body, called.get(index))
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
        """Files that PEFT reads, or transformers where the whole model is trained, and the optimizer's state."""
        if isinstance(state, Script):
            return self.scripts.export(state, with_optimizer=with_optimizer)
        return self.scripts.files_of(state, with_optimizer=with_optimizer)

    def load(self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool) -> Trained:
        """What is trained, from such files as fit ``config``."""
        if config.is_whole_model != isinstance(self.model, WholeModelCore):
            what = "a whole model" if config.is_whole_model else "an adapter"
            raise InvalidInput("path", f"holds the weights of {what}, which this mesh does not take")
        adapter = self.scripts.adapter_of(files, with_optimizer=with_optimizer, trainable=trainable)
        if adapter.config.rank != config.rank:
            raise InvalidInput("path", f"its rank is {adapter.config.rank}, this adapter's is {config.rank}")
        return self.adopt(adapter, config) if trainable else adapter

    def freeze(self, state: Trained) -> LoraAdapter:
        """The parameters, copied on the device."""
        if isinstance(self.model, WholeModelCore):
            raise InvalidInput(
                "sampling_session_seq_id",
                "nothing is sampled on this mesh, which trains whole models; save under a name, and download that",
            )
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
        return self.copy_state(state).data()

    def copy_state(self, state: Trained) -> StateCopy:
        """The same, on its way to host memory."""
        script = state.pack() if isinstance(state, Script) else None
        return copy_state(_lora(state), self.model.determinism, num_ranks=self.model.ranks.size, script=script)

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
        targets = request.targets()
        adapter = None if state is None else _lora(state)
        self.sampler.add(
            sampler_request(request_id, adapter, request, targets, self.capabilities.pictures, cache_group=cache_group)
        )
        self._targets[request_id] = targets

    def step_samples(self) -> list[SampleOutput]:
        """One prefill or decode step over everything under way."""
        outputs: list[SampleOutput] = []
        for ended in self.sampler.step():
            if isinstance(ended, SamplerResult):
                outputs.append(sample_output(ended, self._targets.pop(ended.key)))
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
            self.drop_sample(key)

    def close(self) -> None:
        """Nothing was started."""


def _finished(outcome: TrainOutcome | None, body: ForwardBackwardBody | Call, called: CalledPass | None) -> PassAnswer:
    """What a pass that has run is answered. Should that fail, it is its own affair; its gradient is there already."""
    try:
        if isinstance(body, ForwardBackwardBody):
            assert outcome is not None
            return wire_result(outcome, body)
        assert called is not None
        return called.finish(outcome)
    except Exception as error:  # noqa: BLE001 - as above
        return broken_off(error)


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
