"""Rollouts of several turns whose sampler is a service."""

from __future__ import annotations

from twinkle_agentic.rollout.multi_turn import MultiTurnRollout


class ClientMultiTurnRollout(MultiTurnRollout):
    """Tools, template and history are this process's; only sampling is the service's.

    Every turn is one ``sample`` call with one sample a row; further arguments of a call (``adapter_uri=``) go to it.
    """


__all__ = ["ClientMultiTurnRollout"]
