"""The actions that change something, each with a look at what it has changed."""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from gpupool_state import StateLock
from gpupoold.access.peers import AdminGroups
from gpupoold.checkpoints import fetcher
from gpupoold.checkpoints.download import Download
from gpupoold.checkpoints.fetcher import PART_FOLDER
from gpupoold.checkpoints.hub import Hub, HubFile
from gpupoold.checkpoints.layout import Wanted
from gpupoold.checkpoints.manifest import Manifest, read_manifest, write_manifest
from gpupoold.config.file import read_config_file
from gpupoold.config.schema import Settings
from gpupoold.control.operations import Configuration
from gpupoold.control.processes.child import Child, ForkServer
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.control.weights.kept_snapshots import SavedSnapshots, SnapshotKeys, StoredSnapshots
from gpupoold.control.weights.snapshot_files import SnapshotFiles
from gpupoold.domain import DeviceFacts, ModelName
from gpupoold.errors import ConfigError, Failed, Refused
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import NO_NODE, create_memfd
from gpupoold.replay import log_file
from gpupoold.replay.log_file import LogEntry
from gpupoold.system.listeners import admin_listener
from gpupoold.system.systemd import FdStore, Notifier
from gpupoold.wire import messages as m
from gpupoold.wire.messages import ModelToLoad, WorkerReady
from tests.syscall_faults.injector import Scenario
from tests.syscall_faults.state_scenarios import StateChanged
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import run_hub

READY = WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0", "emulated")
SIZE = 300_000


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def memory(text: bytes = b"weights") -> int:
    """A memfd of a snapshot that begins so."""
    fd = create_memfd("gpupool-snapshot", SIZE)
    os.pwrite(fd, text, 0)
    return fd


class ManifestWritten(Scenario):
    """The note of a download takes the place of another."""

    errors = (OSError,)

    async def prepare(self) -> None:
        write_manifest(self.folder, Manifest("org/a", None, "1", ()))

    async def act(self) -> None:
        files = tuple(HubFile(f"file-{number}", number, "0" * 64) for number in range(100))
        write_manifest(self.folder, Manifest("org/a", None, "2", files, complete=True))

    async def state(self) -> Any:
        found = read_manifest(self.folder)
        return found and (found.commit, len(found.files))


class Downloaded(Scenario):
    """A checkpoint comes from the hub; what was fetched of it may stay."""

    errors = (Failed, Refused)  # refused: its configuration cannot be read
    uncounted = frozenset({"socket"})  # connections to the hub, which is in this process

    async def prepare(self) -> None:
        fetcher.FIRST_RETRY_S = 0.001
        self._stack = ExitStack()
        hub = self._stack.enter_context(run_hub())
        hub.add("org/model", samples.sharded())
        os.environ["HF_ENDPOINT"] = hub.url
        os.environ.pop("HF_HUB_OFFLINE", None)

    async def act(self) -> None:
        await Download(
            Hub("org/model"), None, self.folder / "model", lambda *_: None, Wanted()
        ).run()

    async def state(self) -> Any:
        folder = self.folder / "model"
        found = read_manifest(folder)
        if found is None or not found.complete:
            return None
        files = {name: (folder / name).read_bytes() for name in samples.sharded()}
        return files == samples.sharded() and not (folder / PART_FOLDER).exists()

    async def close(self) -> None:
        self._stack.close()


class SnapshotSaved(Scenario):
    """A file of a snapshot takes the place of another."""

    errors = (Failed,)

    async def prepare(self) -> None:
        self._files = SnapshotFiles(self.folder / "snapshots")
        self._new = memory(b"new")
        old = memory(b"old")
        self._files.save("key", old, "layout", (1, 2))
        os.close(old)

    async def act(self) -> None:
        self._files.save("key", self._new, "layout", (1, 2))

    async def state(self) -> Any:
        found = self._files.load("key")
        if found is None:
            return None, listing(self.folder)
        try:
            return os.pread(found.fd, 3, 0), listing(self.folder)
        finally:
            os.close(found.fd)

    async def close(self) -> None:
        os.close(self._new)


class SnapshotSavedFirst(SnapshotSaved):
    """The first file of a snapshot, in a folder that has to be made."""

    async def prepare(self) -> None:
        self._files = SnapshotFiles(self.folder / "snapshots")
        self._new = memory(b"new")


class SnapshotRead(SnapshotSaved):
    """A file of a snapshot comes back to memory; one that is not read stays."""

    is_best_effort = True

    async def prepare(self) -> None:
        await super().prepare()
        self._digest = ""

    async def act(self) -> None:
        found = self._files.load("key")
        if found is not None:
            self._digest = hashlib.sha256(os.pread(found.fd, SIZE, 0)).hexdigest()
            os.close(found.fd)

    async def state(self) -> Any:
        return self._digest, listing(self.folder)


