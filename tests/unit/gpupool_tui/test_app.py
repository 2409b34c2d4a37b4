"""Every key and action of the application, against a small admin server on a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from gpupool_tui.app import TopApp
from gpupool_tui.board import all_keys, segments_of
from gpupool_tui.dialogs import ChoiceDialog, TargetsDialog, TextDialog
from gpupool_tui.picture import Picture
from gpupool_tui.text import ASCII, UNICODE, plain
from gpupool_tui.view import Panel, View
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import GpuInfo
from gpupoold.api.schemas_explain import Why
from gpupoold.api.schemas_models import SetModelRequest
from tests.unit.gpupool_cli import samples, test_why
from tests.unit.gpupool_cli.fake_daemon import FakeDaemon

NAMES = ("alpha", "beta", "gamma")


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each key wait in steps of 4 ms, not of 20 ms, until the application is idle."""
    monkeypatch.setattr("textual._wait.SLEEP_GRANULARITY", 0.004)


@pytest.fixture
def busy(daemon: FakeDaemon) -> FakeDaemon:
    """A daemon with three models, two requests, turns and events."""
    for name in NAMES:
        daemon.add(name)
    daemon.live_requests = [samples.live_request(f"cmpl-{n}", "alpha") for n in range(2)]
    daemon.turns = [samples.turn(n, "alpha") for n in range(1, 4)]
    daemon.tell("alpha was added")
    daemon.tell("the worker died", level="error")
    return daemon


