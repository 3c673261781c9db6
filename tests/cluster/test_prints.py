"""What programs in samplers print reaches the terminal, and nothing else that Ray would pass on."""

import pytest

from covey.cluster.start import print_lines


@pytest.mark.parametrize(
    ("batch", "shown"),
    [
        (
            {"actor_name": "SamplerActor", "pid": 7, "lines": ["a reward", "speaks"]},
            "sampler 7: a reward\nsampler 7: speaks\n",
        ),
        ({"actor_name": "judge-0-3f2a", "pid": 8, "lines": ["x"]}, "judge 8: x\n"),
        ({"actor_name": "TrainerRank", "pid": 9, "lines": [":actor_name:TrainerRank", "x"]}, "trainer rank 9: x\n"),
        ({"actor_name": "SamplerActor", "pid": 7, "lines": ["\x1b[2J gone"]}, "sampler 7: \\x1b[2J gone\n"),
        ({"actor_name": "SamplerActor", "pid": 7, "is_err": True, "lines": ["x"]}, "to stderr: sampler 7: x\n"),
        ({"actor_name": None, "pid": "raylet", "lines": ["a worker died"]}, ""),
    ],
)
def test_what_a_program_prints_is_shown_with_who_printed_it(
    batch: dict[str, object], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_lines(batch)
    out, err = capsys.readouterr()
    assert out + (f"to stderr: {err}" if err else "") == shown
