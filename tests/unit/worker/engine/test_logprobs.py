"""Log-probabilities of prompts in slices, and ranks without a compiler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: E402

from gpupoold.worker.engine.vllm_process import (  # noqa: E402
    MAX_ROWS,
    bound_logprobs,
    count_not_less,
    keep_from_compiling,
)

NUM_WORDS = 50
WIDTH = 8


class Runner:
    """What vLLM's runner has of requests whose prompts are computed in chunks."""

    def __init__(self, prompts: dict[str, list[int]]) -> None:
        generator = torch.Generator().manual_seed(1)
        self.head = torch.randn(WIDTH, NUM_WORDS, generator=generator)
        self.rows_at_once: list[int] = []
        self.requests = {
            name: SimpleNamespace(
                prompt_token_ids=ids, num_computed_tokens=0, in_progress_prompt_logprobs_cpu=None
            )
            for name, ids in prompts.items()
        }
        self.num_prompt_logprobs = dict.fromkeys(prompts, 3)
        self.input_batch = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(prompts)}
        )
        self.model = SimpleNamespace(compute_logits=self._logits)
        self.model_config = SimpleNamespace(logprobs_mode="raw_logprobs")
        self.sampler = Sampler()
        self.device = torch.device("cpu")

    def _logits(self, states: Any) -> Any:
        self.rows_at_once.append(len(states))
        return states @ self.head

    def _sync_device(self) -> None:
        pass

    def step(self, compute: Any, num_scheduled: dict[str, int]) -> dict[str, Any]:
        starts = [0]
        for name in self.requests:
            starts.append(starts[-1] + num_scheduled.get(name, 0))
        self.query_start_loc = SimpleNamespace(np=torch.tensor(starts).numpy())
        states = torch.randn(starts[-1], WIDTH, generator=torch.Generator().manual_seed(starts[-1]))
        found: dict[str, Any] = compute(self, states, num_scheduled)
        for name, number in num_scheduled.items():
            self.requests[name].num_computed_tokens += number
        return found


@pytest.mark.parametrize("length", [1, 2, MAX_ROWS, MAX_ROWS + 1, MAX_ROWS + 2, 3 * MAX_ROWS + 7])
@pytest.mark.parametrize("chunk", [1, MAX_ROWS - 1, MAX_ROWS, 2 * MAX_ROWS + 1, 1000])
def test_prompts_in_slices_have_the_same_log_probabilities(length: int, chunk: int) -> None:
    bound_logprobs()
    sliced = GPUModelRunner._get_prompt_logprobs_dict
    found = []
    for compute in (sliced.__wrapped__, sliced):
        prompts = {"a": [1, 2, 3], "b": [n % NUM_WORDS for n in range(length)]}
        runner = Runner(prompts)
        answers = runner.step(compute, {"a": 3, "b": min(chunk, length)})
        while (done := runner.requests["b"].num_computed_tokens) < length:
            answers |= runner.step(compute, {"b": min(chunk, length - done)})
        answers |= runner.step(compute, {"a": 1, "b": 1})  # a token of each answer
        assert not runner.num_prompt_logprobs
        found.append(answers)
    assert max(runner.rows_at_once, default=0) <= MAX_ROWS
    whole, in_slices = found
    assert whole.keys() == in_slices.keys() == {"a", "b"}
    for name, expected in whole.items():
        for one, other in zip(expected[:3], in_slices[name][:3], strict=True):
            torch.testing.assert_close(one, other)


def test_ranks_are_those_that_vllm_compiles() -> None:
    keep_from_compiling()
    scores = torch.tensor([[0.5, 0.25, 0.25], [3.0, 1.0, 2.0]])
    assert count_not_less(scores, torch.tensor([[0.25], [2.0]])).tolist() == [3, 2]
    found = Sampler.gather_logprobs(scores, 1, torch.tensor([1, 2]))
    assert found.selected_token_ranks.tolist() == [3, 2]
    bound_logprobs()
    bound_logprobs()  # again: no change
    assert not hasattr(GPUModelRunner._get_prompt_logprobs_dict.__wrapped__, "__wrapped__")