class Running:
    """The application and its pilot."""

    def __init__(self, app: TopApp, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    @property
    def rows(self) -> list[str]:
        """What the board shows."""
        return [plain(line) for line in self.app.board.lines]

    def shows(self, text: str) -> bool:
        """Return whether some line has the text."""
        return any(text in row for row in self.rows)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await self.pilot.pause(0.02)

    async def until_text(self, words: list[str]) -> None:
        """Wait until the text that is open has all the words."""
        text = self.dialog(TextDialog).query_one("#text", Static)
        await self.until(lambda: all(word in str(text.content) for word in words))

    def dialog(self, kind: type[Any]) -> Any:
        assert isinstance(self.app.screen, kind)
        return self.app.screen


@contextlib.asynccontextmanager
async def running(
    daemon: FakeDaemon, theme: str = "textual-dark", **changes: Any
) -> AsyncIterator[Running]:
    with AdminClient(daemon.socket_path) as client:
        picture = Picture(client.top())
    view = View(UNICODE, UTC, interval_s=0.15)
    for name, value in changes.items():
        setattr(view, name, value)
    app = TopApp(daemon.socket_path, picture, view)
    app.theme = theme
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        yield Running(app, pilot)


async def test_what_the_daemon_tells_is_on_the_screen(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        assert run.shows("ready")
        for name in NAMES:
            assert run.shows(name)
        assert run.shows("the worker died")
        busy.add("delta")
        await run.until(lambda: run.shows("delta"))
        shown = [run.app.screen._compositor.render_strips()[y].text for y in range(30)]
        assert [row.rstrip() for row in shown] == run.rows


async def test_moving_and_edges(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        selected = run.app.view.selected
        await run.press("j")
        assert selected[Panel.MODELS] == "alpha"
        assert run.shows("▸alpha")
        for keys, name in ((("down",), "beta"), (("k",), "alpha"), (("up",), "alpha")):
            await run.press(*keys)
            assert selected[Panel.MODELS] == name
        await run.press("end")
        assert selected[Panel.MODELS] == "gamma"
        await run.press("home")
        assert selected[Panel.MODELS] == "alpha"
        await run.press("pagedown")
        assert selected[Panel.MODELS] == "gamma"
        await run.press("pageup")
        assert selected[Panel.MODELS] == "alpha"
        await run.press("G", "g", "escape")
        assert Panel.MODELS not in selected


async def test_panels_are_jumped_to_and_maximised(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        view = run.app.view
        for panel in (Panel.DEVICES, Panel.EVENTS):
            await run.press(str(panel.value))
            assert (view.focus, view.maximised) == (panel, None)
            await run.press(str(panel.value))
            assert view.maximised is panel
            await run.press("escape")
            assert view.maximised is None
        await run.press("1", "tab")
        after_tab = view.focus
        await run.press("shift+tab", "shift+tab")
        assert (after_tab, view.focus) == (Panel.LANES, Panel.EVENTS)
        await run.press("m")
        before_tab = view.maximised
        await run.press("tab")
        assert (before_tab, view.maximised) == (Panel.EVENTS, Panel.DEVICES)
        await run.press("m")
        assert view.maximised is None


async def test_sorting(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        sorting = run.app.view.sorting
        await run.press("full_stop")
        assert sorting[Panel.MODELS].column == "wait"
        await run.press("comma", "comma", "comma", "comma")
        assert sorting[Panel.MODELS].column == "name"
        assert run.shows("MODEL▲")
        await run.press("r")
        assert run.shows("MODEL▼")
        first = next(row for row in run.rows if row.startswith((" alpha", " beta", " gamma")))
        assert first.startswith(" gamma")
        await run.press("5", "full_stop", "r")  # events have their own order


async def test_filter(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("slash", *"ET")
        assert run.app.view.filter == "ET"
        assert run.shows("beta")
        assert not run.shows("gamma")
        await run.press("enter", "j")
        assert run.app.view.selected[Panel.MODELS] == "beta"
        assert run.shows("1 with 'ET'")
        await run.press("escape")
        assert run.app.view.filter == ""
        await run.press("slash", "q", "escape")
        assert run.app.view.filter == ""
        assert not run.app.query_one("#filter", Input).has_class("open")
        await run.press("j")
        assert run.app.view.selected[Panel.MODELS] == "gamma"


async def test_holding_the_picture(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("f")
        assert run.shows("HELD")
        busy.add("delta")
        await run.pilot.pause(0.3)
        assert not run.shows("delta")
        await run.press("space")
        await run.until(lambda: run.shows("delta"))
        assert not run.shows("HELD")


async def test_zoom_interval_and_theme(busy: FakeDaemon) -> None:
    async with running(busy, interval_s=1.0) as run:
        await run.press("right_square_bracket")
        assert run.shows("1s a cell")
        await run.press("left_square_bracket", "left_square_bracket")
        assert run.shows("250ms a cell")
        await run.press("plus")
        assert run.app.view.interval_s == 2.0
        await run.press("minus", "minus")
        assert run.app.view.interval_s == 0.5
        palettes = []
        for _ in range(3):
            await run.press("T")
            await run.pilot.pause()
            palettes.append(run.app.board.palette)
        assert run.app.theme == "textual-dark"
        styles = {palette.look("good").style for palette in palettes}
        assert len(styles) == 3


async def test_a_theme_that_was_chosen_before(busy: FakeDaemon) -> None:
    async with running(busy, theme="textual-light") as run:
        back = run.app.board.palette.look("").style.bgcolor
        assert back is not None
        assert back.get_truecolor().red > 200


async def test_help_has_every_key(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("question_mark")
        dialog = run.dialog(TextDialog)
        shown = str(dialog.query_one("#text", Static).content)
        for key in all_keys():
            assert key.meaning in shown
        await run.press("j", "k", "escape", "h", "q")
        assert len(run.app.screen_stack) == 1


DETAILS = {
    Panel.DEVICES: ["kind", "80G", "by hand", "latest turns"],
    Panel.LANES: ["latest turns", "weights came in"],
    Panel.MODELS: ["97.5 %", "aliases", "Qwen2ForCausalLM"],
    Panel.REQUESTS: ["cmpl-0", "100 tokens"],
    Panel.EVENTS: ["the worker died", "error"],
}


async def test_details(busy: FakeDaemon) -> None:
    busy.device["is_role_fixed"] = True
    async with running(busy) as run:
        for panel, words in DETAILS.items():
            run.app.view.focus = panel
            await run.press("enter")
            await run.until_text(words)
            await run.press("escape")
            assert len(run.app.screen_stack) == 1


async def test_details_of_a_group_have_a_line_for_each_gpu(busy: FakeDaemon) -> None:
    gib = 2**30
    busy.device["gpus"] = [
        GpuInfo(gpu=4, memory_bytes=40 * gib, free_bytes=10 * gib),
        GpuInfo(gpu=5, memory_bytes=40 * gib, free_bytes=10 * gib, utilisation=0.5, power_w=402.4),
    ]
    async with running(busy) as run:
        run.app.view.focus = Panel.DEVICES
        await run.press("enter")
        await run.until_text(["4: 30G of 40G in use, no readings", "5: 30G of 40G in use, 50 %"])


async def test_details_say_why(busy: FakeDaemon) -> None:
    busy.whys["alpha"] = Why(model=test_why.MODEL)
    busy.whys["cmpl-0"] = Why(request=test_why.REQUEST)
    async with running(busy) as run:
        await run.press("enter")
        await run.until_text(
            ["ready: 3 live requests", "in 1.5s", "requests waited for other models' turns"]
        )
        await run.press("escape")
        run.app.view.focus = Panel.REQUESTS
        await run.press("enter")
        await run.until_text(["is paused on device 1", "in about 750ms", "not all can be in time"])


async def test_details_of_what_is_gone_say_so(busy: FakeDaemon) -> None:
    async with running(busy, is_held=True) as run:
        busy.models.clear()
        await run.press("enter")
        text = run.dialog(TextDialog).query_one("#text", Static)
        await run.until(lambda: "no model 'alpha'" in str(text.content))


async def test_pin_and_unpin(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("p")
        run.dialog(ChoiceDialog)
        await run.press("escape")
        assert busy.cached["alpha"] == {}
        await run.press("p", "enter")
        await run.until(lambda: run.shows("alpha: pinned"))
        assert busy.cached["alpha"]["is_pinned"]
        await run.until(lambda: run.app.picture.latest.models[0].is_pinned)
        await run.press("p", "enter")
        await run.until(lambda: run.shows("alpha: not pinned any more"))


async def test_unload_asks_what_becomes_of_live_requests(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("u")
        options = run.dialog(ChoiceDialog).query_one(OptionList)
        labels = [str(option.prompt) for option in options.options]
        assert labels == [
            "free devices and host memory, after the requests have ended",
            "free devices, after the requests have ended",
            "free devices and host memory, ending the requests",
            "free devices, ending the requests",
        ]
        await run.press("down", "enter")
        await run.until(lambda: run.shows("alpha: freed 15G on devices"))
        await run.press("j", "u", "down", "down", "enter")
        await run.until(lambda: len(busy.unloads) == 2)
        assert busy.unloads == [("alpha", "drain", True), ("beta", "force", False)]


async def test_targets(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("t")
        dialog = run.dialog(TargetsDialog)
        assert dialog.query_one("#ttft", Input).value == "10s"
        dialog.query_one("#ttft", Input).value = "soon"
        await run.press("enter")
        assert "soon" in str(dialog.query_one("#problem", Static).content)
        dialog.query_one("#ttft", Input).value = "2s"
        dialog.query_one("#tbt", Input).value = "0"
        await run.press("enter")
        assert "more than zero" in str(dialog.query_one("#problem", Static).content)
        assert busy.requests == []
        dialog.query_one("#tbt", Input).value = "50ms"
        await run.press("tab", "enter")
        await run.until(lambda: run.shows("alpha: 2s to the first token, 50ms between tokens"))
        assert busy.requests == [SetModelRequest(ttft_s=2.0, tbt_s=0.05)]
        await run.press("t", "escape")
        assert len(busy.requests) == 1


async def test_cancel(busy: FakeDaemon) -> None:
    async with running(busy, focus=Panel.REQUESTS) as run:
        await run.press("x", "enter")
        await run.until(lambda: run.shows("cmpl-0: cancelled after 20 tokens"))
        await run.until(lambda: len(run.app.picture.latest.requests) == 1)
        assert [one.request_id for one in busy.live_requests] == ["cmpl-1"]


async def test_drain_and_undrain(busy: FakeDaemon) -> None:
    async with running(busy, focus=Panel.DEVICES) as run:
        await run.press("d", "enter")
        await run.until(lambda: run.shows("device 0: drained; no requests"))
        await run.until(lambda: run.shows("draining"))
        await run.press("d", "enter")
        await run.until(lambda: run.shows("device 0: has work again"))
        assert not busy.device["is_draining"]


async def test_what_fails_is_said_in_a_line(busy: FakeDaemon) -> None:
    async with running(busy, focus=Panel.REQUESTS, is_held=True) as run:
        busy.live_requests.clear()
        await run.press("x", "enter")
        await run.until(lambda: run.shows("no live request has the id 'cmpl-0'"))
        await run.press("escape")
        assert not run.shows("no live request has the id")


async def test_read_only_changes_nothing(busy: FakeDaemon) -> None:
    async with running(busy, is_read_only=True) as run:
        for panel, keys in {Panel.MODELS: "put", Panel.REQUESTS: "x", Panel.DEVICES: "d"}.items():
            run.app.view.focus = panel
            for key in keys:
                await run.press(key)
                assert len(run.app.screen_stack) == 1
                assert run.shows("read-only: actions are disabled")
                await run.press("escape")


async def test_an_action_of_another_panel_says_where_to_go(busy: FakeDaemon) -> None:
    async with running(busy, focus=Panel.EVENTS) as run:
        await run.press("u")
        assert len(run.app.screen_stack) == 1
        assert run.shows("this key is for models: press 3 first")


async def test_nothing_to_act_on(daemon: FakeDaemon) -> None:
    async with running(daemon) as run:
        await run.press("j", "end", "enter", "p", "u", "t", "4", "x")
        assert len(run.app.screen_stack) == 1


async def test_a_daemon_that_goes_and_comes_back(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        busy.stop_admin()
        await run.until(lambda: run.shows("connection lost, trying again"))
        assert run.shows("gamma")  # the last picture stays
        dimmed = [look for line in run.app.board.lines[1:-1] for _, look in line]
        assert all("lost" in look.split() for look in dimmed)
        busy.socket_path.unlink(missing_ok=True)
        with FakeDaemon(busy.socket_path) as again:
            again.add("delta")
            again.pid = 99
            await run.until(lambda: run.shows("the daemon has started again"))
            assert run.shows("delta")
            assert run.app.picture.turns == {}


async def test_the_mouse(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        y = next(y for y, row in enumerate(run.rows) if row.startswith(" beta"))
        await run.pilot.click(offset=(3, y))
        assert run.app.view.selected[Panel.MODELS] == "beta"
        title = next(y for y, row in enumerate(run.rows) if "1 Devices" in row)
        await run.pilot.click(offset=(3, title))
        assert run.app.view.focus is Panel.DEVICES


async def test_resizing(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.pilot.resize_terminal(80, 24)
        await run.until(lambda: len(run.rows) == 24)
        await run.pilot.resize_terminal(140, 44)
        await run.until(lambda: len(run.rows) == 44)
        assert run.shows("cmpl-0")


async def test_no_colour_and_ascii(busy: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with running(busy, glyphs=ASCII) as run:
        assert all(row.isascii() for row in run.rows)
        board = run.app.board
        styles = [s.style for line in board.lines for s in segments_of(line, board.palette)]
        assert all(
            style is None or (style.color, style.bgcolor) == (None, None) for style in styles
        )
        await run.press("u")
        assert run.dialog(ChoiceDialog).query_one(".box").has_class("ascii")


async def test_q_leaves(busy: FakeDaemon) -> None:
    async with running(busy) as run:
        await run.press("q")
        assert run.app.return_code == 0
