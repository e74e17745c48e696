"""Our own twin of a mesh worker: it claims, answers and commits through the journal, but computes nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import TypeVar

import numpy as np

from twinkle.core.adapter import Checkpoint, CheckpointKind, StoredFile
from twinkle.core.adapter_sizes import AdapterSizes
from twinkle.core.batch_loss import CORRECT_TOKENS
from twinkle.core.clock import SystemClock
from twinkle.core.errors import NotFound, StorageUnavailable
from twinkle.core.lease import Lease, ProcessIdentity
from twinkle.core.mesh import MeshCapabilities
from twinkle.core.operation import Claim, Failure, FailureCategory, OperationKind, Outcome
from twinkle.core.pictures import PictureRules
from twinkle.core.settings import Settings
from twinkle.scheduler.channels import ChannelListener, CompletionPublisher
from twinkle.scheduler.fairness import charge_of_tokens, in_service_order, with_virtual_time
from twinkle.scheduler.token_stream import ListenedSample
from twinkle.storage.blobs import day_of, open_blob_store
from twinkle.storage.journal.records import NewSamplingSession, Records
from twinkle.storage.payloads import read_payload, write_result
from twinkle.storage.sampling.ephemeral import NewEphemeralWeights
from twinkle.storage.stores import Stores
from twinkle.tasks.nudge import ring_channel
from twinkle.wire.bodies.base import parse_body
from twinkle.wire.bodies.training import UnloadModelResponse
from twinkle.wire.calls import Call, decode_call, is_call
from twinkle.wire.sample_result import SampleResult, TopkLogprobs, WireSequence, encode_sample_response
from twinkle.wire.sampling import parse_sample
from twinkle.wire.training import decode_data
from twinkle.wire.training_result import ForwardBackwardResult, encode_forward_backward_output

T = TypeVar("T")

_MESH = "default"
BASE_MODEL = "tiny/one"
CAPABILITIES = MeshCapabilities(
    base_model=BASE_MODEL,
    architecture="Qwen3ForCausalLM",
    vocab_size=1000,
    max_context_length=2048,
    max_rank=64,
    device="cpu",
    determinism="none",
    tokenizer_path="/srv/models/tiny/one",
    adapter_slots=16,
    pictures=PictureRules(token_id=300, patch_size=4, merge_size=2, min_pixels=8 * 8, max_pixels=64 * 64),
    adapter_sizes=AdapterSizes(attn=100, mlp=200, unembed=50),
)
WEIGHTS = bytes(range(256)) * 8
"""What every checkpoint's one file holds if nothing else is said."""
DEVICE_S = 0.25
"""What every operation is charged for."""
_POLL_S = 0.005
_SWEEP_S = 0.05
"""How long what nobody rings for may wait. The workers of a run's shared services look all the while it lasts."""
_KIND_OF_SAVE = {
    OperationKind.SAVE_WEIGHTS: CheckpointKind.TRAINING,
    OperationKind.SAVE_WEIGHTS_FOR_SAMPLER: CheckpointKind.SAMPLER,
    OperationKind.SAVE_WEIGHTS_EXTERNAL: CheckpointKind.EXTERNAL,
}


