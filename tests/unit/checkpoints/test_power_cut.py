"""What a power cut leaves of a download: never less than its note says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpupoold.checkpoints.manifest import Manifest, read_manifest
from tests.power_cut import PowerCut
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.fake_hub import FakeHub

ROOT = Path(__file__).parents[3]
REPO = "org/model"
DOWNLOAD = f"""
import asyncio, sys
from pathlib import Path
from gpupoold.checkpoints.download import Download
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.layout import Wanted
asyncio.run(Download(Hub({REPO!r}), None, Path(sys.argv[1]), print, Wanted()).run())
"""
NOTE = """
import sys
from pathlib import Path
from gpupoold.checkpoints.manifest import Manifest, write_manifest
folder = Path(sys.argv[1])
write_manifest(folder, Manifest("org/model", None, "first", ()))
write_manifest(folder, Manifest("org/model", None, "second", ()))
"""


def run(code: str, target: Path, cut: PowerCut) -> None:
    command = [sys.executable, "-c", code, str(target)]
    subprocess.run(command, cwd=ROOT, env=cut.environment, check=True, timeout=120)


def watched(tmp_path: Path) -> tuple[Path, PowerCut]:
    disk = tmp_path / "models"
    disk.mkdir()
    return disk, PowerCut(disk, tmp_path)


def test_a_note_that_was_written_is_there(tmp_path: Path) -> None:
    folder, cut = watched(tmp_path)
    run(NOTE, folder, cut)
    manifest = read_manifest(cut.leave(tmp_path / "left"))
    assert manifest == Manifest(REPO, None, "second", ())


def test_a_finished_download_is_there_as_a_whole(tmp_path: Path, hub: FakeHub) -> None:
    files = samples.checkpoint()
    hub.add(REPO, files)
    folder, cut = watched(tmp_path)
    run(DOWNLOAD, folder / "org--model", cut)
    left = cut.leave(tmp_path / "left") / "org--model"
    manifest = read_manifest(left)
    assert manifest is not None
    assert manifest.complete
    for file in manifest.files:
        assert (left / file.path).read_bytes() == files[file.path]
