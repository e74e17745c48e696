"""The commands. Each takes flags, lets them override the ``TWINKLE_*`` environment, and imports what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twinkle.cli.exit_codes import EXIT_ERROR, EXIT_TRY_AGAIN
from twinkle.core.errors import TwinkleError

if TYPE_CHECKING:
    from twinkle.core.settings import Settings


HomeFlag = Annotated[Path | None, typer.Option(help="Folder of the embedded stack.  [default: .twinkle]")]
ModelFlag = Annotated[str | None, typer.Option(help="Path or id of the frozen base model.")]
ModelNameFlag = Annotated[str | None, typer.Option(help="The name clients use for it.  [default: as in --model]")]
EngineFlag = Annotated[str | None, typer.Option(help="transformers, or null (computes nothing; for benchmarks).")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
AtFlag = Annotated[
    int | None, typer.Option(metavar="STEP", min=0, help="After this step of the optimizer; 0: its start.")
]
AtOperationFlag = Annotated[int | None, typer.Option(min=0, help="Or after the operation of this number.")]
WaitFlag = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the mesh.")]
LimitFlag = Annotated[str | None, typer.Option(metavar="N", help="0 is no limit; `default` is the settings'.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document instead of a table.")]

app = typer.Typer(
    help="A shared training service: many tenants' LoRA adapters on one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
keys = typer.Typer(help="API keys: shown once, stored as hashes.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")
runs = typer.Typer(
    help="Training runs and their past: fork them, rewind them.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(runs, name="runs")
tokens = typer.Typer(
    help="Weights access tokens: who reads whose checkpoints.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(tokens, name="tokens")
tenants = typer.Typer(help="Tenants: their weights and limits.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tenants, name="tenants")


def main() -> None:
    """Run the command line. Our own errors become one line and an exit code, never a traceback."""
    try:
        app()
    except TwinkleError as error:
        print(f"twinkle: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_TRY_AGAIN if error.retryable else EXIT_ERROR) from None


def _settings(**flags: object) -> Settings:
    """The process's settings, with logging set up by them."""
    from twinkle.core.logs import configure_logging
    from twinkle.core.settings import load_settings

    settings = load_settings(**flags)
    configure_logging(settings.log_level, settings.log_json)
    return settings


@app.command()
def serve(
    model: ModelFlag = None,
    model_name: ModelNameFlag = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DEVICE[,model=MODEL[,model-name=NAME]]",
            help="A mesh, its device, and its model if it has one of its own; may be repeated.  [default: default=cpu]",
        ),
    ] = None,
    home: HomeFlag = None,
    host: Annotated[str | None, typer.Option(help="Where the API listens.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.  [default: 8765]")] = None,
    flower: Annotated[bool, typer.Option("--flower", help="Start Flower too, behind a password.")] = False,
    flower_port: Annotated[int | None, typer.Option(help="0 takes a free one.  [default: 5555]")] = None,
    engine: EngineFlag = None,
) -> None:
    """Run everything on this machine: broker, API, workers, housekeeping.

    twinkle serve --model ./my-model --mesh first=cuda:0 --mesh second=cuda:1 --flower
    """
    if sys.platform == "win32":
        from twinkle.core.errors import ConfigError

        raise ConfigError(
            "`twinkle serve` does not run on Windows (Celery has no process pool there); use WSL, or the compose file"
        )
    from twinkle.cli.serve import run

    settings = _settings(
        home=home,
        model=model,
        model_name=model_name,
        host=host,
        port=port,
        flower_port=flower_port,
        engine=engine,
    )
    raise SystemExit(run(settings, meshes=mesh or [], with_flower=flower))


