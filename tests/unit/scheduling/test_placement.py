from gpupoold.scheduling.placement import DeviceView, StickyPlacement, WholeDevicePlacement


def view(
    device: int, working: str = "", resident: str = "", num_live: int | None = None
) -> DeviceView:
    models = frozenset(working.split())
    live = len(models) if num_live is None else num_live
    return DeviceView(device, live, models, frozenset(resident.split()))


class TestSticky:
    def test_joins_the_device_that_serves_the_model(self) -> None:
        devices = [view(0), view(1, "a b c")]
        assert StickyPlacement().choose("c", devices) == 1

    def test_of_several_that_serve_it_the_one_with_fewer_requests(self) -> None:
        devices = [view(0, "a", num_live=9), view(1, "a b", num_live=3)]
        assert StickyPlacement().choose("a", devices) == 1

    def test_a_new_model_goes_to_the_least_busy_device(self) -> None:
        assert StickyPlacement().choose("x", [view(0, "a b"), view(1, "c"), view(2, "d e")]) == 1

    def test_among_equals_where_it_is_resident(self) -> None:
        assert StickyPlacement().choose("x", [view(0, "a"), view(1, "b", "x")]) == 1

    def test_comes_home_among_equals(self) -> None:
        placement = StickyPlacement()
        assert placement.choose("x", [view(0, "a"), view(1)]) == 1
        assert placement.choose("x", [view(0, "a", "x"), view(1, "b")]) == 1
        assert placement.choose("x", [view(0, "a"), view(1, "b c")]) == 0  # the new home
        assert placement.choose("x", [view(0, "a"), view(1, "b")]) == 0

    def test_no_device_no_choice(self) -> None:
        assert StickyPlacement().choose("x", []) is None

    def test_a_home_that_is_gone_is_forgotten(self) -> None:
        placement = StickyPlacement()
        assert placement.choose("x", [view(0), view(1, "a")]) == 0
        assert placement.choose("x", [view(1, "a")]) == 1


class TestWholeDevice:
    def test_waits_while_every_device_serves_another_model(self) -> None:
        assert WholeDevicePlacement().choose("x", [view(0, "a"), view(1, "b")]) is None

    def test_joins_its_model(self) -> None:
        assert WholeDevicePlacement().choose("b", [view(0), view(1, "b")]) == 1

    def test_takes_an_idle_device_where_it_is_resident(self) -> None:
        assert WholeDevicePlacement().choose("x", [view(0), view(1, "", "x")]) == 1
