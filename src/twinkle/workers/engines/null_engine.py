"""An engine that computes nothing, for measuring the queue and for testing its promises.

An adapter's state is a hash chain over everything ever applied to it, so a doubled, lost or reordered operation shows
in the ``state:hash2`` metric and in every checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from twinkle.core.adapter import AdapterConfig
from twinkle.core.batch_loss import BATCH_LOSSES, CORRECT_TOKENS
from twinkle.core.errors import InvalidInput
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.slices import Slices
from twinkle.scheduler.token_stream import TokenPiece
from twinkle.wire.bodies.training import AdamParams
from twinkle.wire.calls import Call
from twinkle.wire.sample_result import SampleResult, WireSequence, encode_sample_response
from twinkle.wire.sampling import SampleRequest
from twinkle.wire.training import ForwardBackwardBody
from twinkle.wire.training_result import ForwardBackwardResult
from twinkle.workers.engine import Pass, PassAnswer, SampleOutput, WrittenState
from twinkle.workers.engines.null_calls import NullState, answer_call, answer_load, answer_pass, chain

_FILE = "state.json"
_STEP_TOKENS = 2**17
"""Of the samples that end in one step, but for the first of them: what is large is written one by one."""


class NullEngine:
    """See the module's docstring."""

    def __init__(self, *, base_model: str, max_rank: int) -> None:
        self._capabilities = MeshCapabilities(
            base_model=base_model,
            architecture="null",
            vocab_size=2**31 - 1,
            max_context_length=2**20,
            max_rank=max_rank,
            device="none",
            determinism="mkl-strict",
        )
        self._samples: list[tuple[str, SampleRequest]] = []

    @property
    def capabilities(self) -> MeshCapabilities:
        """What clients may ask of it."""
        return self._capabilities

    def memory_held(self) -> dict[str, int]:
        """Nothing is held."""
        return {}

    def create(self, config: AdapterConfig) -> NullState:
        """A state that depends on the configuration alone."""
        return NullState(applied=chain("", config.model_dump_json()))

    def start_passes(self, passes: Sequence[Pass[NullState]]) -> Slices[list[PassAnswer]]:
        """One slice, whatever they are."""
        yield from ()
        return self.run_passes(passes)

    def run_passes(self, passes: Sequence[Pass[NullState]]) -> list[PassAnswer]:
        """Log-probabilities of zero; a backward pass extends the pending chain."""
        return [
            answer_pass(item.state, item.body) if isinstance(item.body, Call) else _run(item.state, item.body)
            for item in passes
        ]

    def call(self, state: NullState, call: Call) -> bytes:
        """Any name is taken for a component, as there is none; what changes the state extends a chain."""
        return answer_call(state, call)

    def note_failure(self, state: NullState) -> None:
        """Forget the last pass."""
        state.last = ""

    def load_into(self, state: NullState, files: dict[str, bytes], call: Call) -> tuple[NullState, bytes]:
        """What ``export`` wrote, and no gradients."""
        return answer_load(state, json.loads(files[_FILE]), call)

    def adopt(self, state: NullState, config: AdapterConfig) -> NullState:
        """The same in either dialect."""
        return state

    def optim_step(self, state: NullState, params: AdamParams) -> dict[str, float]:
        """Fold the pending chain into the applied one."""
        if not np.isfinite(params.learning_rate):
            raise InvalidInput("adam_params.learning_rate", "must be a finite number")
        state.step(repr(params.learning_rate))
        return {"step": float(state.steps), "state": float(int(state.applied[:12], 16))}

    def has_gradients(self, state: NullState) -> bool:
        """Whether something is pending."""
        return bool(state.pending)

    def clear_gradients(self, state: NullState) -> None:
        """Forget what is pending."""
        state.pending = ""

    def export(self, state: NullState, *, with_optimizer: bool) -> dict[str, bytes]:
        """One JSON file."""
        steps = state.steps if with_optimizer else 0
        consumed = {"consumed": state.consumed} if state.consumed else {}
        return {_FILE: json.dumps({"applied": state.applied, "steps": steps, **consumed}).encode()}

    def load(
        self, config: AdapterConfig, files: dict[str, bytes], *, with_optimizer: bool, trainable: bool
    ) -> NullState:
        """What ``export`` wrote."""
        content = json.loads(files[_FILE])
        return NullState(applied=content["applied"], steps=content["steps"] if with_optimizer else 0)

    def freeze(self, state: NullState) -> NullState:
        """The applied chain."""
        return NullState(applied=state.applied)

    def weights_bytes(self, state: NullState) -> int:
        """The length of the chain."""
        return len(state.applied)

    def snapshot(self, state: NullState) -> bytes:
        """The whole state."""
        return json.dumps(asdict(state)).encode()

    def copy_state(self, state: NullState) -> WrittenState:
        """The same."""
        return WrittenState(self.snapshot(state))

    def restore(self, data: bytes) -> NullState:
        """What ``snapshot`` wrote."""
        content = json.loads(data)
        if isinstance(content, list):
            # As earlier releases wrote it.
            content = dict(zip(("applied", "pending", "steps"), content, strict=True))
        return NullState(**content)

    def add_sample(self, request_id: str, state: NullState | None, request: SampleRequest, *, cache_group: str) -> None:
        """Queue a sample; nothing is cached."""
        self._samples.append((request_id, request))

    def step_samples(self) -> list[SampleOutput]:
        """Finish the oldest samples with zeros: one, however large, and as many small ones as a step has room for."""
        finished: list[SampleOutput] = []
        room = _STEP_TOKENS
        for request_id, request in self._samples:
            if room <= 0:
                break
            finished.append(_sample(request_id, request))
            room -= finished[-1].num_tokens
        del self._samples[: len(finished)]
        return finished

    def drawn_so_far(self, request_id: str, known: Sequence[int]) -> list[TokenPiece]:
        """Nothing: a sample is drawn as a whole."""
        return []

    @property
    def num_samples_under_way(self) -> int:
        """Samples added and not yet returned."""
        return len(self._samples)

    def drop_sample(self, request_id: str) -> None:
        """Forget a sample."""
        self._samples = [sample for sample in self._samples if sample[0] != request_id]

    def drop_samples(self) -> None:
        """Forget every sample."""
        self._samples.clear()

    def close(self) -> None:
        """Nothing was started."""


