"""A trained adapter taken away with the official command line, and read by PEFT."""

from __future__ import annotations

import time
from pathlib import Path

import tinker
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness.polling import wait_until
from harness.sdk_command_line import run_tinker
from harness.served import Served

TOKENS = list(range(5, 25))


def test_a_downloaded_adapter_is_the_one_that_was_trained(served: Served, tiny_model: Path, tmp_path: Path) -> None:
    key = served.create_key("downloads")
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(TOKENS[:-1]),
        loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
    )
    with tinker.ServiceClient(base_url=served.url, api_key=key) as service:
        run = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
        for _ in range(3):
            run.forward_backward([datum], "cross_entropy")
            run.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        trained = run.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        path = run.save_state("out").result().path

    arguments = ("checkpoint", "download", path, "--force", "--output", str(tmp_path / "got"))
    run_tinker(*arguments, base_url=served.url, api_key=key, home=tmp_path)

    (config,) = (tmp_path / "got").rglob("adapter_config.json")
    assert {file.name for file in config.parent.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, config.parent)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS[:-1]])).logits[0]
    logprobs = torch.log_softmax(logits, dim=-1)[torch.arange(len(TOKENS) - 1), TOKENS[1:]]
    # Float32 on both sides, summed in another order.
    torch.testing.assert_close(logprobs, torch.tensor(trained), atol=1e-4, rtol=1e-4)


def test_a_long_sample_stops_when_it_is_cancelled(served: Served) -> None:
    with served.client("cancels") as service:
        sampling = service.create_sampling_client(base_model="tiny")
        params = tinker.SamplingParams(max_tokens=400, stop=[])
        futures = [sampling.sample(tinker.ModelInput.from_ints([5]), 4, params) for _ in range(24)]
        open_samples = (
            "SELECT 1 FROM operation o JOIN tenant t ON t.id = o.tenant"
            " WHERE t.name = 'cancels' AND o.state IN ('queued', 'running')"
        )
        # Running for a while: a client that has no answer to its request yet has nothing to cancel.
        running = f"{open_samples} AND o.started_at < ?"
        wait_until(lambda: served.query(running, time.time() - 0.5), what="a sample runs")

        for future in futures:
            future.future().cancel()

        wait_until(lambda: not served.query(open_samples), what="no sample is open any more", deadline_s=60)
        cancelled = served.query("SELECT COUNT(*) FROM operation WHERE error_code = 'cancelled'")[0][0]
        drawn = sampling.sample(tinker.ModelInput.from_ints([5]), 1, tinker.SamplingParams(max_tokens=2)).result()

    assert cancelled > 0
    assert len(drawn.sequences[0].tokens) <= 2
