import pytest

from covey.system.lookup import check_options, is_function_path, near, one_of, resolve


def double(value: float) -> float:
    return 2 * value


def scaled(value: float, *, factor: float, offset: float = 0.0) -> float:
    return value * factor + offset


def anything(value: float, **options: float) -> float:
    return value + sum(options.values())


TABLE = {"double": double}


def test_a_name_of_the_table_is_found() -> None:
    assert resolve("double", TABLE) is double


def test_a_path_names_a_function_of_a_module() -> None:
    assert resolve("math:sqrt", TABLE)(9.0) == 3.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("triple", "expected one of double or module:function, got triple"),
        ("no_such_module:f", "no_such_module:f needs module no_such_module, which cannot be imported"),
        ("math:no_such_function", r"module math must define the function no_such_function \(math:no_such_function\)"),
        ("math:pi", r"module math must define the function pi \(math:pi\)"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        resolve(name, TABLE)


def test_known_options_pass() -> None:
    check_options(scaled, {"factor": 2.0, "offset": 1.0})
    check_options(double, {})
    check_options(anything, {"whatever": 1.0})


def test_an_unknown_option_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"^loss_options must be among factor, offset for scaled, got fctor$"):
        check_options(scaled, {"fctor": 2.0, "factor": 2.0}, setting="loss_options")
    with pytest.raises(ValueError, match=r"^options must be empty for double, got value$"):
        check_options(double, {"value": 1.0})


def test_an_option_without_default_must_be_set() -> None:
    with pytest.raises(ValueError, match=r"^options must set factor for scaled, got \['offset'\]$"):
        check_options(scaled, {"offset": 1.0})


def test_a_word_outside_the_choice_is_refused() -> None:
    assert one_of("scale", "sum", ("sum", "mean")) == "sum"
    with pytest.raises(ValueError, match=r"^scale must be one of sum, mean, got max$"):
        one_of("scale", "max", ("sum", "mean"))


def test_the_nearest_name_is_offered_where_one_is_near() -> None:
    assert near("soft_overlog", ["repetition", "soft_overlong"]) == "; did you mean soft_overlong?"
    assert near("xyz", ["repetition"]) == ""


def test_a_function_is_told_from_a_file_by_its_form() -> None:
    assert all(is_function_path(text) for text in ("my_rows:posts", "a.b.c:f"))
    assert not any(
        is_function_path(text) for text in ("rows.jsonl", "a/b", "C:/rows.jsonl", "a:b/c", ":f", "a:", "1a:b")
    )
