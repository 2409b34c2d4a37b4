"""Size of a checkpoint's loaded weights, and whether a device can hold them."""

from __future__ import annotations

from collections.abc import Mapping

from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.checkpoints.drafter import drafter_elements
from gpupoold.checkpoints.tensor_file import DTYPE_BITS
from gpupoold.errors import Refused, UsageError
from gpupoold.units import format_bytes

MODEL_DTYPE_BITS = {"float16": 16, "half": 16, "bfloat16": 16, "float32": 32, "float": 32}
# Loading casts these dtypes to the model's; integers and 8-bit floats are quantized data.
_CAST_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})


def estimate_weight_bytes(
    info: CheckpointInfo, dtype: str, engine: Mapping[str, str] | None = None
) -> int:
    """Return the device bytes of the weights in ``dtype``; quantized tensors keep their size.

    ``auto`` follows the engine: the checkpoint's dtype, but 16 bits for float32. The weights of a
    drafter in the options ``engine`` count too.

    Raises:
        UsageError: the engine does not offer ``dtype``.
        Refused: the drafter's files are damaged.
    """
    target_bits = model_dtype_bits(dtype)
    num_bits = 0
    drafter = drafter_elements(engine or {}, info.path)
    for stored, num_elements in [*info.elements, *drafter.items()]:
        bits = target_bits if stored in _CAST_DTYPES else DTYPE_BITS[stored]
        num_bits += num_elements * bits
    return num_bits // 8


def model_dtype_bits(dtype: str) -> int:
    """Return the bits of a number in a model's ``dtype``.

    Raises:
        UsageError: the engine does not offer ``dtype``.
    """
    if dtype != "auto" and dtype not in MODEL_DTYPE_BITS:
        raise UsageError(
            f"unknown dtype {dtype!r}", f"use auto, {', '.join(sorted(MODEL_DTYPE_BITS))}"
        )
    return 16 if dtype == "auto" else MODEL_DTYPE_BITS[dtype]


def check_fits(
    info: CheckpointInfo, dtype: str, weight_bytes: int, device_bytes: int, *, kv_bytes: int = 0
) -> None:
    """Check that a device of ``device_bytes`` can hold the weights and ``kv_bytes``.

    ``weight_bytes`` are those of :func:`estimate_weight_bytes`, ``device_bytes`` is the memory of
    the largest device for the model, ``kv_bytes`` the least useful KV, for example of one request.

    Raises:
        Refused: the model does not fit; the message has both sizes, the hint a fitting alternative.
        UsageError: the engine does not offer ``dtype``.
    """
    needed_bytes = weight_bytes + kv_bytes
    if needed_bytes <= device_bytes:
        return
    kv = f" and {format_bytes(kv_bytes)} of KV" if kv_bytes else ""
    raise Refused(
        f"{info.path}: {format_bytes(weight_bytes)} of weights ({dtype}){kv} do not fit on a "
        f"device of {format_bytes(device_bytes)}",
        _remedy(info, dtype, needed_bytes, device_bytes),
    )


def _remedy(info: CheckpointInfo, dtype: str, needed_bytes: int, device_bytes: int) -> str:
    saved_bytes = estimate_weight_bytes(info, dtype) - estimate_weight_bytes(info, "bfloat16")
    if saved_bytes > 0 and needed_bytes - saved_bytes <= device_bytes:
        smaller = format_bytes(needed_bytes - saved_bytes)
        return f"with dtype bfloat16 the model takes {smaller} and fits"
    needed = f"use a device of at least {format_bytes(needed_bytes)}"
    return needed if info.quantization else f"{needed}, or a quantized version of the model"
