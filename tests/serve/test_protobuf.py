"""Messages of the Tinker API against bytes written by hand and by Google's own library."""

import random
from contextlib import suppress

import pytest

from covey_serve.wire import protobuf
from covey_serve.wire.protobuf import decode, encode


def test_a_request_is_read_from_the_bytes_of_its_layout() -> None:
    raw = bytes.fromhex("0a01611007220b") + b"cross_entro" + bytes.fromhex("3001")
    found = decode("ForwardBackwardRequest", raw)
    assert (found["model_id"], found["seq_id"], found["loss_fn"], found["forward_only"]) == (
        "a",
        7,
        "cross_entro",
        True,
    )
    assert found["data"] == []
    assert found["config"] == []


def test_a_message_is_read_as_it_was_written() -> None:
    datum = {
        "model_input": [{"encoded_text": {"tokens": b"\x01\0\0\0"}}],
        "loss_fn_inputs": [{"key": "weights", "value": {"dense": b"\0\0\x80?", "dtype": 1, "shape": (1,)}}],
    }
    config = [{"key": "beta", "value": {"number": 0.25}}]
    raw = encode("ForwardBackwardRequest", {"model_id": "m", "seq_id": 3, "data": [datum], "config": config})
    found = decode("ForwardBackwardRequest", raw)
    (read,) = found["data"]
    assert read["model_input"][0]["encoded_text"] == {"tokens": b"\x01\0\0\0"}
    assert read["loss_fn_inputs"][0]["value"] == {"dense": b"\0\0\x80?", "sparse": [], "dtype": 1, "shape": (1,)}
    assert found["config"][0]["value"] == {"number": 0.25, "text": ""}


def test_negative_numbers_and_unpacked_shapes_are_read() -> None:
    assert decode("Tensor", bytes.fromhex("20ffffffffffffffffff012003"))["shape"] == (-1, 3)


def test_unknown_fields_are_left_out() -> None:
    assert decode("Setting", bytes.fromhex("0a01619a0601fff80601"))["key"] == "a"


@pytest.mark.parametrize("raw", ["0a", "0aff", "0b", "08", "ffffffffffffffffffffff", "0a0180", "1001", "0903", "0801"])
def test_cut_or_foreign_bytes_are_refused_in_one_line(raw: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]{5,120}$"):
        decode("Setting", bytes.fromhex(raw))


def test_random_bytes_end_in_a_message_or_an_error() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        raw = chance.randbytes(chance.randrange(1, 60))
        with suppress(ValueError):
            assert isinstance(decode("ForwardBackwardRequest", raw), dict)


def test_a_flood_of_fields_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "MAX_FIELDS", 1000)
    with pytest.raises(ValueError, match="at most 1000 fields"):
        decode("ForwardBackwardRequest", b"\x1a\x00" * 1001)
