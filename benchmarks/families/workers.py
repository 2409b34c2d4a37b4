"""A worker process as the checks of families drive it: requests move to another one, or die."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.families.family import Family
from benchmarks.families.prompts import Prompt, decoded_features
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.requests.core_shell import arrived
from gpupoold.domain import Targets
from gpupoold.scheduling.events import Action, Ended, Send
from gpupoold.wire import messages as m
from tests.functional.worker_peer import Snapshot, WorkerPeer, encode_request

_KV_HOST_BYTES = 64 << 20
_QUOTA_MAX_S = 0.05
_LOAD_TIMEOUT_S = 180.0
_PROFILING_BUDGET_S = 0.5


class Moved(NamedTuple):
    """A request that has left a worker: its tokens so far, and its KV."""

    tokens: list[int]
    kv_transfer: m.KvTransfer | None
    fds: tuple[int, ...]


class FamilyWorker(WorkerPeer):
    """Worker ``number`` on an emulated device of ``num_gpus``, in short turns."""

    def __init__(self, number: int, device_bytes: int, log_path: Path, num_gpus: int = 1) -> None:
        self._present: set[str] = set()
        self.numbers: dict[str, list[float]] = {}  # of pooling models, by request
        super().__init__(
            device_bytes // num_gpus,
            _KV_HOST_BYTES // num_gpus,
            _QUOTA_MAX_S,
            options={
                "--device": number,
                "--num-gpus": num_gpus,
                "--are-cores-shared": int(num_gpus > 1),
            },
            log_path=log_path,
        )
        self.number = number

    def load_family(
        self,
        family: Family,
        path: Path,
        snapshot: Snapshot | None,
        profiling_budget_s: float = _PROFILING_BUDGET_S,
    ) -> m.ModelLoaded:
        """Load a checkpoint, from ``snapshot`` if there is one; its steps are timed.

        Raises:
            AssertionError: the worker refused the model; the argument is its answer.
        """
        drafts = family.speculative_config(path)
        return self.load(
            family.name,
            path,
            dtype=family.dtype,
            max_model_len=family.max_model_len,
            engine={"speculative_config": json.dumps(drafts)} if drafts else {},
            snapshot=snapshot,
            profiling_budget_s=profiling_budget_s,
            timeout_s=_LOAD_TIMEOUT_S,
        )

    def meet(self, other: FamilyWorker) -> None:
        """Get access to the host cache of ``other``, for KV transfers from there."""
        if other.kv_host_fd is not None and other.ready.facts.kv_host_limit_bytes is not None:
            message = m.PeerHost(other.number, other.ready.facts.kv_host_limit_bytes)
            self.channel.send(message, (other.kv_host_fd,))

    def wait_tokens(self, request_id: str, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Pump until a request has so many tokens.

        Raises:
            AssertionError: the request failed, or the tokens do not come.
        """
        deadline_s = time.monotonic() + timeout_s
        while len(self.tokens[request_id]) < num_tokens:
            problem = self.ended.get(request_id)
            assert problem is None, problem
            assert time.monotonic() < deadline_s, f"{request_id}: no token"
            self.pump(0.5)

    def finish(self, request_id: str) -> list[int]:
        """Pump until a request has ended; return its tokens.

        Raises:
            AssertionError: the request failed.
        """
        self.run_until_ended(request_id)
        assert self.ended[request_id] in ("length", "stop"), self.ended[request_id]
        return self.tokens[request_id]

    def release(self, model: str, request_id: str) -> Moved:
        """Let a running request leave with its KV."""
        self.channel.send(m.MigrateOut(model, request_id))
        answer = self.wait(m.Migrated)
        assert answer.is_known, "the request had ended"
        self.shell.handle(Ended(request_id, is_complete=False))
        fds = () if answer.kv_transfer is None else (self.channel.take_fd(),)
        return Moved(self.tokens[request_id], answer.kv_transfer, fds)

    def receive(
        self,
        model: str,
        request_id: str,
        prompt: Prompt,
        num_tokens: int,
        moved: Moved,
        salt: str | None,
    ) -> int:
        """Continue a request that has left another worker; return the blocks that came with it."""
        order = m.AddRequest(
            model,
            request_id,
            time.monotonic(),
            len(prompt.token_ids),
            num_tokens,
            encode_request(
                request_id,
                prompt.token_ids,
                salt,
                mm_features=decoded_features(prompt.features),
                max_tokens=num_tokens,
            ),
            list(moved.tokens),
            is_moving=True,
            kv_transfer=moved.kv_transfer,
        )
        self.tokens[request_id] = []
        self.channel.send(order, moved.fds)
        for fd in moved.fds:
            os.close(fd)
        answer = self.wait(m.RequestAttached | m.RequestsFailed)  # type: ignore[arg-type]
        assert isinstance(answer, m.RequestAttached), answer
        num_blocks: int = self.call("checksum", model=model)["num_live_blocks"]
        self._present.add(request_id)
        request = LiveRequest(order, Targets(), output_token_ids=moved.tokens)
        self.shell.handle(arrived(request))
        return num_blocks

    def forget_transfer(self, moved: Moved) -> None:
        """Free the host memory of a KV transfer that has arrived."""
        if moved.kv_transfer is not None:
            self.channel.send(m.ReleaseKvTransfer(moved.kv_transfer.transfer_id))

    def num_loads(self, model: str) -> int:
        """Return how often weights of a model have come back to the device."""
        return sum(
            one.model == model and bool(one.weight_bytes or one.prefetched_bytes)
            for one in self.switches
        )

    def kill(self, rank: int = 0) -> None:
        """End the process of a rank with SIGKILL; the others end by themselves."""
        leader = self.leader()
        ranks = [leader, *leader.children()]
        assert len(ranks) > rank, f"rank {rank} has ended before"
        ranks[rank].kill()
        self.process.wait()
        self.forget()

    def pool(self, model: str, request_id: str, prompt: list[int], task: str) -> list[float]:
        """Ask a pooling model; return the numbers of its answer.

        Raises:
            AssertionError: the request failed.
        """
        self.ask(model, request_id, prompt, task=task)
        self.run_until_ended(request_id)
        assert request_id in self.numbers, self.ended[request_id]
        return self.numbers[request_id]

    def _note(self, message: m.FromWorker) -> None:
        if isinstance(message, m.StepOutputs):
            self._note_numbers(message)
        super()._note(message)

    def _note_numbers(self, message: m.StepOutputs) -> None:
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        if not message.frames:
            return
        frames = [bytearray(one) for one in message.frames]  # writable, as tensors must be
        outputs: Any = MsgpackDecoder(EngineCoreOutputs).decode(frames)
        for output in outputs.outputs:
            if output.pooling_output is not None:
                self.numbers[output.request_id] = output.pooling_output.flatten().tolist()

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Send) and action.request_id in self._present:
            return  # the worker has the request already
        super()._carry_out(action)
