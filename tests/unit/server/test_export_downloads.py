"""What an export has kept is downloaded: from where it broke off, checked, and to no place but the folder."""

from __future__ import annotations

import hashlib
import secrets

import pytest

from twinkle.cli.files.downloading import Download, download
from twinkle.client.endpoint import Endpoint, find_endpoint
from twinkle.core.clock import SystemClock
from twinkle.core.errors import ConfigError, StorageUnavailable
from twinkle.core.ids import new_id
from twinkle.storage.blobs import open_blob_store
from twinkle.storage.stores import Stores
from twinkle.workers.jobs.export import kept_files
from twinkle.workers.jobs.export.kept_files import KeptFiles

CONTENT = secrets.token_bytes(100_000)
PATH = "merged/model.safetensors"


@pytest.fixture
def stores(api):
    stores = Stores.at(api.settings.resolved_database_url, SystemClock())
    yield stores
    stores.close()


@pytest.fixture
def kept(api, http, stores, tmp_path, monkeypatch):
    """A file of an export, which lies in several pieces."""
    monkeypatch.setattr(kept_files, "PIECE_BYTES", 30_000)
    tenant = stores.tenants.key(http.headers["x-api-key"]).tenant
    source = tmp_path / "source"
    source.write_bytes(CONTENT)
    digest = hashlib.sha256(CONTENT).hexdigest()
    files = KeptFiles(stores, open_blob_store(api.settings.resolved_object_store), SystemClock())
    file_id = files.keep(f"job-{new_id()}", tenant, PATH, source, digest, keep_s=3600)
    return Download(file=file_id, path=PATH, size_bytes=len(CONTENT), sha256=digest)


@pytest.fixture
def endpoint(api, http) -> Endpoint:
    return find_endpoint(str(http.base_url.join("/")), http.headers["x-api-key"])


def test_a_download_goes_on_where_it_broke_off_and_is_not_sent_again(kept, endpoint, tmp_path):
    folder = tmp_path / "here"
    (folder / "merged").mkdir(parents=True)
    (folder / "merged" / ".model.safetensors.part").write_bytes(CONTENT[:70_000])

    came = download(endpoint, kept, folder)
    again = download(endpoint, kept, folder)

    assert (folder / PATH).read_bytes() == CONTENT
    assert came and not again
    assert [path.name for path in (folder / "merged").iterdir()] == ["model.safetensors"]


def test_other_bytes_than_the_job_wrote_are_not_kept(kept, endpoint, tmp_path):
    folder = tmp_path / "here"
    (folder / "merged").mkdir(parents=True)
    (folder / "merged" / ".model.safetensors.part").write_bytes(b"x" * 70_000)

    with pytest.raises(StorageUnavailable, match="other bytes"):
        download(endpoint, kept, folder)

    assert list((folder / "merged").iterdir()) == []
    assert download(endpoint, kept, folder)


def test_a_path_that_leads_out_of_the_folder_is_refused(kept, endpoint, tmp_path):
    for path in ("../outside", "/etc/outside", "a/../../outside"):
        with pytest.raises(ConfigError, match="no place within"):
            download(endpoint, Download(file=kept.file, path=path, size_bytes=1, sha256=""), tmp_path / "here")


def test_a_server_that_is_away_is_asked_again_for_a_while(kept, tmp_path):
    nobody = find_endpoint("http://127.0.0.1:9", "tml-nobody-is-there")

    with pytest.raises(StorageUnavailable, match="goes on where it ended"):
        download(nobody, kept, tmp_path, pause_s=0.0)
