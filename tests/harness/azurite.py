"""An object store of Azure's kind on this machine: Azurite, fetched from npm when a test first asks for it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from harness.polling import wait_until
from harness.servers import free_port

CACHE = Path(__file__).resolve().parents[2] / ".cache"
PACKAGE = "azurite@3.35.0"
CONTAINER = "exports"
ACCOUNT = "devstoreaccount1"
# The one key that every Azurite has; Microsoft's documents print it.
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_FETCH_S = 300.0


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """A server with an empty container, started in ``folder``; what the environment says of it."""
    port = free_port()
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
    command = [str(_server()), *where, "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}/{ACCOUNT}"
            wait_until(lambda: _answers(url), what="Azurite", deadline_s=60)
            _create_container(url)
            yield {
                "AZURE_STORAGE_ENDPOINT": url,
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
                "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
            }
        finally:
            server.kill()


def _server() -> Path:
    folder = CACHE / PACKAGE
    server = folder / "node_modules" / ".bin" / "azurite-blob"
    if not server.exists():
        npm = shutil.which("npm")
        assert npm is not None, "Azurite runs on Node; install it, with npm"
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
        subprocess.run(command, check=True, timeout=_FETCH_S, stdout=subprocess.DEVNULL)
    return server


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def _create_container(url: str) -> None:
    """Signed as https://learn.microsoft.com/rest/api/storageservices/authorize-with-shared-key says."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    kind = "application/octet-stream"
    lines = ["PUT", *[""] * 4, kind, *[""] * 6, *(f"{name}:{text}" for name, text in headers.items())]
    signed = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"])
    digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed.encode(), hashlib.sha256).digest()
    headers |= {
        "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        "Content-Type": kind,
    }
    asked = urllib.request.Request(f"{url}/{CONTAINER}?restype=container", method="PUT", data=b"", headers=headers)
    urllib.request.urlopen(asked, timeout=30).close()
