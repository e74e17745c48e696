"""What each tenant of the demo does: sample, train, save, sample again. Plain use of the official `tinker` SDK."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import tinker
from transformers import PreTrainedTokenizerBase

from chat_datums import Message, chat_to_datum, prompt_tokens, read_chats

DATA = Path(__file__).parent / "data"
BATCH_SIZE = 16
MAX_ANSWER_TOKENS = 40
STEPS_AVERAGED = 5
# A run that learned anything ends far below this share of its first loss.
LARGEST_LOSS_RATIO = 0.5


@dataclass(frozen=True)
class TenantPlan:
    """What one tenant trains, on what, and which questions it asks before and after."""

    tenant: str
    data_file: str
    questions: tuple[str, ...]
    rank: int
    steps: int
    learning_rate: float
    placeholders: tuple[tuple[str, str], ...] = ()

    def chats(self) -> list[list[Message]]:
        """Returns the tenant's training text."""
        return read_chats(DATA / self.data_file, placeholders=dict(self.placeholders))


PLANS: Final = (
    TenantPlan(
        tenant="ada",
        data_file="self_cognition.jsonl",
        placeholders=(("name", "Ada"), ("author", "the Twinkle team")),
        questions=("Who are you?", "Who made you?", "Kindly tell me who you are."),
        rank=16,
        steps=120,
        learning_rate=5e-3,
    ),
    TenantPlan(
        tenant="sum",
        data_file="arithmetic.jsonl",
        questions=("What is 5 plus 6?", "What is 13 - 3?", "What is 19 plus 2?"),
        rank=32,
        steps=240,
        learning_rate=5e-3,
    ),
)


@dataclass
class TenantRun:
    """A tenant's progress, written by its thread and read by the display."""

    plan: TenantPlan
    phase: str = "waiting"
    losses: list[float] = field(default_factory=list)
    num_tokens: int = 0
    training_s: float = 0.0
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    state_path: str = ""
    sampler_path: str = ""
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def first_loss(self) -> float:
        """Loss per answer token at the first step."""
        return self.losses[0]

    @property
    def last_loss(self) -> float:
        """Loss per answer token, mean of the last steps."""
        last = self.losses[-STEPS_AVERAGED:]
        return sum(last) / len(last)

    @property
    def has_learned(self) -> bool:
        """Whether the loss fell clearly."""
        return self.last_loss < LARGEST_LOSS_RATIO * self.first_loss


def start_tenant(plan: TenantPlan, *, url: str, api_key: str, tokenizer: PreTrainedTokenizerBase) -> TenantRun:
    """Starts a tenant in a thread of its own and returns its progress at once."""
    run = TenantRun(plan)

    def target() -> None:
        try:
            capabilities = tinker.RestClient(base_url=url, api_key=api_key).get_server_capabilities().result()
            base_model = capabilities.supported_models[0].model_name
            assert base_model is not None
            service = tinker.ServiceClient(base_url=url, api_key=api_key)
            train_tenant(run, service, tokenizer, base_model=base_model)
        except Exception as error:  # noqa: BLE001 - handed to the main thread, which reports it
            run.error = error
        finally:
            run.done.set()

    # A daemon, so that Ctrl-C does not wait for a long poll to return.
    threading.Thread(target=target, name=f"tenant-{plan.tenant}", daemon=True).start()
    return run


def train_tenant(
    run: TenantRun, service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, *, base_model: str
) -> None:
    """Does everything one tenant does, in order, and keeps `run` up to date; blocks until the end."""
    plan = run.plan
    run.phase = "create adapter"
    training = service.create_lora_training_client(base_model=base_model, rank=plan.rank).result()

    run.phase = "sample before"
    run.before = answers(training.save_weights_and_get_sampling_client().result(), tokenizer, plan.questions)

    run.phase = "train"
    started = time.monotonic()
    datums = [chat_to_datum(tokenizer, chat) for chat in plan.chats()]
    batches = endless_batches(datums, random.Random(plan.tenant))
    for step in range(plan.steps):
        batch = next(batches)
        adam = tinker.AdamParams(learning_rate=plan.learning_rate * (1 - step / plan.steps), eps=1e-8)
        # Both are in the queue before the first result is awaited.
        forward_backward = training.forward_backward(batch, loss_fn="cross_entropy")
        optim_step = training.optim_step(adam)
        loss_sum = forward_backward.result().metrics["loss:sum"]
        optim_step.result()
        num_answer_tokens = sum(sum(datum.loss_fn_inputs["weights"].data) for datum in batch)
        run.losses.append(loss_sum / num_answer_tokens)
        run.num_tokens += sum(datum.model_input.length for datum in batch)
        run.training_s = time.monotonic() - started

    run.phase = "save"
    state = training.save_state("demo-final")
    sampler = training.save_weights_for_sampler("demo-final")
    run.state_path = state.result().path
    run.sampler_path = sampler.result().path

    run.phase = "sample after"
    run.after = answers(service.create_sampling_client(model_path=run.sampler_path).result(), tokenizer, plan.questions)
    run.phase = "done"


def answers(client: tinker.SamplingClient, tokenizer: PreTrainedTokenizerBase, questions: Sequence[str]) -> list[str]:
    """Returns the most likely answer to each question, all asked at once."""
    end_of_turn = tokenizer.eos_token_id
    params = tinker.SamplingParams(max_tokens=MAX_ANSWER_TOKENS, temperature=0.0, stop=[end_of_turn])
    futures = [
        client.sample(
            tinker.ModelInput.from_ints(prompt_tokens(tokenizer, [{"role": "user", "content": question}])),
            num_samples=1,
            sampling_params=params,
        )
        for question in questions
    ]
    texts = [tokenizer.decode(future.result().sequences[0].tokens, skip_special_tokens=True) for future in futures]
    return [str(text) for text in texts]


def endless_batches(datums: Sequence[tinker.Datum], rng: random.Random) -> Iterator[list[tinker.Datum]]:
    """Yields batches for ever; every datum is used once before any is used again."""
    waiting: list[tinker.Datum] = []
    while True:
        while len(waiting) < BATCH_SIZE:
            waiting += rng.sample(list(datums), len(datums))
        yield waiting[:BATCH_SIZE]
        del waiting[:BATCH_SIZE]
