"""On-disk cache of compiled kernels: one zip file an entry, written atomically, checked when read."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Part of every key: raise it when the layout of an entry changes.
FORMAT = 1


#: What reading a damaged entry raises, found by changing and cutting one at every byte; ``RuntimeError`` comes from a
#: flipped encryption flag and, as ``NotImplementedError``, from a changed compression method or version.
_CORRUPT = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


class CacheWarning(UserWarning):
    """The cache could not be used; the kernel is compiled anew."""


@dataclass(frozen=True)
class CacheEntry:
    name: str
    ptx: str
    cubin: bytes
    seconds: float


@dataclass(frozen=True)
class ArtifactCache:
    """Entries under ``folder``, which is made when first written to.

    Safe for several processes: an entry appears whole, by rename, and two writers of one key write the same bytes.
    """

    folder: Path

    @classmethod
    def default(cls) -> ArtifactCache:
        """The cache in the user's cache folder, as the platform has it."""
        import platformdirs

        return cls(Path(platformdirs.user_cache_path("kda_lib")) / "kernels")

    def path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps({"format": FORMAT, **key}, sort_keys=True, allow_nan=False)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()}.zip"

    def load(self, key: Mapping[str, Any]) -> CacheEntry | None:
        """The entry for this key, or ``None``. A corrupt entry is removed, with a :class:`CacheWarning`."""
        path = self.path(key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            warnings.warn(f"the kernel cache cannot be read: {error.strerror or error}", CacheWarning, stacklevel=2)
            return None
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                # ZipFile.read checks each member's CRC.
                meta = json.loads(archive.read("meta.json"))
                entry = CacheEntry(
                    meta["name"], archive.read("kernel.ptx").decode(), archive.read("kernel.cubin"), meta["seconds"]
                )
            if meta["key"] != json.loads(json.dumps(key)):
                raise ValueError("it belongs to another key")
        except _CORRUPT as error:
            reason = str(error) or type(error).__name__
            warnings.warn(f"discarding the corrupt cache entry {path.name}: {reason}", CacheWarning, stacklevel=2)
            # Where it cannot be removed, it cannot be replaced either, and store() says so.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return entry

    def store(self, key: Mapping[str, Any], *, name: str, ptx: str, cubin: bytes, seconds: float) -> None:
        """Keep an entry. Where the folder cannot be written, warn with :class:`CacheWarning` and go on."""
        path = self.path(key)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
            try:
                with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                    archive.writestr("meta.json", json.dumps({"key": key, "name": name, "seconds": seconds}))
                    archive.writestr("kernel.ptx", ptx)
                    archive.writestr("kernel.cubin", cubin)
                os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror or error
            warnings.warn(f"the kernel cache cannot be written: {reason}", CacheWarning, stacklevel=2)
