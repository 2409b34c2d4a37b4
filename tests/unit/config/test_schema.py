"""Settings: defaults, units, what a wrong file is told, and that the example is complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpupoold.config import schema as config
from gpupoold.config.file import read_config_file
from gpupoold.config.schema import Settings, known_keys, parse_settings
from gpupoold.errors import ConfigError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "gpupool.toml"
GIB = 2**30


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no system configuration, no environment of the developer."""
    for name in ("GPUPOOL_CONFIG", "GPUPOOL_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(config, "NVIDIA_GPUS", tmp_path / "no-gpus")
    monkeypatch.setattr(config, "SYSTEM_CONFIG", tmp_path / "no-config.toml")


def parse(text: str) -> Settings:
    return parse_settings(tomllib.loads(text), "gpupool.toml")


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert caught.value.message.startswith("gpupool.toml: ")
    return str(caught.value).removeprefix("gpupool.toml: ")


class TestDefaults:
    def test_values(self) -> None:
        settings = read_config_file().settings
        assert (settings.server.host, settings.server.port) == ("127.0.0.1", 8000)
        assert settings.server.max_body_bytes == 10_000_000
        memory, limits = settings.memory, settings.limits
        assert (memory.model_cache_or_auto, memory.kv_host_or_auto) == (None, None)
        assert (memory.reserve_or_auto, limits.max_bytes_in_flight_or_auto) == (None, None)
        assert settings.simulated_host.memory_bytes is None
        assert settings.scheduling.quota_max_s == 4.0
        assert settings.limits.load_timeout_s == 600.0
        assert settings.limits.stop_grace_s == 10.0
        assert not settings.security.allow_remote_code
        assert not settings.security.allow_pickle

    def test_recorded_workloads_are_nowhere_until_named(self) -> None:
        assert read_config_file().settings.paths.workloads_dir is None
        named = parse('[paths]\nworkloads_dir = "/data/workloads"')
        assert named.paths.workloads_dir == Path("/data/workloads")
        assert "relative" in refusal('[paths]\nworkloads_dir = "workloads"')

    def test_without_gpu_one_emulated_device(self) -> None:
        (device,) = read_config_file().settings.devices
        assert (device.kind, device.memory_bytes, device.index) == ("emulated", 2 * GIB, None)

    @pytest.mark.parametrize(
        ("visible", "indexes"),
        [(None, [0, 1, 2]), ("0,2", [0, 1]), ("5", [0]), ("0,-1,1", [0]), ("0,1,2,3", [0, 1, 2])],
    )
    def test_one_device_per_visible_gpu(
        self,
        visible: str | None,
        indexes: list[int],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        _install_gpus(3, tmp_path, monkeypatch)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        devices = read_config_file().settings.devices
        assert [(device.kind, device.index) for device in devices] == [("cuda", i) for i in indexes]
        assert all(device.memory_bytes is None for device in devices)

    @pytest.mark.parametrize("visible", ["", "-1"])
    def test_all_gpus_hidden(
        self, visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _install_gpus(3, tmp_path, monkeypatch)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [device.kind for device in read_config_file().settings.devices] == ["emulated"]

    def test_reserve_depends_on_the_kind(self) -> None:
        memory = read_config_file().settings.memory
        assert (memory.reserve_for("emulated"), memory.reserve_for("cuda")) == (0, 3 * GIB)
        assert parse('[memory]\nreserve = "1GiB"').memory.reserve_for("cuda") == GIB

    def test_limits_of_engines_hold_for_each_gpu(self) -> None:
        set_by_hand = parse('[memory]\nengines = "2GiB"').memory
        assert (set_by_hand.engines_for(None), set_by_hand.engines_for(GIB, 4)) == (
            2 * GIB,
            8 * GIB,
        )
        memory = read_config_file().settings.memory
        assert (memory.engines_for(None, 4), memory.engines_for(4 * GIB, 4)) == (None, 3 * GIB)

    def test_frozen(self) -> None:
        settings = read_config_file().settings
        with pytest.raises(ValidationError):
            settings.server.port = 1


class TestPaths:
    def test_root(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 0)
        paths = read_config_file().settings.paths
        assert paths.state_dir == Path("/var/lib/gpupool")
        assert paths.runtime_dir == Path("/run/gpupool")
        assert paths.log_dir == Path("/var/lib/gpupool/logs")
        assert paths.download_dir == Path("/var/lib/gpupool/models")

    def test_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
        monkeypatch.setenv("HOME", "/home/ann")
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
        paths = read_config_file().settings.paths
        assert paths.state_dir == Path("/home/ann/.local/state/gpupool")
        assert paths.runtime_dir == Path("/run/user/1000/gpupool")
        assert paths.model_dirs[1] == Path("/home/ann/.local/share/gpupool/models")
        monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
        assert read_config_file().settings.paths.state_dir == Path("/srv/state/gpupool")

    def test_user_of_the_service_without_the_variables_of_the_unit(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 998)
        monkeypatch.setenv("HOME", "/var/lib/gpupool")
        assert read_config_file().settings.paths.state_dir == Path("/var/lib/gpupool")

    def test_runtime_variable_goes_before_the_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setenv("GPUPOOL_RUNTIME_DIR", "/tmp/rt")
        assert read_config_file().settings.paths.runtime_dir == Path("/tmp/rt")
        assert parse('[paths]\nruntime_dir = "/x"').paths.runtime_dir == Path("/x")

    def test_logs_and_downloads_follow_state_dir(self) -> None:
        paths = parse('[paths]\nstate_dir = "/data"').paths
        assert (paths.log_dir, paths.download_dir) == (Path("/data/logs"), Path("/data/models"))
        assert parse('[paths]\nlog_dir = "/logs"').paths.log_dir == Path("/logs")

    def test_one_wrong_state_dir_is_one_problem(self) -> None:
        assert refusal('[paths]\nstate_dir = "data"') == (
            "paths.state_dir: 'data' is relative; begin with / or ~"
        )
        assert "more wrong" not in refusal("[paths]\nstate_dir = 3")


class TestWhichFile:
    def test_named_file(self, tmp_path: Path) -> None:
        assert read_config_file(_write(tmp_path / "a.toml", 1)).settings.server.port == 1

    def test_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        named, system = _write(tmp_path / "a.toml", 1), _write(tmp_path / "c.toml", 3)
        monkeypatch.setattr(config, "SYSTEM_CONFIG", system)
        assert read_config_file().settings.server.port == 3
        monkeypatch.setenv("GPUPOOL_CONFIG", str(_write(tmp_path / "b.toml", 2)))
        assert read_config_file().settings.server.port == 2
        assert read_config_file(named).settings.server.port == 1

    def test_missing_file_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(ConfigError, match=r"gone.toml: cannot be read: No such file"):
            read_config_file(tmp_path / "gone.toml")
        monkeypatch.setenv("GPUPOOL_CONFIG", str(tmp_path / "gone.toml"))
        with pytest.raises(ConfigError, match=r"gone.toml: cannot be read"):
            read_config_file()

    @pytest.mark.parametrize("content", [b"[server\n", b"port = \n", b"x = '\xff'\n"])
    def test_not_toml(self, content: bytes, tmp_path: Path) -> None:
        path = tmp_path / "bad.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad.toml: .*is not valid TOML"):
            read_config_file(path)


class TestUnits:
    @pytest.mark.parametrize(
        ("written", "size"), [('"24GiB"', 24 * GIB), ('"1.5GB"', 1_500_000_000), ("4096", 4096)]
    )
    def test_sizes(self, written: str, size: int) -> None:
        assert parse(f"[memory]\nkv_host = {written}").memory.kv_host_bytes == size

    @pytest.mark.parametrize(
        ("written", "seconds"), [('"500ms"', 0.5), ('"2m"', 120.0), ("3", 3.0), ("0.25", 0.25)]
    )
    def test_durations(self, written: str, seconds: float) -> None:
        assert parse(f"[scheduling]\nquota_max = {written}").scheduling.quota_max_s == seconds


class TestDevices:
    def test_list(self) -> None:
        one, two = parse(
            '[[device]]\nkind = "emulated"\nmemory = "1GiB"\n'
            '[[device]]\nkind = "emulated"\npage_bytes = "64KiB"'
        ).devices
        assert (one.memory_bytes, one.page_bytes) == (GIB, None)
        assert (two.memory_bytes, two.page_bytes) == (2 * GIB, 65536)

    def test_names_instead_of_tables(self) -> None:
        devices = parse('devices = ["cuda:1", "cuda", "emulated", "sim:A10"]').devices
        assert [(device.kind, device.index, device.gpu) for device in devices] == [
            ("cuda", 1, None),
            ("cuda", 0, None),
            ("emulated", None, None),
            ("sim", None, "A10"),
        ]
        assert devices[2].memory_bytes == 2 * GIB

    def test_simulated_boxes(self) -> None:
        many = parse_settings({"devices": ["sim:H800"] * 16}, "test").devices
        assert many == parse('devices = ["sim:16xH800"]').devices
        assert many == parse('[[device]]\nkind = "sim"\ngpu = "H800"\n' * 16).devices
        assert [(device.kind, device.gpu, device.memory_bytes) for device in many] == [
            ("sim", "H800", None)
        ] * 16

    def test_cuda_indexes_are_filled_in(self) -> None:
        devices = parse(
            '[[device]]\nkind = "cuda"\n[[device]]\nkind = "cuda"\nindex = 0\n'
            '[[device]]\nkind = "emulated"\n[[device]]\nkind = "cuda"\nmemory = "40GiB"'
        ).devices
        assert [device.index for device in devices] == [1, 0, None, 2]

    def test_a_gpu_is_shared_by_those_that_say_how_much_they_take(self) -> None:
        shared = '[[device]]\nkind = "cuda"\nindex = 0\nmemory = "6GiB"\n' * 2
        devices = parse(shared + '[[device]]\nkind = "cuda"').devices
        assert [device.index for device in devices] == [0, 0, 1]
        said = "two devices have the same index: give each device memory to share it"
        assert said in refusal(shared + '[[device]]\nkind = "cuda"\nindex = 0')

    def test_groups_and_single_devices_mix(self) -> None:
        devices = parse(
            '[[device]]\nkind = "cuda"\ngpus = [3, 0]\n[[device]]\nkind = "cuda"\n'
            '[[device]]\nkind = "emulated"\ngpus = 2\nmemory = "1GiB"\n'
            '[[device]]\nkind = "cuda"\ngpus = [4]\n[[device]]\nkind = "emulated"'
        ).devices
        assert [device.gpus for device in devices] == [(3, 0), (1,), (), (4,), ()]
        assert [device.num_gpus for device in devices] == [2, 1, 2, 1, 1]
        assert [device.index for device in devices] == [None, 1, None, 4, None]
        assert devices[2].memory_bytes == GIB

    def test_names_of_groups(self) -> None:
        devices = parse('devices = ["cuda:4-7", "cuda", "sim:2x4xH800", "sim:1x8xA10"]').devices
        assert [(device.kind, device.gpus, device.num_gpus) for device in devices] == [
            ("cuda", (4, 5, 6, 7), 4),
            ("cuda", (0,), 1),
            ("sim", (), 4),
            ("sim", (), 4),
            ("sim", (), 8),
        ]
        assert devices[2] == parse('[[device]]\nkind="sim"\ngpu="H800"\ngpus=4').devices[0]


class TestWrongFiles:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("[server]\nprot = 1", "server.prot: unknown key (did you mean 'port'?)"),
            ("[servr]\nport = 1", "servr: unknown key (did you mean 'server'?)"),
            ("[server]\nmax_body_bytes = 1", "unknown key (did you mean 'max_body'?)"),
            ("[log]\nquota_max = 1", "log.quota_max: unknown key ('quota_max' belongs in"),
            ("[log]\nzzz = 1", "log.zzz: unknown key (known here: level)"),
            ("[[device]]\nkind='cuda'\nindx=1", "device[0].indx: unknown key (did you mean 'index"),
            ("server = 3", "server: must be a table (write the keys under [server])"),
            ("paths = 3", "paths: must be a table (write the keys under [paths])"),
            ('[server]\nport = "80"', "server.port: must be a whole number, got '80'"),
            ("[server]\nport = 65536", "server.port: must be at most 65535"),
            ('[server]\nhost = ""', "server.host: "),
            ('[memory]\nkv_host = "8GX"', "memory.kv_host: '8GX': unknown unit 'GX'"),
            ("[memory]\nkv_host = -1", "memory.kv_host: must be at least 0"),
            ("[memory]\nkv_host = true", "memory.kv_host: write a size"),
            ("[scheduling]\nquota_max = inf", "scheduling.quota_max: write a duration"),
            ('[scheduling]\nquota_max = "0s"', "scheduling.quota_max: must be greater than 0"),
            ('[security]\nallow_pickle = "no"', "security.allow_pickle: must be true or false"),
            ("[limits]\nmax_live_requests = 0", "limits.max_live_requests: must be greater"),
            ('[log]\nlevel = "loud"', "log.level: must be 'debug', 'info', 'warning' or 'error'"),
            ('[paths]\nmodel_dirs = "/x"', "paths.model_dirs: write a list"),
            ('[paths]\nmodel_dirs = ["x"]', "paths.model_dirs[0]: 'x' is relative"),
            ('devices = ["cuda:0-3", "cuda:3"]', "GPU 3 is in two devices: a group has its GPUs"),
            ('devices = ["cuda:0-1", "cuda:1-2"]', "GPU 1 is in two devices"),
            ('devices = ["cuda:0-8"]', "devices: 'cuda:0-8': write the first and the last GPU of"),
            ('devices = ["cuda:3-0"]', "write the first and the last GPU of 2 to 8"),
            ('devices = ["cuda:2-2"]', "write the first and the last GPU of 2 to 8"),
            ('devices = ["cuda:0-99999"]', "is not a device"),
            ('devices = ["sim:2x9xH800"]', "device[0].gpus: a group has 1 to 8 GPUs, not 9"),
            ('devices = ["sim:2x0xH800"]', "is not a device"),
            ('[[device]]\nkind="cuda"\ngpus=[0, 0]', "device[0].gpus: names a GPU twice"),
            ('[[device]]\nkind="cuda"\ngpus=[]', "a group has 1 to 8 GPUs, not 0"),
            ('[[device]]\nkind="cuda"\ngpus=[0, -1]', "write ordinals from 0 to 1023"),
            ('[[device]]\nkind="cuda"\ngpus=[0, true]', "write ordinals from 0 to 1023"),
            ('[[device]]\nkind="cuda"\ngpus="0-3"', "write a list of GPUs such as [0, 1, 2, 3]"),
            ('[[device]]\nkind="cuda"\ngpus=2', "is a list of ordinals, such as [0, 1]"),
            ('[[device]]\nkind="cuda"\nindex=0\ngpus=[0, 1]', "exclude each other"),
            ('[[device]]\nkind="emulated"\ngpus=[0, 1]', "is a number of GPUs, such as 2"),
            ('[[device]]\nkind="emulated"\ngpus=100', "a group has 1 to 8 GPUs, not 100"),
            ("[[device]]", "device[0].kind: is missing"),
            ('[[device]]\nkind = "gpu"', "must be 'emulated', 'cuda' or 'sim', got 'gpu'"),
            ('[[device]]\nkind = "sim"', 'device[0]: kind = "sim" needs gpu'),
            ('[[device]]\nkind = "sim"\ngpu = "H9"', "no hardware profile 'H9': there are A10"),
            ('[[device]]\nkind = "cuda"\ngpu = "A10"', 'gpu is for kind = "sim" only'),
            ('[[device]]\nkind="sim"\ngpu="A10"\nindex=0', 'index is for kind = "cuda" only'),
            ('[[device]]\nkind="sim"\ngpu="A10"\npage_bytes=4096', "which has no pages"),
            ('devices = ["sim:H9"]', "devices: no hardware profile 'H9'"),
            ('devices = ["sim"]', "devices: 'sim' is not a device: write"),
            ('devices = ["sim:0xH800"]', "is not a device"),
            ('devices = ["cuda:x"]', "is not a device"),
            ('devices = ["emulated:2"]', "is not a device"),
            ("devices = [3]", "devices: 3 is not a device"),
            ("devices = []", "devices: write a list such as"),
            ('devices = "cuda"', "devices: write a list such as"),
            ('devices = ["cuda:1", "cuda:1"]', "two devices have the same index"),
            ('devices = ["cuda"]\n[[device]]\nkind = "cuda"', "not both"),
            (
                '[server]\nhost = "[::1]"',
                "server.host: '[::1]': write the address without brackets",
            ),
            (f'[paths]\nruntime_dir = "/{"r" * 97}"', "a path of 109 bytes, and Linux allows 107"),
            ('[[device]]\nkind = "emulated"\nindex = 1', 'index is for kind = "cuda" only'),
            ('[[device]]\nkind = "cuda"\nlink = "2GB/s"', 'link is for kind = "emulated" only'),
            ('[[device]]\nkind = "emulated"\nlink = "2GB"', 'such as "2GB/s"'),
            ('[[device]]\nkind = "emulated"\nlink = "2GHz/s"', "unknown unit"),
            ('[[device]]\nkind = "emulated"\nlink = "1kB/s"', "must be at least"),
            ('[[device]]\nkind = "emulated"\nlink = "2TB/s"', "must be at most"),
            ('[[device]]\nkind = "emulated"\nlink = true', 'such as "2GB/s"'),
            ('[[device]]\nkind = "cuda"\npage_bytes = 4096', "multiple of 2 MiB on a cuda device"),
            ('[[device]]\nkind = "cuda"\nindex = -1', "device[0].index: must be at least"),
            ('[[device]]\nkind="cuda"\nindex=1\n' * 2, "device: two devices have the same index"),
            ('[device]\nkind = "cuda"', "write [[device]], with two brackets"),
            ("device = []", "device: an empty list"),
            ('[memory]\nreserve = "2GiB"', "leaves no memory of a device of 2 GiB"),
        ],
    )
    def test_names_file_key_and_remedy(self, text: str, said: str) -> None:
        assert said in refusal(text)

    def test_unknown_key_is_told_first(self) -> None:
        told = refusal('[server]\nport = "x"\nhots = "y"')
        assert (
            told == "server.hots: unknown key (did you mean 'host'?; 1 more problem in this file)"
        )


