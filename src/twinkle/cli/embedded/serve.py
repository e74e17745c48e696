"""``twinkle serve``: the whole service on one machine, from one command."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path

from pydantic import SecretStr

from twinkle.cli.console import say
from twinkle.cli.embedded.broker import Broker, free_port, prepare_broker
from twinkle.cli.embedded.home import keep_private, kept_password, logs_of, make_home, sole_owner, write_secret
from twinkle.cli.embedded.service import Service
from twinkle.cli.embedded.stack import MeshPlan, parse_meshes, plan_stack
from twinkle.cli.embedded.supervisor import Guard
from twinkle.cli.operator.journal import opened_journal
from twinkle.core.errors import ConfigError
from twinkle.core.settings import Settings
from twinkle.hub.reference import PATH_STARTS, without_scheme
from twinkle.hub.support import check_model
from twinkle.tasks.surroundings import refuse_taken

DEFAULT_TENANT = "default"
FLOWER_PASSWORD_FILE = "flower-password"


def run(settings: Settings, *, meshes: list[str], with_flower: bool) -> int:
    """Run the stack until SIGTERM or Ctrl-C. Blocks; the exit code.

    Raises:
        ConfigError: It cannot start: a flag is wrong, the home or a port is taken, a child refuses its settings.
    """
    started = time.monotonic()
    plans = parse_meshes(meshes, settings)
    for plan in plans:
        _check_path(plan)
    # A worker would say the same a minute later, with the API up and a key made.
    for model in dict.fromkeys(plan.model for plan in plans if _engine(plan, settings) == "transformers"):
        check_model(model)
    keep_private()
    home = make_home(settings.home)
    with sole_owner(home):
        settings = _settle(settings, home, with_flower=with_flower)
        broker = None if settings.redis_url.get_secret_value() else prepare_broker(home)
        if broker is not None:
            settings = settings.model_copy(update={"redis_url": SecretStr(broker.url)})
        _announce(settings, plans, broker, _first_key(settings), with_flower=with_flower)
        stack = plan_stack(settings, plans, broker, with_flower=with_flower)
        with closing(Guard()) as guard:
            asyncio.run(Service(settings, plans, stack, guard, started=started).run())
    return 0


def _engine(mesh: MeshPlan, settings: Settings) -> str:
    return mesh.own.get("engine", settings.engine)


def _check_path(mesh: MeshPlan) -> None:
    if not mesh.model:
        raise ConfigError(f"--model is missing for mesh {mesh.name}: a folder with a model, or the id of one")
    meant = without_scheme(mesh.model)
    if meant.startswith(PATH_STARTS) and not Path(meant).expanduser().is_dir():
        raise ConfigError(f"--model {mesh.model}: no such folder")


def _settle(settings: Settings, home: Path, *, with_flower: bool) -> Settings:
    """Replace what was left open (home, ports, Flower's password) by what it is in this run."""
    chosen: dict[str, object] = {"home": home, "port": _listening_port(settings.host, settings.port, "--port")}
    if "tell_model_folder" not in settings.model_fields_set:
        # Who starts everything on one machine looks for the tokenizer there too; others are never told.
        chosen["tell_model_folder"] = True
    if with_flower:
        chosen["flower_port"] = _listening_port(settings.flower_host, settings.flower_port, "--flower-port")
        password_file = home / FLOWER_PASSWORD_FILE
        if given := settings.flower_password.get_secret_value():
            write_secret(password_file, given + "\n")
        chosen["flower_password"] = SecretStr(kept_password(password_file))
    return settings.model_copy(update=chosen)


def _listening_port(host: str, port: int, flag: str) -> int:
    """The port to listen on; a free one for 0.

    Raises:
        ConfigError: Somebody listens there, or the address is not this machine's.
    """
    if port == 0:
        return free_port()
    refuse_taken(host, port, flag)
    return port


def _first_key(settings: Settings) -> str | None:
    """Bring the journal up to date; an API key if this is the first time, else ``None``."""
    with opened_journal(settings, creates=True) as stores:
        tenants = stores.tenants
        return None if tenants.has_keys() else tenants.create_key(DEFAULT_TENANT, "made by twinkle serve")


def _announce(
    settings: Settings, plans: list[MeshPlan], broker: Broker | None, first_key: str | None, *, with_flower: bool
) -> None:
    names = ", ".join(dict.fromkeys(plan.model_name for plan in plans))
    say(f"Twinkle serves {names} at http://{settings.host}:{settings.port}")
    if settings.any_key:
        say("  any key  is taken, and none as well: each is a tenant of its own. Only this machine is answered")
    if first_key is not None:
        say(f"  API key  {first_key}")
        say("           shown this once and kept as a hash; `twinkle keys create` makes more")
    if with_flower:
        say(f"  Flower   http://{settings.flower_host}:{settings.flower_port}  user {settings.flower_user}")
        say(f"           password in {settings.home / FLOWER_PASSWORD_FILE}")
    say(f"  home     {settings.home}")
    say(f"  logs     {logs_of(settings.home)}")
    say(f"  broker   {'your own, from TWINKLE_REDIS_URL' if broker is None else broker.kind}")
