"""What a script's model id means on this machine."""

from __future__ import annotations

from pathlib import Path

from twinkle.core.errors import ConfigError

HUGGING_FACE = "hf"


def resolve_model_id(model_id: str) -> str:
    """A local directory, or an id of the Hugging Face hub for transformers to load.

    The text after the last ``://`` is looked for in the file system first, whatever the scheme.

    Raises:
        ConfigError: The model is of a hub that cannot be reached.
    """
    scheme, _, rest = model_id.rpartition("://")
    if Path(rest).expanduser().exists():
        return str(Path(rest).expanduser())
    if scheme and scheme != HUGGING_FACE:
        raise ConfigError(
            f"model_id: {model_id} is not a local directory, and models of {scheme}:// are not downloaded; download it "
            "and pass the directory, or use hf://"
        )
    return rest
