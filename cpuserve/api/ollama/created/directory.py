"""ModelDirectory: the files and manifests of created models in one directory on disk.

DIR/blobs has each file under its SHA-256. DIR/models has the manifest of each model.
DIR/weights has a folder for each set of files, with links to the blobs under the names
that clients sent. Manifests are replaced atomically, after all files are there,
so a server that was killed leaves no broken model.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.ollama.created.manifest import Manifest, key_of
from cpuserve.api.stored.disk import writing
from cpuserve.api.stored.owned_folder import OwnedFolder, open_plain, read_records, write_whole
from cpuserve.api.stored.quota import Quota
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.fault_points import fault

# Seconds that a blob of no model is kept: its client may be about to create the model.
_UNUSED_S = 3600.0
_PLACE = "--models-dir"


# The most files of one model, and how many more blobs are stored for each model that is allowed.
MOST_FILES = 1000
_BLOBS_A_MODEL = 20


class Room:
    """Bytes that are reserved for one blob or download; they are given back by `free`."""

    def __init__(self, quota: Quota, owner: str) -> None:
        self.bytes = 0
        self._quota = quota
        self._owner = owner

    @property
    def left(self) -> int:
        """How many more bytes the owner may store now."""
        return max(0, self._quota.room(self._owner))

    def grow_to(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` in all; return False, without a change, if there is no room."""
        more = num_bytes - self.bytes
        if more > 0 and not self._quota.take(self._owner, more):
            return False
        self.bytes += max(0, more)
        return True

    def free(self) -> None:
        """Give the bytes back."""
        self._quota.add(self._owner, -self.bytes)
        self.bytes = 0


