"""Event logs as files: what is read is what was written, and bad files are named."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from gpupoold import __version__
from gpupoold.domain import Role, Targets
from gpupoold.errors import UsageError
from gpupoold.replay import log_file
from gpupoold.replay.log_file import (
    Header,
    LogEntry,
    RecordedCore,
    lines,
    open_log,
    replay_file,
    write,
)
from gpupoold.scheduling import events as e
from gpupoold.scheduling.core import Core
from gpupoold.scheduling.events import (
    Action,
    ChangeRole,
    Migrate,
    ModelCosts,
    Send,
    StartTurn,
    Turn,
)
from gpupoold.scheduling.policies.named import POLICY_NAMES, PolicyOptions, make_policy

HEADER = '{"policy":"gpupool","options":{"num_prefill":null},"format":"gpupool-event-log-2"}\n'


def read(path: Path) -> tuple[Header, list[LogEntry]]:
    with open_log(path) as log:
        return log.header, [entry for _, entry in log.entries]


EVENTS: tuple[e.Event, ...] = (
    e.ModelAdded("a", Targets(0.1, 1 / 3), 1 << 40, 7, ModelCosts(decode_context_s=1e-9)),
    e.TargetsChanged("a", Targets(2.0, 1e-3)),
    e.ModelRemoved("a"),
    e.DeviceUp(0, 80 * 10**9, 2.5e10),
    e.DeviceUp(1, 80 * 10**9, 2.5e10, False, 2 << 30),
    e.DeviceUp(2, 80 * 10**9, 2.5e10, role=Role.DECODE, is_role_fixed=True),
    e.DeviceUp(3, 80 * 10**9, 2.5e10, kind="NVIDIA H200"),
    e.DeviceUp(4, 80 * 10**9, 2.5e10, far_share=0.4),
    e.DeviceDown(1),
    e.RoleSet(0, Role.PREFILL, False),
    e.DrainSet(0, True),
    e.BandwidthMeasured(0, 1.25e10),
    e.FarSnapshots(0, ("a", "b")),
    e.FarSnapshots(0, ()),
    e.QuotaMaxSet(2.5),
    e.Tick(),
    e.Hosted(0, "a"),
    e.Hosted(3, "a", ModelCosts(decode_base_s=0.01)),
    e.Unhosted(0, "ä\n"),
    e.Hostable("a", (0, 2)),
    e.Hostable("a", ()),
    e.Arrived("r", "a", 0.1 + 0.2, 5, None),
    e.Arrived("r", "a", 12345.678901234567, 5, 9),
    e.Arrived("r", "a", 1.0, 5, num_tokens=3, max_tokens=16),
    e.Stepped(0, "a", ("r", "s"), 3, 0.02),
    e.Stepped(0, "a", (), 1, None),
    e.PromptCached("r", 32),
    e.Attached("r"),
    e.Attached("r", 12),
    e.Ended("12"),
    e.Ended("13", is_complete=False),
    e.MemoryChanged(0, (("a", 0), ("b", 1 << 35))),
    e.TurnEnded(0, 77),
)
ACTIONS: tuple[Action, ...] = (
    Send("r", 3),
    Migrate("r", 0, 1),
    StartTurn(0, Turn(1, "a", math.inf), "b"),
    StartTurn(0, Turn(1, "a", 0.1), None),
    StartTurn(0, Turn(1, "a", 0.1, 256), None),
    ChangeRole(1, Role.MIXED),
    StartTurn(0, None, None),
)


def test_every_kind_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert {type(one) for one in EVENTS} == set(get_args(e.Event))
    assert {type(one) for one in ACTIONS} == set(get_args(Action))
    entries = [LogEntry(1e9 + 1 / 3, EVENTS, ACTIONS), LogEntry(2e9, (), (), "KeyError: 'x'")]
    header = Header("aegaeon", PolicyOptions(num_prefill=6))
    write(tmp_path / "log", lines(header, entries))
    assert read(tmp_path / "log") == (header, entries)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_a_file_replays(tmp_path: Path, policy: str) -> None:
    options = PolicyOptions(num_prefill=2)
    core = RecordedCore(Core(make_policy(policy, options)))
    core.handle([e.ModelAdded(m, Targets(), 10**10, 10**5, ModelCosts()) for m in "abc"], 0.0)
    for number in range(3):
        core.handle([e.DeviceUp(number, 80 * 10**9, 2e10)], 0.0)
        core.handle([e.Hosted(number, model) for model in "abc"], 0.1)
    for number in range(50):
        model = "abc"[number * number % 3]
        core.handle([e.Arrived(f"r{number}", model, number / 3, number)], number / 3)
        for device in core.state.devices.values():
            if device.turn is not None:
                ids = tuple(device.batches[device.turn.model].requests)
                stepped = e.Stepped(device.number, device.turn.model, ids, 1, 0.03)
                core.handle([stepped, e.TurnEnded(device.number, device.turn.turn_id)], number / 3)
    assert core.is_from_start
    path = tmp_path / "log"
    write(path, lines(Header(policy, options), core.entries()))
    assert replay_file(path).difference is None


def test_a_file_of_a_version_without_kv_limits_has_unlimited_devices(tmp_path: Path) -> None:
    entries = (
        '{"type":"ModelAdded","model":"a","targets":{"ttft_s":10.0,"tbt_s":0.1},'
        '"weight_bytes":79000000000,"kv_bytes_per_token":1000000,"costs":{}}',
        '{"type":"DeviceUp","device":0,"capacity_bytes":80000000000,'
        '"bandwidth_bytes_per_s":2e10,"prefetches":true}',
        '{"type":"Hosted","device":0,"model":"a"}',
        *(
            f'{{"type":"Arrived","request_id":"{name}","model":"a","arrival_s":0.0,'
            '"prompt_tokens":900,"output_tokens":null}'
            for name in "rs"
        ),
    )
    path = tmp_path / "log"
    path.write_text(HEADER + f'{{"now_s":0.0,"events":[{",".join(entries)}]}}\n')
    _, [entry] = read(path)
    assert entry.events[1] == e.DeviceUp(0, 80 * 10**9, 2e10)
    difference = replay_file(path).difference
    assert difference is not None
    sent = [one for one in difference.replayed.actions if isinstance(one, Send)]
    assert sent == [Send("r", 0), Send("s", 0)]


def test_a_difference_is_found(tmp_path: Path) -> None:
    entry = LogEntry(0.0, (e.DeviceUp(0, 1, 1.0),), (Send("r", 0),))
    write(tmp_path / "log", lines(Header("gpupool"), [LogEntry(0.0, (), ()), entry]))
    difference = replay_file(tmp_path / "log").difference
    assert difference is not None
    assert (difference.index, difference.recorded) == (1, entry)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not an event log"),
        ("{}", "is not an event log: .*policy"),
        ('{"policy":"gpupool","format":"other"}', "in format 'other'.*reads gpupool-event-log-2"),
        ('{"policy":"best"}\n', "no policy is named 'best'"),
        (HEADER + '{"now_s":1}\n{"now_s":', "line 3: "),
        (HEADER + '{"now_s":"x"}', "line 2: "),
        (HEADER + '{"now_s":1,"events":[{"device":1}]}', "line 2: type None is none of ModelAdd"),
        (HEADER + '{"now_s":1,"events":[{"type":["a"]}]}', r"line 2: type \['a'\] is none of"),
        (HEADER + '{"now_s":1,"events":[{"type":"DeviceDown"}]}', "line 2: .*`device`"),
        (HEADER + '{"now_s":1,"actions":[{"type":"DeviceDown"}]}', "line 2: .*none of Send"),
        (HEADER + "\n", "line 2: "),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        replay_file(path)


def later_log(path: Path) -> RecordedCore:
    """Write the log of a core that began long before the first entry that was kept."""
    core = RecordedCore(Core(make_policy("gpupool")), max_entries=20)
    core.handle([e.ModelAdded(m, Targets(), 10**10, 10**5, ModelCosts()) for m in "abc"], 0.0)
    core.handle([e.DeviceUp(0, 80 * 10**9, 2e10), *(e.Hosted(0, m) for m in "abc")], 0.0)
    for number in range(55):
        now_s = number / 3
        core.handle([e.Arrived(f"r{number}", "abc"[number % 3], now_s, number)], now_s)
    assert not core.is_from_start
    write(path, lines(Header("gpupool"), core.entries(), core.segments[0]))
    return core


def test_a_log_that_begins_later_has_the_state_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    core = later_log(path)
    replay = replay_file(path)
    assert replay.difference is None
    assert replay.header.has_state
    assert replay.num_entries == replay.events["Arrived"] == len(core.entries())
    assert replay.line == len(path.read_bytes().splitlines())
    assert replay.last_s == 18.0


def test_the_state_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    later_log(path)
    path.write_text(path.read_text().replace(f'"version":"{__version__}"', '"version":"9.9"'))
    with pytest.raises(UsageError, match=r"state of gpupool 9\.9, this is"):
        replay_file(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'["Core",', b'["os.system",', "line 2: no kind of object is named 'os.system'"),
        (b'["State",', b'["State",3,', r"line 4: Expected `object \| array`, got `int`"),
        (b'"step_ratio":1.0', b'"step_ratio":"1"', r"line \d+: step_ratio of a Speed is not"),
        (b"\n[", b"\n{", "line 2: "),
    ],
)
def test_a_bad_state_is_named_with_its_line(
    tmp_path: Path, old: bytes, new: bytes, message: str
) -> None:
    path = tmp_path / "log"
    later_log(path)
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new))
    with pytest.raises(UsageError, match=message):
        replay_file(path)


def test_a_changed_log_differs_at_the_changed_entry(tmp_path: Path) -> None:
    path = tmp_path / "log"
    later_log(path)
    before, after = path.read_bytes().rsplit(b'"prompt_tokens":50,', 1)
    path.write_bytes(before + b'"prompt_tokens":50,"num_tokens":9000000,' + after)
    assert replay_file(path).difference is None  # a length that changes no decision
    path.write_bytes(before.replace(b'"Send"', b'"Sent"') + after)
    with pytest.raises(UsageError, match="type 'Sent' is none of Send"):
        replay_file(path)


@pytest.mark.parametrize("limit", ["MAX_LINE_BYTES", "MAX_FILE_BYTES"])
def test_files_without_end_are_refused(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(log_file, limit, 1 << 16)
    with pytest.raises(UsageError, match="/dev/zero, line 1: too large for an event log"):
        replay_file(Path("/dev/zero"))


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    header = HEADER.replace("}\n", ',"has_state":true}\n')
    path.write_text(header + '["list",' + "[" * 100_000 + "]" * 100_000 + "]\n")
    with pytest.raises(UsageError, match="line 2: "):
        replay_file(path)


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    def cut_off() -> Iterator[bytes]:
        yield b"first\n"
        raise OSError("gone")

    write(tmp_path / "log", [b"before\n"])
    with pytest.raises(OSError, match="gone"):
        write(tmp_path / "log", cut_off())
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before\n"]
