"""Which spec each kind of jobs has. Adding a kind is one line here and one in ``twinkle.jobs.plans``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from twinkle.core.errors import InvalidInput
from twinkle.wire.bodies.jobs_base import JobSpec, parse_part
from twinkle.wire.bodies.jobs_batch import BatchSpec
from twinkle.wire.bodies.jobs_check import CheckSpec
from twinkle.wire.bodies.jobs_export import ExportSpec
from twinkle.wire.bodies.jobs_flow import FlowSpec
from twinkle.wire.bodies.jobs_ops import OpsSpec
from twinkle.wire.bodies.jobs_rl import DistillSpec, ReinforcementSpec
from twinkle.wire.bodies.jobs_script import ScriptSpec
from twinkle.wire.bodies.jobs_sweep import SweepSpec
from twinkle.wire.bodies.jobs_training import PreferenceSpec, SupervisedSpec

SPECS: Mapping[str, type[JobSpec]] = {
    "batch": BatchSpec,
    "check": CheckSpec,
    "distill": DistillSpec,
    "dpo": PreferenceSpec,
    "export": ExportSpec,
    "flow": FlowSpec,
    "grpo": ReinforcementSpec,
    "ops": OpsSpec,
    "script": ScriptSpec,
    "sft": SupervisedSpec,
    "sweep": SweepSpec,
}


def parse_spec(kind: str, values: Mapping[str, object], *, within: str = "") -> JobSpec:
    """Reads the spec of a kind of jobs; ``within`` is where the job stands in its request.

    Raises:
        InvalidInput: A field is wrong, missing or unknown, or there is no such kind.
    """
    spec_class = SPECS.get(kind)
    if spec_class is None:
        raise InvalidInput(f"{within}.kind".strip("."), f"{kind!r} is none of {', '.join(sorted(SPECS))}")
    return parse_part(spec_class, json.dumps(dict(values)).encode(), within=f"{within}.spec".strip("."))
