"""The model cache: its budget, and who closes descriptors."""

from __future__ import annotations

import os

import pytest

from gpupoold.errors import Refused
from gpupoold.pool.image_cache import CachedImage, ImageCache


def image(num_bytes: int) -> int:
    fd = os.memfd_create("image")
    os.ftruncate(fd, num_bytes)
    return fd


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_images_come_and_go() -> None:
    cache = ImageCache(10_000)
    first, second = image(3000), image(4000)
    cache.put("a", first, "d1")
    cache.put("b", second, "d2")
    assert cache.get("a") == CachedImage(first, 3000, "d1")
    assert cache.get("c") is None
    assert cache.used_bytes == 7000
    cache.drop("a")
    cache.drop("a")
    assert not is_open(first)
    assert cache.used_bytes == 4000
    cache.close()
    assert not is_open(second)
    assert cache.used_bytes == 0


def test_a_new_image_replaces_the_old_one() -> None:
    cache = ImageCache(10_000)
    old, new = image(3000), image(5000)
    cache.put("a", old, "d1")
    cache.put("a", new, "d2")
    assert not is_open(old)
    assert cache.get("a") == CachedImage(new, 5000, "d2")
    cache.close()


def test_room() -> None:
    cache = ImageCache(8 << 20)
    cache.check_room("a", 8 << 20)
    cache.put("a", image(6 << 20), "d")
    cache.check_room("a", 8 << 20)  # has its place already
    cache.check_room("b", 2 << 20)
    with pytest.raises(Refused, match=r"b: an image of 3 MiB .* 2 MiB of 8 MiB") as e:
        cache.check_room("b", 3 << 20)
    assert "memory.model_cache" in e.value.hint
    cache.put("b", image(6 << 20), "d")  # larger than it was thought to be
    with pytest.raises(Refused, match="0 B of 8 MiB are free"):
        cache.check_room("c", 1)
    cache.close()
