from covey.system.waits.timer import PhaseTimer


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_inside_another_pauses_it() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("sampling"):
        clock.now += 2
        with timer.phase("reward"):
            clock.now += 5
        clock.now += 1
    clock.now += 10
    assert timer.seconds == {"sampling": 3.0, "reward": 5.0}


def test_a_phase_that_raises_is_charged_and_closed() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    try:
        with timer.phase("backward"):
            clock.now += 4
            raise ValueError
    except ValueError:
        clock.now += 50
    with timer.phase("backward"):
        clock.now += 1
    assert timer.seconds == {"backward": 5.0}


def test_an_open_phase_counts_up_to_now() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("evaluation"):
        clock.now += 3
        assert timer.seconds == {"evaluation": 3.0}
        clock.now += 1
    assert timer.seconds == {"evaluation": 4.0}


def test_seconds_measured_elsewhere_are_taken_from_the_open_phase_so_that_nothing_counts_twice() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("sampling"):
        clock.now += 6
        timer.charge("reward", 4)
        timer.charge("reward", 30)
    assert timer.seconds == {"sampling": 0.0, "reward": 6.0}
