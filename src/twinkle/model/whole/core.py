"""A model that is trained whole: what the fused engine is to adapters, for copies of all its parameters.

A copy is an adapter whose flat buffers hold every parameter (``twinkle.module.whole``), so that jobs, optimizers,
snapshots and calls are those of adapters. A pass is one copy's: nothing is shared with others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from twinkle.core.errors import ConfigError, OutOfMemory
from twinkle.core.slices import Slices
from twinkle.infra.device_memory import bytes_of
from twinkle.infra.rank_group import ALONE
from twinkle.model.device_traits import plain_dtype
from twinkle.model.fused.adam import adam_step
from twinkle.model.fused.determinism import strict_mode_in_force
from twinkle.model.fused.gradient_buffers import is_out_of_memory
from twinkle.model.fused.job_run import JobRun
from twinkle.model.fused.model_info import model_info
from twinkle.model.fused.one_by_one import UNFUSED, OneByOne
from twinkle.model.fused.training import AdamParams, Datum, TrainJob
from twinkle.model.loading import load_base_model, takes_pictures
from twinkle.model.whole.rows import RowsPass, parts_of
from twinkle.module.lora import LoraAdapter, LoraConfig
from twinkle.module.whole import WHOLE, WholePool

TOKENS_PER_PASS = {"cpu": 1024}
TOKENS_PER_PASS_ACCELERATOR = 8192
PROBE_TOKENS = 24


class WholeModelCore(OneByOne):
    """The jobs of :mod:`twinkle.model.fused.training` on copies of all of a model's parameters.

    Parameters, gradients and moments are float32; on an accelerator products are made in bfloat16. Dropout is not
    applied, so that an operation done again computes the same. Not thread-safe: one pass at a time.

    Args:
        model: As transformers made it, in float32; it is taken over.
        name: What it is called.
        tokens_per_pass: About how many tokens, padding included, it takes at once; what suits the device if omitted.
    """

    without_embeddings = "a run of the whole model has not; train an adapter for it"
    picture_rules = None
    """It takes text."""
    ranks = ALONE

    def __init__(self, model: Any, *, name: str, tokens_per_pass: int | None = None) -> None:
        self.model = model.eval().requires_grad_(True)
        self.pool = WholePool(self.model)
        self.device: torch.device = self.pool.base.params.device
        self.info = model_info(model, name=name, max_rank=0)
        self._tokens_per_pass = tokens_per_pass or TOKENS_PER_PASS.get(self.device.type, TOKENS_PER_PASS_ACCELERATOR)
        self._compute_dtype = plain_dtype(self.device.type)
        self.determinism = self._measured()

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        name: str,
        device: str = "cpu",
        tokens_per_pass: int | None = None,
        prepare: Callable[[Any], None] = lambda model: None,
    ) -> WholeModelCore:
        """Load a model to be trained; ``prepare`` gets it as transformers made it.

        Raises:
            ConfigError: It cannot be loaded, or it looks at pictures.
        """
        if takes_pictures(path):
            raise ConfigError(
                f"TWINKLE_SERVES: whole-model trains language models; {name} looks at pictures, which would be left out"
            )
        model = load_base_model(path, name=name, dtype=torch.float32).to(torch.device(device))
        prepare(model)
        return cls(model, name=name, tokens_per_pass=tokens_per_pass)

    def _measured(self) -> str:
        """Whether a job that is done again is seen to have the same bits."""
        if self.device.type != "cpu" or not strict_mode_in_force():
            return "none"
        tokens = np.arange(PROBE_TOKENS) % self.info.vocab_size
        tokens = tokens[: self.info.max_context_length]
        inputs: dict[str, np.ndarray] = {"target_tokens": tokens, "weights": np.ones(tokens.size, dtype=np.float32)}
        probe = self.pool.create(WHOLE)
        gradients = []
        for _ in range(2):
            data = (Datum(tokens, inputs), Datum(tokens[:5], {key: each[:5] for key, each in inputs.items()}))
            (outcome,) = self.forward_backward([TrainJob(probe, data, "cross_entropy")])
            if isinstance(outcome, Exception):
                raise ConfigError(f"TWINKLE_MODEL: a pass of {self.info.name} fails: {outcome}") from outcome
            gradients.append(probe.grad.clone())
            probe.clear_gradients()
        return UNFUSED if torch.equal(*gradients) else "none"

    @property
    def base_bytes(self) -> int:
        """See :class:`LoraCore`."""
        return bytes_of(self.model)

    def create_adapter(self, config: LoraConfig, *, trainable: bool = True) -> LoraAdapter:
        """A copy of the model's parameters as they were loaded."""
        return self.pool.create(config, trainable=trainable)

    def optim_step(self, adapter: LoraAdapter, params: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients of one copy."""
        return adam_step(adapter, params)

    def _run_job(self, run: JobRun) -> Slices[None]:
        for number, part in enumerate(parts_of(run.job.data, tokens_per_pass=self._tokens_per_pass)):
            if number:
                yield
            self._run_part(run, part)
            if run.failure is not None:
                return

    def _run_part(self, run: JobRun, part: range) -> None:
        rows = RowsPass(self.model, run, part, self.device, self._compute_dtype)
        try:
            with self.pool.lent(run.job.adapter, run.sum), torch.set_grad_enabled(run.job.backward):
                rows.run()
        except Exception as error:  # noqa: BLE001 - whatever it was, it is this job's alone
            is_memory = is_out_of_memory(error)
            run.fail(OutOfMemory(f"the device ran out of memory: {error}") if is_memory else error.with_traceback(None))
