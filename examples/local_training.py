"""A training loop without a service: a tiny model, the shipped text, a LoRA adapter.

python examples/local_training.py                   # one adapter on the fused engine
python examples/local_training.py --plain           # the same loop on TransformersModel
python examples/local_training.py --tenants 3       # three adapters in the same passes
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from twinkle.hub.tiny import make_tiny_model
from twinkle.model import MultiLoraTransformersModel, TransformersModel

DATA = Path(__file__).parent / "data" / "arithmetic.jsonl"
BATCH_SIZE = 8
Row = dict[str, list[int]]


class ChatTemplate:
    """Turns a chat into a row: labels are shifted by one, and only the answer is trained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def encode(self, trajectory: dict[str, list[dict[str, str]]]) -> Row:
        """The row of one trajectory."""
        messages = trajectory["messages"]
        prompt = self._tokens(messages[:-1], add_generation_prompt=True)
        tokens = self._tokens(messages, add_generation_prompt=False)
        labels = [-100] * (len(prompt) - 1) + tokens[len(prompt) :]
        return {"input_ids": tokens[:-1], "labels": labels}

    def _tokens(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens


def batches(
    trajectories: list[dict[str, list[dict[str, str]]]], steps: int
) -> Iterator[list[dict[str, list[dict[str, str]]]]]:
    """Shuffled batches, epoch after epoch."""
    generator = torch.Generator().manual_seed(0)
    order: list[int] = []
    for _ in range(steps):
        if len(order) < BATCH_SIZE:
            order = torch.randperm(len(trajectories), generator=generator).tolist()
        yield [trajectories[order.pop()] for _ in range(BATCH_SIZE)]


def prepare(
    model: TransformersModel | MultiLoraTransformersModel, name: str, template: ChatTemplate, steps: int
) -> None:
    """Add an adapter and say how it is trained."""
    config = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear")
    model.add_adapter_to_model(name, config, gradient_accumulation_steps=2)
    model.set_template(template, adapter_name=name)
    model.set_optimizer("AdamW", lr=5e-3, adapter_name=name)
    model.set_lr_scheduler(
        "CosineWarmupScheduler", num_warmup_steps=2, num_training_steps=steps // 2, adapter_name=name
    )


def main() -> None:
    """Train, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="use TransformersModel")
    parser.add_argument("--tenants", type=int, default=1, help="adapters to train together")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "twinkle-local-training")
    arguments = parser.parse_args()
    if arguments.plain and arguments.tenants > 1:
        parser.error("--tenants needs the fused model")

    torch.manual_seed(0)
    texts = DATA.read_text(encoding="utf-8").splitlines()
    trajectories = [json.loads(line) for line in texts]
    folder = make_tiny_model(arguments.output / "model", texts=texts, hidden_size=64, layers=2, vocab_size=512)
    template = ChatTemplate(AutoTokenizer.from_pretrained(folder))
    model = (TransformersModel if arguments.plain else MultiLoraTransformersModel)(model_id=f"ms://{folder}")
    names = [f"tenant-{number}" for number in range(arguments.tenants)]
    for name in names:
        prepare(model, name, template, arguments.steps)
    print(model.get_train_configs(adapter_name=names[0]))

    for step, batch in enumerate(batches(trajectories, arguments.steps), start=1):
        if isinstance(model, MultiLoraTransformersModel):
            model.fused_forward_backward(dict.fromkeys(names, batch))
        else:
            model.forward_backward(inputs=batch)
        for name in names:
            model.clip_grad_and_step(adapter_name=name)
            if step % 20 == 0:
                print(f"step {step} {name}: {model.calculate_metric(is_training=True, adapter_name=name)}")
    for name in names:
        print(model.save(name, output_dir=arguments.output / "checkpoints", save_optimizer=True, adapter_name=name))


if __name__ == "__main__":
    main()
