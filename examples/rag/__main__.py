"""A RAG box: an embedder, a reranker and two chat models on one device for half of their weights.

`python -m examples.rag` makes four tiny random checkpoints, starts a daemon with one emulated
device, embeds the paragraphs of this project's documentation, and asks questions: each alone, then
all at once. A question is embedded, the nearest passages are reranked, one chat model answers from
the best, and another reviews the answer. All results at once must be equal to the results alone.
Random weights write nonsense; the path of the requests is that of real models.

With real models in a running daemon:

    python -m examples.rag --url http://127.0.0.1:8000 --models EMBEDDER RERANKER WRITER REVIEWER
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.bench.rig import emulated_config, make_checkpoints, weight_bytes
from benchmarks.private_daemon import PrivateDaemon, private_daemon
from examples.rag.pipeline import Rag, RagModels, Sourced
from gpupoold.units import format_bytes, format_duration

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = RagModels("tiny-bert-embed", "tiny-bert-rerank", "tiny-llama", "tiny-qwen3")
TARGETS = {"ttft_s": 5.0, "tbt_s": 0.1}
QUESTIONS = (
    "What happens to an answer when its worker dies?",
    "Where are the weights of a paused model?",
    "How does the scheduler choose the next model?",
    "Which requests are refused, and with which status?",
)
_MAX_PASSAGES = 64
_PASSAGE_CHARS = (80, 240)
_CHAT_MAX_LEN = 512


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.rag",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="a running server, instead of a daemon of its own")
    parser.add_argument(
        "--models", nargs=4, metavar="NAME", help="embedder, reranker and two chat models there"
    )
    options = parser.parse_args()
    if (options.url is None) != (options.models is None):
        parser.error("--url and --models belong together")
    console = Console(highlight=False)
    if options.url is not None:
        is_good = play(console, options.url, RagModels(*options.models))
    else:
        with tiny_box(console) as daemon:
            is_good = play(console, daemon.http_url, TINY)
            print_models(console, daemon)
    return 0 if is_good else 1


@contextlib.contextmanager
def tiny_box(console: Console) -> Iterator[PrivateDaemon]:
    """Start a daemon with the tiny models on a device for half of their weights."""
    folder = ROOT / "build" / "rag-models"
    chat = make_checkpoints(folder, ["llama", "qwen3"], 10_000_000)
    for kind in ("bert-embed", "bert-rerank"):
        maker = [sys.executable, "-m", "tests.support.tiny_pooling", str(folder), "--kind", kind]
        subprocess.run(maker, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    paths = {path.name: path for path in (folder / TINY.embedder, folder / TINY.reranker, *chat)}
    total = sum(map(weight_bytes, paths.values()))
    sizes = f"{format_bytes(total // 2)} for {format_bytes(total)} of weights"
    console.print(f"[bold]1.[/] an emulated device of {sizes}, and {len(paths)} models")
    with private_daemon(emulated_config(total // 2)) as daemon:
        for name, path in paths.items():
            limit = {"max_model_len": _CHAT_MAX_LEN} if path in chat else {}
            daemon.add_model(name, path, dtype="float32", **TARGETS, **limit)
        yield daemon


def passages_of(folder: Path) -> list[str]:
    """Return paragraphs of the Markdown files in a folder, cut to a moderate length."""
    shortest, longest = _PASSAGE_CHARS
    texts = (file.read_text("utf-8") for file in sorted(folder.glob("*.md")))
    paragraphs = (part.strip() for text in texts for part in text.split("\n\n"))
    plain = [part[:longest] for part in paragraphs if len(part) >= shortest and part[0].isalpha()]
    return plain[:: max(1, len(plain) // _MAX_PASSAGES)][:_MAX_PASSAGES]


def play(console: Console, url: str, models: RagModels) -> bool:
    """Ask all questions alone and at once; return whether the results are equal."""
    alone, together = asyncio.run(ask_twice(console, url, models))
    table = Table("question", "passages", "answer", "equal", title="All questions at once")
    for one, other in zip(alone, together, strict=True):
        numbers = " ".join(map(str, other.passages))
        start = ascii(other.answer)[1:40]
        table.add_row(one.question, numbers, start, "yes" if one == other else "[red]no[/]")
    console.print(table)
    return alone == together


async def ask_twice(
    console: Console, url: str, models: RagModels
) -> tuple[list[Sourced], list[Sourced]]:
    """Return the results of the questions one by one, and of all at once."""
    passages = passages_of(ROOT / "docs")
    rag = Rag(url, models, passages)
    try:
        console.print(f"[bold]2.[/] {len(passages)} passages embedded by {models.embedder}")
        await rag.index()
        console.print(f"[bold]3.[/] {len(QUESTIONS)} questions, one by one and all at once")
        alone = [await rag.ask(question) for question in QUESTIONS]
        return alone, await rag.ask_all(QUESTIONS)
    finally:
        await rag.close()


def print_models(console: Console, daemon: PrivateDaemon) -> None:
    """Print each model's requests and latencies, and the number of switches."""
    with daemon.client() as client:
        now, requests = client.ps(), list(client.requests())
    table = Table("model", "requests", "first result, p50 / p99", "in time", title="Models")
    for model in now.models:
        times = [model.ttft_p50_s, model.ttft_p99_s]
        shown = " / ".join("-" if one is None else format_duration(one) for one in times)
        share = "-" if model.attainment_1h is None else f"{100 * model.attainment_1h:.0f} %"
        num_requests = sum(one.model == model.name for one in requests)
        table.add_row(model.name, str(num_requests), shown, share)
    console.print(table)
    plural = "" if now.num_switches == 1 else "es"
    console.print(f"{now.num_switches} switch{plural} on one device")


if __name__ == "__main__":
    sys.exit(main())
