"""Streams and requests across a restart of the service: what clients see, as JSON.

    python3 restart_client.py MODEL COMMAND...

Only the standard library, for the booted root's own Python.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

ADDRESS = ("127.0.0.1", 8000)
LONG, SHORT = 900, 60
NUM_STREAMS = 4
PERIOD_S = 0.25
LIMIT_S = 180.0
NUM_AFTERWARDS = 8


@dataclass
class Seen:
    """What one client saw; times in seconds after the command began."""

    kind: str
    began_s: float
    ended_s: float = 0.0
    num_events: int = 0
    outcome: str = ""


class Clients:
    """Clients in threads of their own, and the instant at which the command began."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.zero_at = time.monotonic()
        self.seen: list[Seen] = []
        self.threads: list[threading.Thread] = []

    def start(self, kind: str, num_tokens: int, *, stream: bool) -> Seen:
        seen = Seen(kind, self._now())
        self.seen.append(seen)
        thread = threading.Thread(target=self._run, args=(seen, num_tokens, stream), daemon=True)
        self.threads.append(thread)
        thread.start()
        return seen

    def _now(self) -> float:
        return round(time.monotonic() - self.zero_at, 2)

    def _run(self, seen: Seen, num_tokens: int, stream: bool) -> None:
        try:
            seen.outcome = self._ask(seen, num_tokens, stream)
        except (OSError, http.client.HTTPException) as error:
            seen.outcome = type(error).__name__
        seen.ended_s = self._now()

    def _ask(self, seen: Seen, num_tokens: int, stream: bool) -> str:
        connection = http.client.HTTPConnection(*ADDRESS, timeout=LIMIT_S)
        body = {"model": self.model, "prompt": "Hello", "max_tokens": num_tokens, "stream": stream}
        body |= {"temperature": 0, "ignore_eos": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if not stream or answer.status != 200:
            text = answer.read()
            return f"{answer.status}" + (f" {text[:160]!r}" if answer.status != 200 else "")
        last = b""
        for line in answer:
            if line.startswith(b"data: "):
                seen.num_events += 1
                last = line[6:].strip()
        if last == b"[DONE]":
            return "complete"
        return f"ended after {last[:200].decode()}"


def main() -> None:
    clients = Clients(sys.argv[1])
    streams = [clients.start("long", LONG, stream=True) for _ in range(NUM_STREAMS)]
    streams += [clients.start("short", SHORT, stream=True)]
    while not all(one.num_events for one in streams):
        time.sleep(0.01)
    clients.zero_at = time.monotonic()
    command: Any = subprocess.Popen(sys.argv[2:], stdout=sys.stderr)
    restarted_s, afterwards = None, 0
    while afterwards < NUM_AFTERWARDS and time.monotonic() - clients.zero_at < LIMIT_S:
        clients.start("new", 4, stream=False)
        time.sleep(PERIOD_S)
        if restarted_s is None and command.poll() is not None:
            restarted_s = round(time.monotonic() - clients.zero_at, 2)
        news = [one for one in clients.seen if one.kind == "new" and one.outcome]
        afterwards = sum(one.outcome == "200" and one.began_s > (restarted_s or 1e9) for one in news)
    for thread in clients.threads:
        thread.join(LIMIT_S)
    print(f"restarted {restarted_s} s after the command, status {command.poll()}")
    for one in clients.seen:
        print(json.dumps(asdict(one)))


if __name__ == "__main__":
    main()
