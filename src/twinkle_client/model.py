"""Models at a server, under the names that training scripts use: only the import path changes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

from twinkle.core.model_names import plain_model_name
from twinkle_client.connection import Connection, current
from twinkle_client.endpoint import model_path
from twinkle_client.errors import CallFailed, InvalidInput
from twinkle_client.futures import Lane, Remote, blocking
from twinkle_client.model_calls import ModelCalls, TrainedAdapter
from twinkle_client.types import UploadStatus


class MultiLoraTransformersModel(Remote[ModelCalls]):
    """A base model at a server, and one adapter on it.

    Every call waits for its outcome. The same calls under ``submit`` do not: they are handed over in the order in which
    they are made, together with the others, and give futures.

    Args:
        model_id: What the server calls the base model; ``ms://`` and ``hf://`` before it say nothing.
        connection: To the server; that of ``init_twinkle_client`` if omitted.
        settings: What the class of the library has more (``device_mesh``, ``mixed_precision``, ...) is the server's to
            choose; they are taken and say nothing.
    """

    def __init__(self, model_id: str, *, connection: Connection | None = None, **settings: Any) -> None:
        connection = current() if connection is None else connection
        self.model_id = plain_model_name(model_id)
        if settings:
            warnings.warn(f"{', '.join(settings)}: the server chooses this, it is not sent", stacklevel=2)
        path = model_path("model", model_id)
        lane, adapter = Lane(connection), TrainedAdapter()
        self._path = path
        self._adapter = adapter
        super().__init__(
            connection,
            submit=ModelCalls(path, self.model_id, adapter, lane.submit),
            here=ModelCalls(path, self.model_id, adapter, lane.send),
        )
        self.connection.call(f"{path}/create", {})

    @property
    def adapter_name(self) -> str | None:
        """The adapter that calls are about."""
        return self._adapter.name

    add_adapter_to_model = blocking(ModelCalls.add_adapter_to_model)
    remove_adapter = blocking(ModelCalls.remove_adapter)
    forward = blocking(ModelCalls.forward)
    forward_only = blocking(ModelCalls.forward_only)
    calculate_loss = blocking(ModelCalls.calculate_loss)
    backward = blocking(ModelCalls.backward)
    forward_backward = blocking(ModelCalls.forward_backward)
    clip_grad_norm = blocking(ModelCalls.clip_grad_norm)
    step = blocking(ModelCalls.step)
    zero_grad = blocking(ModelCalls.zero_grad)
    lr_step = blocking(ModelCalls.lr_step)
    clip_grad_and_step = blocking(ModelCalls.clip_grad_and_step)
    set_loss = blocking(ModelCalls.set_loss)
    set_optimizer = blocking(ModelCalls.set_optimizer)
    set_lr_scheduler = blocking(ModelCalls.set_lr_scheduler)
    set_template = blocking(ModelCalls.set_template)
    set_processor = blocking(ModelCalls.set_processor)
    add_metric = blocking(ModelCalls.add_metric)
    apply_patch = blocking(ModelCalls.apply_patch)
    calculate_metric = blocking(ModelCalls.calculate_metric)
    get_train_configs = blocking(ModelCalls.get_train_configs)
    get_state_dict = blocking(ModelCalls.get_state_dict)
    save = blocking(ModelCalls.save)
    load = blocking(ModelCalls.load)
    resume_from_checkpoint = blocking(ModelCalls.resume_from_checkpoint)

    def upload_to_hub(
        self,
        checkpoint_dir: str | Mapping[str, Any],
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,
        poll_interval: float = 5.0,
    ) -> str:
        """Have a checkpoint sent to a hub by the server; the upload's id, for :meth:`upload_status`.

        Args:
            checkpoint_dir: What ``save`` gave, or a checkpoint's path.
            hub_model_id: ``org/name``, with ``ms://`` or ``hf://`` before it.
            hub_token: Of the hub; the server's own if omitted.
            async_upload: Return when it has begun. Else wait until it has ended.
            poll_interval: Seconds between two questions meanwhile.

        Raises:
            CallFailed: It has failed, and was waited for.
            TimeoutError: It takes longer than a call may; it goes on.
        """
        path = checkpoint_dir.get("twinkle_path") if isinstance(checkpoint_dir, Mapping) else str(checkpoint_dir)
        arguments = {"checkpoint_dir": path, "hub_model_id": hub_model_id, "hub_token": hub_token}
        begun = self.connection.call(f"{self._path}/upload_to_hub", arguments)
        request_id = str(begun["request_id"])
        ends_at = time.monotonic() + self.connection.call_timeout_s
        while not async_upload:
            status = self.upload_status(request_id)
            if status.status == "failed":
                raise CallFailed(status.error or f"{request_id}: the upload failed", status=200, code="upload_failed")
            if status.status == "completed":
                break
            if time.monotonic() + poll_interval > ends_at:
                raise TimeoutError(
                    f"{request_id}: the upload goes on; upload_status({request_id!r}) says how far it is"
                )
            time.sleep(poll_interval)
        return request_id

    def upload_status(self, request_id: str) -> UploadStatus:
        """How far an upload is."""
        answer = self.connection.ask("GET", f"{self._path}/upload_status/{request_id}")
        return UploadStatus.model_validate(answer)


TransformersModel = MultiLoraTransformersModel
"""Scripts that train one model by themselves have one adapter on a shared one here; the calls are the same."""


class MultiLoraMegatronModel(MultiLoraTransformersModel):
    """The same: how a base model is laid out on devices is the server's to choose, and no call shows it."""


class MegatronModel:
    """Training all weights of a model, which no shared server does."""

    def __init__(self, model_id: str, *args: Any, **settings: Any) -> None:
        raise InvalidInput(
            "MegatronModel",
            "trains all weights of a model; where the server has a mesh for that, say so with"
            " MultiLoraTransformersModel(...).add_adapter_to_model(name, None), else use MultiLoraMegatronModel",
        )
