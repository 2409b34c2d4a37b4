"""A thousand switches under streams: no token may differ, no memory may leak.

Each model has one stream at a time, and no stream begins with a cached prefix. Every batch is then
the same in every round, and so are the tokens, also in bfloat16.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu import figures
from benchmarks.gpu.rig import Setting, add_timed, arguments, setting_of
from benchmarks.memory_streams import stream_keys

_SWITCHES = 1000
_DRY_SWITCHES = 100
_NUM_MODELS = 3
_KV_HOST_BYTES = 2 << 30
_DRY_KV_HOST_BYTES = 64 << 20
# The device's memory, in weights of a model; some KV is added.
_DEVICE_MODELS = 1.5
# Small enough that no two of the small models fit.
_DRY_SLACK_BYTES = 5 << 19
_MAX_MODEL_LEN = 512
# Prompts of 125 tokens: several KV blocks, the last not full.
_PROMPT = 3
_WARM_UP_ROUNDS = 2
# Time left for the end of the last round and the work afterwards.
_END_S = 12.0
_HOST_BYTES_GAINED = 8 << 20
_DEVICE_BYTES_GAINED = 2 << 20


def run(setting: Setting, shape: str, num_switches: int) -> None:
    """Measure and report."""
    path, weight_bytes = setting.checkpoint(shape), setting.weight_bytes(shape)
    kv_host_bytes = _DRY_KV_HOST_BYTES if setting.is_dry else _KV_HOST_BYTES
    names = [f"{shape}-{index}".lower() for index in range(_NUM_MODELS)]
    config = setting.device(int(_DEVICE_MODELS * weight_bytes), _DRY_SLACK_BYTES)
    config += f"[memory]\nmodel_cache = {setting.model_cache_bytes([shape] * _NUM_MODELS)}\n"
    config += f'kv_host = {kv_host_bytes}\n[scheduling]\nquota_max = "30ms"\n'
    with setting.daemon(config) as daemon:
        for name in names:
            add_timed(setting, daemon, name, path, _MAX_MODEL_LEN)
        keys = [(name, _PROMPT) for name in names]
        num_warm_up = 1 if setting.is_dry else _WARM_UP_ROUNDS
        ends_s = time.monotonic() + setting.left_s - _END_S
        streamed = asyncio.run(stream_keys(daemon, keys, num_switches, num_warm_up, ends_s))
    setting.report.add(stream_figures(streamed, num_switches), streams=streamed)


def stream_figures(streamed: Mapping[str, Any], num_switches: int) -> dict[str, figures.Figure]:
    """The figures of a run."""
    found = {
        "switches": figures.at_least(streamed["switches"], num_switches),
        "switches_differing_tokens": figures.at_most(streamed["differing_tokens"], 0),
        "switches_tokens": figures.measured(streamed["tokens"]),
        "switches_pages_leaked": figures.at_most(streamed["pages_leaked"], 0),
        "switches_host_gained_bytes": figures.at_most(
            streamed["host_bytes_gained"], _HOST_BYTES_GAINED
        ),
    }
    if (gained := streamed["device_bytes_gained"]) is not None:
        found["switches_device_gained_bytes"] = figures.at_most(gained, _DEVICE_BYTES_GAINED)
    return found


def main() -> int:
    """Run it; see the module."""
    parser = arguments(__doc__)
    parser.add_argument("--shape", default="1B")
    parser.add_argument("--switches", type=int, help="default: 1000, or 100 in a dry run")
    args = parser.parse_args()
    num_switches = args.switches or (_DRY_SWITCHES if args.dry_run else _SWITCHES)
    run(setting_of(args), args.shape, num_switches)
    return 0


if __name__ == "__main__":
    sys.exit(main())
