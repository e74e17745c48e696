"""Layers that mix the tokens of a sequence: attention and the gated delta net."""

from collections.abc import Callable

import torch
import transformers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from torch import distributed
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from harness.megatron_layers.ranks import HIDDEN, Found, Layout, Ranks, apart, config_of, drawn, gradient_of
from twinkle.model.megatron.modules.attention import PackedCoreAttention
from twinkle.model.megatron.modules.delta_net import DeltaNetSubmodules, GatedDeltaNet


def check_attention(layout: Layout) -> Found:
    return {
        f"{kind} {name}": value
        for kind, value_size in (("heads", 8), ("narrow values", 6))
        for name, value in attention(layout, value_size).items()
    }


def attention(layout: Layout, value_size: int) -> Found:
    ranks = Ranks(layout)
    query, key, value, slope = drawn(4, 8), drawn(2, 8), drawn(2, value_size), drawn(4, value_size)
    for tensor in (*query, *key, *value):
        tensor.requires_grad_()
    expected = torch.cat([attended_plainly(*one) for one in zip(query, key, value, strict=True)])
    (expected * torch.cat(slope)).sum().backward()
    core = PackedCoreAttention(
        config_of(layout), 1, AttnMaskType.causal, "self", pg_collection=ranks.groups, v_channels=value_size
    )
    own = [ranks.row.own(ranks.row.place([one.detach() for one in many])) for many in (query, key, value, slope)]
    inputs = [matrix.requires_grad_() for matrix in own[:3]]
    found = core(*inputs, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=ranks.row.params())
    (found * own[3]).sum().backward()
    ranks.is_sequence_parallel = False
    result = {"output": apart(ranks.together(found), expected.detach())}
    for name, matrix, many in zip(("query", "key", "value"), inputs, (query, key, value), strict=True):
        assert matrix.grad is not None
        result[f"gradient of {name}"] = apart(
            ranks.together(matrix.grad), torch.cat([one.grad for one in many if one.grad is not None])
        )
    return result


def attended_plainly(query_NHD: torch.Tensor, key_NGD: torch.Tensor, value_NGD: torch.Tensor) -> torch.Tensor:
    heads = (query_NHD.shape[1] // key_NGD.shape[1],)
    key_NHD, value_NHD = (matrix.repeat_interleave(heads[0], dim=1) for matrix in (key_NGD, value_NGD))
    scores_HNN = torch.einsum("nhd,mhd->hnm", query_NHD, key_NHD) * query_NHD.shape[-1] ** -0.5
    later_NN = torch.ones(len(query_NHD), len(query_NHD), dtype=torch.bool).triu(1)
    return torch.einsum("hnm,mhd->nhd", scores_HNN.masked_fill(later_NN, -torch.inf).softmax(-1), value_NHD)


def check_delta_net(layout: Layout) -> Found:
    sizes = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
    }
    plain = Qwen3_5GatedDeltaNet(
        transformers.AutoConfig.for_model("qwen3_5_text", hidden_size=HIDDEN, rms_norm_eps=1e-6, **sizes), 0
    )
    torch.nn.init.uniform_(plain.norm.weight, 0.5, 1.5)
    torch.nn.init.uniform_(plain.dt_bias)
    ranks = Ranks(layout)
    layer = GatedDeltaNet(
        config_of(layout, **sizes),
        DeltaNetSubmodules(ColumnParallelLinear, RowParallelLinear),
        layer_number=1,
        pg_collection=ranks.groups,
    )
    keys, values = 16, 48
    convolved = (keys, keys, values)

    def own(name: str, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> torch.Tensor:
        def get(path: str) -> torch.Tensor:
            return of(plain.get_parameter(path))

        if name == "in_proj.weight":
            joined = torch.cat([get(f"in_proj_{part}.weight") for part in ("qkv", "z", "b", "a")])
            return ranks.shard(joined, (*convolved, values, 4, 4))
        if name == "conv1d.weight":
            return ranks.shard(get(name), convolved)
        if name == "out_proj.weight":
            return ranks.shard(get(name), axis=1)
        return get("norm.weight") if name == "out_norm.weight" else ranks.shard(get(name))

    for name, parameter in layer.named_parameters():
        parameter.data.copy_(own(name, lambda weight: weight.data))
    hidden, slope = drawn(HIDDEN), drawn(HIDDEN)
    for tensor in hidden:
        tensor.requires_grad_()
    expected = torch.cat([plain(one[None])[0] for one in hidden])
    (expected * torch.cat(slope)).sum().backward()
    own_hidden = ranks.own([one.detach() for one in hidden]).requires_grad_()
    found, _ = layer(own_hidden[:, None], packed_seq_params=ranks.row.params())
    (found[:, 0] * ranks.own(slope)).sum().backward()
    assert own_hidden.grad is not None
    result = {
        "output": apart(ranks.together(found[:, 0]), expected.detach()),
        "gradient of hidden": apart(
            ranks.together(own_hidden.grad), torch.cat([one.grad for one in hidden if one.grad is not None])
        ),
    }
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad, group=ranks.groups.cp)
        result[f"gradient of {name}"] = apart(parameter.grad, own(name, gradient_of))
    return result
