"""Two tenants train at once on one tiny model, from an empty folder to sampled answers, in a few minutes on a CPU.

    python examples/demo.py [--home .demo] [--keep]

Makes a tiny Qwen3 model with random weights, starts `twinkle serve` on it, and lets two tenants train through the
official `tinker` SDK at the same time: "ada" learns who it is, "sum" learns small arithmetic. Nothing is downloaded,
and nothing is left running, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from demo_stack import DemoError, Stack, interrupt
from demo_tenants import PLANS, TenantRun, start_tenant
from twinkle.hub.tiny import make_tiny_model

REFRESH_S = 0.2
PLAIN_LINE_EVERY_S = 10.0
STALL_TIMEOUT_S = 120.0
EXIT_INTERRUPTED = 130


def main() -> int:
    """Runs the demo; returns the exit code."""
    arguments = parse_arguments()
    console = Console(highlight=False)
    # The SDK logs every poll that fails, which is noise once the service has been told to stop.
    logging.getLogger("tinker").setLevel(logging.ERROR)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it bare
    signal.signal(signal.SIGTERM, interrupt)
    try:
        run_demo(console, arguments.home.absolute(), keep=arguments.keep)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped")
        return EXIT_INTERRUPTED
    except DemoError as error:
        console.print(f"[red]the demo failed:[/red] {error}", soft_wrap=True)
        return 1
    return 0


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=Path(".demo"), help="folder for everything the demo writes")
    parser.add_argument("--keep", action="store_true", help="leave the service running at the end, until Ctrl-C")
    return parser.parse_args()


def run_demo(console: Console, home: Path, *, keep: bool) -> None:
    """Makes the model, starts the stack, trains, reports; raises DemoError when anything is not as it should be."""
    started = time.monotonic()
    texts = [message["content"] for plan in PLANS for chat in plan.chats() for message in chat]
    with phase(console, "making a tiny Qwen3 model with random weights"):
        model = make_tiny_model(home / "models" / "tiny-qwen3", texts=texts)
        tokenizer = AutoTokenizer.from_pretrained(model)
    with Stack(model, home / "home") as stack:
        with phase(console, "starting the service: broker, API, worker, Flower"):
            stack.wait_until_ready()
        with phase(console, "creating an API key for each tenant"):
            keys = {plan.tenant: stack.create_key(plan.tenant) for plan in PLANS}
        runs = [start_tenant(plan, url=stack.url, api_key=keys[plan.tenant], tokenizer=tokenizer) for plan in PLANS]
        show_progress(console, runs, stack)
        report(console, runs)
        console.print(f"\n[bold]All of it took {time.monotonic() - started:.0f} s.[/bold] Where to look next:")
        show_places(console, stack, keep=keep)
        failed = [run.plan.tenant for run in runs if not run.has_learned]
        if failed:
            raise DemoError(f"the loss did not fall by half for: {', '.join(failed)} (see {stack.log_file})")
        if keep:
            console.print("\nThe service keeps running; Ctrl-C stops it.")
            stack.wait()
            stack.check_alive()


@contextmanager
def phase(console: Console, what: str) -> Iterator[None]:
    """Shows a spinner while the block runs, and one line with its time afterwards."""
    started = time.monotonic()
    if console.is_terminal:
        with console.status(f"{what} ..."):
            yield
    else:
        console.print(f"{what} ...")
        yield
    console.print(f"[green]done[/green] {what} ({time.monotonic() - started:.1f} s)")


def show_progress(console: Console, runs: Sequence[TenantRun], stack: Stack) -> None:
    """Shows all tenants until the last one is done; raises DemoError as soon as one fails or the service ends."""
    if console.is_terminal:
        columns = (
            TextColumn("[bold]{task.description}[/bold] {task.fields[phase]:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bars = [progress.add_task(r.plan.tenant, total=r.plan.steps, phase=r.phase, facts="") for r in runs]
            for _ in until_done(runs, stack):
                for bar, run in zip(bars, runs, strict=True):
                    progress.update(bar, completed=len(run.losses), phase=run.phase, facts=facts(run))
        return
    next_line = time.monotonic() + PLAIN_LINE_EVERY_S
    for finished in until_done(runs, stack):
        if finished or time.monotonic() >= next_line:
            next_line += PLAIN_LINE_EVERY_S
            console.print("; ".join(plain_progress(run) for run in runs), soft_wrap=True)


def until_done(runs: Sequence[TenantRun], stack: Stack) -> Iterator[bool]:
    """Yields False every moment while tenants are busy and True once at the end.

    Raises:
        DemoError: A tenant failed, the service ended, or nothing moved for a long time.
    """
    seen: list[tuple[str, int]] = []
    moved = time.monotonic()
    while True:
        for run in runs:
            if run.error is not None:
                raise DemoError(f"tenant {run.plan.tenant} failed in phase '{run.phase}': {run.error!r}") from run.error
        if all(run.done.is_set() for run in runs):
            yield True
            return
        stack.check_alive()
        if (now := [(run.phase, len(run.losses)) for run in runs]) != seen:
            seen, moved = now, time.monotonic()
        elif time.monotonic() - moved > STALL_TIMEOUT_S:
            where = "; ".join(plain_progress(run) for run in runs)
            raise DemoError(f"nothing moved for {STALL_TIMEOUT_S:.0f} s ({where}); see the logs in {stack.home}")
        yield False
        time.sleep(REFRESH_S)


def facts(run: TenantRun) -> str:
    """Returns loss and speed so far."""
    if not run.losses:
        return ""
    return f"loss {run.losses[-1]:.3f}  {run.num_tokens / run.training_s:,.0f} tok/s"


def plain_progress(run: TenantRun) -> str:
    """Returns a tenant's progress as plain text."""
    done, total = len(run.losses), run.plan.steps
    text = f"{run.plan.tenant}: {run.phase}, step {done}/{total}"
    if 0 < done < total:
        text += f", {facts(run)}, ETA {run.training_s / done * (total - done):.0f} s"
    elif done:
        text += f", {facts(run)}"
    return text


