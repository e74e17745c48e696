"""The tables of how a step and a sample are computed."""

from __future__ import annotations

from markdown_table import Result, machine_line, table


def sweep_text(result: Result) -> str:
    """Returns the table of a sweep at once and one after the other."""
    work, seconds = result["workload"], result["seconds"]
    lines = [
        machine_line(result),
        "",
        f"{work['members']} fine-tunings of {work['steps']} steps of {work['batch_size']} rows, rank {work['rank']}. "
        "Seconds from the sweep's submission to its end, medians.",
        "",
        *table(
            ("members", "all at once, s", "one after the other, s", "times as long"),
            [(work["members"], seconds["at once"], seconds["one after the other"], result["times"])],
        ),
    ]
    return "\n".join(lines)


def dry_run_text(result: Result) -> str:
    """Returns what dry runs foretold against what the jobs then took."""
    work = result["workload"]
    lines = [
        machine_line(result),
        "",
        f"{work['steps']} steps on {work['rows']} rows; what each took, and what that is of both ends of what was "
        "foretold.",
        "",
        *table(
            ("kind", "foretold, s", "took, s", "of the least", "of the most", "within a quarter", "on the device, s"),
            [
                (
                    one["kind"],
                    "{} to {}".format(*one["foretold_s"]),
                    one["took_s"],
                    round(one["took_s"] / one["foretold_s"][0], 2),
                    round(one["took_s"] / one["foretold_s"][1], 2),
                    "yes" if one["is_within"] else "no",
                    "{} of {} to {}".format(one["device_s"], *one["foretold_device_s"]),
                )
                for one in result["kinds"]
            ],
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
        "launched_base": "without graphs, base",
        "launched_mix": "without graphs, mix",
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


def _missed_at(goal: Result) -> str:
    return ", ".join(goal["missed_at"]) or "nowhere"


def _model_of(cell: Result) -> tuple[object, ...]:
    return f"{cell['hidden_size']} / {cell['layers']}", cell["threads"]
