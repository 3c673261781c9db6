"""The generated stand-in for summaries of forum posts."""

from covey.rewards import LengthPenalty, SentenceEnd
from covey_tasks.rows.posts import NUM_TEST, NUM_TRAIN, posts


def test_posts_are_the_same_every_time_and_no_post_is_in_both_splits() -> None:
    rows = posts()
    assert posts() == rows
    prompts = {split: {row["prompt"] for row in rows[split]} for split in rows}
    assert (len(prompts["train"]), len(prompts["test"])) == (NUM_TRAIN, NUM_TEST) == (2048, 256)
    assert not prompts["train"] & prompts["test"]


def test_a_summary_says_only_what_its_post_says() -> None:
    for row in posts()["test"]:
        assert row["completion"].strip().rstrip(".") in row["prompt"]
        assert row["prompt"].startswith("POST: ")
        assert row["prompt"].endswith("\nTL;DR:")


def test_most_summaries_leave_something_to_learn_and_some_are_perfect() -> None:
    written = [row["completion"] for row in posts()["train"]]
    ends, lengths = SentenceEnd()(written), LengthPenalty(max_words=6, per_word=0.1)(written)
    assert 0.37 < sum(ends) / len(ends) < 0.43
    perfect = [end == 1 and length == 0 for end, length in zip(ends, lengths, strict=True)]
    assert 0.13 < sum(perfect) / len(perfect) < 0.19
    assert -0.6 < min(lengths) < -0.3
