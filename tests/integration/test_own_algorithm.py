"""The programs of docs/researchers.md: algorithms that config files register, trained by the command."""

import json
import re
import shutil

import pytest

from rlhf_jax import config, train
from rlhf_jax.algorithms import rloo, sft
from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import __main__ as evaluate
from rlhf_jax.report import __main__ as report
from rlhf_jax.stages import ALGORITHMS, SFTAlgorithm, policy_gradient_algorithm
from tests.helpers import docs_commands
from tests.helpers.paths import ROOT


def program(name: str) -> str:
    """The file of that name which the page prints."""
    return docs_commands.programs()[name]


@pytest.fixture
def registries(monkeypatch):
    """The registries as they are without the test's algorithm, afterwards."""
    monkeypatch.setattr(config.stages, "STAGES", config.stages.STAGES)
    stages, algorithms = dict(config.STAGES), dict(ALGORITHMS)
    yield
    for registry, before in ((config.STAGES, stages), (ALGORITHMS, algorithms)):
        registry.clear()
        registry.update(before)


def trained(tmp_path, name: str, metric: str = "objective/scores", updates: int = 30) -> list[float]:
    """A metric of the updates of a printed program, run by the command."""
    (tmp_path / f"{name}.py").write_text(program(f"{name}.py"))
    run_dir = tmp_path / "run"
    assert train.main(["--config", str(tmp_path / f"{name}.py"), "--run_dir", str(run_dir)]) == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((run_dir / "config.json").read_text())["stage"] == name
    assert (run_dir / "policy" / "model.safetensors").exists()
    values = [line[metric] for line in lines if metric in line]
    assert len(values) == updates
    return values


@pytest.mark.runs
def test_an_algorithm_of_ones_own_trains_by_the_command(tmp_path, registries):
    assert len([line for line in program("reinforce.py").splitlines() if line.strip()]) < 90
    scores = trained(tmp_path, "reinforce")
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2


def test_a_supervised_algorithm_of_ones_own_trains_by_the_command(tmp_path, registries):
    losses = trained(tmp_path, "even_sft", "loss", 20)
    assert losses[-1] < 0.7 * losses[0]


def test_a_record_takes_the_config_of_its_kind_alone():
    with pytest.raises(UserError, match="'mine': SFTConfig does not inherit PolicyConfig"):
        policy_gradient_algorithm("mine", config.SFTConfig, rloo.OBJECTIVE)
    with pytest.raises(UserError, match="'mine': RLOOConfig does not inherit SupervisedConfig"):
        SFTAlgorithm("mine", config.RLOOConfig, sft.update)


@pytest.fixture(scope="module")
def run_elsewhere(golden_ppo, tmp_path_factory):
    """The folder of a PPO run, as one of an algorithm that this process does not know."""
    folder = shutil.copytree(golden_ppo.run_dir, tmp_path_factory.mktemp("own") / "run")
    options = json.loads((folder / "config.json").read_text())
    options |= {"stage": "elsewhere", "temper": 2.0, "run_dir": str(folder)}
    (folder / "config.json").write_text(json.dumps(options))
    return folder


def test_a_report_shows_the_run_of_an_algorithm_of_a_config_file(run_elsewhere, capsys):
    assert report.main([str(run_elsewhere), "--no_png"]) == 0, capsys.readouterr().err
    page = (run_elsewhere / "report.html").read_text()
    assert "temper" in page and 'id="button-policy"' in page


def test_evaluation_reads_the_run_of_an_algorithm_of_a_config_file(golden_sft, run_elsewhere, capsys):
    assert evaluate.main(["--run_dir", str(run_elsewhere), "--max_eval_samples", "4"]) == 0, capsys.readouterr().err
    found = json.loads((run_elsewhere / "evaluation" / "evaluation.json").read_text())
    assert found["plan"]["policy"]["path"] == str(run_elsewhere / "policy")
    assert found["plan"]["ref"]["path"] == golden_sft.paths["policy"]


def test_a_run_of_an_algorithm_of_a_config_file_is_continued_with_that_file(run_elsewhere, capsys):
    assert train.main(["--config", str(run_elsewhere / "config.json")]) == 2
    assert "set --config to the file that registers it" in capsys.readouterr().err


@pytest.mark.runs
def test_an_equation_of_rloo_is_replaced_in_a_file_of_ones_own(tmp_path, registries):
    scores = trained(tmp_path, "median_rloo")
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.2


def test_the_other_programs_of_the_page_run():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "researchers.md").read_text(), re.M | re.S)
    for block in blocks:
        if "get_config" not in block:
            exec(compile(block, "researchers.md", "exec"), {"__name__": "page"})
