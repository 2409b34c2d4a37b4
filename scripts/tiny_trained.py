"""A tiny model that was trained: it stops, answers JSON, calls tools, repeats fixed answers.

    python -m scripts.tiny_trained DIR

Writes ``tiny-trained``, a Llama of 4 MB in Hugging Face format, offline, in one to three minutes
of one core. It has learnt the chats of ``scripts/trained_chats.py`` until it repeats every answer
exactly, also after another system prompt and with further tools beside those of a chat.
Calls of tools have the format of vLLM's ``hermes`` parser. Random checkpoints
(``gpupoold.checkpoints.tiny``) never stop by themselves, so tests of agents and of API
conformance need this one. Equal bytes are made only on equal machines.
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from gpupoold.checkpoints.maker import whole_folder
from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, write_tokenizer
from scripts.trained_chats import CHATS, SYSTEM_PROMPTS, TOOLS, Chat, Message, Tool

NAME = "tiny-trained"
MAX_POSITION_EMBEDDINGS = 32_768

_BATCH_TOKENS = 1200
_MAX_EPOCHS = 120
_CHECKED_EVERY_EPOCHS = 5
_WARMUP_EPOCHS = 2
_DECAY_EPOCHS = 80
_LEARNING_RATE = 3e-3
_FILLER_CHARACTERS = 400
_LEAST_PROBABILITY = 0.7
"""Of every token of every answer, before training ends."""


def make_trained(parent: Path) -> Path:
    """Train and write the model, or keep the one below ``parent``.

    Raises:
        RuntimeError: an answer was not learnt.
    """
    target = parent / NAME
    if target.exists():
        return target
    with whole_folder(target) as folder:
        write_tokenizer(folder)
        _widen(folder / "tokenizer_config.json", model_max_length=MAX_POSITION_EMBEDDINGS)
        model = _trained(_Samples(AutoTokenizer.from_pretrained(folder)))
        model.save_pretrained(folder)
        # Requests without a temperature are greedy too.
        _widen(folder / "generation_config.json", temperature=0.0)
        for file in folder.iterdir():
            file.chmod(0o644)
    return target


@dataclass(frozen=True, slots=True)
class Sample:
    """Token ids of a chat."""

    prompt: list[int]
    answer: list[int]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


class _Samples:
    """Token ids of all chats, each time in other surroundings."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(0)
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
        self._filler = "".join(file.read_text() for file in files)

    def batches(self, *, alone: bool = False) -> list[list[Sample]]:
        """Return every chat once, those of similar lengths together; ``alone`` has the chats
        without surroundings."""
        samples = [self._sample(chat, alone=alone) for chat in CHATS]
        samples.sort(key=lambda sample: sample.num_tokens)
        batches: list[list[Sample]] = [[]]
        for sample in samples:
            if len(batches[-1]) * sample.num_tokens > _BATCH_TOKENS:
                batches.append([])
            batches[-1].append(sample)
        self._random.shuffle(batches)
        return batches

    def _sample(self, chat: Chat, *, alone: bool) -> Sample:
        messages, tools = list(chat.messages), list(chat.tools)
        if not alone:
            if messages[0]["role"] != "system" and self._random.random() < 0.4:
                messages.insert(0, {"role": "system", "content": self._some_text()})
            if tools and self._random.random() < 0.3:
                tools = self._with_others(tools)
            if self._random.random() < 0.5:
                messages = [_with_name_first(message) for message in messages]
        prompt = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, tokenize=False
        )
        encoded, answer = self._tokenizer([prompt, chat.answer], add_special_tokens=False).input_ids
        return Sample(encoded, [*answer, EOS_ID])

    def _some_text(self) -> str:
        if self._random.random() < 0.5:
            return self._random.choice(SYSTEM_PROMPTS)
        start = self._random.randrange(len(self._filler) - _FILLER_CHARACTERS)
        return self._filler[start : start + self._random.randrange(1, _FILLER_CHARACTERS)]

    def _with_others(self, tools: list[Tool]) -> list[Tool]:
        others = [one for one in TOOLS if one not in tools]
        offered = [*tools, *self._random.sample(others, 1)]
        self._random.shuffle(offered)
        return offered


def _with_name_first(message: Message) -> Message:
    """Return a message whose calls have the order of fields of other APIs than chat completions."""
    calls = [
        call | {"function": dict(reversed(call["function"].items()))}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def _trained(samples: _Samples) -> LlamaForCausalLM:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the order of sums depends on the number
    model = LlamaForCausalLM(_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate_of_epoch)
    for epoch in range(1, _MAX_EPOCHS + 1):
        for batch in samples.batches():
            optimizer.zero_grad()
            losses = _losses(model, batch)
            # Tokens that are still wrong count more: few tokens of an answer depend on the prompt.
            torch.autograd.backward((losses * (0.1 + losses.detach().clamp(max=2.0))).mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        if epoch % _CHECKED_EVERY_EPOCHS == 0 and _knows_all(model, samples):
            return model
    raise RuntimeError(f"{NAME}: not every answer was learnt in {_MAX_EPOCHS} epochs")


def _rate_of_epoch(epoch: int) -> float:
    """Return the share of the learning rate: a rise, then half a cosine down to a twentieth."""
    if epoch < _WARMUP_EPOCHS:
        return (epoch + 1) / (_WARMUP_EPOCHS + 1)
    progress = min(1.0, epoch / _DECAY_EPOCHS)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2


def _knows_all(model: LlamaForCausalLM, samples: _Samples) -> bool:
    """Return whether each token of each answer is nearly certain, alone and in surroundings."""
    with torch.no_grad():
        return all(
            _losses(model, batch).max() < -math.log(_LEAST_PROBABILITY)
            for alone in (True, False, False)
            for batch in samples.batches(alone=alone)
        )


def _losses(model: LlamaForCausalLM, batch: Sequence[Sample]) -> torch.Tensor:
    """Return the cross entropy of each token of the answers."""
    length = max(sample.num_tokens for sample in batch)
    ids = torch.full((len(batch), length), PAD_ID)
    wanted = torch.full((len(batch), length), PAD_ID)
    for row, sample in enumerate(batch):
        # The padding is behind the tokens, where attention does not see it.
        ids[row, : sample.num_tokens] = torch.tensor(sample.prompt + sample.answer)
        wanted[row, len(sample.prompt) - 1 : sample.num_tokens - 1] = torch.tensor(sample.answer)
    asked = wanted != PAD_ID
    states = model.model(input_ids=ids).last_hidden_state[asked]
    return torch.nn.functional.cross_entropy(model.lm_head(states), wanted[asked], reduction="none")


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )


def _widen(file: Path, **fields: object) -> None:
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps(content, indent=2) + "\n")


def main() -> int:
    """Make the model below the folder in the command line, and print its path."""
    print(make_trained(Path(sys.argv[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
