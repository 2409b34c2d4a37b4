"""Stream an answer with OpenAI's client: ``python examples/clients/openai_chat.py``."""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("GPUPOOL_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("GPUPOOL_KEY", "none"),
    timeout=600,  # a request may wait for its model's turn
)
model = os.environ.get("GPUPOOL_MODEL") or client.models.list().data[0].id
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Say hello."}],
    max_tokens=32,
    stream=True,
    # Tokens at an even pace instead of bursts; leave the header out for tokens as they come.
    extra_headers={"X-Gpupool-Pace": "steady"},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
