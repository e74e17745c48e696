"""Weights that no rank ever holds whole: each reads its share of the files, and FSDP2 begins with that share.

transformers reads of a checkpoint what a parameter's sharding says, slice by slice (``DtensorShardOperation``). So a
model is given sharded parameters without values before it is loaded. ``fully_shard`` wants whole parameters, with or
without values: it gets them without, and the shares are put in their places behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.configuration_utils import DistributedConfig

Choose = Callable[[Any], Iterable[nn.Parameter]]
"""Which parameters of a model are to be spread."""
WEIGHT_FILES = "*.safetensors"
LOADED_WHOLE = """
    device_map quantization_config gguf_file state_dict distributed_config tp_plan tp_size ignore_mismatched_sizes
""".split()  # noqa: SIM905 - a line for each would take half a screen
"""Arguments of ``from_pretrained`` that decide themselves where weights come from, or go."""


def class_of(loader: Any, path: str, config: Any = None, **settings: Any) -> Any:
    """The class that an ``Auto`` class of transformers loads a folder with; any other is its own."""
    if not issubclass(loader, transformers.models.auto.auto_factory._BaseAutoModelClass):
        return loader
    config = config or transformers.AutoConfig.from_pretrained(path, **settings)
    trusted = {name: value for name, value in settings.items() if name == "trust_remote_code"}
    with torch.device("meta"):
        return type(loader.from_config(config, **trusted))


def can_be_spread(folder: str, settings: Mapping[str, Any]) -> bool:
    """Whether the weights of a folder can be read slice by slice, loaded with these settings."""
    return any(Path(folder).glob(WEIGHT_FILES)) and not any(settings.get(name) for name in LOADED_WHOLE)


def load_spread(
    model_class: type, path: str, mesh: TorchDeviceMesh, device: torch.device, *, choose: Choose, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """A model whose chosen parameters are spread over the ranks by their first dimension; transformers' loading info.

    All ranks must call it together. Parameters that the files lack (``missing_keys``) have no meaning in it.

    Args:
        model_class: A class of transformers, none of its ``Auto`` ones.
        path: A folder with safetensors files.
        mesh: The ranks, on one axis.
        device: Where the parameters are to lie.
        choose: Which of them.
        settings: Of ``from_pretrained``.
    """

    def spread(cls: type, model: nn.Module, config: Any, manager: Any) -> nn.Module:
        chosen = {id(parameter) for parameter in choose(model)}
        for module, name, parameter in _own_parameters(model):
            if id(parameter) in chosen:
                sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        return model

    def initialize_weights(model: Any) -> None:
        # What the files lack is not drawn: not every model's way of drawing knows of shares.
        if all(getattr(parameter, "_is_hf_initialized", False) for parameter in model.parameters()):
            super(reader, model).initialize_weights()

    # With name and module of its own class: by these transformers knows what a file's names become.
    steps = {"maybe_distribute_model": classmethod(spread), "initialize_weights": initialize_weights}
    reader: Any = type(model_class.__name__, (model_class,), {**steps, "__module__": model_class.__module__})
    model, info = reader.from_pretrained(
        path, distributed_config=DistributedConfig(), output_loading_info=True, **settings
    )
    model.__class__ = model_class
    if hasattr(model.config, "distributed_config"):
        del model.config.distributed_config
    _put_on(model, device, mesh)
    return model, info


def _put_on(model: nn.Module, device: torch.device, mesh: TorchDeviceMesh) -> None:
    """Move everything to a device; of what is spread a copy, that no mapped file is kept open for it."""
    moved: dict[int, nn.Parameter] = {}
    for module, name, parameter in _own_parameters(model):
        if id(parameter) not in moved:
            data = parameter.detach()
            on_device: torch.Tensor
            if isinstance(data, DTensor):
                share = data.to_local()
                on_device = _spread_over(share.to(device, copy=True), data.shape, mesh, (Shard(0),))
            else:
                on_device = data.to(device)
            moved[id(parameter)] = nn.Parameter(on_device, requires_grad=parameter.requires_grad)
        module.register_parameter(name, moved[id(parameter)])
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


@contextmanager
def spread_parameters_kept(model: nn.Module) -> Iterator[None]:
    """Within this context what is spread is whole and without values, and afterwards what it was.

    The sharding that ``fully_shard`` gives it within must be by the first dimension, over the same ranks.
    """
    shares = {id(parameter): parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    empty = {
        key: nn.Parameter(torch.empty(share.shape, dtype=share.dtype, device="meta"), requires_grad=share.requires_grad)
        for key, share in shares.items()
    }
    places: dict[str, int] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shares:
                places[f"{path}.{name}" if path else name] = id(parameter)
                module.register_parameter(name, empty[id(parameter)])
    yield
    if not shares:
        return
    sharded = dict(model.named_parameters(remove_duplicate=False))
    filled: dict[int, nn.Parameter] = {}
    for name, key in places.items():
        target: Any = sharded[name]
        if key not in filled:
            share: Any = shares[key]
            data = _spread_over(share.detach().to_local(), share.shape, target.device_mesh, target.placements)
            filled[key] = nn.Parameter(data, requires_grad=target.requires_grad)
    model.load_state_dict({name: filled[key] for name, key in places.items()}, strict=False, assign=True)


def _spread_over(share: torch.Tensor, shape: torch.Size, mesh: TorchDeviceMesh, placements: Any) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(share, mesh, placements, run_check=False, shape=shape, stride=stride)


def _own_parameters(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every place of a parameter; of one that several share, all of them."""
    return [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
