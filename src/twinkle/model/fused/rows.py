"""Between a script's rows and the jobs of the fused engine.

The engine knows losses of one datum. A loss C of a whole batch of logprobs has the same gradient as ``cross_entropy``
with the weights ``-dC/dlp``, which is how every loss runs here.

Shapes: B rows, T positions (padded), N tokens of a row, K alternatives a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from twinkle.core.errors import BatchTooLong, InvalidInput
from twinkle.core.pictures import PictureRules
from twinkle.loss import Loss
from twinkle.model.forward_pass import CAUSAL, EMBEDDING, ForwardPass, PassOptions
from twinkle.model.fused.training import ENTROPY_WEIGHTS, Datum, TrainJob, TrainOutcome
from twinkle.model.pictures import Patches, Picture
from twinkle.module.lora import LoraAdapter
from twinkle.processor import InputProcessor
from twinkle.processor.input_processor import IGNORED_LABEL, TokenSequence
from twinkle.processor.media import refuse_media

LOSS = "cross_entropy"


def with_teacher_indices(loss_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords in which a teacher's logits are cut to its ``topk`` tokens, whose logprobs the engine can give."""
    kwargs = dict(loss_kwargs)
    teacher, topk = kwargs.get("teacher_logits"), kwargs.get("topk")
    if teacher is not None and topk is not None:
        del kwargs["teacher_logits"]
        kwargs["teacher_topk_logprobs"], kwargs["teacher_topk_indices"] = torch.as_tensor(teacher).topk(topk, dim=-1)
    return kwargs


def open_pass(
    rows: Sequence[Mapping[str, Any]],
    processor: InputProcessor,
    loss_kwargs: Mapping[str, Any],
    *,
    is_training: bool,
    max_length: int,
    picture_rules: PictureRules | None = None,
) -> ForwardPass:
    """A pass that has not run: the tokens of each row, and the targets whose logprobs are wanted.

    Raises:
        BatchTooLong: The rows hold more than ``max_length`` tokens.
        InvalidInput: A row has no labels, or not as many as tokens.
    """
    sequences = processor.sequences(rows)
    num_tokens = sum(len(sequence.input_ids) for sequence in sequences)
    if num_tokens > max_length:
        raise BatchTooLong(
            "inputs", f"hold {num_tokens} tokens, max_length is {max_length}; send fewer or shorter rows"
        )
    labels: list[torch.Tensor] = []
    for index, sequence in enumerate(sequences):
        if sequence.labels is None:
            raise InvalidInput(f"inputs[{index}].labels", "is missing; send the next token for each of input_ids")
        if sequence.labels.shape != sequence.input_ids.shape or sequence.labels.is_floating_point():
            raise InvalidInput(
                f"inputs[{index}].labels", f"must be token ids, one for each of the {len(sequence.input_ids)} tokens"
            )
        labels.append(sequence.labels)
    targets = [values.masked_fill(values == IGNORED_LABEL, 0) for values in labels]
    if loss_kwargs.get("teacher_topk_indices") is not None:
        alternatives = _teacher_rows(loss_kwargs["teacher_topk_indices"], targets)
        targets = [torch.cat([own[:, None], other], dim=1) for own, other in zip(targets, alternatives, strict=True)]
    labels_BT = pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL)
    return ForwardPass(
        inputs={"labels": labels_BT},
        outputs={},
        is_training=is_training,
        tokens=[sequence.input_ids for sequence in sequences],
        targets=targets,
        pictures=[_placed(f"inputs[{index}]", sequence, picture_rules) for index, sequence in enumerate(sequences)],
        loss_kwargs=loss_kwargs,
    )


