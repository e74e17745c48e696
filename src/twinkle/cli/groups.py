"""The commands that come in groups: keys, runs, tokens, data."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from twinkle.cli.flags import AtFlag, AtOperationFlag, HomeFlag, JsonFlag, RunArgument, WaitFlag, settings_of

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="How its id begins, or the key itself.")]

keys = typer.Typer(help="API keys: shown once, stored as hashes.", no_args_is_help=True, rich_markup_mode=None)
runs = typer.Typer(
    help="Training runs and their past: fork them, rewind them.", no_args_is_help=True, rich_markup_mode=None
)
tokens = typer.Typer(
    help="Weights access tokens: who reads whose checkpoints.", no_args_is_help=True, rich_markup_mode=None
)
data = typer.Typer(help="Training data: what is wrong with it.", no_args_is_help=True, rich_markup_mode=None)


@keys.command("create")
def keys_create(
    tenant: Annotated[str, typer.Option(help="Whose key it is; the tenant is made if need be.")],
    name: Annotated[str, typer.Option(help="What the key is for.")] = "cli",
    scopes: Annotated[
        str | None, typer.Option(metavar="WORDS", help="What it may: some of train,sample,read.  [default: everything]")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0.001, help="How long it opens anything.  [default: until it is revoked]")
    ] = None,
    home: HomeFlag = None,
) -> None:
    """Make an API key. It stands alone on the last line and is shown this once.

    twinkle keys create --tenant alice --name dashboard --scopes read --days 90
    """
    from twinkle.cli.operator.keys import create_key

    create_key(settings_of(home=home), tenant=tenant, name=name, scopes=scopes, days=days)


@keys.command("list")
def keys_list(
    tenant: Annotated[str | None, typer.Option(help="Whose.  [default: everybody's]")] = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the keys that were made, without the keys themselves.

    twinkle keys list --tenant alice --json
    """
    from twinkle.cli.operator.keys import list_keys

    list_keys(settings_of(home=home), tenant=tenant, as_json=as_json)


@keys.command("show")
def keys_show(key: KeyArgument, home: HomeFlag = None, as_json: JsonFlag = False) -> None:
    """Show one key: whose, what it may, when it was used and when it ends.

    twinkle keys show 3f2a
    """
    from twinkle.cli.operator.keys import show_key

    show_key(settings_of(home=home), key, as_json=as_json)


@keys.command("revoke")
def keys_revoke(key: KeyArgument, home: HomeFlag = None) -> None:
    """End a key, and the tokens that were exchanged for it, within a second.

    twinkle keys revoke 3f2a
    """
    from twinkle.cli.operator.keys import revoke_key

    revoke_key(settings_of(home=home), key)


@keys.command("rotate")
def keys_rotate(
    key: KeyArgument,
    grace_hours: Annotated[float, typer.Option(min=0, help="How long the old one goes on.")] = 0.0,
    home: HomeFlag = None,
) -> None:
    """Make a key like this one, and end this one. The new one stands alone on the last line.

    twinkle keys rotate 3f2a --grace-hours 24
    """
    from twinkle.cli.operator.keys import rotate_key

    rotate_key(settings_of(home=home), key, grace_hours=grace_hours)


@runs.command("list")
def runs_list(
    home: HomeFlag = None,
    limit: Annotated[int, typer.Option(help="How many of the newest.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List the newest training runs.

    twinkle runs list --limit 50
    """
    from twinkle.cli.operator.runs import list_runs

    list_runs(settings_of(home=home), limit=limit, as_json=as_json)


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
    from twinkle.cli.operator.runs import show_run

    show_run(settings_of(home=home), run, num_steps=steps, as_json=as_json)


@runs.command("fork")
def runs_fork(
    run: RunArgument,
    at: AtFlag = None,
    at_operation: AtOperationFlag = None,
    timeout_s: WaitFlag = 120.0,
    dialect: Annotated[
        Literal["tinker", "twinkle"] | None,
        typer.Option(help="Which the new run is trained through; default: as this one."),
    ] = None,
    home: HomeFlag = None,
) -> None:
    """Begin a new run as this one was after a step. Its id stands alone on the last line.

    twinkle runs fork 0b1c...:train:0 --at 100
    """
    from twinkle.cli.operator.runs import fork_run

    fork_run(settings_of(home=home), run, step=at, operation=at_operation, timeout_s=timeout_s, dialect=dialect)


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
    from twinkle.cli.operator.runs import rewind_run

    rewind_run(settings_of(home=home), run, step=at, operation=at_operation, timeout_s=timeout_s)


@runs.command("pin")
def runs_pin(
    run: RunArgument,
    off: Annotated[bool, typer.Option("--off", help="Let it leave the device again.")] = False,
    home: HomeFlag = None,
) -> None:
    """Keep a run's adapter on its device from its next operation on, whoever else needs the room.

    twinkle runs pin 0b1c...:train:0
    """
    from twinkle.cli.operator.runs import pin_run

    pin_run(settings_of(home=home), run, is_pinned=not off)


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
    from twinkle.cli.operator.tokens import create_token

    create_token(settings_of(home=home), target, name=name, days=days)


@tokens.command("list")
def tokens_list(
    run: Annotated[str | None, typer.Option(help="Only this run's.")] = None,
    home: HomeFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """List the tokens whose time is not over, without the tokens themselves.

    twinkle tokens list --json
    """
    from twinkle.cli.operator.tokens import list_tokens

    list_tokens(settings_of(home=home), run=run, as_json=as_json)


@tokens.command("revoke")
def tokens_revoke(
    token: Annotated[str, typer.Argument(help="Its id, as `tokens list` shows it.")], home: HomeFlag = None
) -> None:
    """Let a token open nothing any more, at once. What was accepted with it goes on.

    twinkle tokens revoke 4e0c...
    """
    from twinkle.cli.operator.tokens import revoke_token

    revoke_token(settings_of(home=home), token)


@data.command("check")
def data_check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A file or folder of rows, or the id of a data set.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template: a folder, or an id of a hub.")],
    template: Annotated[str, typer.Option(help="The class that encodes.")] = "Template",
    preprocessor: Annotated[
        str | None, typer.Option("--map", metavar="NAME", help="A preprocessor that makes conversations of the rows.")
    ] = None,
    init_args: Annotated[str | None, typer.Option(metavar="JSON", help="Arguments of the preprocessor.")] = None,
    max_length: Annotated[int, typer.Option(min=1, help="In tokens.")] = 8192,
    truncation_strategy: Annotated[str, typer.Option(help="raise, left, right, split or delete.")] = "raise",
    use_chat_template: Annotated[bool, typer.Option(help="Or raw text, of which all tokens train.")] = True,
    subset: Annotated[str, typer.Option(help="Of a hub's data set.")] = "default",
    split: Annotated[str, typer.Option(help="Of a hub's data set.")] = "train",
    limit: Annotated[int | None, typer.Option(min=1, help="Look at so many rows only.  [default: all]")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Name the rows that cannot be trained on, and tell how long the others are and what of them trains.

    Ends with 1 if a row is wrong.

    twinkle data check train.jsonl --model Qwen/Qwen3.5-4B --template Qwen3_5Template
    """
    from twinkle.cli.files.data import DataCheck, check

    settings_of()
    asked = DataCheck(
        file=file,
        subset=subset,
        split=split,
        template=template,
        model=model,
        max_length=max_length,
        truncation_strategy=truncation_strategy,
        use_chat_template=use_chat_template,
        preprocessor=preprocessor,
        init_args=init_args,
        limit=limit,
    )
    raise SystemExit(check(asked, as_json=as_json))
