"""The commands ``twinkle meshes``: what they are called with."""

from __future__ import annotations

from typing import Annotated

import typer

from twinkle.cli.flags import HomeFlag, JsonFlag, ModelFlag, ModelNameFlag, RunArgument, settings_of

MeshArgument = Annotated[str, typer.Argument(metavar="MESH", help="Its name.")]

meshes = typer.Typer(
    help="Meshes: ask for one, empty one, give one back, and move runs between them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@meshes.command("list")
def meshes_list(home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """List the meshes, what they serve, where their ranks are and whether they are being emptied.

    twinkle meshes list --json
    """
    from twinkle.cli.operator.meshes import list_meshes

    list_meshes(settings_of(home=home), as_json=as_json)


@meshes.command("add")
def meshes_add(
    mesh: MeshArgument,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:0, npu.")] = "cpu",
    ranks: Annotated[
        str | None, typer.Option(metavar="N|ray:N", help="Devices: of the machine, or of a Ray cluster.  [default: 1]")
    ] = None,
    model: ModelFlag = None,
    model_name: ModelNameFlag = None,
    home: HomeFlag = None,
) -> None:
    """Ask for a mesh: `twinkle serve` starts its worker within seconds, and at every later start. Undoes a drain.

    twinkle meshes add second --device cuda --ranks ray:8 --model ./my-model
    """
    from twinkle.cli.operator.meshes import add_mesh

    settings = settings_of(home=home, model=model, model_name=model_name)
    add_mesh(settings, mesh, device=device, ranks=ranks)


@meshes.command("drain")
def meshes_drain(
    mesh: MeshArgument,
    to: Annotated[str | None, typer.Option(metavar="MESH", help="Where to.  [default: whichever has room]")] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Let it stay, with what is still on it.")] = False,
    home: HomeFlag = None,
) -> None:
    """Let nothing new come to a mesh and move what is on it to others of its model. Clients notice nothing but time.

    twinkle meshes drain first --to second
    """
    from twinkle.cli.operator.meshes import drain_mesh

    drain_mesh(settings_of(home=home), mesh, to=to, undo=undo)


@meshes.command("remove")
def meshes_remove(
    mesh: MeshArgument,
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait until it is empty.")] = 120.0,
    home: HomeFlag = None,
) -> None:
    """Give a mesh back: drain it, let `twinkle serve` stop its worker, forget it.

    twinkle meshes remove first
    """
    from twinkle.cli.operator.meshes import remove_mesh

    remove_mesh(settings_of(home=home), mesh, timeout_s=timeout_s)


@meshes.command("move")
def meshes_move(
    run: RunArgument,
    to: Annotated[str, typer.Option(metavar="MESH", help="Where to.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait until it is there.")] = 60.0,
    home: HomeFlag = None,
) -> None:
    """Move one run, or a sampling session, to another mesh of its model.

    twinkle meshes move 0b1c...:train:0 --to second
    """
    from twinkle.cli.operator.meshes import move_run

    move_run(settings_of(home=home), run, to=to, timeout_s=timeout_s)
