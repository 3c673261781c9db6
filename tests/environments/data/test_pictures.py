"""Rows with pictures are refused by the name of the column."""

from collections.abc import Mapping
from typing import Any

import pytest
from PIL import Image

from covey.environments.data.pictures import picture_in

PICTURE = Image.new("RGB", (2, 2))


def asked(*content: Mapping[str, Any]) -> dict[str, Any]:
    return {"prompt": [{"role": "system", "content": "Look."}, {"role": "user", "content": list(content)}]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            asked({"type": "image"}, {"type": "text", "text": "?"}),
            "a part of type image in message 2 of column 'prompt'",
        ),
        (asked({"type": "image", "text": ""}), "a part of type image in message 2 of column 'prompt'"),
        (asked({"type": "image_url", "image_url": {"url": "http://a.b/c"}}), "a part of type image in message 2"),
        (asked({"type": "text", "text": "?"}, {"type": "input_audio"}), "a part of type audio in message 2"),
        (asked({"text": "?", "video": "a.mp4"}), "a part of type video in message 2"),
        ({"prompt": "?", "image": PICTURE}, "a picture, film or sound in column 'image'"),
        ({"prompt": "?", "photo": [PICTURE, PICTURE]}, "a picture, film or sound in column 'photo'"),
        ({"prompt": "?", "figure": {"bytes": b"\x89PNG", "path": None}}, "a picture, film or sound in column 'figure'"),
        ({"prompt": "?", "figure": {"bytes": None, "path": "a.png"}}, "a picture, film or sound in column 'figure'"),
        ({"prompt": "?", "images": ["https://a.b/fox.jpg?w=3"]}, "a picture, film or sound in column 'images'"),
        ({"prompt": "?", "Image": "data:image/png;base64,iVBOR"}, "a picture, film or sound in column 'Image'"),
    ],
)
def test_what_is_no_text_is_named_with_its_column(row: Mapping[str, Any], said: str) -> None:
    assert picture_in(row).startswith(said)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Describe fox.png", "answer": "https://a.b/fox.jpg"},
        asked({"type": "text", "text": "?", "image": None}, {"type": "text", "text": "!"}),
        {"prompt": "?", "image": None, "images": [], "image_caption": "a red fox", "images_count": 3},
        {"prompt": "?", "columns": {"bytes": 3}, "messages": ["image"], "parts": [{"role": "user", "content": None}]},
    ],
)
def test_text_about_pictures_stays_text(row: Mapping[str, Any]) -> None:
    assert picture_in(row) == ""
