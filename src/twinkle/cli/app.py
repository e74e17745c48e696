"""The commands. Each takes flags, lets them override the ``TWINKLE_*`` environment, and imports what it needs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from twinkle.cli.exit_codes import EXIT_ERROR, EXIT_TRY_AGAIN
from twinkle.cli.files.commands import files
from twinkle.cli.flags import EngineFlag, HomeFlag, JsonFlag, ModelFlag, ModelNameFlag, settings_of, settings_of_service
from twinkle.cli.groups import data, keys, runs, tokens
from twinkle.cli.jobs.commands import jobs
from twinkle.cli.jobs.export import OwnKeyFlag, PublicFlag, TitleOption, VerifyOption
from twinkle.cli.jobs.options import ServerFlag
from twinkle.cli.jobs.submit import submit
from twinkle.cli.mesh_groups import meshes
from twinkle.cli.operator_groups import ops, tenants
from twinkle.core.errors import TwinkleError
from twinkle.core.process.lazy import without_collector

app = typer.Typer(
    help="A shared training service: many tenants' LoRA adapters on one frozen base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys, name="keys")
app.add_typer(runs, name="runs")
app.add_typer(tokens, name="tokens")
app.add_typer(tenants, name="tenants")
app.add_typer(ops, name="ops")
app.add_typer(meshes, name="meshes")
app.add_typer(data, name="data")
app.add_typer(submit, name="submit")
app.add_typer(jobs, name="jobs")
app.add_typer(files, name="files")

_COMPUTING = (["serve"], ["worker"], ["jobs-worker"], ["processors"])
"""What the extra of the API alone does not suffice for."""


def main() -> None:
    """Run the command line. Our own errors become one line and an exit code, never a traceback."""
    try:
        app()
    except TwinkleError as error:
        print(f"twinkle: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_TRY_AGAIN if error.retryable else EXIT_ERROR) from None
    except ModuleNotFoundError as error:
        if (error.name or "twinkle").startswith("twinkle"):
            raise
        extra = "worker" if sys.argv[1:2] in _COMPUTING else "server"
        print(f"twinkle: {error.name} is not installed: pip install 'twinkle-queue[{extra}]'", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None
    except PermissionError as error:
        print(f"twinkle: {error.filename or 'a file or folder'}: {error.strerror}", file=sys.stderr)
        raise SystemExit(EXIT_ERROR) from None


@app.command()
def serve(
    model: ModelFlag = None,
    model_name: ModelNameFlag = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=DEVICE[,model=MODEL[,model-name=NAME]]",
            help="A mesh, its device, and what it has of its own: a model, ranks=4 or ray:8, engine=megatron,tensor=2,"
            "pipeline=2, serves=samples; may be repeated.  [default: default=cpu]",
        ),
    ] = None,
    home: HomeFlag = None,
    host: Annotated[str | None, typer.Option(help="Where the API listens.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="0 takes a free one.  [default: 8765]")] = None,
    flower: Annotated[bool, typer.Option("--flower", help="Start Flower too, behind a password.")] = False,
    flower_port: Annotated[int | None, typer.Option(help="0 takes a free one.  [default: 5555]")] = None,
    engine: EngineFlag = None,
    any_key: Annotated[
        bool | None,
        typer.Option("--any-key", help="Take any key, each for a tenant of its own; on this machine only."),
    ] = None,
) -> None:
    """Run everything on this machine: broker, API, workers, jobs worker, housekeeping.

    twinkle serve --model ./my-model --mesh first=cuda:0 --mesh second=cuda:1 --flower
    """
    if sys.platform == "win32":
        from twinkle.core.errors import ConfigError

        raise ConfigError(
            "`twinkle serve` does not run on Windows (Celery has no process pool there); use WSL, or the compose file"
        )
    with without_collector():
        from twinkle.cli.embedded.serve import run

    settings = settings_of(
        home=home,
        model=model,
        model_name=model_name,
        host=host,
        port=port,
        flower_port=flower_port,
        engine=engine,
        any_key=any_key,
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
    settings = settings_of_service(home=home, host=host, port=port)
    with without_collector():
        from twinkle.server.run import serve_api

    serve_api(settings)


@app.command()
def worker(
    mesh: Annotated[str | None, typer.Option(help="The mesh to serve.  [default: default]")] = None,
    model: ModelFlag = None,
    model_name: ModelNameFlag = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:0, npu.  [default: cpu]")] = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N|ray:N", help="Devices: of this machine, or of the nodes of a Ray cluster.  [default: 1]"
        ),
    ] = None,
    engine: EngineFlag = None,
    home: HomeFlag = None,
    stay_refused: Annotated[
        bool,
        typer.Option(
            "--stay-refused",
            help="When the settings are refused, wait to be stopped: for whatever starts it again however it ends.",
        ),
    ] = False,
) -> None:
    """Run the worker of one mesh.

    twinkle worker --mesh first --model ./my-model --device cuda:0
    twinkle worker --mesh big --model ./my-model --device cuda --ranks ray:8
    """
    settings = settings_of_service(
        mesh=mesh,
        model=model,
        model_name=model_name,
        device=device,
        ranks=ranks,
        engine=engine,
        home=home,
    )
    with without_collector():
        from twinkle.core.errors import ConfigError
        from twinkle.workers.entry import run_worker, wait_refused

    try:
        code = run_worker(settings)
    except ConfigError as error:
        if stay_refused:
            wait_refused(error)
        raise
    raise SystemExit(code)


@app.command()
def housekeeping(home: HomeFlag = None) -> None:
    """Run the sweeps: leases, sessions, gaps, deadlines, expiries. One is enough.

    twinkle housekeeping
    """
    settings = settings_of_service(home=home)
    with without_collector():
        from twinkle.tasks.housekeeping import run_housekeeping

    raise SystemExit(run_housekeeping(settings))


@app.command()
def jobs_worker(home: HomeFlag = None) -> None:
    """Run what tenants have handed over as jobs. Any number of them share the work.

    twinkle jobs-worker
    """
    settings = settings_of_service(home=home)
    with without_collector():
        from twinkle.workers.jobs.process import run_jobs_worker

    raise SystemExit(run_jobs_worker(settings))


@app.command()
def processors(home: HomeFlag = None) -> None:
    """Serve data sets and loaders over HTTP, apart from the jobs workers (TWINKLE_PROCESSORS=apart for those).

    twinkle processors
    """
    settings = settings_of_service(home=home)
    with without_collector():
        from twinkle.workers.processors.serving import run_processors

    raise SystemExit(run_processors(settings))


@app.command()
def export(
    what: Annotated[str, typer.Argument(metavar="CHECKPOINT|JOB", help="tinker://..., or an export that was begun.")],
    peft: Annotated[bool, typer.Option("--peft", help="The adapter as PEFT and vLLM load it.  [default]")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="The whole model for transformers and vLLM.")] = False,
    gguf: Annotated[bool, typer.Option("--gguf", help="The whole model for llama.cpp.")] = False,
    gguf_q8_0: Annotated[bool, typer.Option("--gguf-q8-0", help="The same in eight bits a weight.")] = False,
    gguf_adapter: Annotated[bool, typer.Option("--gguf-adapter", help="The adapter for llama.cpp.")] = False,
    ollama: Annotated[bool, typer.Option("--ollama", help="GGUF with a Modelfile.")] = False,
    to: Annotated[str, typer.Option(metavar="FOLDER|URL", help="A folder here, or hf://, ms://, s3://...")] = "export",
    public: PublicFlag = False,
    own_key: OwnKeyFlag = False,
    title: TitleOption = None,
    verify: VerifyOption = None,
    client_id: Annotated[
        str | None, typer.Option("--id", help="Submitted again under this id it is the same job.")
    ] = None,
    server: ServerFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON document a line.")] = False,
) -> None:
    """Take a checkpoint to other tools. It is read back and compared before it is given out.

    A download that broke off goes on with: twinkle export job-... --to FOLDER

    twinkle export tinker://0b1c.../weights/best --merged --to ./my-model
    """
    from twinkle.cli.jobs.exporting import Export, run_export

    chosen = {
        "peft": peft,
        "merged": merged,
        "gguf": gguf,
        "gguf-q8_0": gguf_q8_0,
        "gguf-adapter": gguf_adapter,
        "ollama": ollama,
    }
    asked = Export(
        what=what,
        forms=[form for form, is_wanted in chosen.items() if is_wanted],
        to=to,
        is_public=public,
        own_key=own_key,
        title=title,
        verify=verify,
        client_id=client_id,
        server=server,
        as_json=as_json,
    )
    raise SystemExit(run_export(asked))


@app.command()
def flower(
    host: Annotated[str | None, typer.Option(help="Where to listen.  [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="[default: 5555]")] = None,
) -> None:
    """Run Flower on our broker. Its password comes from TWINKLE_FLOWER_PASSWORD.

    TWINKLE_FLOWER_PASSWORD=... twinkle flower --port 5555
    """
    from twinkle.dashboards.flower import run_flower

    run_flower(settings_of(flower_host=host, flower_port=port))


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
    from twinkle.cli.operator.status import is_alive, show_status

    settings = settings_of(home=home)
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
    from twinkle.cli.operator.top import show_top

    show_top(settings_of(home=home), every_s=every_s, once=once, as_json=as_json)


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
    from twinkle.cli.operator.orphans import show_orphans

    show_orphans(settings_of(home=home), older_than_days=older_than_days, delete=delete, as_json=as_json)


@app.command()
def vacuum(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Give back to the disk what deleted rows of the journal took; on a full disk too. Writers wait meanwhile.

    twinkle vacuum --home .twinkle
    """
    from twinkle.cli.operator.vacuum import vacuum_journal

    vacuum_journal(settings_of(home=home), as_json=as_json)


@app.command()
def audit(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.  [default: of all]")] = None,
    event: Annotated[
        str | None, typer.Option(metavar="WORD", help="What begins so: apikey, checkpoint_delete, tenant_suspend, ...")
    ] = None,
    actor: Annotated[str | None, typer.Option(metavar="TEXT", help="Who: a key's id, a job's, an operator.")] = None,
    days: Annotated[float, typer.Option(min=0.001, help="How far back.")] = 7.0,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many of the latest.")] = 100,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show who made, revoked, published, deleted, suspended what, and when. Nobody can change what stands here.

    twinkle audit --tenant alice --event apikey --days 30
    """
    from twinkle.cli.operator.audit import show_audit

    show_audit(settings_of(home=home), tenant=tenant, event=event, actor=actor, days=days, limit=limit, as_json=as_json)


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
