"""Losses as a client writes them, and what the official SDK makes of them on its way to the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from twinkle.core.loss_graph import LossGraph
from twinkle.wire.loss_graph import parse_loss_graph

Traceable = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]
SESSION = "4f6c3c1e-0000-4000-8000-000000000001"


def encoded(loss: Traceable, ranks: Mapping[str, int], *, session: str = SESSION, number: int = 0) -> dict[str, Any]:
    """The body of the ``create_custom_loss`` that the SDK would send."""
    handle = trace_loss(loss, ranks, session)  # type: ignore[arg-type]
    return {
        "type": "create_custom_loss",
        "session_id": session,
        "custom_loss_seq_id": number,
        "name": handle.name,
        "inputs": [declared.model_dump() for declared in handle.inputs],
        "graph": encode_graph(handle).model_dump(),
    }


def graph_of(loss: Traceable, ranks: Mapping[str, int]) -> LossGraph:
    """A loss as the service reads it."""
    return parse_loss_graph(json.dumps(encoded(loss, ranks)).encode())


def likelihood(logprobs, weights):
    loss = -(logprobs * weights).sum()
    return loss, {"custom/likelihood:sum": loss}


def clipped_policy(logprobs, old_logprobs, advantages, mask):
    ratio = torch.exp(logprobs - old_logprobs)
    lowest = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    num_trained = mask.sum().clamp(min=1)
    loss = -(lowest * mask).sum() / num_trained
    metrics = {
        "custom/clipped:mean": ((ratio - 1).abs() > 0.2).float().mean(),
        "custom/kl:mean": ((old_logprobs - logprobs) * mask).sum() / num_trained,
        "custom/trained:sum": mask.sum(),
    }
    return loss, metrics


def preference(logprobs, reference_logprobs, beta):
    """A pair in one datum: the first of a position's two targets is preferred to the second."""
    chosen, rejected = logprobs.unbind(1)
    chosen_reference, rejected_reference = reference_logprobs.unbind(1)
    margin = beta * ((chosen - chosen_reference).sum() - (rejected - rejected_reference).sum())
    loss = -functional.logsigmoid(margin)
    return loss, {"custom/preference/margin:mean": margin, "custom/preference/accuracy:mean": (margin > 0).float()}


def distribution(logprobs, target_distribution):
    """Cross entropy against a teacher's distribution over K targets, renormalised over them."""
    student = torch.log_softmax(logprobs, dim=-1)
    loss = -(target_distribution * student).sum(dim=-1).mean()
    entropy = -(student.exp() * student).sum(-1).mean()
    return loss, {"custom/entropy:mean": entropy}


def ranked(logprobs, rewards):
    """A loss of all pairs of positions: a matrix, a triangle, indices, a sort."""
    order = torch.argsort(rewards, descending=True)
    sorted_logprobs = logprobs[order]
    differences = sorted_logprobs[:, None] - sorted_logprobs[None, :]
    above = torch.triu(torch.ones_like(differences), diagonal=1)
    loss = (functional.softplus(-differences) * above).sum() / above.sum().clamp(min=1.0)
    return loss, {"custom/best:mean": sorted_logprobs[0]}
