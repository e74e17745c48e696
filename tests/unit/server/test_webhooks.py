"""Webhooks: signed, told at least once and in order, never where only the service reaches, never the job's harm."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from harness.clock import HandClock
from twinkle.core.addresses import is_allowed, parse_networks
from twinkle.core.ids import new_id
from twinkle.core.job import Job, JobEvent, JobKind, JobState, NewJob
from twinkle.core.lease import ProcessIdentity
from twinkle.jobs.webhooks import Webhooks
from twinkle.storage.stores import Stores

if TYPE_CHECKING:
    from conftest import Api

KEY = b"k" * 32
LOOPBACK = parse_networks(["127.0.0.0/8", "::1/128"])
DAY_S = 24 * 3600.0


class Receiver:
    """Somebody's own server: it keeps what it is told, and answers as it is told to."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.heard: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class _Answer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.heard.append(({name.lower(): value for name, value in self.headers.items()}, body))
                status = receiver.statuses.pop(0) if receiver.statuses else 204
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("location", f"{receiver.url}/elsewhere")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Answer)
        self.port = self._server.server_address[1]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def types(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.heard]

    @property
    def ids(self) -> list[str]:
        return [headers["webhook-id"] for headers, _ in self.heard]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def stores(api: Api, clock: HandClock) -> Iterator[Stores]:
    one = Stores.at(api.settings.resolved_database_url, clock)
    yield one
    one.close()


Submit = Callable[..., Job]


@pytest.fixture
def submit(api: Api, stores: Stores) -> Iterator[Submit]:
    key = api.stores.tenants.key(api.new_key())
    assert key is not None
    jobs: list[str] = []

    def one(url: str) -> Job:
        new = NewJob(
            id=f"job-{new_id()}", tenant=key.tenant, kind=JobKind.OPS, spec={}, digest="d", name="a", notify_url=url
        )
        jobs.append(new.id)
        return stores.jobs.create(new)

    yield one
    for job in jobs:
        # Nobody is there any more to be told of it.
        with stores.database.transaction() as transaction:
            transaction.execute("UPDATE job SET notify_url = NULL WHERE id = ?", (job,))


def _run(stores: Stores, job: Job, *, state: JobState = JobState.SUCCEEDED) -> None:
    claim = stores.running_jobs.claim(job.id, ProcessIdentity.current(), lease_s=60)
    assert claim is not None
    stores.running_jobs.record(claim, events=[JobEvent(kind="metrics", message="step 1", data={"loss": 2.0})])
    stores.running_jobs.finish(claim, state, result={"file": "file-1"})


def _deliver(stores: Stores, clock: HandClock, *, times: int = 6, allowed: Any = LOOPBACK, **more: Any) -> None:
    async def deliver() -> None:
        webhooks = Webhooks(hooks=stores.job_hooks, key_of=lambda tenant: KEY, clock=clock, allowed=allowed, **more)
        with webhooks.threads:
            for _ in range(times):
                await webhooks.deliver_due()

    asyncio.run(deliver())


def _messages(stores: Stores, job: Job) -> list[str]:
    return [event.message for event in stores.jobs.events(job.id, job.tenant) if event.kind == "message"]


