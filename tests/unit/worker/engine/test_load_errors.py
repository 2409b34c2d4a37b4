from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gpupoold.errors import Refused
from gpupoold.worker.engine.configuration import check_kind, failure, refusal

KV_TOO_SMALL = (
    "To serve at least one request with the model's max seq len (4096), (0.02 GiB KV cache is "
    "needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available "
    "memory, the estimated maximum model length is 1216. Try increasing `gpu_memory_utilization`"
)


def test_kv_that_does_not_fit_names_the_length_that_would() -> None:
    error = refusal("m", ValueError(KV_TOO_SMALL))
    assert "4096 tokens does not fit" in error.message
    assert "--max-len 1216" in error.hint
    assert "gpu_memory_utilization" not in str(error)


def test_kv_that_never_fits_suggests_no_length() -> None:
    text = KV_TOO_SMALL.replace("estimated maximum model length is 1216. ", "")
    assert "--max-len" not in str(refusal("m", ValueError(text)))


def test_no_room_at_all() -> None:
    error = refusal("m", ValueError("No available memory for the cache blocks. Try increasing"))
    assert "no space for KV" in error.message


def test_the_messages_of_validators_come_without_their_frame() -> None:
    text = (
        "1 validation error for VllmConfig\n  Value error, no such thing here "
        "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
        "    For further information visit y\n"
    )
    error = refusal("m", ValueError(text))
    assert error.message == "m: vLLM cannot load the model: no such thing here"
    assert "gpupool logs" in error.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "Model architectures ['X'] are not supported for now. Supported architectures: ...",
            "m: the architecture X is not supported by vLLM",
            "supported models",
        ),
        (
            "load has model type `eliza` but Transformers does not recognize this architecture",
            "m: the model type 'eliza' is not known to Transformers or vLLM",
            "supported models",
        ),
        (
            "Cannot find any model weights with `/srv/my models/bad`",
            "m: there are no weights in /srv/my models/bad",
            "restore the files",
        ),
        (
            "[Errno 2] No such file or directory: '/srv/bad/model-1.safetensors'",
            "m: the file /srv/bad/model-1.safetensors is missing",
            "restore the files",
        ),
        (
            "Unknown quantization method: magic. Must be one of ['awq', 'fp8']",
            "m: the quantisation 'magic' is not supported",
            "unquantised",
        ),
        (
            "gguf quantization is currently not supported in cpu.",
            "m: the quantisation 'gguf' is not supported on this device (cpu)",
            "unquantised",
        ),
        (
            "No WNA16 MoE backend supports the deployment configuration.",
            "m: vLLM has no kernel of this device for quantised mixtures of experts (WNA16)",
            "on a GPU",
        ),
        (
            "Unsupported FP8 MoE backend: NONE",
            "m: vLLM has no kernel of this device for quantised mixtures of experts (FP8)",
            "on a GPU",
        ),
        (
            "_C::static_scaled_fp8_quant() expected at most 0 argument(s) but received 4",
            "m: FP8 with one scale for each tensor cannot be computed by vLLM's CPU build",
            "one scale for each channel",
        ),
        (
            "Failed to find a kernel that can implement the MXFP8 linear layer. Reasons: ...",
            "m: vLLM has no kernel of this device for MXFP8 layers",
            "on a GPU",
        ),
        (
            "Cannot find any of ['sym'] in the model's quantization config.",
            "m: the quantization_config in config.json lacks sym",
            "another quantised version",
        ),
        (
            "Following weights were not initialized from checkpoint: {'d', 'b', 'c', 'a'}",
            "m: the checkpoint lacks tensors: a, b, c and 1 more",
            "different models",
        ),
        (
            "There is no module or parameter named 'embed' in LlamaForCausalLM. Available: {'x'}",
            "m: LlamaForCausalLM has no parameter for the checkpoint's tensor 'embed'",
            "different models",
        ),
        (
            "Attempted to load weight (torch.Size([1])) into parameter (torch.Size([2]))",
            "m: a tensor of the checkpoint has the shape torch.Size([1",
            "different models",
        ),
        (
            "User-specified max_model_len (1024) is greater than the derived max_model_len "
            "(max_position_embeddings=512.0 or model_max_length=None in model's config.json).",
            "m: a context of 1024 tokens exceeds the model's limit of 512",
            "--max-len",
        ),
        (
            "Unknown RoPE scaling type magic",
            "m: the rope_scaling type 'magic' in config.json is not supported",
            "config.json",
        ),
        (
            "Validation error for field 'heads':\n    TypeError: Field 'heads' expected int",
            "m: config.json has an invalid value for 'heads': Field 'heads' expected int",
            "config.json",
        ),
    ],
)
def test_what_vllm_says_in_words_for_users(text: str, message: str, hint: str) -> None:
    error = refusal("m", ValueError(text))
    assert error.message.startswith(message)
    assert hint in error.hint


def raised(act: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        act()
    return caught.value


def weight_loader() -> None:
    raise AssertionError


def create_engine_config() -> None:
    dict[str, int]()["heads"]


def test_an_error_without_text_says_where_it_was_raised() -> None:
    error = refusal("m", raised(weight_loader))
    assert error.message.startswith(
        "m: the weights do not match config.json: AssertionError in weight_loader ("
    )
    assert error.message.endswith("): raise AssertionError")
    assert "AssertionError without a message" in refusal("m", AssertionError()).message


def test_an_error_whose_text_needs_its_type() -> None:
    message = refusal("m", raised(create_engine_config)).message
    assert message == "m: config.json cannot be used: KeyError: 'heads'"
    assert failure("m", "in a step", IndexError("out of range")).message == (
        "m: the engine failed in a step: IndexError: out of range"
    )


def test_a_launch_of_a_triton_kernel_on_a_cpu() -> None:
    kernel: Any = weight_loader  # as vLLM's placeholder, a plain function
    error = failure("m", "in its self-check", raised(lambda: kernel[1,]()))
    assert error.message == (
        "m: the engine failed in its self-check: "
        "a step needs a Triton kernel that vLLM's CPU build lacks"
    )
    assert "without speculative decoding" in error.hint


@dataclass
class Kind:
    runner_type: str = "generate"
    is_encoder_decoder: bool = False


def test_only_models_that_make_text_or_pool_text_are_served() -> None:
    check_kind("m", "X", Kind())
    check_kind("m", "X", Kind(runner_type="pooling"))
    with pytest.raises(Refused, match="m: X neither generates nor pools text"):
        check_kind("m", "X", Kind(runner_type="draft"))
    with pytest.raises(Refused, match="m: X is an encoder-decoder model"):
        check_kind("m", "X", Kind(is_encoder_decoder=True))