def report(console: Console, runs: Sequence[TenantRun]) -> None:
    """Prints losses, samples and checkpoints."""
    losses = Table("tenant", "data", "rank", "steps", "loss: start", "end", "seconds", title="Loss per answer token")
    for run in runs:
        plan = run.plan
        losses.add_row(
            *(plan.tenant, plan.data_file, str(plan.rank), str(plan.steps)),
            *(f"{run.first_loss:.2f}", f"{run.last_loss:.2f}", f"{run.training_s:.0f}"),
        )
    samples = Table("tenant", "question", "before", "after", title="The most likely answer", show_lines=True)
    for run in runs:
        trained_on = {chat[0]["content"] for chat in run.plan.chats()}
        for question, before, after in zip(run.plan.questions, run.before, run.after, strict=True):
            note = "" if question in trained_on else "\n(not in its training text)"
            samples.add_row(run.plan.tenant, question + note, printable(before), printable(after))
    console.print(losses, samples)
    console.print("[bold]Checkpoints[/bold] (training state, and weights to sample from)")
    for run in runs:
        for path in (run.state_path, run.sampler_path):
            console.print(f"  {run.plan.tenant}  {path}", markup=False, soft_wrap=True)


def printable(text: str, *, longest: int = 60) -> str:
    """Returns a sample cut to one short line without control characters, or markup that rich would read."""
    line = "".join(char if char.isprintable() else "·" for char in text)
    return (line[:longest] + "…" if len(line) > longest else line).replace("[", r"\[") or "(nothing)"


def show_places(console: Console, stack: Stack, *, keep: bool) -> None:
    """Prints where everything is."""
    again = "" if keep else "  (stops now; with --keep it stays)"
    places = (
        ("API", f"{stack.url}{again}"),
        ("Flower", f"{stack.flower_url}{again}"),
        ("", f"user twinkle, password in {stack.flower_password_file}"),
        ("logs", f"{stack.log_file} and {stack.home / 'logs'}"),
        ("client code", "examples/demo_tenants.py, the training loop of this demo"),
        ("how it works", "docs/"),
    )
    for what, where in places:
        console.print(f"  {what:<13} {where}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    sys.exit(main())
