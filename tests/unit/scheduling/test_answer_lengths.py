"""What the core learns of how long answers get, and what bounds what it expects."""

from __future__ import annotations

import pytest

from gpupoold.scheduling import events as e
from tests.unit.scheduling.driver import GB, Driver, sends

DEFAULT_TOKENS = 256


def answer(driver: Driver, num_tokens: int, *, is_complete: bool = True) -> None:
    driver.arrive("a", "r")
    driver.step(0, "r", num_tokens=num_tokens)
    driver.send(e.Ended("r", is_complete))


def expected_tokens(driver: Driver, **more: int) -> int:
    driver.send(e.Arrived("asked", "a", driver.now_s, 100, **more))  # type: ignore[arg-type]
    expected = driver.state.requests["asked"].expected_tokens
    driver.send(e.Ended("asked", is_complete=False))
    return expected


class TestWhatIsLearnt:
    def test_answers_that_were_cancelled_or_failed_teach_nothing(self) -> None:
        driver = Driver()
        for _ in range(50):
            answer(driver, 1, is_complete=False)
        assert expected_tokens(driver) == DEFAULT_TOKENS
        assert driver.state.lengths.recent("a") == []

    def test_complete_answers_do(self) -> None:
        driver = Driver()
        for _ in range(50):
            answer(driver, 10)
        assert expected_tokens(driver) < 20

    def test_the_requests_of_a_model_that_is_removed_teach_nothing(self) -> None:
        driver = Driver()
        driver.arrive("a", "r")
        driver.step(0, "r", num_tokens=3)
        driver.send(e.ModelRemoved("a"))
        assert driver.state.lengths.num_models == 0

    def test_an_answer_that_goes_on_after_a_death_is_learnt_once_and_whole(self) -> None:
        driver = Driver()
        driver.arrive("a", "r", prompt_tokens=100)
        driver.step(0, "r", num_tokens=40)
        driver.send(e.Ended("r", is_complete=False))
        driver.send(e.Arrived("r", "a", 0.0, 100, num_tokens=40))
        request = driver.state.requests["r"]
        assert (request.context_tokens, request.num_tokens) == (140, 40)
        driver.step(0, "r", num_tokens=20)
        driver.send(e.Ended("r"))
        assert list(driver.state.lengths.recent("a")) == [60]

    def test_an_answer_cut_off_before_it_was_expected_to_end_is_not_learnt(self) -> None:
        driver = Driver()
        for _ in range(50):
            driver.send(e.Arrived("r", "a", 0.0, 100, max_tokens=1))
            driver.step(0, "r")
            driver.send(e.Ended("r"))
        assert expected_tokens(driver) == DEFAULT_TOKENS

    @pytest.mark.parametrize(("max_tokens", "num_tokens"), [(300, 300), (100, 60)])
    def test_an_answer_that_got_long_or_ended_by_itself_is(
        self, max_tokens: int, num_tokens: int
    ) -> None:
        driver = Driver()
        driver.send(e.Arrived("r", "a", 0.0, 100, max_tokens=max_tokens))
        driver.step(0, "r", num_tokens=num_tokens)
        driver.send(e.Ended("r"))
        assert list(driver.state.lengths.recent("a")) == [num_tokens]


class TestWhatIsExpected:
    def test_no_more_than_the_limit_of_the_request(self) -> None:
        driver = Driver()
        assert expected_tokens(driver, max_tokens=1) == 1
        assert expected_tokens(driver, max_tokens=200) == 200
        assert expected_tokens(driver, max_tokens=4000) == DEFAULT_TOKENS

    def test_more_than_an_answer_has_already(self) -> None:
        driver = Driver()
        assert expected_tokens(driver, num_tokens=300) > 300
        assert expected_tokens(driver, num_tokens=300, max_tokens=310) == 310

    def test_kv_room_is_kept_for_the_limit_only(self) -> None:
        """19 GB beside the weights are 1,900 tokens: of 384 + 256 + 16 two fit, of 401 four."""
        driver = Driver(
            weight_bytes=GB, capacity_bytes=20 * GB, kv_bytes_per_token=10**7, kv_host_bytes=0
        )
        sent = []
        for number in range(6):
            arrived = e.Arrived(f"r{number}", "a", 0.0, 384, max_tokens=1)
            sent += sends(driver.send(arrived))
        assert len(sent) == 4