def _placed(field: str, sequence: TokenSequence, rules: PictureRules | None) -> tuple[Picture, ...]:
    """The pictures of a row where its tokens for pictures are."""
    if sequence.pictures is None:
        refuse_media(field, sequence.media, "is of a kind that this model does not take; use TransformersModel")
        return ()
    if rules is None:
        raise InvalidInput(f"{field}.pixel_values", "is a picture, but this model takes text alone")
    grids = [(time, rows, columns) for time, rows, columns in sequence.pictures.image_grid_thw.tolist()]
    sizes = [time * rows * columns for time, rows, columns in grids]
    places = (sequence.input_ids == rules.token_id).nonzero().flatten().tolist()
    num_tokens = [size // rules.merge_size**2 for size in sizes]
    if len(places) != sum(num_tokens):
        raise InvalidInput(
            f"{field}.input_ids",
            f"holds {len(places)} tokens {rules.token_id} that stand for pictures, but image_grid_thw makes"
            f" {sum(num_tokens)}; encode the row with this model's processor",
        )
    pictures: list[Picture] = []
    first = 0
    for grid, patches, length in zip(grids, sequence.pictures.pixel_values.split(sizes), num_tokens, strict=True):
        pictures.append(Picture(places[first], length, Patches(patches.numpy(), grid)))
        first += length
    return tuple(pictures)


def scoring_job(opened: ForwardPass, adapter: LoraAdapter, loss: Loss) -> TrainJob:
    """The engine's job for a pass's logprobs, and for the entropies of their distributions if the loss wants them."""
    return dataclasses.replace(job_of(opened, adapter, None), with_entropies=loss.require_entropy)


def job_of(
    opened: ForwardPass,
    adapter: LoraAdapter,
    weights: Sequence[torch.Tensor] | None,
    entropy_weights: Sequence[torch.Tensor] = (),
) -> TrainJob:
    """The engine's job for a pass: with weights a backward pass, without them the logprobs alone."""
    data: list[Datum] = []
    for index, (tokens_N, targets) in enumerate(zip(opened.tokens, opened.targets, strict=True)):
        row = torch.zeros(targets.shape) if weights is None else weights[index]
        inputs = {"target_tokens": targets.numpy(), "weights": row.to(torch.float32).numpy()}
        if entropy_weights:
            inputs[ENTROPY_WEIGHTS] = entropy_weights[index].to(torch.float32).numpy()
        data.append(
            Datum(
                tokens=tokens_N.numpy(),
                pictures=opened.pictures[index],
                inputs=inputs,
            )
        )
    return TrainJob(adapter, tuple(data), LOSS, backward=weights is not None, with_entropies=bool(entropy_weights))


def set_outputs(opened: ForwardPass, outcome: TrainOutcome) -> None:
    """Fill in a pass's ``logps`` (B, T), and ``topk_logps`` (B, T, K) where a teacher's tokens were asked for.

    ``entropies`` (B, T) come with them where they were computed. In training they are leaves, by which a loss can be
    differentiated.
    """
    padded = pad_sequence([torch.from_numpy(values) for values in outcome.logprobs], batch_first=True)
    if padded.dim() == 2:
        outputs = {"logps": padded}
    else:
        outputs = {"logps": padded[..., 0].clone(), "topk_logps": padded[..., 1:].clone()}
    if outcome.entropies:
        rows = [torch.from_numpy(values) for values in outcome.entropies]
        outputs["entropies"] = pad_sequence(rows, batch_first=True)
    opened.outputs = {name: values.requires_grad_(opened.is_training) for name, values in outputs.items()}


def weights_of(opened: ForwardPass) -> tuple[torch.Tensor, ...]:
    """``-dC/dlp`` of the pass's loss C for each row, in the shape of its targets; its loss is settled.

    Raises:
        InvalidInput: No output took part in the loss.
    """
    opened.settle_loss()
    if opened.gradients is None:
        raise InvalidInput("loss", "does not depend on the logprobs, so it has no gradient")
    weights = -opened.gradients["logps"]
    if "topk_logps" in opened.gradients:
        weights = torch.cat([weights[..., None], -opened.gradients["topk_logps"]], dim=-1)
    return tuple(row[: len(tokens_N)] for row, tokens_N in zip(weights, opened.tokens, strict=True))


def entropy_weights_of(opened: ForwardPass) -> tuple[torch.Tensor, ...]:
    """``-dC/dH`` of a settled loss C for each row, H the entropies; empty where it has none."""
    if opened.gradients is None or "entropies" not in opened.gradients:
        return ()
    weights = -opened.gradients["entropies"]
    return tuple(row[: len(tokens_N)] for row, tokens_N in zip(weights, opened.tokens, strict=True))


def linear_weights(opened: ForwardPass, loss: Loss) -> tuple[torch.Tensor, ...]:
    """The weights of a loss whose gradient does not depend on the logprobs, before these are known."""
    zeros_BT = torch.zeros(opened.inputs["labels"].shape, requires_grad=True)
    trial = dataclasses.replace(opened, outputs={"logps": zeros_BT})
    trial.calculate_loss(loss)
    return weights_of(trial)


def _teacher_rows(indices: Any, targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    indices_BTK = torch.as_tensor(indices).cpu()
    longest = max(len(row) for row in targets)
    if indices_BTK.dim() != 3 or indices_BTK.shape[0] != len(targets) or indices_BTK.shape[1] < longest:
        raise InvalidInput(
            "teacher_topk_indices",
            f"have shape {tuple(indices_BTK.shape)}; send ({len(targets)}, {longest}, K), padded like the rows",
        )
    return [row_TK[: len(target)].to(torch.int64) for row_TK, target in zip(indices_BTK, targets, strict=True)]


def refuse_options(options: PassOptions, *, may_return_logits: bool) -> None:
    """Raise ``InvalidInput`` for what the engine does not compute."""
    if options.temperature != 1.0:
        raise InvalidInput("temperature", f"is {options.temperature}; the fused engine computes logprobs at 1 only")
    if options.router_replay_action is not None:
        raise InvalidInput("router_replay_action", "the fused engine routes every pass anew; use TransformersModel")
    if options.return_logits and not may_return_logits:
        raise InvalidInput("return_logits", "the fused engine keeps no logits in training; ask forward_only for them")
    if options.task not in (CAUSAL, EMBEDDING):
        tasks = f"{CAUSAL} and {EMBEDDING}"
        raise InvalidInput(
            "task", f"is {options.task!r}; the fused engine does {tasks}, for others use TransformersModel"
        )


def raise_failures(outcomes: Sequence[TrainOutcome | Exception]) -> None:
    """Raise the failure of one job, or those of several as a group."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"the passes of {len(failures)} adapters failed", failures)
