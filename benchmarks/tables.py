"""From ``results/*.json`` to the tables in ``README.md``.

python benchmarks/tables.py [--results DIR] [--print]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE / "README.md"

Result = Mapping[str, Any]


def main() -> None:
    """Fills the README's marked places, or prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--print", action="store_true", dest="prints", help="print the tables, change no file")
    arguments = parser.parse_args()
    texts = {
        name: render(json.loads(path.read_text()))
        for name, render in RENDERERS.items()
        if (path := arguments.results / f"{name}.json").exists()
    }
    if arguments.prints:
        print("\n\n".join(texts.values()))
    else:
        README.write_text(filled(README.read_text(), texts))


def filled(document: str, texts: Mapping[str, str]) -> str:
    """Returns the document with each text between its ``<!-- name -->`` and ``<!-- /name -->``.

    Raises:
        ValueError: A text has no place in the document.
    """
    for name, text in texts.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if place.search(document) is None:
            raise ValueError(f"no place for {name}")
        document = place.sub(lambda match, text=text: f"{match[1]}{text}\n{match[2]}", document)
    return document


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
    return "\n".join(lines)


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


def step_text(result: Result) -> str:
    """Returns the step benchmark's table."""
    work = result["workload"]
    lines = [
        machine_line(result),
        "",
        f"{work['datums']} sequences of {work['tokens_per_datum']} tokens, rank {work['rank']}, cross entropy, AdamW. "
        "Both sides take turns step by step; the ratio is the median over neighbours. Threads are those of torch.",
        "",
        *table(
            (
                *("hidden / layers", "threads", "steps", "plain PEFT ms", "service ms", "ratio", "quartiles"),
                *("PEFT CPU ms", "service and client CPU ms", "CPU ratio"),
            ),
            [_step_row(cell) for cell in result["cells"]],
        ),
        "",
        *table(
            (
                *("hidden / layers", "threads", "PEFT forward + backward ms", "PEFT AdamW ms"),
                *("service to first result ms", "then to second ms"),
            ),
            [_parts_row(cell) for cell in result["cells"]],
        ),
    ]
    return "\n".join(lines)


def custom_loss_text(result: Result) -> str:
    """Returns the table of the benchmark of custom losses."""
    work = result["workload"]
    lines = [
        machine_line(result),
        "",
        f"{work['datums']} sequences of {work['tokens_per_datum']} tokens, rank {work['rank']}, AdamW. "
        "Each side has an adapter; they take turns step by step, the ratio is the median over neighbours.",
        "",
        *table(
            (
                "hidden / layers",
                "threads",
                "steps",
                "client runs the loss ms",
                "service runs it ms",
                "ratio",
                "quartiles",
            ),
            [_custom_loss_row(cell) for cell in result["cells"]],
        ),
    ]
    return "\n".join(lines)


def ranks_text(result: Result) -> str:
    """Returns the table of the benchmark of several ranks."""
    work = result["workload"]
    columns = ("tokens", "layout", "step_ms", "speed_up", "cpu_ms", "cpu_ratio", "load_average")
    lines = [
        machine_line(result),
        "",
        f"hidden {work['hidden_size']}, {work['layers']} layers, vocabulary {work['vocab_size']}, one adapter of rank "
        f"{work['lora_rank']}, {work['datums']} datums a step, one torch thread a rank. Medians.",
        "",
        *table(
            (
                "tokens a datum",
                "layout",
                "step ms",
                "× as fast as one rank",
                "CPU ms",
                "CPU of one rank's",
                "load average",
            ),
            [tuple(cell[name] for name in columns) for cell in result["cells"]],
        ),
    ]
    return "\n".join(lines)


