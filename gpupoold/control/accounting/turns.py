"""The latest turns of all devices. Pure bookkeeping."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpupoold.api.schemas_top import TurnInfo
from gpupoold.domain import SWITCH_STAGES, LargestTransfer
from gpupoold.wire import messages as m

_NUM_KEPT = 4096


def largest_transfer(switch: m.SwitchRecord | None) -> LargestTransfer:
    """Return the largest transfer: weights, else KV, else only page mappings."""
    if switch is None:
        return "none"
    if switch.weight_bytes:
        return "weights"
    return "kv" if switch.kv_in_bytes or switch.kv_out_bytes else "pages"


@dataclass(slots=True)
class _Going:
    """Data of a device since the end of its last turn."""

    switch: m.SwitchRecord | None = None
    model: str = ""
    num_tokens: int = 0


class TurnLog:
    """A bounded ring of turns; the oldest turns are dropped."""

    def __init__(self, num_kept: int = _NUM_KEPT) -> None:
        self.last_id = 0
        self._kept: deque[TurnInfo] = deque(maxlen=num_kept)
        self._going: dict[int, _Going] = {}

    def switched(self, switch: m.SwitchRecord) -> None:
        """Record a switch for the coming turn."""
        going = self._of(switch.device)
        before = going.switch
        if before is not None and before.model == switch.model:
            going.switch = _together(before, switch)
            return
        self._close_unused(switch.device, going)
        going.switch = switch

    def stepped(self, device: int, outputs: m.StepOutputs) -> None:
        """Count the tokens of a step of the present turn."""
        going = self._of(device)
        if (
            going.model != outputs.model
        ):  # the turn before was cancelled, without a report of the end
            going.model, going.num_tokens = outputs.model, 0
        going.num_tokens += sum(item.num_tokens for item in outputs.progress)

    def ended(self, device: int, message: m.TurnReport) -> None:
        """Record the end of a turn; a turn that could not run leaves only its switch."""
        if message.began_s is None:
            return
        going = self._of(device)
        if going.switch is not None and going.switch.model != message.model:
            self._close_unused(device, going)
        num_tokens = going.num_tokens if going.model == message.model else 0
        seconds = max(0.0, message.ended_s - message.began_s)
        self._add(device, message.model, message.began_s, seconds, num_tokens, going.switch)
        self._going[device] = _Going()

    def worker_down(self, device: int) -> None:
        """Drop the present turn of a device whose worker has ended."""
        self._going.pop(device, None)

    def after(self, after_id: int, limit: int) -> list[TurnInfo]:
        """Return the latest ``limit`` turns with larger ids, oldest first."""
        num_new = self.last_id - max(0, after_id)
        count = min(num_new, limit, len(self._kept))
        if count <= 0:
            return []
        return list(_last(self._kept, count))

    def _of(self, device: int) -> _Going:
        return self._going.setdefault(device, _Going())

    def _close_unused(self, device: int, going: _Going) -> None:
        switch, going.switch = going.switch, None
        if switch is not None:
            end_s = switch.at_s + switch.total_s
            self._add(device, switch.model, end_s, 0.0, 0, switch, did_run=False)

    def _add(
        self,
        device: int,
        model: str,
        began_s: float,
        seconds: float,
        num_tokens: int,
        switch: m.SwitchRecord | None,
        *,
        did_run: bool = True,
    ) -> None:
        self.last_id += 1
        self._kept.append(
            TurnInfo(
                id=self.last_id,
                device=device,
                model=model,
                began_at=began_s + time.time() - time.monotonic(),
                seconds=seconds,
                num_tokens=num_tokens,
                switch_kind=largest_transfer(switch),
                switch_s=0.0 if switch is None else switch.total_s,
                did_run=did_run,
            )
        )


def _together(first: m.SwitchRecord, second: m.SwitchRecord) -> m.SwitchRecord:
    """Merge two switches to the same model before the same turn."""
    times = (f"{stage}_s" for stage in ("total", *SWITCH_STAGES))
    sizes = ("weight_bytes", "kv_in_bytes", "kv_out_bytes")
    added = {name: getattr(first, name) + getattr(second, name) for name in (*times, *sizes)}
    return replace(first, late_weight_bytes=second.late_weight_bytes, **added)


def _last(turns: deque[TurnInfo], count: int) -> Iterable[TurnInfo]:
    """Return the last ``count`` turns in order; a deque is fast at its ends only."""
    found = [turn for turn, _ in zip(reversed(turns), range(count), strict=False)]
    return reversed(found)
