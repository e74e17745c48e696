"""A training and a sampler on different ranks: ``sync_training.py MODEL_DIR RANK PORT``, started once for each rank."""

import json
import os
import sys

import peft
import torch
from torch import distributed

import twinkle
from twinkle.checkpoint_engine import BroadcastCheckpointEngine, CheckpointEngineManager
from twinkle.model import TransformersModel
from twinkle.sampler import TorchSampler

PROMPT = [5, 6, 7, 8]
ROW = {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, 9]}


def share(model_dir: str) -> None:
    """A model that lies in halves on both ranks, each of which samples too."""
    torch.manual_seed(0)
    mesh = twinkle.DeviceMesh.from_sizes(fsdp_size=2, device_type="cpu")
    model = TransformersModel(model_dir, device_mesh=mesh)
    model.add_adapter_to_model("a", peft.LoraConfig(r=4, target_modules="all-linear"))
    sampler = TorchSampler(model_dir, slots=2)
    model.set_optimizer("AdamW", lr=0.03)
    model.forward_backward(inputs=[ROW])
    model.clip_grad_and_step()
    CheckpointEngineManager(model, sampler).sync_weights(merge_and_sync=True)
    output = model.forward_only(inputs=[{"input_ids": PROMPT, "labels": [*PROMPT[1:], -100]}])
    (response,) = sampler.sample([PROMPT], {"max_tokens": 0, "prompt_logprobs": 0})
    is_first = distributed.get_rank() == 0
    told = torch.as_tensor(output["logps"])[0, :3].tolist() if is_first else response.prompt_logprobs[1:]
    print(json.dumps(told), flush=True)


def main() -> None:
    model_dir, rank, port = sys.argv[1:]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=rank, LOCAL_RANK=rank)
    torch.set_num_threads(1)
    twinkle.initialize(mode="local")
    trains = rank == "0"
    for kind in ("full", "lora alone"):
        alone = twinkle.DeviceMesh.from_sizes(world_size=1)
        model = TransformersModel(model_dir, device_mesh=alone) if trains else None
        if model is not None and kind != "full":
            model.add_adapter_to_model("a", peft.LoraConfig(r=4, target_modules="all-linear"))
        sampler = None if trains else TorchSampler(model_dir, device_mesh=alone, slots=2)
        # Small buckets, so that there are several.
        engine = BroadcastCheckpointEngine(bucket_bytes=20_000)
        manager = CheckpointEngineManager(model, sampler, engine=engine)
        for _ in range(2):
            if model is not None:
                model.set_optimizer("AdamW", lr=0.03)
                model.forward_backward(inputs=[ROW])
                model.clip_grad_and_step()
            manager.sync_weights(merge_and_sync=False)
        if model is not None:
            output = model.forward_only(inputs=[{"input_ids": PROMPT, "labels": [*PROMPT[1:], -100]}])
            print(json.dumps(torch.as_tensor(output["logps"])[0, :3].tolist()), flush=True)
        if sampler is not None:
            (response,) = sampler.sample([PROMPT], {"max_tokens": 0, "prompt_logprobs": 0})
            print(json.dumps(response.prompt_logprobs[1:]), flush=True)
    share(model_dir)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
