"""The tables of what the queue and its clients cost."""

from __future__ import annotations

from collections.abc import Iterable

from markdown_table import Result, machine_line, table
from measures import to_empty_server

# What is to be reached on the machine of the results: 1.4 ms of the API's CPU an operation at one adapter, 1.0 ms at
# 16, where the empty server took 0.50 and 0.43 ms; and half as much again as its latency where one adapter waits.
GOALS = {(1, "api_cpu"): 2.8, (16, "api_cpu"): 2.3, (1, "p50"): 1.5}


def queue_text(result: Result) -> str:
    """Returns the queue benchmark's tables."""
    floor, work = result["floor"], result["workload"]
    lines = [
        machine_line(result),
        "",
        f"Payload: {work['datums']} datums of {work['tokens_per_datum']} tokens. "
        f"Median of {work['rounds']} rounds of {work['window_s']:g} s each.",
        "",
        *table(
            ("call that returns at once", "p50 ms", "p95 ms"),
            [
                (label, floor[key]["p50_ms"], floor[key]["p95_ms"])
                for label, key in (
                    ("`GET healthz`, the SDK's HTTP stack, this server", "http_call_twinkle"),
                    ("`GET healthz`, the SDK's HTTP stack, empty server", "http_call_nothing"),
                    ("`get_server_capabilities()` of the SDK, this server", "sdk_call_twinkle"),
                    ("`get_server_capabilities()` of the SDK, empty server", "sdk_call_nothing"),
                )
            ],
        ),
        "",
        *table(
            (
                *("adapters", "mode", "client processes", "ops/s", "empty server ops/s", "p50 ms", "p95 ms", "p99 ms"),
                *("empty p50 ms", "p50 above empty"),
            ),
            [_queue_row(served, empty) for served, empty in pairs(result["cells"])],
        ),
        "",
        "CPU milliseconds per operation, by process (of the serial and the deepest pipelined runs):",
        "",
        *table(
            ("adapters", "mode", "client (SDK)", "API", "worker", "broker", "housekeeping", "client, empty server"),
            [_cpu_row(served, empty) for served, empty in pairs(result["cells"]) if served["steps_in_flight"] != 1],
        ),
    ]
    return "\n".join(
        [*lines, "", "As multiples of the empty server beside it, round by round:", "", *_ratio_table(result)]
    )


def native_text(result: Result) -> str:
    """Returns the table of the two clients."""
    work = result["workload"]
    by_key = {(cell["server"], cell["adapters"], cell["steps_in_flight"]): cell["median"] for cell in result["cells"]}
    rows = [
        (
            adapters,
            mode_name(steps),
            *(by_key[client, adapters, steps]["operation"]["p50_ms"] for client in ("sdk", "native")),
            *(by_key[client, adapters, steps]["operation"]["p95_ms"] for client in ("sdk", "native")),
            *(by_key[client, adapters, steps]["ops_per_s"] for client in ("sdk", "native")),
            *(by_key[client, adapters, steps]["cpu_ms_per_op"]["client"] for client in ("sdk", "native")),
        )
        for name, adapters, steps in by_key
        if name == "sdk"
    ]
    lines = [
        machine_line(result),
        "",
        f"Payload: {work['datums']} datums of {work['tokens_per_datum']} tokens. "
        f"Median of {work['rounds']} rounds of {work['window_s']:g} s each.",
        "",
        *table(
            (
                *("adapters", "mode", "SDK p50 ms", "native p50 ms", "SDK p95 ms", "native p95 ms", "SDK ops/s"),
                *("native ops/s", "SDK CPU ms an operation", "native CPU ms an operation"),
            ),
            rows,
        ),
    ]
    return "\n".join(lines)


def dialects_text(result: Result) -> str:
    """Returns the table of a training step through each dialect."""
    work = result["workload"]
    lines = [
        machine_line(result),
        "",
        f"A forward_backward and an optimizer step of {work['datums']} datums of {work['tokens_per_datum']} tokens,"
        f" rank {work['rank']}; median of {result['cells'][0]['steps']} steps, sides in turns. Ratio: to the step of"
        " the Tinker SDK of the same turn, with its quartiles.",
        "",
        *table(
            ("engine", "through", "step ms", "ratio", "quartiles"),
            [
                (cell["engine"], side, told["step_ms"], told["ratio"], " to ".join(map(str, told["ratio_quartiles"])))
                for cell in result["cells"]
                for side, told in cell["sides"].items()
            ],
        ),
    ]
    return "\n".join(lines)


