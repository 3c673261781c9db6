"""Every layer is looked for at start: without any one of them nothing runs."""

import pytest

from covey_sandbox import CallTest, Sandbox, SandboxFailed, Tier
from covey_sandbox.inside.isolation.layers import LAYERS_OF, can_change_user

PAIRS = [(tier, layer) for tier in ("namespace", "landlock") for layer in LAYERS_OF[tier]]
NAMED = {"no_new_privileges": "landlock"}
"""The others cannot be put on without it; the first that fails is named."""


@pytest.mark.long
@pytest.mark.parametrize(("tier", "layer"), PAIRS)
def test_without_a_layer_the_sandbox_does_not_start(tier: Tier, layer: str, sandbox: Sandbox) -> None:
    if sandbox.tier != tier:
        pytest.skip("the other tier's turn")
    if layer == "identity" and not can_change_user():
        pytest.skip("an ordinary user stays who it is")
    with pytest.raises(
        SandboxFailed, match=rf"^no isolation for model code: tier {tier}: {NAMED.get(layer, layer)} is missing: "
    ):
        Sandbox(1, tier, unsafe_without=[layer]).close()


def test_a_layer_that_does_not_exist_cannot_be_left_out(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxFailed, match="there is no layer gravity; there are "):
        Sandbox(1, sandbox.tier, unsafe_without=["gravity"])


def test_what_holds_is_described_for_the_manifest(sandbox: Sandbox) -> None:
    described = sandbox.describe()
    assert described["tier"] == sandbox.tier
    assert set(LAYERS_OF[sandbox.tier]) - set(described["layers"]) <= {"identity"}
    looked_for = {probe.partition(":")[0] for probe in described["probes"]}
    assert looked_for == {*described["layers"], "identity", "isolation"}
    assert described["without"] == []


@pytest.mark.long
def test_running_unsafely_says_so_every_time_and_is_still_not_forged(capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with Sandbox(1, "unsafe_no_isolation") as unsafe:
            code = "class A:\n    def __eq__(self, other): return True\ndef f(n): return n if n else A()"
            report = unsafe.run_blocking(code, [CallTest((1,), expected=1), CallTest((0,), expected=0)], "f")
            assert report.fraction == 0.5
            assert unsafe.describe()["tier"] == "unsafe_no_isolation"
        assert (
            capfd.readouterr().err
            == "covey_sandbox: UNSAFE: tier=unsafe_no_isolation runs model code without isolation\n"
        )
