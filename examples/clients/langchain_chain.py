"""Two models in a LangChain chain (``pip install langchain-openai``).

``python examples/clients/langchain_chain.py``: one model writes, another reviews; gpupool switches
between the two.
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url = os.environ.get("GPUPOOL_URL", "http://127.0.0.1:8000") + "/v1"
key = os.environ.get("GPUPOOL_KEY", "none")
models = os.environ.get("GPUPOOL_MODELS", "").split(",")
if len(models) < 2:
    raise SystemExit("set GPUPOOL_MODELS to two models, such as qwen-7b,llama-8b (`gpupool list`)")
writer, reviewer = models[:2]


def model(name: str) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=url, api_key=key, max_tokens=32, timeout=600)


write = ChatPromptTemplate.from_template("Write one sentence about {topic}.")
review = ChatPromptTemplate.from_template("Improve this sentence: {draft}")
chain = (
    {"draft": write | model(writer) | StrOutputParser()}
    | review
    | model(reviewer)
    | StrOutputParser()
)
print(chain.invoke({"topic": "sharing"}))
