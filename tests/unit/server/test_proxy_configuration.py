"""The reverse proxy's configuration: it parses, and limits nothing otherwise than the API behind it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from twinkle.core.settings import Settings

FILE = Path(__file__).parents[3] / "docker" / "nginx.conf"
UNITS = {"": 1, "s": 1, "k": 2**10, "m": 2**20}


def value_of(name: str) -> int:
    """The last number of a directive's first occurrence, in bytes or seconds."""
    found = re.search(rf"^\s*{name}\s[^;]*?(\d+)([skm]?);", FILE.read_text(), re.MULTILINE)
    assert found is not None, name
    return int(found[1]) * UNITS[found[2]]


def test_the_proxy_limits_what_the_api_limits() -> None:
    settings = Settings()
    assert value_of("client_header_timeout") == settings.head_timeout_s
    assert value_of("send_timeout") == settings.send_timeout_s
    assert value_of("large_client_header_buffers") == settings.max_url_bytes
    assert value_of("limit_conn address") == settings.max_connections_per_address
    assert settings.max_body_bytes <= value_of("client_max_body_size") <= settings.max_body_bytes + 2**20


def test_nginx_takes_it(tmp_path: Path) -> None:
    nginx, openssl = shutil.which("nginx"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("there is no nginx, or no openssl, here")
    certificate = ["-keyout", str(tmp_path / "privkey.pem"), "-out", str(tmp_path / "fullchain.pem")]
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", *certificate, "-days", "2", "-subj", "/CN=a"],
        check=True,
        capture_output=True,
        timeout=30,
    )
    written = FILE.read_text().replace("/etc/nginx/tls", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nerror_log {tmp_path}/log;\n{written}")

    checked = subprocess.run(
        [nginx, "-t", "-c", str(tmp_path / "nginx.conf")], capture_output=True, text=True, check=False, timeout=30
    )

    assert checked.returncode == 0, checked.stderr
