"""What every sampler is: a state machine over many requests, and a convenient call on top of it."""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from twinkle.checkpoint_engine.peft import CONFIG_FILE, WEIGHTS_FILE
from twinkle.core.errors import InvalidInput
from twinkle.data_format.sampling import SampleResponse, SamplingParams
from twinkle.sampler.request import Adapter, DecodeText, SampleRequest, SampleResult
from twinkle.sampler.rows import Row, request_of, response_of
from twinkle.sampler.sequence import Stretch

Outcome = SampleResult | tuple[str, Exception]

MAX_ADAPTERS_FROM_FILES = 8


class PromptEncoder(Protocol):
    """The part of a template that a sampler needs."""

    def encode(self, trajectory: Mapping[str, Any], *, add_generation_prompt: bool) -> Mapping[str, Any]:
        """Return the trajectory with ``input_ids``."""
        ...


class Sampler(ABC):
    """Owned and stepped by one thread.

    Every backend keeps these promises: a request is ended by exactly one outcome, unless it is cancelled; one request's
    failure is its own; a request is sampled with the weights of its adapter or not at all, and with nobody else's.
    """

    def __init__(self, *, decode_text: DecodeText | None) -> None:
        self._decode_text = decode_text
        self._encoder: PromptEncoder | None = None
        self._adapters: dict[str, Adapter] = {}
        self._adapters_from_files: OrderedDict[str, Adapter] = OrderedDict()

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests added and not yet ended."""

    @abstractmethod
    def add(self, request: SampleRequest) -> None:
        """Queues a request.

        Raises:
            InvalidInput: A field is outside its limits, or this backend cannot serve it.
            Conflict: A request with this key has not ended yet.
        """

    @abstractmethod
    def cancel(self, key: str) -> None:
        """Forgets a request and frees what it holds; one that has ended already, or never was, is no error."""

    @abstractmethod
    def step(self) -> list[Outcome]:
        """Advances everything under way; returns the requests that ended with it, each in its own way.

        Raises:
            OutOfMemory: The device has no room. Cancel something, or step again.
        """

    @abstractmethod
    def drawn_so_far(self, key: str, known: Sequence[int]) -> list[Stretch]:
        """Returns what a request under way has drawn, of each sample ``i`` what lies beyond ``known[i]`` tokens.

        A sample that was begun anew and has fewer tokens is returned from its start. Computes nothing.
        """

    @abstractmethod
    def load_adapter(self, files: Mapping[str, bytes]) -> Adapter:
        """Returns an adapter from the files of a PEFT directory.

        Raises:
            InvalidInput: The files do not fit the base model.
        """

    def set_template(self, template: PromptEncoder) -> None:
        """Sets what turns trajectories into prompts; rows that hold ``input_ids`` need none."""
        self._encoder = template

    def add_adapter_to_sampler(self, adapter_name: str, adapter: Adapter) -> None:
        """Makes an adapter known under a name, in place of the one that had it."""
        if not adapter_name:
            raise InvalidInput("adapter_name", "is empty; the empty name stands for the base model")
        self._adapters[adapter_name] = adapter

    def sample(
        self,
        inputs: Sequence[Row],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str = "",
        adapter_path: str | None = None,
        *,
        use_base_model: bool = False,
    ) -> list[SampleResponse]:
        """Continues every row and waits for all: for a sampler of one's own, that nobody else adds requests to.

        Args:
            inputs: Token ids, rows with ``input_ids``, or trajectories if a template is set.
            sampling_params: The same for all rows.
            adapter_name: One that was added; empty for the base model.
            adapter_path: A PEFT directory, instead of a name. Read at every call, so it is never stale.
            use_base_model: Samples the base model whatever the adapter.

        Returns:
            One response for each row, in their order.

        Raises:
            InvalidInput: A row or a parameter is outside its limits, or the adapter is unknown.
            RuntimeError: Requests are under way already.
        """
        if self.num_requests:
            raise RuntimeError(f"{self.num_requests} requests are under way; step the sampler until they have ended")
        params = sampling_params or SamplingParams()
        if not isinstance(params, SamplingParams):
            params = SamplingParams.from_dict(params)
        adapter = None if use_base_model else self._adapter(adapter_name, adapter_path)
        rows = [self._encoded(row) for row in inputs]
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests = [
            # Rows that are equal shall not get equal samples, unless a seed was given.
            request_of(row, params, key=str(index), adapter=adapter, seed=seed + (index if params.seed is None else 0))
            for index, row in enumerate(rows)
        ]
        results = self._run(requests)
        return [
            response_of(results[request.key], row, params, decode_text=self._decode_text)
            for request, row in zip(requests, rows, strict=True)
        ]

    def _run(self, requests: Sequence[SampleRequest]) -> dict[str, SampleResult]:
        results: dict[str, SampleResult] = {}
        try:
            for request in requests:
                self.add(request)
            while self.has_work:
                for outcome in self.step():
                    if isinstance(outcome, tuple):
                        raise outcome[1]
                    results[outcome.key] = outcome
        finally:
            for request in requests:
                self.cancel(request.key)
        return results

    def _encoded(self, row: Row) -> Mapping[str, Any]:
        if not isinstance(row, Mapping):
            return {"input_ids": list(row)}
        if "input_ids" in row:
            return row
        if self._encoder is None:
            raise InvalidInput("inputs", "a row has no input_ids; encode the data set, or call set_template before")
        return self._encoder.encode(row, add_generation_prompt=True)

    def _adapter(self, name: str, path: str | None) -> Adapter | None:
        if path is not None:
            if name:
                raise InvalidInput("adapter_path", f"comes with adapter_name {name}; send one of them")
            return self._adapter_from_files(Path(path))
        if not name:
            return None
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters)) or "none"
            raise InvalidInput("adapter_name", f"{name} was not added to this sampler; known: {known}")
        return self._adapters[name]

    def _adapter_from_files(self, folder: Path) -> Adapter:
        try:
            files = {name: (folder / name).read_bytes() for name in (CONFIG_FILE, WEIGHTS_FILE)}
        except OSError as error:
            raise InvalidInput("adapter_path", f"{folder} is not a PEFT directory: {error.strerror}") from error
        digest = hashlib.sha256(files[CONFIG_FILE] + b"\0" + files[WEIGHTS_FILE]).hexdigest()
        adapter = self._adapters_from_files.get(digest)
        if adapter is None:
            adapter = self._adapters_from_files[digest] = self.load_adapter(files)
        self._adapters_from_files.move_to_end(digest)
        while len(self._adapters_from_files) > MAX_ADAPTERS_FROM_FILES:
            self._adapters_from_files.popitem(last=False)
        return adapter
