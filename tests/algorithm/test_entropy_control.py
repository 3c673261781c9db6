from covey.algorithm.controllers import EntropyControl, entropy_control, update_entropy_control
from covey.algorithm.settings import AlgorithmConfig


def test_the_entropy_coefficient_rises_below_the_target_and_falls_above_it() -> None:
    control = EntropyControl(coef=0.0, active=False)
    seen = []
    for entropy in (0.1, 0.2, 0.5, 0.5, 0.5, 0.1):
        control = update_entropy_control(control, entropy=entropy, target=0.2)
        seen.append((round(control.coef, 6), round(control.applied, 6)))
    assert seen == [(0.005, 0.005), (0.01, 0.01), (0.005, 0.0), (0.0, 0.0), (0.0, 0.0), (0.005, 0.005)]


def test_a_bonus_towards_a_target_waits_until_an_entropy_was_seen() -> None:
    steered, fixed = AlgorithmConfig(entropy_coef=0.5, target_entropy=0.2), AlgorithmConfig(entropy_coef=0.5)
    assert (entropy_control(steered).applied, entropy_control(fixed).applied) == (0.0, 0.5)
    assert update_entropy_control(entropy_control(steered), entropy=0.1, target=0.2).applied == 0.505


def test_the_entropy_coefficient_stays_within_its_bounds() -> None:
    control = EntropyControl(coef=0.998, active=True)
    assert update_entropy_control(control, entropy=0.0, target=0.2).coef == 1.0
