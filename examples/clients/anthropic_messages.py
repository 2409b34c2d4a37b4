"""Stream an answer with Anthropic's client: ``python examples/clients/anthropic_messages.py``."""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("GPUPOOL_URL", "http://127.0.0.1:8000"),
    api_key=os.environ.get("GPUPOOL_KEY", "none"),
    timeout=600,
)
model = os.environ.get("GPUPOOL_MODEL") or client.models.list().data[0].id
with client.messages.stream(
    model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=32
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
