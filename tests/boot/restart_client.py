"""Print what clients see of a command that restarts the service.

    python3 restart_client.py MODEL COMMAND...

Four long streams and a short stream are open when the command begins, and a new request begins
every quarter of a second until requests that began after the restart succeed. Uses only the
standard library, for the booted root's own Python.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

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
            if answer.status == 200:
                return "200"
            message = json.loads(text)["error"]["message"]
            return f"{answer.status}, Retry-After {answer.headers['Retry-After']}, {message}"
        outcome = "closed without an end"
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            seen.num_events += 1
            if b'"error"' in line:
                outcome = f"error event: {json.loads(line[6:])['error']['message']}"
            elif line.strip() == b"data: [DONE]" and not outcome.startswith("error"):
                outcome = "complete"
        return outcome

    def report(self) -> None:
        """Print a line for each stream, and for each outcome of new requests."""
        by_outcome: dict[str, list[Seen]] = defaultdict(list)
        for one in self.seen:
            if one.kind == "new":
                by_outcome[one.outcome].append(one)
            else:
                print(f"{one.kind} stream: {one.num_events} events, {one.outcome}, {one.ended_s} s")
        for outcome, those in by_outcome.items():
            longest = max(one.ended_s - one.began_s for one in those)
            print(
                f"{len(those)} new requests, begun {those[0].began_s} to {those[-1].began_s} s, "
                f"longest {longest:.2f} s: {outcome}"
            )


def main() -> None:
    clients = Clients(sys.argv[1])
    streams = [clients.start("long", LONG, stream=True) for _ in range(NUM_STREAMS)]
    streams += [clients.start("short", SHORT, stream=True)]
    while not all(one.num_events for one in streams):
        time.sleep(0.01)
    clients.zero_at = time.monotonic()
    command = subprocess.Popen(sys.argv[2:], stdout=sys.stderr)
    restarted_s, num_successes = LIMIT_S, 0
    while num_successes < NUM_AFTERWARDS and time.monotonic() - clients.zero_at < LIMIT_S:
        clients.start("new", 4, stream=False)
        time.sleep(PERIOD_S)
        if restarted_s == LIMIT_S and command.poll() is not None:
            restarted_s = round(time.monotonic() - clients.zero_at, 2)
        after = [one for one in clients.seen if one.began_s > restarted_s]
        num_successes = sum(one.outcome == "200" for one in after)
    for thread in clients.threads:
        thread.join(LIMIT_S)
    print(f"the command ended after {restarted_s} s with status {command.wait(LIMIT_S)}")
    clients.report()


if __name__ == "__main__":
    main()
