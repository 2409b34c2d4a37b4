"""Questions about images: to a daemon through the official client, and to vLLM alone.

``python -m tests.functional.images CHECKPOINT`` reads a JSON list of questions, each the seeds of
its images, and prints the greedy token ids of each answer as vLLM gives them without gpupool.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from PIL import Image

MAX_LEN = 1024
Question = tuple[int, ...]
"""The seeds of a question's images; another number of images is another prompt."""


def picture(seed: int, size: tuple[int, int] = (100, 80)) -> Image.Image:
    """An image of random pixels."""
    width, height = size
    return Image.frombytes("RGB", size, random.Random(seed).randbytes(3 * width * height))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def messages(question: Question) -> list[Any]:
    """A chat of one message with images and text."""
    parts = [image_part(data_url(encoded(picture(seed)))) for seed in question]
    text = {"type": "text", "text": f"What is in these {len(question)} images?"}
    return [{"role": "user", "content": [*parts, text]}]


class ImageAnswer:
    """A streamed greedy answer of exactly ``num_tokens`` tokens, read in the background."""

    def __init__(
        self, api: AsyncOpenAI, model: str, question: Question, num_tokens: int = 100
    ) -> None:
        self.token_ids: list[int] = []
        self._arguments: dict[str, Any] = {
            "model": model,
            "messages": messages(question),
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }
        self._task = asyncio.create_task(self._read(api))

    async def started(self) -> None:
        """Return once there are some tokens."""
        while len(self.token_ids) < 3 and not self._task.done():
            await asyncio.sleep(0.005)

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def finished(self) -> list[int]:
        """All token ids; raises what the client got instead."""
        await self._task
        return self.token_ids

    async def _read(self, api: AsyncOpenAI) -> None:
        async for chunk in await api.chat.completions.create(**self._arguments):
            for choice in chunk.choices:
                self.token_ids += (choice.model_extra or {}).get("token_ids") or []


async def answers(
    api: AsyncOpenAI, asked: Sequence[tuple[str, Question]], num_tokens: int = 100
) -> list[list[int]]:
    """The answers to each model's question, asked one after the other."""
    return [await ImageAnswer(api, *one, num_tokens).finished() for one in asked]


def of_vllm_alone(
    checkpoint: Path, questions: Sequence[Question], num_tokens: int, env: dict[str, str]
) -> list[list[int]]:
    """The answers of vLLM without gpupool, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.functional.images", str(checkpoint), str(num_tokens)],
        input=json.dumps(questions),
        env=env
        | {
            "GPUPOOL_PLAIN_LINEAR": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print_answers(checkpoint: str, num_tokens: int) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(
        checkpoint, dtype="float32", max_model_len=MAX_LEN, enforce_eager=True, block_size=32
    )
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    found = [
        list(engine.chat(messages(tuple(one)), greedy, use_tqdm=False)[0].outputs[0].token_ids)
        for one in json.load(sys.stdin)
    ]
    print(json.dumps(found), flush=True)
    os._exit(0)  # the engine's compiler would print leaks


if __name__ == "__main__":
    _print_answers(sys.argv[1], int(sys.argv[2]))
