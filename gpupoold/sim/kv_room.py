"""KV memory of the model on its turn: prompts that fit, and preemptions as in vLLM.

A prompt begins only if all of its KV fits beside the KV of running answers. If the next step's KV
does not fit, the latest request is preempted: its KV is dropped, and computed anew once there is
memory. A lone request is never preempted, although its KV may exceed the device: the daemon
refuses such requests.
"""

from __future__ import annotations

from gpupoold.sim.live import DeviceRequests, SimLive
from gpupoold.sim.memory import SimMemory


class KvRoom:
    """Decides on the requests that a step may contain, and counts preemptions."""

    def __init__(self, requests: DeviceRequests, memory: SimMemory) -> None:
        self._requests = requests
        self._memory = memory
        self.num_preemptions = 0

    def fitting(self, model: str, max_tokens: int | None) -> list[SimLive]:
        """Return the first waiting requests whose KV fits beside a step of all answers.

        The requests have at least ``max_tokens`` to prefill together, if as many fit; with None the
        list has at most one request. Without answers the first request always fits.
        """
        waiting, running = self._requests.waiting[model], self._requests.running[model]
        if not waiting:
            return []
        room_tokens = self._memory.kv_room_tokens(model) - len(running)
        found: list[SimLive] = []
        left = 1 if max_tokens is None else max_tokens
        for live in waiting:
            num_tokens = live.prefill_tokens - live.done_tokens
            if left <= 0 or num_tokens + 1 > room_tokens:
                break
            room_tokens -= num_tokens + 1
            left -= num_tokens
            found.append(live)
        return found or ([] if running else waiting[:1])

    def make(self, model: str, max_steps: int) -> int:
        """Preempt until a decode step fits; return how many steps fit, at most ``max_steps``."""
        running = self._requests.running[model]
        while (room_tokens := self._memory.kv_room_tokens(model)) < len(running):
            num_tokens = self._requests.preempt_latest(model)
            if num_tokens is None:
                return max_steps
            self._memory.add_kv(model, -num_tokens)
            self.num_preemptions += 1
        return min(max_steps, room_tokens // len(running))
