"""ModelDirectory: the files and manifests of created models in one directory on disk.

DIR/blobs has each file under its SHA-256. DIR/models has the manifest of each model.
DIR/weights has a folder for each set of files, with links to the blobs under the names
that clients sent. Manifests are replaced atomically, after all files are there,
so a server that was killed leaves no broken model.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from cpuserve.api.batches.directory import open_plain, write_whole
from cpuserve.api.ollama.created.manifest import Manifest, key_of
from cpuserve.api.response.disk import writing
from cpuserve.errors import ConfigError, InvalidRequest, NotFound
from cpuserve.log import get_logger

log = get_logger("serve")

# Seconds that a blob of no model is kept: its client may be about to create the model.
_UNUSED_S = 3600.0
_PLACE = "--models-dir"


class ModelDirectory:
    """The created models of a server, with limits on their total bytes and their number."""

    def __init__(self, place: str, max_bytes: int, max_models: int) -> None:
        """`place`: the directory, which is created if it is missing.

        Raises:
          ConfigError: the directory cannot be written, or another server uses it.
        """
        self.max_bytes = max_bytes
        self.max_models = max_models
        root = Path(place).expanduser().absolute()
        self._blobs, self._models, self._weights = (
            root / name for name in ("blobs", "models", "weights")
        )
        try:
            for folder in (self._blobs, self._models, self._weights):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock = os.open(root / "lock", flags, 0o600)
        except OSError as error:
            msg = (
                f"--models-dir {place} cannot be used ({error.strerror}): choose another directory"
            )
            raise ConfigError(msg) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            msg = f"another server uses --models-dir {place}: choose another directory"
            raise ConfigError(msg) from None
        self.manifests = {found.name: found for found in self._read()}
        self._drop_parts()
        self.drop_unused()

    def close(self) -> None:
        """Release the lock, so that another server may use the directory."""
        os.close(self._lock)

    def _read(self) -> Iterator[Manifest]:
        for path in sorted(self._models.glob("*.json")):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=Manifest)
            except (OSError, msgspec.DecodeError) as error:
                log.error("%s is damaged (%s): delete it, and create the model again", path, error)

    def _drop_parts(self) -> None:
        for folder in (self._blobs, self._models):
            for path in folder.glob("*.part"):
                path.unlink()

    # --- blobs: files of models, stored under their SHA-256 ------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Return whether the directory has a file with this SHA-256."""
        return self._blob(digest).is_file()

    def _blob(self, digest: str) -> Path:
        return self._blobs / f"sha256-{digest}"

    def part(self) -> Path:
        """Return a new path for a file that is being received."""
        return self._blobs / f"{uuid.uuid4().hex}.part"

    def keep_blob(self, part: Path, digest: str) -> None:
        """Move a completely received file to its final path, which contains its SHA-256."""
        with writing(_PLACE):
            part.replace(self._blob(digest))

    def room(self) -> int:
        """Return how many more bytes may be stored; if none, first delete unused files.

        Downloads from the Hugging Face hub, which are in its own cache, count as well.
        """
        left = self.max_bytes - self._used()
        if left <= 0:
            self.drop_unused()
            left = self.max_bytes - self._used()
        return max(0, left)

    def _used(self) -> int:
        blobs = sum(path.stat().st_size for path in self._blobs.iterdir() if path.is_file())
        return blobs + sum(found.size for found in self.manifests.values())

    def drop_unused(self, *, older_than_s: float = _UNUSED_S) -> None:
        """Delete blobs and folders that belong to no model and are older than `older_than_s`."""
        used = {digest for found in self.manifests.values() for digest in found.digests}
        folders = {
            key_of(files)
            for found in self.manifests.values()
            for files in (found.files, found.adapters)
        }
        now = time.time()
        for path in self._blobs.glob("sha256-*"):
            is_old = now - path.stat().st_mtime >= older_than_s
            if path.name.removeprefix("sha256-") not in used and is_old:
                path.unlink()
        for path in self._weights.iterdir():
            if path.name not in folders:
                shutil.rmtree(path, ignore_errors=True)

    # --- models: manifests, and folders of files -----------------------------------------------

    def folder(self, files: Mapping[str, str]) -> Path:
        """Return the folder with links to these files; it is created if it is missing.

        files: the SHA-256 of each file by its name; the names have been checked.

        Raises:
          NotFound: a file has not been sent.
          DiskError: the folder cannot be written.
        """
        missing = [name for name, digest in files.items() if not self.has_blob(digest)]
        folder = self._weights / key_of(files)
        if folder.is_dir():
            return folder
        if missing:
            digest = files[missing[0]]
            msg = f"the file {missing[0]} is not here: send it to /api/blobs/sha256:{digest} first"
            raise NotFound(msg)
        made = folder.with_suffix(f".{uuid.uuid4().hex}.part")
        try:
            with writing(_PLACE):
                made.mkdir(mode=0o700)
                for name, digest in files.items():
                    os.link(self._blob(digest), made / name)
                made.replace(folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return folder

    def check_room(self, name: str) -> None:
        """Raise InvalidRequest if the number of models is at its limit and `name` is a new one."""
        if name not in self.manifests and len(self.manifests) >= self.max_models:
            msg = (
                f"The server keeps {len(self.manifests)} models of clients, and may keep "
                f"{self.max_models}: delete one, or start it with a larger --models-count"
            )
            raise InvalidRequest(msg, param="model", code="models_full")

    def save(self, made: Manifest) -> None:
        """Write a manifest to disk, in place of an earlier manifest with the same name.

        Raises:
          InvalidRequest: the number of models is at its limit.
          DiskError: the manifest cannot be written; the earlier one is still there.
        """
        self.check_room(made.name)
        with writing(_PLACE):
            write_whole(self._path(made.name), made)
        self.manifests[made.name] = made

    def remove(self, name: str) -> None:
        """Delete a model, and its files unless other models use them.

        Raises:
          DiskError: the directory cannot be written; the model is still there.
        """
        with writing(_PLACE):
            self._path(name).unlink(missing_ok=True)
        found = self.manifests.pop(name)
        used = {digest for other in self.manifests.values() for digest in other.digests}
        for digest in found.digests - used:
            self._blob(digest).unlink(missing_ok=True)
        self.drop_unused()

    def _path(self, name: str) -> Path:
        return self._models / f"{key_of(name)}.json"


def open_new(path: Path) -> int:
    """Create a new file for writing, and return its descriptor."""
    return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