def scale_text(result: Result) -> str:
    """Returns the tables of what an operation costs in journals of several sizes, and of what comes together."""
    work = result["workload"]
    parts = tuple(result["alone"][0]["cost"])
    sizes = ("series", "rows", "adapters", "meshes")
    loaded = (
        *(*sizes, "tenants", "operations", "crashes", "ops_per_s", "cpu_ms_per_op"),
        *(f"{part}_cpu_ms_per_op" for part in ("append", "claim", "commit")),
    )
    wakes = ("open_futures", "commit_size", "queries_per_completion", "wake_p50_ms", "wake_p95_ms")
    lines = [
        machine_line(result),
        "",
        f"{work['database']}, payloads of {work['payload_bytes']} bytes. One operation at a time, median of "
        f"{work['operations_alone']} in CPU ms; in brackets against the first size of the series, by CPU and by wall.",
        "",
        *table(
            ("series", "rows", "adapters", "meshes", *parts),
            [(*(cell[key] for key in sizes), *(_scale_cell(cell, part) for part in parts)) for cell in result["alone"]],
        ),
        "",
        f"Everything waiting at once, batches of at most {work['max_adapters']}, a worker that dies at one step in "
        f"{work['steps_per_crash']}; CPU ms of an operation.",
        "",
        *table(
            (
                *("series", "rows", "adapters", "meshes", "tenants", "operations", "workers died", "ops/s", "CPU"),
                *("of it append", "claim", "commit"),
            ),
            [tuple(cell[key] for key in loaded) for cell in result["loaded"]],
        ),
        "",
        "Submissions that arrive together, against a transaction for each:",
        "",
        *table(
            (
                *("submitters", "operations a transaction", "p50 ms", "alone p50 ms", "p95 ms", "alone p95 ms"),
                *("ops/s", "alone ops/s", "CPU ms", "alone CPU ms"),
            ),
            [
                (
                    *(cell["submitters"], cell["grouped"]["ops_per_transaction"]),
                    *(
                        cell[side][key]
                        for key in ("p50_ms", "p95_ms", "ops_per_s", "cpu_ms_per_op")
                        for side in ("grouped", "single")
                    ),
                )
                for cell in result["group_commit"]
            ],
        ),
        "",
        "Clients that wait, and what the journal is asked:",
        "",
        *table(
            (
                *("open futures", "operations a commit", "queries a completion", "commit to answer p50 ms", "p95 ms"),
                "queries a second when nothing ends",
            ),
            [tuple(cell[key] for key in (*wakes, "idle_queries_per_s")) for cell in result["wake_ups"]],
        ),
    ]
    return "\n".join(lines)


def pairs(cells: Iterable[Result]) -> list[tuple[Result, Result]]:
    """Returns each measurement of the service with that of the empty server under the same load."""
    by_key = {(cell["server"], cell["adapters"], cell["steps_in_flight"]): cell for cell in cells}
    return [
        (cell, by_key["nothing", adapters, steps])
        for (server, adapters, steps), cell in by_key.items()
        if server == "twinkle"
    ]


def mode_name(steps_in_flight: int) -> str:
    """Returns the mode as a reader of the table sees it."""
    if steps_in_flight == 0:
        return "serial"
    return "1 step in flight" if steps_in_flight == 1 else f"{steps_in_flight} steps in flight"


def _ratio_table(result: Result) -> list[str]:
    """Returns what does not depend on how fast the machine is, with the goals of whoever waits for each operation."""
    rows = []
    for served, empty in pairs(result["cells"]):
        adapters, steps = served["adapters"], served["steps_in_flight"]
        ratio = to_empty_server(served["rounds"], empty["rounds"])
        goals = {of: GOALS.get((adapters, of), "") if steps == 0 else "" for of in ratio}
        told = (ratio["api_cpu"], goals["api_cpu"], ratio["p50"], goals["p50"])
        rows.append((adapters, mode_name(steps), *told))
    return table(("adapters", "mode", "CPU of the API", "goal", "p50", "goal"), rows)


def _queue_row(served: Result, empty: Result) -> tuple[object, ...]:
    ours, floor = served["median"], empty["median"]
    above_ms = ours["operation"]["p50_ms"] - floor["operation"]["p50_ms"]
    return (
        served["adapters"],
        mode_name(served["steps_in_flight"]),
        served["client_processes"],
        *(ours["ops_per_s"], floor["ops_per_s"]),
        *(ours["operation"][f"p{percent}_ms"] for percent in (50, 95, 99)),
        floor["operation"]["p50_ms"],
        f"{above_ms:.1f}",
    )


def _cpu_row(served: Result, empty: Result) -> tuple[object, ...]:
    used = served["median"]["cpu_ms_per_op"]
    return (
        served["adapters"],
        mode_name(served["steps_in_flight"]),
        *(used.get(role, 0.0) for role in ("client", "api", "worker", "broker", "housekeeping")),
        empty["median"]["cpu_ms_per_op"]["client"],
    )


def _scale_cell(cell: Result, part: str) -> str:
    cost, ratio = cell["cost"][part], cell["of_smallest"][part]
    return f"{cost['cpu_p50_ms']} ({ratio['cpu_p50_ms']:.2f}, {ratio['wall_p50_ms']:.2f})"
