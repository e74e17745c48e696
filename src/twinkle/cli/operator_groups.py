"""What an operator sees and does of all tenants: ``twinkle tenants``, ``twinkle ops``."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.flags import HomeFlag, JsonFlag, LimitFlag, settings_of

OperationArgument = Annotated[str, typer.Argument(metavar="ID", help="The id of its future.")]

tenants = typer.Typer(help="Tenants: their weights and limits.", no_args_is_help=True, rich_markup_mode=None)
ops = typer.Typer(
    help="Single operations of all tenants: which wait or failed, why, and to cancel one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@tenants.command("list")
def tenants_list(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """List the tenants with their weights and limits.

    twinkle tenants list --json
    """
    from twinkle.cli.operator.tenants import list_tenants

    list_tenants(settings_of(home=home), as_json=as_json)


@tenants.command("set")
@tenants.command("limits")
def tenants_set(
    tenant: Annotated[str, typer.Argument(help="Whose weight or limits.")],
    weight: Annotated[float | None, typer.Option(help="Its share beside others'; 1 at first.")] = None,
    max_adapters: LimitFlag = None,
    max_running: LimitFlag = None,
    max_samples: LimitFlag = None,
    max_body_bytes: LimitFlag = None,
    max_files_bytes: LimitFlag = None,
    max_jobs: LimitFlag = None,
    max_running_jobs: LimitFlag = None,
    tokens_per_minute: LimitFlag = None,
    max_sessions: LimitFlag = None,
    max_runs: LimitFlag = None,
    max_sampling_sessions: LimitFlag = None,
    max_queued: LimitFlag = None,
    max_queued_bytes: LimitFlag = None,
    max_checkpoints: LimitFlag = None,
    max_checkpoint_bytes: LimitFlag = None,
    max_kept_bytes: LimitFlag = None,
    home: HomeFlag = None,
) -> None:
    """Change a tenant's weight or limits; what is not given stays. Where nothing is given, show them.

    twinkle tenants limits alice
    twinkle tenants set alice --weight 2 --tokens-per-minute 100000
    """
    from twinkle.cli.operator.tenants import set_tenant

    limits = {
        "max_adapters": max_adapters,
        "max_running": max_running,
        "max_samples": max_samples,
        "max_body_bytes": max_body_bytes,
        "max_files_bytes": max_files_bytes,
        "max_jobs": max_jobs,
        "max_running_jobs": max_running_jobs,
        "tokens_per_minute": tokens_per_minute,
        "max_sessions": max_sessions,
        "max_runs": max_runs,
        "max_sampling_sessions": max_sampling_sessions,
        "max_queued": max_queued,
        "max_queued_bytes": max_queued_bytes,
        "max_checkpoints": max_checkpoints,
        "max_checkpoint_bytes": max_checkpoint_bytes,
        "max_kept_bytes": max_kept_bytes,
    }
    set_tenant(settings_of(home=home), tenant, weight=weight, limits=limits)


@tenants.command("show")
def tenants_show(
    tenant: Annotated[str, typer.Argument(help="Whose.")], home: HomeFlag = None, as_json: JsonFlag = False
) -> None:
    """Show a tenant's limits and how much of them is taken, what it has stored, and what it used lately.

    twinkle tenants show alice
    """
    from twinkle.cli.operator.tenants import show_tenant

    show_tenant(settings_of(home=home), tenant, as_json=as_json)


@tenants.command("suspend")
def tenants_suspend(
    tenant: Annotated[str, typer.Argument(help="Whom.")],
    reason: Annotated[str, typer.Option(help="Why; the tenant reads it.")],
    now: Annotated[bool, typer.Option("--now", help="Cancel its samples that wait or run, too.")] = False,
    home: HomeFlag = None,
) -> None:
    """Let a tenant begin nothing new. What was accepted goes on, jobs wait, everything can be read and deleted.

    twinkle tenants suspend alice --reason 'unpaid since May'
    """
    from twinkle.cli.operator.tenants import suspend_tenant

    suspend_tenant(settings_of(home=home), tenant, reason=reason, cancels_samples=now)


@tenants.command("resume")
def tenants_resume(tenant: Annotated[str, typer.Argument(help="Whom.")], home: HomeFlag = None) -> None:
    """Let a suspended tenant begin again; its jobs go on by themselves.

    twinkle tenants resume alice
    """
    from twinkle.cli.operator.tenants import resume_tenant

    resume_tenant(settings_of(home=home), tenant)


@ops.command("list")
def ops_list(
    state: Annotated[
        str, typer.Option(metavar="WORDS", help="Some of waiting,running,failed,done.")
    ] = "waiting,running,failed",
    tenant: Annotated[str | None, typer.Option(help="Of this tenant only.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Of this mesh only.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Of those that wait or run, and of the others.")] = 20,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List operations: the oldest that wait or run, and the latest that failed.

    twinkle ops list --state failed --tenant alice
    """
    from twinkle.cli.operator.ops import list_operations

    list_operations(settings_of(home=home), states=state, tenant=tenant, mesh=mesh, limit=limit, as_json=as_json)


@ops.command("show")
def ops_show(operation: OperationArgument, home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Show all that is known of an operation but its data.

    twinkle ops show 8e0f:train:0:req:12
    """
    from twinkle.cli.operator.ops import show_operation

    show_operation(settings_of(home=home), operation, as_json=as_json)


@ops.command("why")
def ops_why(operation: OperationArgument, home: HomeFlag = None) -> None:
    """Say in a sentence why an operation is where it is.

    twinkle ops why 8e0f:train:0:req:12
    """
    from twinkle.cli.operator.ops import say_why

    say_why(settings_of(home=home), operation)


@ops.command("cancel")
def ops_cancel(
    operation: OperationArgument,
    reason: Annotated[str, typer.Option(help="Why; the tenant reads it.")],
    home: HomeFlag = None,
) -> None:
    """Cancel an operation that waits: it fails in its turn and its run goes on. One that runs ends as it would.

    twinkle ops cancel 8e0f:train:0:req:12 --reason 'it would take the mesh for a day'
    """
    from twinkle.cli.operator.ops import cancel_operation

    cancel_operation(settings_of(home=home), operation, reason=reason)
