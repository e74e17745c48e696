"""A loader whose server, worker and process are killed in the middle of an epoch, held against an undisturbed one."""

from __future__ import annotations

import json

import psutil
import pytest

from harness.polling import wait_for
from harness.processor_calls import ProcessorCalls
from harness.served import Served
from harness.struck import Struck

ROWS = [{"nums": [n, n + 1, n + 2], "target": 3 * n + 3} for n in range(23)]


def _children(served: Served) -> list[psutil.Process]:
    """The processes that hold rows."""
    found = served.part("the jobs worker").children(recursive=True)
    return [child for child in found if "spawn_main" in " ".join(child.cmdline())]


@pytest.mark.timeout(300)
def test_whatever_is_killed_a_loader_gives_the_same_batches_in_the_same_order_and_none_twice(struck: Struck) -> None:
    served = struck.served
    calls = ProcessorCalls(served.url, served.create_key("data"))
    meta = json.dumps({"data": ROWS, "_TWINKLE_TYPE_": "DatasetMeta"})
    loaders = []
    for _ in range(2):
        dataset = calls.create("dataset", "Dataset", dataset_meta=meta)
        calls.call(dataset, "map", preprocess_func="CountdownProcessor")
        loading = {"dataset": dataset, "batch_size": 2, "shuffle": True, "seed": 3}
        loaders.append(calls.create("dataloader", "DataLoader", **loading))
    calm, shaken = loaders
    calls.call(calm, "__iter__")
    undisturbed = calls.rest(calm)

    calls.call(shaken, "__iter__")
    found = [calls.next(shaken)]
    for part in ("a process with rows", "the jobs worker", "the API"):
        victim = _children(served)[0] if part == "a process with rows" else served.part(part)
        victim.kill()
        found += [calls.next(shaken), calls.next(shaken)]
    found += calls.rest(shaken)

    assert found == undisturbed
    assert [len(batch) for batch in found] == [2] * 11 + [1]
    wait_for(lambda: not psutil.pid_exists(victim.pid), what="the end of what was killed")