class FakeWorker:
    """Claims, answers and commits as a mesh worker does, but computes nothing."""

    def __init__(self, settings: Settings, *, capabilities: MeshCapabilities = CAPABILITIES) -> None:
        self._settings = settings
        self._capabilities = capabilities
        clock = SystemClock()
        self.stores = stores = Stores.at(settings.resolved_database_url, clock)
        self._clock = clock
        self.journal = stores.journal
        self._meshes = stores.meshes
        self._blobs = open_blob_store(settings.resolved_object_store)
        self._publisher = CompletionPublisher(settings.redis_url.get_secret_value())
        self._bell = ChannelListener(settings.redis_url.get_secret_value(), ring_channel(_MESH), lambda _: self._ring())
        self.executed: list[Claim] = []
        self.weights = WEIGHTS
        """What the next checkpoints hold."""
        self.rehearse: Callable[[Claim, ListenedSample], None] | None = None
        """Called with each sample that somebody listens to, before it is answered."""
        self.failing: Callable[[Claim], Failure | None] | None = None
        """Asked about each operation before it is answered: how it fails, if it does."""
        self.sequences: list[WireSequence] | None = None
        """What samples come out as; token 0, 1, 2 and so on if nothing is said."""
        self._lease: Lease | None = None
        self._may_run = threading.Event()
        self._pass = threading.Lock()
        self._may_run.set()
        self._rung = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-worker", daemon=True)

    def register(self) -> None:
        lease = self._meshes.acquire(_MESH, ProcessIdentity.current(), lease_s=3600)
        assert lease is not None
        self._meshes.publish(lease, self._capabilities)
        self._lease = lease

    @property
    def lease(self) -> Lease:
        assert self._lease is not None
        return self._lease

    def release(self) -> None:
        assert self._lease is not None
        self._meshes.release(self._lease)

    def start(self) -> None:
        self.register()
        self._bell.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._ring()
        self._thread.join()
        self._bell.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While this lasts nothing is claimed; begins when what is under way has ended."""
        self._may_run.clear()
        try:
            with self._pass:
                pass
            yield
        finally:
            self._may_run.set()
            self._ring()

    def payload(self, claim: Claim) -> bytes:
        return read_payload(self._blobs, claim.payload)

    def executed_of(self, lane: str) -> list[Claim]:
        return [claim for claim in self.executed if claim.lane == lane]

    def _run(self) -> None:
        assert self._lease is not None
        while not self._stopping.is_set():
            self._rung.clear()
            with self._pass:
                has_worked = self._may_run.is_set() and self._run_what_waits(self._lease)
            if not has_worked:
                self._rung.wait(_SWEEP_S)

    def _ring(self) -> None:
        self._rung.set()

    def _run_what_waits(self, lease: Lease) -> bool:
        """Whether there was anything."""
        claims = self._patiently(self._claim_operations) + self._patiently(self._claim_samples)
        if claims:
            records = {claim.request_id: Records() for claim in claims}
            outcomes = [self._answer(claim, records[claim.request_id]) for claim in claims]
            # Before the commit: whoever sees an outcome may look here the next moment.
            self.executed += claims
            self._patiently(partial(self.journal.commit, lease, outcomes, records))
            self._publisher.publish([outcome.request_id for outcome in outcomes])
        return bool(claims)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask until it is answered: PostgreSQL cuts the transaction of whoever the machine lets wait for long."""
        while True:
            try:
                return ask()
            except StorageUnavailable:
                if self._stopping.wait(_POLL_S):
                    raise

    def _claim_operations(self) -> list[Claim]:
        assert self._lease is not None
        return self.journal.claim(self._lease, with_virtual_time(lambda heads: heads), 16)

    def _claim_samples(self) -> list[Claim]:
        assert self._lease is not None
        choose = with_virtual_time(lambda heads: [turn.head for turn in in_service_order(heads)][:16])
        return self.journal.claim_samples(self._lease, choose, 16, under_way=())

    def _answer(self, claim: Claim, records: Records) -> Outcome:
        rejection = claim.rejection or self._why_not(claim)
        if rejection is not None:
            return _failed(claim, Failure(message=rejection, category=FailureCategory.USER, code="user"))
        failure = None if self.failing is None else self.failing(claim)
        if failure is not None:
            return _failed(claim, failure)
        if claim.kind is OperationKind.SAMPLE and self.rehearse is not None:
            request = parse_body(ListenedSample, self.payload(claim))
            if request.listener is not None:
                self.rehearse(claim, request)
        result = self._result(claim, records)
        inline_bytes, now = self._settings.inline_payload_bytes, self._clock.now()
        payload = write_result(self._blobs, claim.request_id, result, inline_bytes=inline_bytes, now=now)
        return Outcome(
            request_id=claim.request_id,
            lane=claim.lane,
            seq=claim.seq,
            kind=claim.kind,
            result=payload,
            num_tokens=self._num_tokens(claim),
            device_s=DEVICE_S,
            charge=charge_of_tokens(self._num_tokens(claim)),
        )

    def _why_not(self, claim: Claim) -> str | None:
        """What a sample is told whose session may no longer read what it was opened on."""
        if claim.kind is OperationKind.SAMPLE:
            try:
                self.stores.checkpoints.sampled(self.stores.sampling_sessions.find(claim.lane))
            except NotFound as error:
                return error.message
        return None

    def _num_tokens(self, claim: Claim) -> int:
        """What it processed: a sample's prompt is not among it."""
        if claim.kind is not OperationKind.SAMPLE:
            return claim.num_tokens
        request = parse_sample(self.payload(claim))
        return (request.sampling_params.max_tokens or 1) * request.num_samples

    def _result(self, claim: Claim, records: Records) -> bytes:
        payload = self.payload(claim)
        if is_call(payload):
            return self._call(claim, decode_call(payload), records)
        if claim.kind in {OperationKind.FORWARD, OperationKind.FORWARD_BACKWARD}:
            body = decode_data(payload, picture_rules=self._capabilities.pictures)
            logprobs = [np.full(len(datum.tokens), -1.0, dtype=np.float32) for datum in body.data]
            metrics = {"loss:sum": float(claim.seq)}
            if body.loss_fn_config.get("count_correct"):
                metrics[CORRECT_TOKENS] = 1.0
            return encode_forward_backward_output(ForwardBackwardResult(tuple(logprobs), metrics))
        if claim.kind is OperationKind.SAMPLE:
            return self._sample(payload)
        if claim.kind is OperationKind.UNLOAD_MODEL:
            return UnloadModelResponse(model_id=claim.lane).to_json()
        body = json.loads(payload)
        if claim.kind is OperationKind.OPTIM_STEP:
            return b'{"metrics":{"seq":%d}}' % claim.seq
        if claim.kind in _KIND_OF_SAVE:
            return json.dumps(self._save(claim, body, records)).encode()
        return json.dumps({"model_id": claim.lane, "path": body.get("path")}).encode()

    def _call(self, claim: Claim, call: Call, records: Records) -> bytes:
        if call.method == "save":
            kind = OperationKind.SAVE_WEIGHTS_FOR_SAMPLER if call.arguments["is_sampler"] else claim.kind
            body = {"path": call.arguments["name"] or f"checkpoint-{claim.seq}"}
            path = self._save(replace(claim, kind=kind), body, records)["path"]
            return json.dumps({"twinkle_path": path, "checkpoint_dir": path}).encode()
        return json.dumps({"result": {"method": call.method, "seq": claim.seq, **call.arguments}}).encode()

    def _sample(self, payload: bytes) -> bytes:
        request = parse_sample(payload)
        if self.sequences is not None:
            return encode_sample_response(SampleResult(tuple(self.sequences[: request.num_samples])))
        length = request.sampling_params.max_tokens or 1
        tokens, logprobs = np.arange(length, dtype=np.int32), np.full(length, -1.0, dtype=np.float32)
        topk = None
        if request.topk_sample_logprobs:
            ids = np.tile(np.arange(request.topk_sample_logprobs, dtype=np.int32), (length, 1))
            topk = TopkLogprobs(ids, np.full(ids.shape, -2.0, dtype=np.float32))
        sequence = WireSequence(tokens, logprobs, "length", topk)
        read = None
        if request.prompt_logprobs:
            read = np.full(request.num_prompt_tokens, -1.5, dtype=np.float32)
            read[0] = np.nan
        return encode_sample_response(SampleResult((sequence,) * request.num_samples, prompt_logprobs=read))

    def _save(self, claim: Claim, body: dict[str, object], records: Records) -> dict[str, object]:
        if "path" not in body:
            return self._open_sampler(claim, body, records)
        kind = _KIND_OF_SAVE[claim.kind]
        name = str(body["path"])
        path = f"tinker://{claim.lane}/{kind.segment}/{name}"
        key = f"checkpoints/{day_of(self._clock.now())}/{claim.lane}/{kind.segment}/{name}/{claim.seq}/adapter"
        self._blobs.put(key, self.weights)
        adapter = self.stores.adapters.find(claim.lane)
        checkpoint = Checkpoint(
            path=path,
            tenant=claim.tenant,
            adapter=claim.lane,
            kind=kind,
            name=name,
            seq=claim.seq,
            config=adapter.config,
            files={
                "adapter": StoredFile(key=key, size_bytes=len(self.weights), sha256=sha256(self.weights).hexdigest())
            },
            created_at=self._clock.now(),
        )
        records.checkpoints.append(checkpoint)
        return {"path": path}

    def _open_sampler(self, claim: Claim, body: dict[str, object], records: Records) -> dict[str, object]:
        adapter = self.stores.adapters.find(claim.lane)
        session = NewSamplingSession(
            id=f"{adapter.session}:sample:{body['sampling_session_seq_id']}",
            tenant=claim.tenant,
            session=adapter.session,
            mesh=adapter.mesh,
            base_model=adapter.config.base_model,
            weights=NewEphemeralWeights(
                adapter=claim.lane,
                seq=claim.seq,
                size_bytes=len(WEIGHTS),
                opened_at=self._clock.now(),
                expires_at=None,
                max_open=32,
            ),
            like=claim.lane,
        )
        records.sampling_sessions.append(session)
        return {"sampling_session_id": session.id}


def _failed(claim: Claim, failure: Failure) -> Outcome:
    return Outcome(request_id=claim.request_id, lane=claim.lane, seq=claim.seq, kind=claim.kind, failure=failure)