def fusion_text(result: Result) -> str:
    """Returns the fusion benchmark's tables."""
    work, memory = result["workload"], result["memory"]
    lines = [
        machine_line(result),
        "",
        f"hidden {work['hidden_size']}, {work['layers']} layers, vocabulary {work['vocab_size']}, ranks "
        f"{', '.join(map(str, work['ranks']))} in turn, torch threads {work['threads']}, passes of at most "
        f"{work['tokens_per_pass']} tokens. Tokens per second of CPU time; ratios are medians over rounds in turns.",
        *(["", result["note"]] if "note" in result else []),
        "",
        *table(
            (
                *("tenants", "tokens each", "fused", "switching in PEFT", "one by one", "one tenant", "one in PEFT"),
                *("× switching in PEFT", "by wall time", "× one by one", "of one tenant", "of one in PEFT"),
            ),
            [_fusion_row(cell) for cell in result["cells"]],
        ),
        "",
        *table(
            ("goal", "at least", "worst", "best", "missed at (tenants x tokens)"),
            [
                (goal["what"], f"{goal['goal']:.2f}", f"{goal['worst']:.2f}", f"{goal['best']:.2f}", _missed_at(goal))
                for goal in result["goals"].values()
            ],
        ),
        "",
        f"Memory of one more tenant that trains, rank {memory['rank']}: {memory['adapter_mib']} MiB by its buffers, "
        f"{memory['rss_growth_mib']} MiB by the growth of the process; the base, held once: "
        f"{memory['base_mib']} MiB.",
    ]
    if result["determinism"]:
        columns = ("tenants", "tokens", "mode", "measured_mode", "tokens_per_cpu_s")
        lines += [
            "",
            *table(
                ("tenants", "tokens each", "mode asked for", "mode proven", "tokens per CPU second", "of none"),
                [(*(row[key] for key in columns), f"{row['of_none']:.2f}") for row in result["determinism"]],
            ),
        ]
    if result["processes"]:
        columns = (
            *("processes", "threads_each", "fused_threads", "separate_tokens_per_s", "fused_tokens_per_s"),
            *("separate_rss_mib", "fused_rss_mib"),
        )
        lines += [
            "",
            *table(
                (
                    *("tenants", "threads of each process", "threads fused", "a process each, tokens/s"),
                    *("fused, tokens/s", "a process each, MiB", "fused, MiB"),
                ),
                [tuple(row[key] for key in columns) for row in result["processes"]],
            ),
        ]
    return "\n".join(lines)


def switch_text(result: Result) -> str:
    """Returns the table of what a switch of adapters costs."""
    work = result["workload"]
    ways = ("create", "park", "unpark", "evict", "restore", "peft_switch", "peft_load")
    return "\n".join(
        [
            machine_line(result),
            "",
            f"hidden {work['hidden_size']}, {work['layers']} layers, vocabulary {work['vocab_size']}; a pass is the "
            f"forward and backward of {work['pass_tokens']} tokens of one tenant. Medians of {work['rounds']} rounds, "
            "in milliseconds; in brackets the share of a pass.",
            "",
            *table(
                ("rank", "adapter MiB", "a pass", *(way.replace("_", " ").replace("peft", "PEFT") for way in ways)),
                [
                    (
                        *(f"{row['rank']:.0f}", row["adapter_mib"], row["pass"]),
                        *(f"{row[way]} ({row[f'{way}_of_a_pass']:.0%})" for way in ways),
                    )
                    for row in result["rows"]
                ],
            ),
        ]
    )


