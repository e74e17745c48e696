"""A training loop in the words that every SDK from 0.16 on understands; it runs under the SDK that is installed.

    python sdk_script.py MODEL PATH TOKEN

PATH is somebody else's checkpoint, TOKEN what its owner gave for it. The service and the key are the SDK's own
TINKER_BASE_URL and TINKER_API_KEY. Prints what it saw, as one line of JSON.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
import tarfile
import urllib.request
from collections.abc import Callable, Sequence

import tinker
from tinker import types

TOKENS = [10, 11, 12, 13]
NUM_SAMPLES = 2
MAX_TOKENS = 4
# More than one chunk of a forward_backward: the SDK posts at most 1,024 datums at once.
NUM_DATUMS = 1100


def main(arguments: Sequence[str]) -> int:
    """Trains, saves, loads, samples, looks around and fails once; returns the exit code."""
    model, foreign_path, token = arguments
    service = tinker.ServiceClient()
    served = [one.model_name for one in service.get_server_capabilities().supported_models]
    training = service.create_lora_training_client(base_model=model, rank=4, seed=1)
    passes = [training.forward_backward([_datum()] * NUM_DATUMS, "cross_entropy") for _ in range(2)]
    step = training.optim_step(types.AdamParams(learning_rate=1e-2))
    outputs = [one.result() for one in passes]
    step.result()
    forward = training.forward([_datum()], "cross_entropy").result()
    path = training.save_state("half-way").result().path
    training.load_state(path).result()
    training.load_state_with_optimizer(path).result()
    resumed = service.create_training_client_from_state_with_optimizer(path)
    resumed.forward_backward([_datum()], "cross_entropy").result()
    resumed.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    named = resumed.save_weights_for_sampler("named").result().path
    drawn = [
        _sample(service.create_sampling_client(model_path=named)),
        _sample(service.create_sampling_client(base_model=model)),
        _sample(resumed.save_weights_and_get_sampling_client()),
    ]
    scores = service.create_sampling_client(model_path=named).compute_logprobs(types.ModelInput.from_ints(TOKENS))
    rest = service.create_rest_client()
    run_id = path.removeprefix("tinker://").partition("/")[0]
    listed = rest.list_checkpoints(run_id).result().checkpoints
    run = rest.get_training_run(run_id).result()
    seen = {
        "version": tinker.__version__,
        "serves_model": model in served,
        "outputs": [len(one.loss_fn_outputs) for one in outputs],
        "logprobs": len(forward.loss_fn_outputs[0]["logprobs"].tolist()),
        "loss": outputs[0].metrics["loss:sum"],
        "samples": [[len(sequence.tokens) for sequence in one.sequences] for one in drawn],
        "prompt_logprobs": len(scores.result()),
        "checkpoints": [one.checkpoint_id for one in listed],
        "run_model": run.base_model,
        "archive": _archived(rest, path),
        "granted": _trained_on(service, foreign_path, token),
        "not_granted": _refusal_of(lambda: service.create_training_client_from_state(foreign_path).get_info()),
        "bad_checkpoint": _refusal_of(lambda: training.load_state(f"{path}-absent").result()),
        "after_refusal": len(training.forward([_datum()], "cross_entropy").result().loss_fn_outputs),
    }
    print(json.dumps(seen))
    return 0


def _datum() -> types.Datum:
    inputs = {"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)


def _sample(client: tinker.SamplingClient) -> types.SampleResponse:
    params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=0.7, seed=1, stop=[])
    prompt = types.ModelInput.from_ints(TOKENS)
    return client.sample(prompt=prompt, num_samples=NUM_SAMPLES, sampling_params=params).result()


def _trained_on(service: tinker.ServiceClient, path: str, token: str) -> int | None:
    """A step on somebody else's checkpoint, 1 when it is made; ``None`` where this SDK knows of no tokens."""
    if "weights_access_token" not in inspect.signature(service.create_training_client_from_state).parameters:
        return None
    granted = service.create_training_client_from_state(path, weights_access_token=token)
    granted.load_state_with_optimizer(path, weights_access_token=token).result()
    return int(granted.optim_step(types.AdamParams(learning_rate=1e-2)).result() is not None)


def _archived(rest: object, path: str) -> list[str] | None:
    """The names in a checkpoint's archive; ``None`` where this SDK knows of no archives."""
    ask = getattr(rest, "get_checkpoint_archive_url_from_tinker_path", None)
    if ask is None:
        return None
    with urllib.request.urlopen(ask(path).result().url) as answer:
        content = answer.read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        return archive.getnames()


def _refusal_of(call: Callable[[], object]) -> str:
    try:
        call()
    except tinker.TinkerError as error:
        return type(error).__name__
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
