"""What a transformers model makes of a batch.

Shapes: B rows, T positions (padded), V vocabulary, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch

from twinkle.core.errors import InvalidInput
from twinkle.loss import Loss
from twinkle.model.forward_pass import CAUSAL, EMBEDDING, PassOptions, entropies, label_logps
from twinkle.processor import ModelBatch
from twinkle.processor.media import PIXELS

TASKS = (CAUSAL, EMBEDDING, "fused_lm_ce")


def check_options(options: PassOptions) -> None:
    """Raise ``InvalidInput`` for options that no pass can have."""
    if options.task not in TASKS:
        raise InvalidInput("task", f"is {options.task!r}; send one of {', '.join(TASKS)}")
    if not options.temperature > 0:
        raise InvalidInput("temperature", f"is {options.temperature}, must be positive")
    if options.micro_batch_size is not None and options.micro_batch_size < 1:
        raise InvalidInput("micro_batch_size", f"is {options.micro_batch_size}, must be at least 1")


def outputs_of(model: Any, batch: ModelBatch, loss: Loss, options: PassOptions) -> dict[str, torch.Tensor]:
    """The outputs that the task and the loss want."""
    return _embed(model, batch) if options.task == EMBEDDING else _score(model, batch, loss, options)


def _score(model: Any, batch: ModelBatch, loss: Loss, options: PassOptions) -> dict[str, torch.Tensor]:
    logits_BTV = batch.unpack(model(**_inputs(model, batch), use_cache=False).logits)
    if options.temperature != 1.0:
        logits_BTV = logits_BTV / options.temperature
    outputs: dict[str, torch.Tensor] = {}
    if batch.labels is not None and batch.labels.shape == logits_BTV.shape[:2]:
        _check_labels(batch, logits_BTV.shape[-1])
        outputs["logps"] = label_logps(logits_BTV, batch.labels)
    if options.return_logits or loss.require_logits:
        outputs["logits"] = logits_BTV
    if loss.require_entropy:
        outputs["entropies"] = entropies(logits_BTV)
    return outputs


def _check_labels(batch: ModelBatch, vocab_size: int) -> None:
    """Raises ``InvalidInput`` for labels of another row, or that the model has no word for."""
    for number, (found, wanted) in enumerate(zip(batch.label_lengths, batch.lengths, strict=True)):
        if found != wanted:
            raise InvalidInput("inputs", f"have {found} labels for the {wanted} input_ids of sequence {number}")
    if batch.largest_label >= vocab_size:
        raise InvalidInput("inputs", f"have the label {batch.largest_label}; the model knows tokens below {vocab_size}")


def values_of(model: Any, batch: ModelBatch) -> dict[str, torch.Tensor]:
    """What a critic, whose head has one output, says of each position: the values (B, T)."""
    return {"values": batch.unpack(model(**_inputs(model, batch), use_cache=False).logits).squeeze(-1)}


def _embed(model: Any, batch: ModelBatch) -> dict[str, torch.Tensor]:
    """The last token's last hidden state of each row: the embeddings (B, H)."""
    result = model(**_inputs(model, batch), use_cache=False, output_hidden_states=True, logits_to_keep=1)
    return {"embeddings": batch.last_positions(result.hidden_states[-1])}


def _inputs(model: Any, batch: ModelBatch) -> dict[str, torch.Tensor]:
    """What the model is given.

    Padding has position -1, which a table of positions does not hold; what stands there is masked anyway.

    Raises:
        InvalidInput: The batch has a token that is not the model's, or pictures, and the model was loaded without what
            looks at them.
    """
    inputs = batch.model_inputs
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if batch.largest_token >= vocab_size:
        raise InvalidInput(
            "inputs",
            f"have the token {batch.largest_token}; the model knows those below {vocab_size}. Encode them by the"
            " template of this model",
        )
    pictures = [name for name in PIXELS if name in inputs]
    if pictures and getattr(model.config, "vision_config", None) is None:
        raise InvalidInput(
            "inputs",
            f"have {pictures[0]}, but the model was loaded for text alone; name its class for pictures as model_cls, as"
            " in model_cls='AutoModelForImageTextToText', or take MultiLoraTransformersModel",
        )
    return {**inputs, "position_ids": inputs["position_ids"].clamp(min=0)}
