"""Outputs of a model's image encoder: torch memory outside the device's pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class EncoderOutputs:
    """The outputs that an engine keeps until the prompt's KV is computed, and for equal images.

    vLLM bounds the outputs of one model by the tokens of a step or of an image. Only the model with
    the turn keeps outputs, so all models of a device together need the memory of one.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core: Any = core

    @property
    def num_bytes(self) -> int:
        """Size of the outputs at present."""
        return sum(output.nbytes for output in self._outputs.values())

    def check(self) -> None:
        """Compare the outputs with the scheduler's account of them, between two steps.

        Raises:
            AssertionError: an output is of no known image, or there are too many.
        """
        manager = self._core.scheduler.encoder_cache_manager
        unknown = self._outputs.keys() - {*manager.cached, *manager.freed}
        assert not unknown, f"{len(unknown)} outputs of the encoder belong to no image"
        num_kept = sum(manager.num_embeds_by_hash.values())
        assert num_kept <= manager.cache_size, f"{num_kept} of {manager.cache_size} tokens"

    def drop(self) -> None:
        """Free all outputs, between two steps.

        The scheduler has the encoder run again for a request whose prompt still needs an output.
        """
        if self._outputs:
            # vLLM's own method also warns if there are requests.
            self._core.scheduler.reset_encoder_cache()
            self._core.model_executor.reset_encoder_cache()

    @property
    def _outputs(self) -> dict[str, Any]:
        runner = self._core.model_executor.driver_worker.worker.model_runner
        # A dictionary by hash in vLLM's first model runner; the second has None or an object.
        outputs: dict[str, Any] = getattr(
            runner.encoder_cache, "encoder_outputs", runner.encoder_cache or {}
        )
        return outputs