def sampling_text(result: Result) -> str:
    """Returns the sampling benchmark's tables."""
    work = result["workload"]
    ways = {
        "torch_base": "TorchSampler, base",
        "torch_mix": "TorchSampler, mix",
        "vllm_base": "vLLM, base",
        "vllm_mix": "vLLM, mix",
        "generate": "`generate`, base",
        "peft_one_by_one": "PEFT, mix",
    }
    measured = [way for way in ways if way in result["cells"][0]["tokens_per_cpu_s"]]
    against = [
        (way, reference) for way, references in result["cells"][0]["against"].items() for reference in references
    ]
    lines = [
        machine_line(result),
        "",
        f"hidden {work['hidden_size']}, {work['layers']} layers, vocabulary {work['vocab_size']}, prompts of "
        f"{work['prompt_tokens'][0]} to {work['prompt_tokens'][1]} tokens, {work['new_tokens']} new ones each. Mix: "
        f"{work['adapters']} adapters of rank {work['rank']} and the base in turn. Torch threads {work['threads']}; "
        f"medians of {work['rounds']} rounds in turns.",
    ]
    for clock, key, ratio in (
        ("CPU time", "tokens_per_cpu_s", "against"),
        ("wall time", "tokens_per_s", "against_wall"),
    ):
        lines += [
            "",
            *table(
                (
                    f"requests, by {clock}",
                    *(f"{ways[way]}, tokens/s" for way in measured),
                    *(f"{ways[way]} / {ways[reference]}" for way, reference in against),
                ),
                [
                    (
                        cell["requests"],
                        *(f"{cell[key][way]:.0f}" for way in measured),
                        *(f"{cell[ratio][way][reference]:.2f}" for way, reference in against),
                    )
                    for cell in result["cells"]
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


RENDERERS: Mapping[str, Callable[[Result], str]] = {
    "queue_overhead": queue_text,
    "native_client": native_text,
    "step_overhead": step_text,
    "custom_loss": custom_loss_text,
    "fusion": fusion_text,
    "sampling": sampling_text,
    "adapter_switch": switch_text,
    "ranks": ranks_text,
    "scale": scale_text,
    "scale_postgresql": scale_text,
}


def machine_line(result: Result) -> str:
    """Returns one line on what the numbers were measured on."""
    machine, load = result["machine"], result["load_average"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}, commit {machine['commit']}; "
        f"load average {load['before']} before, {load['after']} after. {versions}."
    )


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


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns a Markdown table, line by line."""
    lines = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


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


def _step_row(cell: Result) -> tuple[object, ...]:
    low, high = cell["ratio_quartiles"]
    return (
        *_model_of(cell),
        *(cell["steps"], cell["peft_ms"], cell["service_ms"], f"{cell['ratio']:.2f}", f"{low:.2f} to {high:.2f}"),
        *(cell["cpu_ms"]["peft"], cell["cpu_ms"]["service"], f"{cell['cpu_ratio']:.2f}"),
    )


def _custom_loss_row(cell: Result) -> tuple[object, ...]:
    low, high = cell["ratio_quartiles"]
    return (
        *_model_of(cell),
        *(cell["steps"], cell["client_ms"], cell["service_ms"], f"{cell['ratio']:.2f}", f"{low:.2f} to {high:.2f}"),
    )


def _parts_row(cell: Result) -> tuple[object, ...]:
    parts = ("forward_backward", "optim_step")
    return (*_model_of(cell), *(cell["parts_ms"][side][part] for side in ("peft", "service") for part in parts))


def _fusion_row(cell: Result) -> tuple[object, ...]:
    ways = ("fused", "peft_switching", "one_by_one", "limit", "peft_one_adapter")
    against, by_wall = cell["fused_against"], cell["fused_against_wall"]
    return (
        *(cell["tenants"], cell["tokens"]),
        *(f"{cell['tokens_per_cpu_s'][way]:.0f}" for way in ways),
        *(f"{against['peft_switching']:.2f}", f"{by_wall['peft_switching']:.2f}"),
        *(f"{against[way]:.2f}" for way in ("one_by_one", "limit", "peft_one_adapter")),
    )


def _scale_cell(cell: Result, part: str) -> str:
    cost, ratio = cell["cost"][part], cell["of_smallest"][part]
    return f"{cost['cpu_p50_ms']} ({ratio['cpu_p50_ms']:.2f}, {ratio['wall_p50_ms']:.2f})"


def _missed_at(goal: Result) -> str:
    return ", ".join(goal["missed_at"]) or "nowhere"


def _model_of(cell: Result) -> tuple[object, ...]:
    return f"{cell['hidden_size']} / {cell['layers']}", cell["threads"]


if __name__ == "__main__":
    main()