class ModelDirectory:
    """The created models of a server, with limits on their total bytes and their number.

    Room is reserved before anything is written or downloaded, so that requests that run
    at the same time cannot exceed the limits together.
    """

    def __init__(
        self, place: str, max_bytes: int, max_models: int, callers: KnownCallers | None = None
    ) -> None:
        """`place`: the directory, which is created if it is missing.

        callers: the owners of models, which have shares of the limits (see Quota).

        Raises:
          ConfigError: the directory cannot be written, or another server uses it.
        """
        self.max_models = max_models
        self._callers = callers or KnownCallers()
        self._bytes = Quota(max_bytes, self._owners)
        self._num_blobs = Quota(MOST_FILES + _BLOBS_A_MODEL * max_models, self._owners)
        self._stored: dict[str, tuple[str, int]] = {}  # the owner and bytes of each blob
        self._creating: list[Manifest] = []
        root = Path(place).expanduser().absolute()
        self._folder = OwnedFolder(f"{_PLACE} {place}", root, ("blobs", "models", "weights"))
        self._blobs, self._models, self._weights = self._folder.parts
        self._damaged: list[Path] = []
        self.manifests = {
            found.name: found for _, found in read_records(self._models, Manifest, self._damaged)
        }
        for found in self.manifests.values():
            found.owner = self._callers.current_owner(found.owner)
        self._folder.drop_unfinished()
        self._measure()
        self.drop_unused()

    def _owners(self) -> tuple[str, ...]:
        return self._callers.owners

    def close(self) -> None:
        """Release the lock, so that another server may use the directory."""
        self._folder.close()

    @property
    def used(self) -> tuple[int, int]:
        """The bytes of all files and downloads, and the most that they may be."""
        return self._bytes.total, self._bytes.limit

    # --- blobs: files of models, stored under their SHA-256 ------------------------------------

    def has_blob(self, digest: str) -> bool:
        """Return whether the directory has a file with this SHA-256."""
        return self._blob(digest).is_file()

    def _blob(self, digest: str) -> Path:
        return self._blobs / f"sha256-{digest}"

    @contextmanager
    def receiving(self, owner: str) -> Iterator[tuple[Path, Room]]:
        """Return a path for a file that is being received, and room for its bytes.

        At the end of the `with` block, both are given back unless `keep_blob` has kept them.

        Raises:
          InvalidRequest: the owner has no room for another file.
        """
        if not self._num_blobs.take(owner, 1):
            self.drop_unused()
            if not self._num_blobs.take(owner, 1):
                msg = (
                    f"The server keeps {self._num_blobs.total} files of models (with a share for "
                    "each caller): create a model of them, or delete models"
                )
                raise InvalidRequest(msg, code="models_full")
        part, room = self._blobs / f"{uuid.uuid4().hex}.part", self.room(owner)
        try:
            yield part, room
        finally:
            part.unlink(missing_ok=True)
            room.free()
            self._num_blobs.add(owner, -1)

    def keep_blob(self, part: Path, digest: str, owner: str, room: Room) -> None:
        """Move a completely received file to its final path, which contains its SHA-256."""
        with writing(_PLACE):
            fault("model_file.rename")
            part.replace(self._blob(digest))
        self._forget(digest)
        self._count(digest, owner, room.bytes)

    def room(self, owner: str) -> Room:
        """Return room for more bytes of an owner; if nothing is left, first delete unused files.

        Downloads from the Hugging Face hub, which are in its own cache, count as well.
        """
        room = Room(self._bytes, owner)
        if room.left <= 0:
            self.drop_unused()
        return room

    @contextmanager
    def reserving(self, owner: str) -> Iterator[Room]:
        """Return room for more bytes of an owner until the end of the `with` block."""
        room = self.room(owner)
        try:
            yield room
        finally:
            room.free()

    def _measure(self) -> None:
        """Count the blobs and downloads that are here at the start."""
        owners = {
            digest: found.owner for found in self.manifests.values() for digest in found.digests
        }
        for path in self._blobs.glob("sha256-*"):
            digest = path.name.removeprefix("sha256-")
            self._count(digest, owners.get(digest, ""), path.stat().st_size)
        for found in self.manifests.values():
            self._bytes.add(found.owner, found.size)

    def _count(self, digest: str, owner: str, size: int) -> None:
        self._stored[digest] = owner, size
        self._bytes.add(owner, size)
        self._num_blobs.add(owner, 1)

    def _forget(self, digest: str) -> None:
        """Count a blob no longer; nothing happens if it was not counted."""
        if (stored := self._stored.pop(digest, None)) is not None:
            self._bytes.add(stored[0], -stored[1])
            self._num_blobs.add(stored[0], -1)

    def drop_unused(self, *, older_than_s: float = _UNUSED_S) -> None:
        """Delete blobs and folders that belong to no model and are older than `older_than_s`.

        The files of models that are being created stay, whatever their age.
        Nothing is deleted if a manifest is damaged, because it may need the files.
        """
        if self._damaged:
            return
        needed = [*self.manifests.values(), *self._creating]
        used = {digest for found in needed for digest in found.digests}
        folders = {key_of(files) for found in needed for files in (found.files, found.adapters)}
        now = time.time()
        for path in self._blobs.glob("sha256-*"):
            digest = path.name.removeprefix("sha256-")
            if digest not in used and now - path.stat().st_mtime >= older_than_s:
                path.unlink()
                self._forget(digest)
        for path in self._weights.iterdir():
            if path.name not in folders and not path.name.endswith(".part"):
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
                    fault("model_file.link")
                    os.link(self._blob(digest), made / name)
                made.replace(folder)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        return folder

    def may_change(self, name: str, owner: str) -> bool:
        """Return whether `owner` may replace or delete a model: it is new or its own.

        Everyone may, on a server without API keys; and with keys, the models that were made
        by earlier versions or while the server had none, because these owners are gone.
        """
        found = self.manifests.get(name)
        if found is None or not self._owners() or found.owner == owner:
            return True
        return not found.owner.startswith(("key-", "caller-"))

    def check_room(self, name: str, owner: str) -> None:
        """Raise InvalidRequest if `owner` has no room for a model and `name` is a new one.

        Models that are being created count as well.
        """
        known = {made.name: made.owner for made in self._creating}
        known |= {made.name: made.owner for made in self.manifests.values()}
        quota = Quota(self.max_models, self._owners)
        for each in known.values():
            quota.add(each, 1)
        if name not in known and quota.room(owner) < 1:
            msg = (
                f"The server keeps {len(known)} models of clients, and may keep {self.max_models} "
                "(with a share for each caller): delete one, or start it with a larger "
                "--models-count"
            )
            raise InvalidRequest(msg, param="model", code="models_full")

    @contextmanager
    def creating(self, made: Manifest) -> Iterator[None]:
        """Keep a place for a model, and its files, until the end of the `with` block.

        Raises:
          InvalidRequest: the number of models is at its limit.
        """
        self.check_room(made.name, made.owner)
        self._creating.append(made)
        try:
            yield
        finally:
            self._creating = [other for other in self._creating if other is not made]

    def save(self, made: Manifest) -> None:
        """Write a manifest to disk, in place of an earlier manifest with the same name.

        Raises:
          DiskError: the manifest cannot be written; the earlier one is still there.
        """
        with writing(_PLACE):
            write_whole(self._path(made.name), made)
        if (earlier := self.manifests.get(made.name)) is not None:
            self._bytes.add(earlier.owner, -earlier.size)
        self._bytes.add(made.owner, made.size)
        self.manifests[made.name] = made

    def remove(self, name: str) -> None:
        """Delete a model, and its files unless other models use them.

        Raises:
          DiskError: the directory cannot be written; the model is still there.
        """
        with writing(_PLACE):
            self._path(name).unlink(missing_ok=True)
        found = self.manifests.pop(name)
        self._bytes.add(found.owner, -found.size)
        needed = [*self.manifests.values(), *self._creating]
        for digest in found.digests - {digest for other in needed for digest in other.digests}:
            self._blob(digest).unlink(missing_ok=True)
            self._forget(digest)
        self.drop_unused()

    def _path(self, name: str) -> Path:
        return self._models / f"{key_of(name)}.json"


def open_new(path: Path) -> int:
    """Create a new file for writing, and return its descriptor."""
    return open_plain(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
