"""Bounds on images, before and while these are decoded."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from typing import Any

import pytest
from PIL import Image
from vllm.exceptions import VLLMValidationError

from gpupoold.frontend import request_context
from gpupoold.frontend.request_context import (
    FORMATS,
    BadImage,
    BytesInFlight,
    RequestImages,
    bounding_images,
    image_size,
    request_images,
)
from gpupoold.frontend.vllm_bounds import charge


def file_of(kind: str, size: tuple[int, int] = (30, 20), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size).save(file, kind, **options)
    return file.getvalue()


def png_head(width: int, height: int) -> bytes:
    """A PNG that promises more pixels than are there."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", FORMATS)
def test_size_of_every_format(kind: str) -> None:
    assert image_size(file_of(kind)) == (30, 20)


def test_size_without_pixels() -> None:
    assert image_size(png_head(9_000, 9_000)) == (9_000, 9_000)
    assert image_size(png_head(20_000, 100)) == (20_000, 100)


def many_scans() -> bytes:
    jpeg = file_of("JPEG", progressive=True)
    return jpeg[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x05\x00" * 200 + jpeg[-2:]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (file_of("TIFF"), "none of the formats BMP, GIF, JPEG, PNG, WEBP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "none of the formats"),
        (b"", "none of the formats"),
        (png_head(60_000, 60_000), "decompression bomb"),
        (png_head(1, 31_000_000), "200 times as long"),
        (png_head(20_001, 100), "200 times as long"),
        (file_of("BMP", (2_600, 2_600)), "20,280,054 bytes, more than 20,000,000"),
        (many_scans(), "more than 100 scans"),
    ],
    ids=["tiff", "eps", "empty", "bomb", "line", "strip", "large", "scans"],
)
def test_bad_images(data: bytes, said: str) -> None:
    with pytest.raises(BadImage, match=said.replace("(", r"\(")):
        image_size(data)


def test_pixels_of_all_images_count() -> None:
    images = RequestImages(asyncio.Semaphore(1))
    images.add_pixels((30, 20), 1_000)
    with pytest.raises(BadImage, match="30 x 20, the images of the request have 1,200 pixels"):
        images.add_pixels((30, 20), 1_000)


def test_bytes_are_in_flight_until_the_answer_has_ended() -> None:
    room = BytesInFlight(100)
    with room.holding(""), bounding_images(asyncio.Semaphore(1)):
        assert request_images.get() is not None
        charge(60)
        assert room.num_bytes == 60
        with pytest.raises(VLLMValidationError, match="larger than the 100 bytes"):
            charge(60)
    assert room.num_bytes == 0
    assert request_images.get() is None


async def test_only_some_requests_decode_at_once() -> None:
    slots = asyncio.Semaphore(request_context.NUM_DECODING)
    first, second, third = (RequestImages(slots) for _ in range(3))
    with first.rendering():
        await first.begin()
        await first.begin()  # for its second image
        await second.begin()
        waiting = asyncio.create_task(third.begin())
        await asyncio.sleep(0)
        assert slots.locked()
        assert not waiting.done()
        with first.rendering():  # another conversation of the same request
            pass
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting
    third.end()
    second.end()
    third.end()
    assert not slots.locked()


async def test_a_client_that_leaves_while_waiting() -> None:
    slots = asyncio.Semaphore(1)
    first, second, third = (RequestImages(slots) for _ in range(3))
    await first.begin()
    waiting = asyncio.create_task(second.begin())
    await asyncio.sleep(0)
    waiting.cancel()
    second.end()
    first.end()
    await asyncio.wait_for(third.begin(), 5)
