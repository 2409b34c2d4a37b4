from gpupoold.instance.reasons import refusal

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
    assert "no room for KV" in error.message


def test_other_reasons_are_shortened_not_lost() -> None:
    text = "1 validation error for ModelConfig\n  Value error, Model architectures ['X'] are not "
    error = refusal("m", ValueError(text + "supported\n For further information visit y\n"))
    assert "['X']" in error.message
    assert "For further information" not in error.message
    assert "supported models" in error.hint


def test_an_error_without_text_has_its_type() -> None:
    assert "AssertionError" in refusal("m", AssertionError()).message