def test_the_owner_is_told_in_order_when_a_job_begins_and_ends_and_sees_that_in_its_events(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    job = submit(f"{receiver.url}/hook?a=b")
    _run(stores, job)

    _deliver(stores, clock)

    assert receiver.types[-1] == "job.succeeded"
    assert receiver.ids == sorted(set(receiver.ids), key=lambda one: int(one.rpartition(":")[2]))
    last = json.loads(receiver.heard[-1][1])["data"]
    assert (last["job_id"], last["name"], last["state"]) == (job.id, "a", "succeeded")
    assert last["result"] == {"file": "file-1"}
    assert all("(204)" in message for message in _messages(stores, job))
    assert len(_messages(stores, job)) == len(receiver.heard) == len(set(receiver.types))


def test_a_receiver_can_check_who_sent_it_and_when(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    _run(stores, submit(receiver.url))

    _deliver(stores, clock)

    headers, body = receiver.heard[0]
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    signature = base64.b64encode(hmac.new(KEY, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{signature}"
    assert headers["webhook-timestamp"] == str(int(clock.now()))
    assert headers["content-type"] == "application/json"


def test_the_secret_is_the_tenants_own(api: Api, http: httpx.Client) -> None:
    path = "/api/native/v1/jobs/webhook_secret"
    with api.http(api.new_key()) as stranger:
        secrets = [client.get(client.base_url.join(path)).json()["secret"] for client in (http, http, stranger)]

    assert secrets[0] == secrets[1] != secrets[2]
    assert len(base64.b64decode(secrets[0].removeprefix("whsec_"))) == 32


def test_what_is_refused_is_told_again_with_growing_pauses_under_the_same_id(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    job = submit(receiver.url)
    _run(stores, job)
    receiver.statuses = [500, 503]

    _deliver(stores, clock)
    first = len(receiver.heard)
    clock.move(5.1)
    _deliver(stores, clock)
    second = len(receiver.heard)
    clock.move(5.1)
    _deliver(stores, clock)
    too_early = len(receiver.heard)
    clock.move(5.0)
    _deliver(stores, clock)

    assert (first, second, too_early) == (1, 2, 2)
    assert len(set(receiver.ids[:3])) == 1
    assert receiver.types[-1] == "job.succeeded"
    assert "it answered 500; the next try comes in 5 s" in _messages(stores, job)[0]
    assert "it answered 503; the next try comes in 10 s" in _messages(stores, job)[1]
    assert stores.jobs.find(job.id, job.tenant).state is JobState.SUCCEEDED


def test_an_event_that_nobody_took_for_a_day_is_given_up_and_the_next_one_is_told(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    job = submit(receiver.url)
    claim = stores.running_jobs.claim(job.id, ProcessIdentity.current(), lease_s=60)
    assert claim is not None
    clock.move(DAY_S)
    stores.running_jobs.finish(stores_claim_again(stores, job), JobState.SUCCEEDED)
    receiver.statuses = [500]

    _deliver(stores, clock)

    assert "it was tried for a day" in _messages(stores, job)[0]
    assert receiver.types[-1] == "job.succeeded"


def stores_claim_again(stores: Stores, job: Job) -> Any:
    claim = stores.running_jobs.claim(job.id, ProcessIdentity.current(), lease_s=60)
    assert claim is not None
    return claim


def test_what_a_process_died_over_is_told_by_the_next_one(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    job = submit(receiver.url)
    _run(stores, job)
    taken = stores.job_hooks.take(job.id, hold_s=60)

    _deliver(stores, clock)
    held = list(receiver.ids)
    clock.move(61)
    _deliver(stores, clock)

    assert taken is not None
    assert held == []
    assert receiver.ids[0] == f"{job.id}:{taken.event.number}"
    assert receiver.types[-1] == "job.succeeded"


def test_a_tenants_dead_receiver_delays_nobody_elses(
    api: Api, stores: Stores, clock: HandClock, receiver: Receiver
) -> None:
    """Of one tenant more is due than there are places, all of it at a receiver that takes calls and says nothing."""
    silent = socket.create_server(("127.0.0.1", 0), backlog=256)
    jobs: list[Job] = []
    for num, url in ((80, f"http://127.0.0.1:{silent.getsockname()[1]}"), (1, receiver.url)):
        found = api.stores.tenants.key(api.new_key())
        assert found is not None
        news = [
            NewJob(id=new_id(), tenant=found.tenant, kind=JobKind.OPS, spec={}, digest="d", notify_url=url)
            for _ in range(num)
        ]
        jobs += stores.jobs.create_many(news)
        clock.move(1.0)
    for job in jobs:
        _run(stores, job)

    async def deliver() -> None:
        webhooks = Webhooks(hooks=stores.job_hooks, key_of=lambda tenant: KEY, clock=clock, allowed=LOOPBACK)
        async with webhooks.delivering(), asyncio.timeout(8):
            while receiver.types[-1:] != ["job.succeeded"]:
                await asyncio.sleep(0.01)
                assert len(webhooks.under_way) <= 5, "four of the one, one of the other"

    asyncio.run(deliver())
    silent.close()
    with stores.database.transaction() as transaction:
        for job in jobs:
            transaction.execute("UPDATE job SET notify_url = NULL WHERE id = ?", (job.id,))


def test_the_certificates_of_this_machine_are_read_once_and_not_for_each_call(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    load = ssl.SSLContext.load_verify_locations

    def noted(context: ssl.SSLContext, *places: Any, **how: Any) -> None:
        read.append("certificates")
        load(context, *places, **how)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", noted)
    _run(stores, submit(receiver.url))

    _deliver(stores, clock)

    assert len(receiver.heard) == 2 and len(read) == 1


def test_a_redirect_is_not_followed(stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit) -> None:
    job = submit(receiver.url)
    _run(stores, job)
    receiver.statuses = [307]

    _deliver(stores, clock, times=1)

    assert len(receiver.heard) == 1
    assert "it answered 307; redirects are not followed" in _messages(stores, job)[0]


def test_a_name_that_stands_for_a_private_address_is_never_called(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit
) -> None:
    job = submit(f"http://localhost:{receiver.port}")
    _run(stores, job)

    _deliver(stores, clock, times=1, allowed=())

    assert receiver.heard == []
    assert "localhost is no address of the public internet" in _messages(stores, job)[0]


def test_a_name_is_looked_up_once_and_that_address_is_called(
    stores: Stores, clock: HandClock, receiver: Receiver, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def resolve(host: Any, *args: Any, **more: Any) -> Any:
        if host != "hooks.test":
            return real(host, *args, **more)
        looked_up.append(host)
        return real("127.0.0.1" if len(looked_up) == 1 else "192.0.2.1", *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    _run(stores, submit(f"http://hooks.test:{receiver.port}/"))

    _deliver(stores, clock, times=1)

    assert looked_up == ["hooks.test"]
    assert receiver.heard[0][0]["host"] == f"hooks.test:{receiver.port}"


@pytest.mark.parametrize(("name", "is_told"), [("hooks.test", True), ("other.test", False)])
def test_who_is_called_must_have_the_certificate_of_the_name_and_not_of_the_address(
    stores: Stores,
    clock: HandClock,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    is_told: bool,
) -> None:
    certificate = _certificate(tmp_path, "hooks.test")
    secure = Receiver(certificate)
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *args, **more: real("127.0.0.1" if host == name else host, *args, **more)
    )
    job = submit(f"https://{name}:{secure.port}/")
    _run(stores, job)

    _deliver(stores, clock, times=1, verify=ssl.create_default_context(cafile=str(certificate)))
    secure.close()

    assert len(secure.heard) == is_told
    assert ("it cannot be reached" in _messages(stores, job)[0]) is not is_told


def _certificate(folder: Path, name: str) -> Path:
    """A file with a key and the certificate that it has signed for itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = folder / "certificate.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return file


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://[::1]/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://localhost:8765/",
        "http://[::ffff:127.0.0.1]/",
        "http://me:secret@example.com/",
    ],
)
def test_an_address_that_only_the_service_reaches_is_refused_before_a_job_is_made(http: httpx.Client, url: str) -> None:
    body = {"kind": "ops", "spec": {"model": "m", "data": "file-1"}, "notify_url": url}

    refused = http.post(http.base_url.join("/api/native/v1/jobs"), json=body)

    assert refused.status_code == 400
    assert refused.json()["detail"].startswith("notify_url: ")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.215.14", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("0.0.0.0", False),
        ("224.0.1.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("64:ff9b::a00:1", False),
        ("2002:a00:1::", False),
    ],
)
def test_only_the_public_internet_is_called(address: str, expected: bool) -> None:
    assert is_allowed(ip_address(address), ()) is expected


def test_an_operator_may_allow_a_network_and_nothing_beside_it() -> None:
    allowed = parse_networks(["10.1.0.0/16"])

    found = [is_allowed(ip_address(one), allowed) for one in ("10.1.2.3", "::ffff:10.1.2.3", "10.2.0.1", "127.0.0.1")]

    assert found == [True, True, False, False]
