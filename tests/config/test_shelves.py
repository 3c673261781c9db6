"""A preset on a shelf goes by its bare name wherever a name is typed, read or shown."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from covey.api.settings import make_config
from covey.cli import main as main_module
from covey.cli.main import main
from covey.config import compose as settings
from covey.config.auto_adjust import find_shadowed_presets
from covey.config.schema import Config, group_choices
from covey.config.shelves import CONF, SHELVES, preset_file, presets
from covey_doctor.advice import still_open
from covey_report.doctor.health import facts_of
from covey_report.logs.read import RunFiles
from covey_report.page.origins import settings_page

from ..support.small import logging_as_it_was

MAX_ENTRIES = 16
SHELVED = [
    (group, shelf, file.stem)
    for group in SHELVES
    for shelf in SHELVES[group]
    for file in (CONF / group / shelf).glob("*.yaml")
]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with logging_as_it_was():
        yield


def composed(*words: str) -> Config:
    settings.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return settings.to_unchecked(compose("config", overrides=list(words)))


@pytest.mark.long
@pytest.mark.parametrize(("group", "shelf", "name"), SHELVED)
def test_a_name_means_the_same_with_its_shelf_in_front_and_without(group: str, shelf: str, name: str) -> None:
    assert composed(f"{group}={name}") == composed(f"{group}={shelf}/{name}")
    assert preset_file(group, name) == preset_file(group, f"{shelf}/{name}") == CONF / group / shelf / f"{name}.yaml"


def test_names_are_listed_bare() -> None:
    choices = group_choices()
    assert {name for group, _, name in SHELVED} <= {name for group in SHELVES for name in choices[group]}
    assert [name for group in SHELVES for name in choices[group] if "/" in name] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("former", "name"), [("documents/code", "fizzbuzz"), ("trl_document", "my_rewards_reference_ratio")]
)
def test_a_former_name_means_the_present_one(former: str, name: str) -> None:
    assert composed(f"recipe={former}", "data.path=x", "rewards=[r:f]") == composed(
        f"recipe={name}", "data.path=x", "rewards=[r:f]"
    )


def test_two_presets_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("papers", "writeups"):
        (tmp_path / "algorithm" / folder).mkdir(parents=True)
        (tmp_path / "algorithm" / folder / "opo.yaml").touch()
    with pytest.raises(
        ValueError, match=r"^algorithm=opo would mean .*papers/opo.yaml and .*writeups/opo.yaml; rename"
    ):
        presets("algorithm", tmp_path)


@pytest.mark.parametrize("name", ["../model/nano", "papers", "papers/", "papers/nope", "/opo", "writeups/opo", ""])
def test_no_other_file_is_taken_for_a_preset(name: str) -> None:
    assert preset_file("algorithm", name) is None


def test_no_folder_of_presets_is_crowded() -> None:
    folders = [path for path in CONF.rglob("*") if path.is_dir()]
    assert {path.name for path in folders if len(list(path.iterdir())) > MAX_ENTRIES} == set()


@pytest.mark.long
def test_a_sweep_takes_names_of_the_front_and_of_shelves(monkeypatch: pytest.MonkeyPatch) -> None:
    advantages = []
    monkeypatch.setitem(main_module.WORK, "train", lambda config, _: advantages.append(config.algorithm.advantage))
    assert main(["train", "environment=arithmetic", "algorithm=gdpo,opo,maxrl", "--multirun"]) == 0
    assert advantages == ["gdpo", "opo", "maxrl"]


def test_files_of_the_users_own_name_shelved_presets_and_are_found_beside_them(tmp_path: Path) -> None:
    for group in ("algorithm", "recipe"):
        (tmp_path / "mine" / group).mkdir(parents=True)
    (tmp_path / "mine" / "algorithm" / "half.yaml").write_text("defaults: [opo, _self_]\nloss: clip\n")
    (tmp_path / "mine" / "recipe" / "short.yaml").write_text(
        "# @package _global_\ndefaults: [override /algorithm: vespo]\nnum_steps: 3\n"
    )
    own = f"hydra.searchpath=[file://{tmp_path}/mine]"
    half, short = composed(own, "algorithm=half"), composed(own, "recipe=short")
    assert (half.algorithm.advantage, half.algorithm.loss) == ("opo", "clip")
    assert (short.algorithm.loss, short.num_steps) == ("vespo", 3)


def test_python_the_doctor_and_the_report_know_shelved_names() -> None:
    config = make_config(None, {"algorithm": "opo"}).config
    assert (config.algorithm.advantage, config.algorithm.loss) == ("opo", "reinforce")
    assert find_shadowed_presets(Config(), ["algorithm=opo"]) != []
    for given, said in (
        ({"algorithm.advantage": "opo", "algorithm.loss": "reinforce"}, ()),
        ({"algorithm.advantage": "opo"}, ("algorithm=opo",)),
    ):
        assert still_open(["algorithm=opo"], given, facts_of(given)) == said
    page = settings_page(
        RunFiles(Path("run"), {"algorithm.loss": "reinforce"}, {"command": "covey train algorithm=opo"})
    )
    assert (page["presets"], page["rows"][0][-1]) == (["algorithm=opo"], "recipe")


def test_the_template_of_the_examples_composes_over_the_recipe_it_begins_with(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conf = Path(__file__).parents[2] / "examples" / "conf"
    assert main(["config", "--config-dir", str(conf), "recipe=my_infill", "data.path=texts.txt"]) == 0
    printed = capsys.readouterr().out
    assert "  mask_ratios:\n  - 0.15\n  - 0.3\n" in printed
    assert "  max_grad_norm: 0.0" in printed


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("algorithm=GRPO", "did you mean grpo?"),
        ("parallel.strategy=deepspeed", "did you mean fsdp?"),
        ("parallel.strategy=zero3", "did you mean fsdp?"),
        ("model.attention=flash_attention_2", "did you mean varlen?"),
        ("engine=sglang", "did you mean vllm?"),
        ("optimizer.schedule=Cosine", "did you mean cosine?"),
        ("engine=SGLang", "choices: fill, native, transformers, vllm"),
    ],
)
def test_what_others_call_a_choice_is_answered_in_any_case(
    word: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "recipe=arithmetic", word]) == 2
    assert meant in capsys.readouterr().err


def test_a_slip_is_answered_with_bare_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "environment=arithmetic", "algorithm=oppo"]) == 2
    said = capsys.readouterr().err
    assert said.startswith('covey: algorithm has no choice "oppo"; did you mean opo? choices: ')
    assert said.rstrip().rpartition("choices: ")[2].split(", ") == group_choices()["algorithm"]
    assert main(["train", "opo"]) == 2
    assert capsys.readouterr().err == 'covey: "opo" sets nothing; did you mean algorithm=opo?\n'
