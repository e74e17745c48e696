"""What a script does with a model besides training it: change it by a patch, push what it has saved."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from twinkle.hub.caches import published_id
from twinkle.hub.model_card import ModelCard
from twinkle.hub.operation import HubOperation
from twinkle.infra.runtime import is_master
from twinkle.plugin.patching import Patch, apply_patch


class _WithModel(Protocol):
    @property
    def model(self) -> Any: ...

    @property
    def model_id(self) -> str: ...


class HubCalls:
    """Calls that every model of this package has."""

    def apply_patch(self: _WithModel, patch_cls: Any, *, adapter_name: str = "", **settings: Any) -> Patch:
        """Change the model by a patch, for all its adapters; the patch, to take it back with.

        Args:
            patch_cls: An object or a class of ``twinkle.patch.Patch``, a function of the model, a name, or the id of a
                plugin, which the operator has to trust.
            adapter_name: Taken as everywhere; a patch is of the whole model.
            settings: For the patch's call.

        Raises:
            InvalidInput: It is none of these, or not trusted.
        """
        return apply_patch(self.model, patch_cls, **settings)

    def upload_to_hub(
        self: _WithModel,
        checkpoint_dir: str | Path,
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,
    ) -> Future[str] | str | None:
        """Push a checkpoint, private and with a card that names base and metrics. The first rank does.

        Returns:
            The URL, or a future of it while training goes on; nothing on the other ranks.

        Raises:
            ConfigError: There is no such folder, or the hub refuses.
        """
        if not is_master():
            return None
        base = published_id(self.model_id)
        card = ModelCard(base=None if Path(base).is_absolute() else base)
        if async_upload:
            return HubOperation.async_push_to_hub(hub_model_id, checkpoint_dir, token=hub_token, card=card)
        return HubOperation.push_to_hub(hub_model_id, checkpoint_dir, token=hub_token, card=card)
