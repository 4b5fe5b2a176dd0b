"""Stores in object storage, `s3://bucket/prefix`: each run is one object, which is there whole or not at all.

An object is a file of packed runs with one run in it, written by one request that makes it and never replaces it. What
is being trained, with its checkpoints, lies on the machine's own disk until then, in the user's cache, and is uploaded
when the upload before was cut off. Trained weights stay there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpulab import files
from gpulab.errors import GpulabError, UsageError
from gpulab.store import identities, records, run_files

URL = re.compile(r"(s3|gs|az):[/\\]+([^/\\].*)")  # a path has lost one of its slashes
AT_ONCE = 16  # downloads


def url_of(store: str | Path | None) -> str | None:
    """The address that a text or a path stands for; None for a folder."""
    url = URL.fullmatch(str(store))
    if url:
        return f"{url[1]}://{url[2]}".replace("\\", "/").rstrip("/")
    if re.match("(s3|gs|az):", str(store)):
        raise UsageError(f"store {str(store)!r}: expected a bucket, and maybe a prefix: s3://bucket/prefix")
    files.check_path(str(store))
    return None


def remote(store: str | Path | None) -> Remote | None:
    """The store in object storage that a text or a path stands for; None for a folder."""
    url = url_of(store)
    return Remote(url) if url else None


def folder_of(store: str | Path) -> Path:
    """A store that has to be a folder. Raises `UsageError` for one in object storage."""
    if url := url_of(store):
        raise UsageError(f"{url}: train, experiment, runs and pack alone can use a store in object storage")
    return Path(store)


class Remote:
    """A store in object storage.

    Credentials and region are those of the environment, as for the vendor's own tools (`AWS_ACCESS_KEY_ID`, …).

    Attributes:
        url: Such as `s3://bucket/prefix`.
        work: A store on this machine's disk, in which runs are trained.
        objects: A store on this machine's disk with what was downloaded.
    """

    def __init__(self, url: str) -> None:
        try:
            import obstore
        except ImportError:
            raise GpulabError(
                f"{url}: a store there needs obstore, which is not installed: pip install 'gpulab[s3]'"
            ) from None

        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        self.url, self.api = url, obstore
        with self.reaching():
            options: Any = {"allow_http": endpoint.startswith("http:")}
            self.store = obstore.store.from_url(url, client_options=options)
        root = files.cache_folder() / "remote" / hashlib.sha256(url.encode()).hexdigest()[:20]
        self.work, self.objects = root / "work", root / "objects"

    @contextlib.contextmanager
    def reaching(self) -> Iterator[None]:
        """What the server refuses inside is a `GpulabError` that names the store."""
        try:
            yield
        except (self.api.exceptions.BaseError, PermissionError) as error:
            raise GpulabError(f"{self.url}: cannot be reached: {str(error).splitlines()[0]}") from None

    def has(self, identity: identities.Identity) -> bool:
        """Whether the store holds a run."""
        with self.reaching(), contextlib.suppress(FileNotFoundError):
            self.api.head(self.store, f"{identity.id}.parquet")
            return True
        return False

    def pull(self) -> Path:
        """Download what is new, forget what is gone, and return the folder with all of it."""
        from gpulab.progress import Progress

        with self.reaching():
            sizes = {entry["path"]: entry["size"] for batch in self.api.list(self.store) for entry in batch}
        uploaded = {name: size for name, size in sizes.items() if re.fullmatch(r"[^./][^/]*\.parquet", name)}
        self.objects.mkdir(parents=True, exist_ok=True)
        downloaded = {entry.name: entry.stat().st_size for entry in os.scandir(self.objects)}
        for name in downloaded.keys() - uploaded.keys():
            (self.objects / name).unlink(missing_ok=True)
        # An object is never replaced by another.
        missing = sorted(name for name, _ in uploaded.items() - downloaded.items())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            downloads = pool.map(lambda name: self._download(name, self.objects), missing)
            list(Progress(downloads, total=len(missing), unit="run", leave=False, delay=2))
        return self.objects

    def fetch(self, identity: identities.Identity) -> None:
        """Put a run that the store holds into `work`, unless it is there."""
        if (self.work / identity.id).exists():
            return
        with tempfile.TemporaryDirectory() as scratch:
            if file := self._download(f"{identity.id}.parquet", Path(scratch)):
                (record,) = records.packed_runs(file)
                run_files.write_run(self.work, record, records.packed_histories(file)[record["id"]].to_pandas())

    def _download(self, name: str, folder: Path) -> Path | None:
        """The file of that name in a folder, with the content of the object; None where there is no object."""
        with self.reaching(), contextlib.suppress(FileNotFoundError):
            files.write(folder / name, self.api.get(self.store, name).bytes().to_bytes())
            return folder / name
        return None

    def push(self, folder: Path) -> None:
        """Upload a run of `work`; one that is there stays as it is."""
        record = run_files.read_record(folder)
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / f"{record['id']}.parquet"
            records.pack_runs(file, [(record, run_files.read_results(folder, record["id"])[0])])
            with self.reaching(), contextlib.suppress(self.api.exceptions.AlreadyExistsError):
                self.api.put(self.store, file.name, file.read_bytes(), mode="create", use_multipart=False)