class SnapshotKept(Scenario):
    """The cache gets a snapshot, which the service manager keeps, and a file is written."""

    is_best_effort = True

    async def prepare(self) -> None:
        (self.folder / "model").mkdir()
        (self.folder / "model" / "config.json").write_text("{}")
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(str(self.folder / "notify"))
        self._manager.setblocking(False)
        self._stored: set[str] = set()
        keys = SnapshotKeys()
        model = ModelToLoad(name=ModelName("a"), source="a", path=str(self.folder / "model"))
        await keys.note(model, READY)
        store = FdStore(Notifier(str(self.folder / "notify")), [])
        self._stored_snapshots = StoredSnapshots(store, keys)
        self._cache = SnapshotCache(10 * SIZE, self._stored_snapshots)
        self._saved = SavedSnapshots(self.folder / "snapshots", 10 * SIZE, keys)
        self._new: int | None = memory()

    async def act(self) -> None:
        snapshot = self._cache.get(SnapshotId("a"))
        if self._new is not None:
            new, self._new = self._new, None
            snapshot = self._cache.put(SnapshotId("a"), new, "layout", (1, 2))
        assert snapshot is not None
        self._stored_snapshots.store(SnapshotId("a"), snapshot)
        self._saved.keep(SnapshotId("a"), snapshot)
        await self._saved.settled(SnapshotId("a"))

    async def state(self) -> Any:
        snapshot = self._cache.get(SnapshotId("a"))
        held = snapshot and os.pread(snapshot.fd, 7, 0)
        self._hear()
        saved = await self._saved.read(SnapshotId("a"), [NO_NODE])
        if saved is not None:
            os.close(saved.fd)
        # The file is named after the checkpoint's folder, which is another in each run.
        return held, len(self._stored), saved is not None, len(listing(self.folder / "snapshots"))

    async def close(self) -> None:
        self._cache.close()
        self._manager.close()

    def _hear(self) -> None:
        while True:
            try:
                message, fds, _, _ = socket.recv_fds(self._manager, 1 << 16, 16)
            except BlockingIOError:
                return
            for fd in fds:
                os.close(fd)
            fields = dict(line.split("=", 1) for line in message.decode().splitlines())
            if "FDSTORE" in fields and len(fds) == 2:
                self._stored.add(fields["FDNAME"])
            elif "FDSTOREREMOVE" in fields:
                self._stored.discard(fields["FDNAME"])


class ConfigurationRead(Scenario):
    """The file is read again; what cannot be read changes nothing."""

    errors = (ConfigError,)

    async def prepare(self) -> None:
        self._file = self.folder / "gpupool.toml"
        self._file.write_text("[limits]\ntoken_timeout = '1m'\n")
        self._configuration = Configuration(read_config_file(self._file), self._file)
        self._file.write_text("[limits]\ntoken_timeout = '2m'\n")

    async def act(self) -> None:
        file = await self._configuration.read()
        self._configuration.take(file, await self._configuration.update_of(file))

    async def state(self) -> Any:
        return self._configuration.settings.limits.token_timeout_s


class ChildStarted(Scenario):
    """A process with a channel and a log, which ends at once."""

    errors = (OSError,)

    async def prepare(self) -> None:
        self._is_done = False

    async def act(self) -> None:
        log = self.folder / "child.log"
        child: Child[m.FromFrontend] = await Child.start("child", "this", [], m.FromFrontend, log)
        child.kill()
        await child.ended()
        self._is_done = True

    async def state(self) -> Any:
        return self._is_done, len(psutil.Process().children())


class ChildForked(Scenario):
    """A process of the fork server's with a channel and a log; the module does not exist."""

    errors = (OSError,)
    unsteady = frozenset({"write"})  # of the log's thread: as many as there are pieces

    async def prepare(self) -> None:
        paths = {f"{name}_dir": self.folder / name for name in ("state", "runtime", "download")}
        settings = Settings.model_validate(
            {
                "paths": paths | {"log_dir": self.folder, "model_dirs": []},
                "device": [{"kind": "emulated"}],
            }
        )
        self._server = ForkServer(settings, {}, ())
        await self.act()
        self._is_done = False

    async def act(self) -> None:
        log = self.folder / "child.log"
        child: Child[m.FromFrontend] = await Child.start(
            "child", "no_such_module", [], m.FromFrontend, log, starter=self._server.fork
        )
        assert await child.ended() == 1
        self._is_done = True

    async def state(self) -> Any:
        return self._is_done

    async def close(self) -> None:
        await self._server.stop()


class FolderLocked(Scenario):
    """The state folder is made and locked, and given back."""

    errors = (Failed,)

    async def prepare(self) -> None:
        self._is_done = False

    async def act(self) -> None:
        StateLock.acquire(self.folder / "state").release()
        self._is_done = True

    async def state(self) -> Any:
        return self._is_done


class AdminSocketMade(Scenario):
    """The admin socket is made and removed."""

    errors = (Failed,)

    async def prepare(self) -> None:
        self._stack = ExitStack()
        self._is_made = False

    async def act(self) -> None:
        groups = AdminGroups("no-such-group", "no-other-group")
        self._stack.enter_context(admin_listener(self.folder, groups, lambda _: None))
        self._is_made = True

    async def state(self) -> Any:
        return self._is_made, (self.folder / "admin.sock").exists()

    async def close(self) -> None:
        self._stack.close()


class MemoryMade(Scenario):
    """Buffers of host memory and an emulated device's memory."""

    errors = (OSError,)

    async def prepare(self) -> None:
        self._made = 0

    async def act(self) -> None:
        buffer = HostBuffer.create("gpupool-test", 1 << 20)
        buffer.close()
        KvHostCache(1 << 20).close()
        EmulatedDevice(1 << 20).close()
        self._made = 1

    async def state(self) -> Any:
        return self._made


class EventLogWritten(Scenario):
    """A file of an event log takes the place of another."""

    errors = (OSError,)

    async def prepare(self) -> None:
        self._path = self.folder / "log.jsonl"
        log_file.write(self._path, log_file.lines(log_file.Header("gpupool"), []))

    async def act(self) -> None:
        entries = [LogEntry(1.0, (), ())] * 3000
        log_file.write(self._path, log_file.lines(log_file.Header("gpupool"), entries))

    async def state(self) -> Any:
        with log_file.open_log(self._path) as log:
            return len(list(log.entries)), listing(self.folder)


def _concrete(kind: Any) -> dict[str, type[Scenario]]:
    found = {} if kind.__abstractmethods__ else {kind.__name__: kind}
    for one in kind.__subclasses__():
        found |= _concrete(one)
    return found


SCENARIOS = _concrete(Scenario) | _concrete(StateChanged)
