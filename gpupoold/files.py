"""Files and folders that other users may have made, or that must survive a power failure.

A file is opened only if regular, and read up to a bound. A folder that this process cannot use has
a remedy.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpupoold.units import format_bytes

# A named pipe without a writer, and a terminal that becomes the process's own, are not waited for.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

# File systems that other machines may read and write.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs", "lustre", "gpfs", "glusterfs"}


class UnfitFile(OSError):
    """A file that is not regular, or too large; ``strerror`` says what it is."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; links are followed.

    Raises:
        UnfitFile: the path is of another kind.
        OSError: the file is missing or cannot be opened.
    """
    require_regular(path, os.stat(path).st_mode)  # opening some devices has an effect
    descriptor = os.open(path, _FLAGS)
    try:
        require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def require_regular(path: Path, mode: int) -> None:
    """Check the mode of a file.

    Raises UnfitFile: the mode is that of another kind than a regular file.
    """
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise UnfitFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    A file without a size, as those below ``/proc``, counts as empty.

    Raises:
        UnfitFile: the path is of another kind, or the file is larger than ``max_bytes``.
        OSError: the file is missing or cannot be read.
    """
    with opened(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        data = file.read(min(num_bytes, max_bytes) + 1) if num_bytes else b""
    if len(data) > max_bytes:
        raise UnfitFile(
            errno.EFBIG, f"is larger than the allowed {format_bytes(max_bytes)}", str(path)
        )
    return data


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk.

    Raises OSError: writing failed, or ``path`` does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file that only the owner may read, with :func:`replace_durably`.

    Raises OSError: writing failed.
    """
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    replace_durably(draft, path)


def replace_durably(draft: Path, path: Path) -> None:
    """Rename a complete file to ``path``, replacing an existing file.

    After a power failure ``path`` is the old or the new file, and the new file once this function
    has returned. Raises OSError: the draft could not be written to disk or renamed; the draft
    stays.
    """
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def filesystem_of(path: Path) -> str:
    """Return the type of the file system of a path, ``unknown`` if it is not known."""
    import psutil  # here, because the command line imports this module

    real = os.path.realpath(path)
    inside = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if os.path.commonpath([partition.mountpoint, real]) == partition.mountpoint
    ]
    # A later mount hides an earlier mount at the same place.
    return max(inside, key=lambda mount: len(mount.mountpoint)).fstype if inside else "unknown"


def is_shared(filesystem: str) -> bool:
    """Return whether other machines may have access to files on such a file system."""
    return filesystem in _NETWORK or filesystem.startswith("fuse")


def hint_to_write(folder: Path) -> str:
    """Return a remedy if this process cannot write to ``folder``; empty if the process can.

    For a missing folder, its nearest existing parent decides.
    """
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    with suppress(OSError):
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            return _hint_for_read_only(folder)
    return f"give the folder to the daemon's user: mkdir -p {folder} && chown {_user()}: {folder}"


def _hint_for_read_only(folder: Path) -> str:
    # systemd sets the variable for the processes of a unit.
    if not os.environ.get("INVOCATION_ID"):
        return f"the file system of {folder} is mounted read-only"
    return (
        f"the service may write to its own folders only. To add this folder: mkdir -p {folder} && "
        f"chown {_user()}: {folder}; `systemctl edit gpupoold` with the lines [Service] and "
        f"ReadWritePaths={folder}; systemctl restart gpupoold"
    )


def hint_to_read(path: Path) -> str:
    """Return a remedy if this process cannot read ``path``; empty if readable or missing.

    The remedy names the first folder on the way that this process cannot enter.
    """
    for folder in reversed(path.absolute().parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            return f"let the daemon's user enter {folder}: setfacl -m u:{_user()}:x {folder}"
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    if os.path.exists(path) and not os.access(path, needed):
        return f"let the daemon's user read {path}: setfacl -R -m u:{_user()}:rX {path}"
    return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