class TestExampleAndDocs:
    def test_example_as_shipped_changes_nothing(self) -> None:
        assert read_config_file(EXAMPLE).settings == read_config_file().settings

    def test_example_shows_the_defaults(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.geteuid", lambda: 0)
        shown = parse_settings(_example_values(), str(EXAMPLE))
        assert shown == read_config_file().settings

    def test_example_has_every_key(self) -> None:
        text = EXAMPLE.read_text()
        for section, keys in known_keys().items():
            body = _section(text, section)
            for key in keys:
                assert re.search(rf"^# ?{key} = ", body, re.MULTILINE), f"{section}.{key}"


def _install_gpus(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(count):
        (tmp_path / "gpus" / f"0000:0{index}:00.0").mkdir(parents=True)
    monkeypatch.setattr(config, "NVIDIA_GPUS", tmp_path / "gpus")


def _write(path: Path, port: int) -> Path:
    path.write_text(f"[server]\nport = {port}\n")
    return path


def _example_values() -> dict[str, Any]:
    """The example with every ``#key = default`` line switched on."""
    return tomllib.loads(re.sub(r"^#(?=[a-z\[])", "", EXAMPLE.read_text(), flags=re.MULTILINE))


def _section(text: str, name: str) -> str:
    match = re.search(rf"^#?\[+{name}\]+\n(.*?)(?=^#?\[|\Z)", text, re.MULTILINE | re.DOTALL)
    assert match is not None, f"no section {name}"
    return match[1]
