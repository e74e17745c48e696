"""``twinkle submit flow.yaml``: jobs by name and what each of them waits for, out of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from twinkle.cli.jobs.options import Spec, data_of
from twinkle.core.errors import ConfigError, InvalidInput
from twinkle.wire.bodies.jobs_base import parse_part
from twinkle.wire.bodies.jobs_flow import FlowFile, FlowSpec
from twinkle.wire.flows import steps_of

_FILES = ("data", "eval_data", "prompts")
"""Fields of specs that may name a file of this machine."""
_PURPOSE = "fine-tune"
_PURPOSES = {"batch": "batch"}


def read_flow(path: Path) -> FlowFile:
    """A flow's file, with its names and circles looked at before anything is sent.

    Raises:
        ConfigError: There is no such file, or it is no flow; the message names the field.
    """
    try:
        said = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(said, dict):
        raise ConfigError(f"{path} is no flow: it has no `jobs`; `twinkle submit flow --schema` says what it may hold")
    try:
        flow = parse_part(FlowFile, json.dumps(said).encode())
        steps_of(FlowSpec(jobs=flow.jobs))
    except InvalidInput as error:
        raise ConfigError(f"{path}: {error.message}") from error
    except TypeError as error:
        raise ConfigError(
            f"{path}: {error}; dates and other objects of YAML are written as texts, in quotes"
        ) from error
    return flow


def flow_jobs(flow: FlowFile) -> dict[str, dict[str, Any]]:
    """The jobs as a request has them, but for files of this machine, which are yet to be uploaded."""
    return {
        name: {
            "kind": job.kind,
            "spec": _with_files(job.kind, job.spec),
            "after": {other: condition.value for other, condition in job.after.items()},
        }
        for name, job in flow.jobs.items()
    }


def _with_files(kind: str, spec: Mapping[str, Any]) -> Spec:
    """The spec of one job, or of a sweep's template."""
    found = {
        name: _file(value, _PURPOSES.get(kind, _PURPOSE)) if name in _FILES else value for name, value in spec.items()
    }
    template = spec.get("template")
    if isinstance(template, dict) and isinstance(template.get("spec"), dict):
        found["template"] = {**template, "spec": _with_files(str(template.get("kind")), template["spec"])}
    return found


def _file(value: Any, purpose: str) -> Any:
    is_named = isinstance(value, str) and "${" not in value
    return data_of(value, purpose=purpose) if is_named else value