def _run(state: NullState, body: ForwardBackwardBody) -> ForwardBackwardResult | Exception:
    if body.loss_fn == "custom" and body.loss_graph is None:
        return InvalidInput("loss_fn", "'custom' needs the graph of a loss")
    logprobs = []
    embeds = body.loss_fn in BATCH_LOSSES and BATCH_LOSSES[body.loss_fn].embeds
    embeddings = tuple(np.zeros(1, dtype=np.float32) for _ in body.data) if embeds else ()
    for index, datum in enumerate(() if embeds else body.data):
        targets = datum.inputs.get("target_tokens")
        if targets is None:
            return InvalidInput(f"data[{index}].loss_fn_inputs.target_tokens", "is missing")
        logprobs.append(np.zeros(targets.shape, dtype=np.float32))
    if not body.forward_only:
        state.pending = chain(state.pending, *(datum.tokens.tobytes().hex() for datum in body.data))
    num_tokens = float(sum(len(datum.tokens) for datum in body.data))
    metrics = {"loss:sum": 0.0, "num_tokens:sum": num_tokens}
    if body.loss_fn_config.get("count_correct"):
        metrics[CORRECT_TOKENS] = 0.0
    return ForwardBackwardResult(tuple(logprobs), metrics, embeddings=embeddings)


def _sample(request_id: str, request: SampleRequest) -> SampleOutput:
    length = request.sampling_params.max_tokens or 1
    zeros = np.zeros(length, dtype=np.float32)
    sequence = WireSequence(tokens=np.zeros(length, dtype=np.int32), logprobs=zeros, stop_reason="length")
    prompt = None
    if request.prompt_logprobs:
        prompt = np.zeros(request.num_prompt_tokens, dtype=np.float32)
        prompt[0] = np.nan
    result = SampleResult(sequences=(sequence,) * request.num_samples, prompt_logprobs=prompt)
    return SampleOutput(
        request_id=request_id, result=encode_sample_response(result), num_tokens=length * request.num_samples
    )
