"""The modules that a chat completion and an addition run, in all processes of a daemon.

``python -m scripts.run_modules`` starts a daemon on one emulated device, adds a tiny model, asks
for one completion and adds a second model. A profile function in each process notes the modules of
the product whose functions are called, in slices of time. Modules that an idle daemon runs in as
many seconds before are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_FOLDERS = ("gpupoold", "cli/gpupool_cli", "tui/gpupool_tui", "state/gpupool_state")
_IDLE_S = 6.0
_SLICE_S = 0.05

# Runs at the start of each interpreter; forks keep the function and share the file.
_PROFILE = """\
import os, sys, threading, time
_out = os.open(os.environ["RUN_MODULES_OUT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_roots = tuple(os.environ["RUN_MODULES_ROOTS"].split(os.pathsep))
_names, _seen = {}, set()
def _profile(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    name = _names.get(code)
    if name is None:
        name = code.co_filename if code.co_filename.startswith(_roots) else ""
        _names[code] = name if code.co_name != "<module>" else ""
    if name:
        key = int(time.time() / %(slice_s)s), name
        if key not in _seen:
            if len(_seen) > 20_000:
                _seen.clear()
            _seen.add(key)
            os.write(_out, f"{key[0]} {name}\\n".encode())
sys.setprofile(_profile)
threading.setprofile(_profile)
"""

_CONFIG = """\
devices = ["emulated"]
[server]
port = 0
[paths]
state_dir = "{folder}/state"
runtime_dir = "{folder}/run"
model_dirs = ["{folder}/models"]
"""


def main() -> None:
    """Print the numbers, and the modules with ``--list``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the modules too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="run-modules-") as name:
        runs = _measure(Path(name))
    for what, (run, idle) in runs.items():
        print(
            f"{what:<12} {len(run):>4} modules, {len(run - idle):>4} of them not in an idle daemon"
        )
        if arguments.list:
            for module in sorted(run):
                print(f"    {module}{' (idle too)' if module in idle else ''}")


def _measure(folder: Path) -> dict[str, tuple[set[str], set[str]]]:
    (folder / "sitecustomize.py").write_text(_PROFILE % {"slice_s": _SLICE_S})
    (folder / "gpupool.toml").write_text(_CONFIG.format(folder=folder))
    out = folder / "out"
    path = os.pathsep.join(
        [str(folder), *(str(_ROOT / tree) for tree in ("", "cli", "tui", "state"))]
    )
    roots = os.pathsep.join(str(_ROOT / folder_name) for folder_name in _FOLDERS)
    traced = os.environ | {
        "PYTHONPATH": path,
        "RUN_MODULES_OUT": str(out),
        "RUN_MODULES_ROOTS": roots,
    }
    plain = os.environ | {"PYTHONPATH": path.partition(os.pathsep)[2]}

    def command(*words: str) -> str:
        run = [sys.executable, "-m", "gpupool_cli.main", *words]
        socket = {"GPUPOOL_SOCKET": str(folder / "run/admin.sock")}
        return subprocess.run(
            run, env=plain | socket, capture_output=True, text=True, check=True
        ).stdout

    command("make-tiny-models", str(folder / "tiny"), "--arch", "llama")
    [model] = (folder / "tiny").iterdir()
    daemon = subprocess.Popen(
        [sys.executable, "-m", "gpupoold", "--config", str(folder / "gpupool.toml")],
        env=traced,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
    )
    try:
        _until_ready(command, daemon, folder / "log")
        command("add-model", "first", "--source", str(model), "--ttft", "10s", "--tbt", "1s")
        url = json.loads(command("status", "--json"))["http_url"]
        _complete(url)  # makes what only a first request makes
        return {
            "completion": _window(out, lambda: _complete(url)),
            "addition": _window(
                out,
                lambda: command(
                    "add-model", "second", "--source", str(model), "--ttft", "10s", "--tbt", "1s"
                ),
            ),
        }
    finally:
        daemon.terminate()
        daemon.wait(60)


def _until_ready(command: Callable[..., str], daemon: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(300):
        try:
            status = json.loads(command("status", "--json"))
        except (subprocess.CalledProcessError, ValueError):
            status = {}
        if daemon.poll() is not None:
            raise SystemExit(f"the daemon ended:\n{log.read_text()}")
        if status.get("state") == "ready":
            return
        time.sleep(0.5)
    raise SystemExit("the daemon is not ready after 150 s")


def _complete(url: str) -> None:
    body = {"model": "first", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=120).read()


def _window(out: Path, run: Callable[[], object]) -> tuple[set[str], set[str]]:
    """Return the modules that ran during ``run`` and a second after, and those of an idle time."""
    time.sleep(2 * _IDLE_S)
    began_s = time.time()
    run()
    time.sleep(1.0)
    ended_s = time.time()
    during, idle = set[str](), set[str]()
    for line in out.read_text().splitlines():
        number, _, name = line.partition(" ")
        at_s = int(number) * _SLICE_S
        module = str(Path(name).relative_to(_ROOT))
        if began_s - _SLICE_S <= at_s <= ended_s:
            during.add(module)
        elif began_s - _IDLE_S <= at_s < began_s:
            idle.add(module)
    return during, idle


if __name__ == "__main__":
    main()
