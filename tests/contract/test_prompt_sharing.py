"""What is computed of a prompt is used for its tenant alone, or for those the operator put together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from harness.journal import Bench, new_sampler
from harness.models import make_text_model
from harness.worker import WorkerRig
from twinkle.core.errors import ConfigError
from twinkle.core.ids import request_id_of
from twinkle.core.operation import OperationKind, Payload, Submission
from twinkle.core.settings import Settings, load_settings
from twinkle.storage.blobs import FolderStore
from twinkle.wire.sample_result import decode_sample_response
from twinkle.workers.endings import Execution
from twinkle.workers.engines.transformers_engine import TransformersEngine
from twinkle.workers.sampling.sampling import CacheGroups

PROMPT = list(range(7, 307))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_model(tmp_path_factory.mktemp("model") / "tiny")


class Desk:
    """The sampling half of a worker, on a real engine, that samples one request after the other."""

    def __init__(self, bench: Bench, model: Path, folder: Path, groups: Mapping[str, Sequence[str]]) -> None:
        self.bench = bench
        self.lease = bench.lease()
        self.engine = TransformersEngine.from_settings(Settings(model=str(model), threads=1))
        rig = WorkerRig(
            "a",
            stores=bench.stores,
            blobs=FolderStore(folder),
            clock=bench.clock,
            sample_slots=8,
            engine=self.engine,
            cache_groups=CacheGroups(groups, lambda tenant: f"name of {tenant}"),
        )
        self.samples = rig.samples
        self.num_rows = 0
        self._seqs = dict.fromkeys(("t0", "t1"), 0)
        run_packed = self.engine.model.run_packed

        def counted(token_ids: torch.Tensor, *others: object) -> torch.Tensor:
            self.num_rows += len(token_ids)
            return run_packed(token_ids, *others)  # type: ignore[arg-type]

        self.engine.model.run_packed = counted  # type: ignore[method-assign,assignment]

    def sample(self, *tenants: str, prompt: Sequence[int] = PROMPT) -> tuple[int, list[int]]:
        """One sample of one token for each, in one batch: the rows the model computed, the cached tokens of each."""
        asked = [self._submit(tenant, prompt) for tenant in tenants]
        self.num_rows = 0
        execution = Execution()
        self.samples.admit(self.bench.claim_samples(self.lease, 8), execution)
        while not self.samples.is_idle:
            self.samples.run_slice(ended := Execution())
            execution.outcomes += ended.outcomes
        self.bench.journal.commit(self.lease, execution.outcomes)
        results = {outcome.request_id: outcome.result for outcome in execution.outcomes}
        return self.num_rows, [self._cached_tokens(results[request_id]) for request_id in asked]

    def _submit(self, tenant: str, prompt: Sequence[int]) -> str:
        lane = f"{tenant}:sample:0"
        self.bench.journal.open_lane(new_sampler(lane, tenant=tenant))
        seq, self._seqs[tenant] = self._seqs[tenant], self._seqs[tenant] + 1
        body = {
            "sampling_session_id": lane,
            "seq_id": seq,
            "prompt": {"chunks": [{"tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": 1, "seed": 1},
        }
        payload = Payload(inline=json.dumps(body).encode())
        kind = OperationKind.SAMPLE
        self.bench.append(Submission(tenant=tenant, lane=lane, seq=seq, kind=kind, digest=str(seq), payload=payload))
        return request_id_of(lane, seq)

    @staticmethod
    def _cached_tokens(result: Payload | None) -> int:
        assert result is not None
        assert result.inline is not None
        return decode_sample_response(result.inline).prompt_cache_hit_tokens


MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk(bench: Bench, model: Path, tmp_path: Path) -> MakeDesk:
    return lambda groups=None: Desk(bench, model, tmp_path, groups or {})


def test_a_stranger_learns_nothing_of_a_prompt_that_a_tenant_has_just_sent(make_desk: MakeDesk) -> None:
    desk = make_desk()

    assert desk.sample("t0") == (len(PROMPT), [0])
    assert desk.sample("t1") == (len(PROMPT), [0])


def test_a_stranger_learns_nothing_of_a_prompt_in_the_same_batch(make_desk: MakeDesk) -> None:
    rows, cached = make_desk().sample("t0", "t1", "t0")

    assert rows == 2 * len(PROMPT)
    assert cached == [0, 0, len(PROMPT)]


def test_a_tenant_finds_its_own_prompt_computed(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.sample("t0")

    assert desk.sample("t0") == (0, [len(PROMPT)])
    assert desk.sample("t0", prompt=[*PROMPT, 5, 6]) == (len(PROMPT) - 256 + 2, [256])


def test_tenants_whom_the_operator_put_together_share(make_desk: MakeDesk) -> None:
    desk = make_desk({"research": ["name of t0", "name of t1"]})
    desk.sample("t0")

    assert desk.sample("t1") == (0, [len(PROMPT)])


def test_a_group_is_not_the_tenant_of_that_name() -> None:
    groups = CacheGroups({"t1": ["name of t0"], "tenant:t1": ["name of t2"]}, lambda tenant: f"name of {tenant}")

    assert len({groups.of(tenant) for tenant in ("t0", "t1", "t2", "t3")}) == 4


def test_groups_come_from_the_settings_and_name_a_tenant_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINKLE_PROMPT_CACHE_GROUPS", '{"research": ["alice", "bob"]}')
    assert load_settings().prompt_cache_groups == {"research": ["alice", "bob"]}

    monkeypatch.setenv("TWINKLE_PROMPT_CACHE_GROUPS", '{"research": ["alice", "bob"], "sales": ["alice"]}')
    with pytest.raises(ConfigError, match=r"TWINKLE_PROMPT_CACHE_GROUPS: .*alice is named twice"):
        load_settings()
