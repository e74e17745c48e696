"""The options of ``twinkle submit export``, and what they have in common with ``twinkle export``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from twinkle.cli.jobs.options import Spec
from twinkle.core.errors import ConfigError

TOKEN_VARIABLES = {"hf://": "HF_TOKEN", "ms://": "MODELSCOPE_API_TOKEN"}
"""Where the token for a hub is found: on a command line others on the machine would see it."""
_BUCKET = "s3://"
_KEY_VARIABLES = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
    "region": "AWS_REGION",
}

OwnKeyFlag = Annotated[
    bool,
    typer.Option("--own-key", help="Write to s3:// with the key of this environment, AWS_ACCESS_KEY_ID and so on."),
]
PublicFlag = Annotated[bool, typer.Option("--public", help="Let everybody see the repository, if it is made now.")]
TitleOption = Annotated[str | None, typer.Option(help="What the model is called in its card and in GGUF.")]
VerifyOption = Annotated[
    str | None,
    typer.Option(metavar="logits|files", help="How it is checked; files for models too large.  [default: logits]"),
]


def export_options(
    checkpoint: Annotated[str, typer.Option(metavar="tinker://...", help="What to export.")],
    form: Annotated[
        list[str] | None,
        typer.Option(help="peft, merged, gguf, gguf-q8_0, gguf-adapter or ollama; may be repeated.  [default: peft]"),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="hf://owner/name, ms://..., s3://..., file://...  [default: kept for download]"
        ),
    ] = None,
    public: PublicFlag = False,
    own_key: OwnKeyFlag = False,
    title: TitleOption = None,
    verify: VerifyOption = None,
) -> Spec:
    """Write a checkpoint in the form of other tools, checked by reading it back.

    The token for a hub is taken from HF_TOKEN or MODELSCOPE_API_TOKEN. twinkle export does the same and downloads.

    twinkle submit export --checkpoint tinker://.../weights/best --form merged --to hf://me/mine
    """
    return export_spec(checkpoint, form or ["peft"], to, is_public=public, own_key=own_key, title=title, verify=verify)


def export_spec(
    checkpoint: str,
    forms: list[str],
    to: str | None,
    *,
    is_public: bool,
    own_key: bool,
    title: str | None,
    verify: str | None,
) -> dict[str, object]:
    """The spec of an export, with the secrets that its target needs.

    Raises:
        ConfigError: One is missing in the environment.
    """
    spec: dict[str, object] = {"checkpoint": checkpoint, "forms": forms, "to": to, "title": title, "verify": verify}
    for scheme, variable in TOKEN_VARIABLES.items():
        if to is not None and to.startswith(scheme):
            spec |= {"hub_token": _required(variable, to), "private": not is_public}
    if own_key:
        if to is None or not to.startswith(_BUCKET):
            raise ConfigError("--own-key: is for --to s3://... alone")
        spec["credentials"] = _credentials(to)
    return spec


def _credentials(to: str) -> dict[str, str]:
    found = {name: os.environ.get(variable, "") for name, variable in _KEY_VARIABLES.items()}
    for name in ("access_key_id", "secret_access_key"):
        _required(_KEY_VARIABLES[name], to)
    return {name: value for name, value in found.items() if value}


def _required(variable: str, to: str) -> str:
    value = os.environ.get(variable, "")
    if not value:
        raise ConfigError(f"{variable} is not set, which {to} needs; set it to a token of yours that may write there")
    return value