@app.command()
def server(
    home: HomeFlag = None,
    host: Annotated[str | None, typer.Option(help="Where to listen.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="[default: 8765]")] = None,
) -> None:
    """Run the API alone.

    TWINKLE_DATABASE_URL=postgresql://... TWINKLE_REDIS_URL=redis://... twinkle server --host 0.0.0.0
    """
    from twinkle.server.run import serve_api

    serve_api(_settings(home=home, host=host, port=port))


@app.command()
def worker(
    mesh: Annotated[str | None, typer.Option(help="The mesh to serve.  [default: default]")] = None,
    model: ModelFlag = None,
    model_name: ModelNameFlag = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0.  [default: cpu]")] = None,
    engine: EngineFlag = None,
    home: HomeFlag = None,
) -> None:
    """Run the worker of one mesh.

    twinkle worker --mesh first --model ./my-model --device cuda:0
    """
    from twinkle.workers.entry import run_worker

    settings = _settings(
        mesh=mesh,
        model=model,
        model_name=model_name,
        device=device,
        engine=engine,
        home=home,
    )
    raise SystemExit(run_worker(settings))


@app.command()
def housekeeping(home: HomeFlag = None) -> None:
    """Run the sweeps: leases, sessions, gaps, deadlines, expiries. One is enough.

    twinkle housekeeping
    """
    from twinkle.tasks.housekeeping import run_housekeeping

    raise SystemExit(run_housekeeping(_settings(home=home)))


@app.command()
def flower(
    host: Annotated[str | None, typer.Option(help="Where to listen.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="[default: 5555]")] = None,
) -> None:
    """Run Flower on our broker. Its password comes from TWINKLE_FLOWER_PASSWORD.

    TWINKLE_FLOWER_PASSWORD=... twinkle flower --port 5555
    """
    from twinkle.dashboards.flower import run_flower

    run_flower(_settings(flower_host=host, flower_port=port))


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Option(help="Whose key it is; the tenant is made if need be.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "cli",
    home: HomeFlag = None,
) -> None:
    """Make an API key. It stands alone on the last line and is shown this once.

    twinkle keys create --tenant alice --name laptop
    """
    from twinkle.cli.keys import create_key

    create_key(_settings(home=home), tenant=tenant, name=name)


@keys.command("list")
def keys_list(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """List the keys that were made, without the keys themselves.

    twinkle keys list --json
    """
    from twinkle.cli.keys import list_keys

    list_keys(_settings(home=home), as_json=as_json)


@runs.command("list")
def runs_list(
    home: HomeFlag = None,
    limit: Annotated[int, typer.Option(help="How many of the newest.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List the newest training runs.

    twinkle runs list --limit 50
    """
    from twinkle.cli.runs import list_runs

    list_runs(_settings(home=home), limit=limit, as_json=as_json)


@runs.command("show")
def runs_show(
    run: RunArgument,
    home: HomeFlag = None,
    steps: Annotated[int, typer.Option(min=1, help="How many of the latest steps.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """Show where a run comes from, how far back it can go, and what that takes up.

    twinkle runs show 0b1c...:train:0
    """
    from twinkle.cli.runs import show_run

    show_run(_settings(home=home), run, num_steps=steps, as_json=as_json)


@runs.command("fork")
def runs_fork(
    run: RunArgument,
    at: AtFlag = None,
    at_operation: AtOperationFlag = None,
    timeout_s: WaitFlag = 120.0,
    home: HomeFlag = None,
) -> None:
    """Begin a new run as this one was after a step. Its id stands alone on the last line.

    twinkle runs fork 0b1c...:train:0 --at 100
    """
    from twinkle.cli.runs import fork_run

    fork_run(_settings(home=home), run, step=at, operation=at_operation, timeout_s=timeout_s)


@runs.command("rewind")
def runs_rewind(
    run: RunArgument,
    at: AtFlag = None,
    at_operation: AtOperationFlag = None,
    timeout_s: WaitFlag = 120.0,
    home: HomeFlag = None,
) -> None:
    """Let a run go on as it was after a step. What came after stays in the journal.

    twinkle runs rewind 0b1c...:train:0 --at 100
    """
    from twinkle.cli.runs import rewind_run

    rewind_run(_settings(home=home), run, step=at, operation=at_operation, timeout_s=timeout_s)


@runs.command("pin")
def runs_pin(
    run: RunArgument,
    off: Annotated[bool, typer.Option("--off", help="Let it leave the device again.")] = False,
    home: HomeFlag = None,
) -> None:
    """Keep a run's adapter on its device from its next operation on, whoever else needs the room.

    twinkle runs pin 0b1c...:train:0
    """
    from twinkle.cli.runs import pin_run

    pin_run(_settings(home=home), run, is_pinned=not off)


@tokens.command("create")
def tokens_create(
    target: Annotated[
        str, typer.Argument(metavar="RUN|PATH", help="The run's id, or one checkpoint's tinker:// path.")
    ],
    days: Annotated[float, typer.Option(help="How long it is good.")] = 7.0,
    name: Annotated[str, typer.Option(help="Whom it is for.")] = "",
    home: HomeFlag = None,
) -> None:
    """Make a token with which any tenant's key reads these checkpoints. It stands alone on the last line.

    twinkle tokens create 0b1c...:train:0 --days 30 --name bob
    """
    from twinkle.cli.tokens import create_token

    create_token(_settings(home=home), target, name=name, days=days)


@tokens.command("list")
def tokens_list(
    run: Annotated[str | None, typer.Option(help="Only this run's.")] = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the tokens whose time is not over, without the tokens themselves.

    twinkle tokens list --json
    """
    from twinkle.cli.tokens import list_tokens

    list_tokens(_settings(home=home), run=run, as_json=as_json)


@tokens.command("revoke")
def tokens_revoke(
    token: Annotated[str, typer.Argument(help="Its id, as `tokens list` shows it.")], home: HomeFlag = None
) -> None:
    """Let a token open nothing any more, at once. What was accepted with it goes on.

    twinkle tokens revoke 4e0c...
    """
    from twinkle.cli.tokens import revoke_token

    revoke_token(_settings(home=home), token)


@tenants.command("list")
def tenants_list(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """List the tenants with their weights and limits.

    twinkle tenants list --json
    """
    from twinkle.cli.tenants import list_tenants

    list_tenants(_settings(home=home), as_json=as_json)


@tenants.command("set")
def tenants_set(
    tenant: Annotated[str, typer.Argument(help="Whose weight or limits.")],
    weight: Annotated[float | None, typer.Option(help="Its share beside others'; 1 at first.")] = None,
    max_adapters: LimitFlag = None,
    max_running: LimitFlag = None,
    max_samples: LimitFlag = None,
    max_body_bytes: LimitFlag = None,
    tokens_per_minute: LimitFlag = None,
    home: HomeFlag = None,
) -> None:
    """Change a tenant's weight or limits; what is not given stays.

    twinkle tenants set alice --weight 2 --tokens-per-minute 100000
    """
    from twinkle.cli.tenants import set_tenant

    limits = {
        "max_adapters": max_adapters,
        "max_running": max_running,
        "max_samples": max_samples,
        "max_body_bytes": max_body_bytes,
        "tokens_per_minute": tokens_per_minute,
    }
    set_tenant(_settings(home=home), tenant, weight=weight, limits=limits)


@app.command()
def status(
    home: HomeFlag = None,
    as_json: JsonFlag = False,
    alive: Annotated[
        str | None, typer.Option(metavar="MESH", help="Only answer, by the exit code, whether this mesh has a worker.")
    ] = None,
) -> None:
    """Show the meshes, their adapters and what waits for them.

    twinkle status --home .twinkle
    """
    from twinkle.cli.status import is_alive, show_status

    settings = _settings(home=home)
    if alive is not None:
        raise SystemExit(0 if is_alive(settings, alive) else 1)
    show_status(settings, as_json=as_json)


@app.command()
def top(
    every_s: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who waits for each mesh, who was served, and who is held back by a limit.

    twinkle top --once
    """
    from twinkle.cli.top import show_top

    show_top(_settings(home=home), every_s=every_s, once=once, as_json=as_json)


@app.command()
def orphans(
    older_than_days: Annotated[
        int, typer.Option(metavar="DAYS", min=2, help="Only what was written so many days ago.")
    ] = 2,
    delete: Annotated[bool, typer.Option("--delete", help="Have housekeeping delete them.")] = False,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show what lies in the object store and in no row of the journal: leftovers of crashes and refused requests.

    Delete only while the journal is the one that belongs to the store, and no older.

    twinkle orphans --delete
    """
    from twinkle.cli.orphans import show_orphans

    show_orphans(_settings(home=home), older_than_days=older_than_days, delete=delete, as_json=as_json)


@app.command()
def version() -> None:
    """Show the version.

    twinkle version
    """
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        print(version_of("twinkle-queue"))
    except PackageNotFoundError:
        print("not installed: run from source")
