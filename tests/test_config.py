"""The config: arguments, recipes, help, and every rule with a neighbour that passes."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from common import ROOT, make_model, run_main
from configs import ROOTS, find_problems, problem_keys

from rl2 import __version__
from rl2.__main__ import main
from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl2.algorithms.losses import POLICY_LOSSES
from rl2.algorithms.names import TOKEN_AVERAGES
from rl2.config.arguments import read_arguments
from rl2.config.conditions import adapter_obstacle, sends_adapters
from rl2.config.help import explain, explain_usage
from rl2.config.key import schema_keys
from rl2.config.parse import compose, parse
from rl2.config.schema import PPOConfig, dump
from rl2.config.unknown import OTHER_NAMES, near_keys
from rl2.ppo_inputs import read_ppo_inputs


def read_rules() -> list[list[str]]:
    """(trainer, refused arguments, key of the problem, arguments that pass) of each rule."""
    lines = (ROOT / "tests/config_rules.txt").read_text(encoding="utf-8").splitlines()
    rules = []
    for line in lines:
        if not line.startswith("#"):
            trainer, _, rule = line.partition(": ")
            rules.append([trainer, *(part.strip() for part in rule.split("|"))])
    return rules


@pytest.mark.parametrize(("trainer", "wrong", "key", "right"), read_rules())
def test_rule(base, monkeypatch, trainer, wrong, key, right):
    """The refused arguments have this problem and no other one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert problem_keys(trainer, *wrong.split()) == ["" if key == "-" else key]
    assert problem_keys(trainer, *shlex.split(right)) == []


def test_other_processes_than_the_first_print_no_problem(base, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="^2$"):
        parse(PPOConfig, [*base, "foo"])
    assert capsys.readouterr().err == ""


def test_columns_are_a_map_that_reads_back(base, tmp_path):
    columns = {"question": "messages", "my label": "answer"}
    config = parse(PPOConfig, [*base, "data.columns={question: messages, my label: answer}"])
    assert config.data.columns == columns
    (tmp_path / "again.yaml").write_text(dump(config))
    assert parse(PPOConfig, ["--config-name=again"]).data.columns == columns
    config = parse(PPOConfig, [*base, "data.columns.question=prompt", "data.columns.label=answer"])
    assert config.data.columns == {"question": "prompt", "label": "answer"}


def test_the_home_folder_may_be_written_as_a_tilde(base, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home (1)"))
    config = parse(PPOConfig, [*base, "trainer.save_dir=~/runs"])
    assert config.trainer.save_dir == f"{tmp_path}/home (1)/runs"


def test_keys_of_another_machine_have_no_problems(base):
    """For a plan: what they name need not be here, and they may be missing."""

    def find_here(*words):
        arguments = read_arguments(PPOConfig, ["actor.model_name=model", *words])
        _, found = compose(PPOConfig, arguments, elsewhere=("data", "rollout.env_path"))
        return [problem.key for problem in found]

    assert find_here() == []
    assert find_here("data.path=no.jsonl", "data.max_length=0") == []
    assert find_here("actor.sp_size=0") == ["actor.sp_size"]
    for slip in ("data.pth", "data.max_length"):  # on every machine
        assert find_here(f"{slip}=x") == [slip]


@pytest.mark.parametrize("root", ROOTS.values())
def test_every_key_is_explained(root):
    text = explain(root)
    for name, entry in schema_keys(root).items():
        assert len(entry.help) > 5, name
        assert entry.is_section or f"  {name}=" in text
        for value in [*entry.choices, *entry.functions]:
            assert value in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_arguments_win_over_a_config_file_whose_name_may_have_dots(base, tmp_path):
    (tmp_path / "right.yaml").rename("v1.2.yaml")
    words = ["--config-dir", ".", "--config-name=v1.2", "trainer.max_steps=3"]
    assert parse(PPOConfig, [*base, *words]).trainer.max_steps == 3


def test_a_config_file_may_choose_algorithms_and_a_folder_may_have_more(base, tmp_path):
    (tmp_path / "mine/algo").mkdir(parents=True)
    (tmp_path / "mine/algo/own.yaml").write_text("# @package _global_\nactor: {clip: 0.05}\n")
    (tmp_path / "mine/a.yaml").write_text("algo: dapo\nactor: {clip_high: 0.3}\n")
    words = [*base, "--config-dir=mine", "data.prompts_per_rollout=2", "actor.update_per_rollout=2"]
    config = parse(PPOConfig, [*words, "--config-name=a"])
    assert (config.rollout.filter, config.actor.clip_high) == ([0.01, 0.99], 0.3)
    assert parse(PPOConfig, [*words, "--config-name=a", "algo=own"]).actor.clip == 0.05
    assert problem_keys("ppo", "--config-dir=mine", "algo=other") == [""]
    (tmp_path / "mine/b.yaml").write_text("defaults: [a, _self_]\nactor: {clip: 0.07}\n")
    (tmp_path / "mine/a.yaml").write_text("actor: {clip: 0.01, clip_high: 0.3}\n")
    actor = parse(PPOConfig, [*words, "--config-name=b"]).actor
    assert (actor.clip, actor.clip_high) == (0.07, 0.3)


def test_hydra_shows_the_config(base, capsys):
    def show(*words: str) -> tuple[int, str, str]:
        """(the status, stdout, stderr) of the command."""
        return run_main(main, "ppo", "--cfg", "job", *words), *capsys.readouterr()

    status, out, _ = show("actor.lr=2e-5", "algo=grpo")
    tree = yaml.safe_load(out)
    assert status == 0 and tree["data"]["path"] == "???"
    assert tree["actor"]["lr"] == 2e-5 and tree["actor"]["average"] == "sequence"
    assert tree["critic"]["dtype"] == "${actor.dtype}"
    status, out, error = show("actor.lr=fast")
    assert status == 1 and "actor.lr" in error and "Traceback" not in error and out == ""


def test_a_sweep_runs_a_job_for_each_value_and_ends_at_a_mistake(base, runs_here, tmp_path, capfd):
    make_model(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    words = ["data.path=rows.jsonl", "actor.model_name=tiny", "data.batch_size=2"]
    assert run_main(main, "sft", "--multirun", *words, "actor.lr=1e-4,1e-3,-1,1e-2") == 2
    errors = capfd.readouterr().err
    assert "actor.lr=-1.0: it must be above 0" in errors and "Traceback" not in errors
    rates = []
    for number in (0, 1):
        run = Path("runs/default", str(number))
        assert (run / "model/config.json").is_file()
        rates.append(yaml.safe_load((run / "config.yaml").read_text())["actor"]["lr"])
    assert rates == [1e-4, 1e-3]
    assert not Path("runs/default/3").exists()


def test_a_sweep_may_be_of_algorithms():
    arguments = read_arguments(PPOConfig, ["--multirun", "algo=grpo,dapo"])
    assert arguments.problems == [] and arguments.words == ["algo=grpo,dapo"]


@pytest.mark.parametrize(
    ("engine", "has_gpu", "samplers", "reason"),
    [
        ("local", False, 0, None),
        ("local", True, 0, "gives its weights' memory of a GPU to the trainer"),
        ("local", True, 1, None),
        ("sglang", False, 0, "sglang is sent whole weights only"),
        ("vllm", True, 1, "vllm is sent whole weights only"),
    ],
)
def test_where_adapters_cannot_be_sent_merged_weights_are(
    base, monkeypatch, engine, has_gpu, samplers, reason
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("rl2.config.conditions.has_gpu", lambda: has_gpu)
    monkeypatch.setattr("rl2.config.conditions.choose_engine", lambda name: (engine, ""))
    words = ["actor.lora_rank=4", f"rollout.num_processes={samplers}"]
    config = parse(PPOConfig, [*base, *words])
    assert sends_adapters(config) == (reason is None)
    assert reason is None or reason in adapter_obstacle(config)
    config.actor.quantize_base = "nf4"
    assert not sends_adapters(config)


@pytest.mark.parametrize(
    ("package", "version", "key"),
    [
        ("peft", None, "actor.lora_rank"),
        ("bitsandbytes", None, "actor.quantize_base"),
        ("torch", "2.11.0", "actor.quantize_base"),  # whose FSDP cannot hold bytes
        ("torch", "2.13.0+cpu", None),
    ],
)
def test_adapters_and_4_bits_need_their_packages(base, monkeypatch, package, version, key):
    versions = {"torch": "2.13.0", "peft": "0.20.0", "bitsandbytes": "0.50.2", package: version}
    monkeypatch.setattr("rl2.config.rules.installed_version", versions.get)
    words = ["actor.quantize_base=nf4", "actor.lora_rank=4"]
    assert problem_keys("sft", *words) == ([key] if key else [])


def test_an_engine_of_several_ranks_fits_a_node_and_the_processes_that_sample(base, monkeypatch):
    monkeypatch.setattr("rl2.config.engines.installed_version", lambda *packages: "0.32.0")
    words = ["rollout.engine=sglang", "data.prompts_per_rollout=8"]
    two_nodes = [(2, 0, 0), (4, 4, 0), (8, 0, 1), (3, 0, 1), (4, 2, 1)]
    node_of_3 = [(2, 2, 0), (2, 0, 1)]
    for world, local, cases in ((8, 4, two_nodes), (3, 3, node_of_3)):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
        for tp_size, samplers, refused in cases:
            sizes = [f"rollout.tp_size={tp_size}", f"rollout.num_processes={samplers}"]
            assert problem_keys("ppo", *words, *sizes) == ["rollout.tp_size"] * refused, sizes
    of_vllm = ["rollout.engine=vllm", "data.prompts_per_rollout=9", "rollout.tp_size=3"]
    assert problem_keys("ppo", *of_vllm) == ["rollout.tp_size"]  # it has one engine a process


SEGMENTS = "max_split_size_mb:512,expandable_segments:True"
TOP_P = "rollout.train_sampling_params.top_p=0.9"
MIN_P = "rollout.train_sampling_params.min_p=0.1"
SERVER = "rollout.server_urls=[http://a:1] rollout.shared_dir=weights"


@pytest.mark.parametrize(
    ("engine", "release", "has_gpu", "allocator", "word", "refused"),
    [
        # Releases that have been tried, and others.
        ("sglang", "0.5.17", True, "", "", None),
        ("sglang", "1.0.0rc1", True, "", "", None),
        ("sglang", "0.4.9.post6", True, "", "", "engine"),
        ("vllm", "0.32.0", False, "", "", None),
        ("vllm", "0.31.1", False, "", "", "engine"),
        ("vllm", "0.33.0", False, "", "", "engine"),
        # torch_memory_saver, by which SGLang gives its memory back, would end its processes.
        ("local", "0.5.23", True, SEGMENTS, "", None),
        ("sglang", "0.5.23", True, SEGMENTS, "", "engine"),
        ("sglang", "0.5.23", False, SEGMENTS, "", None),
        ("sglang", "0.5.23", True, "expandable_segments:False", "", None),
        # What top_p leaves is not trained with other engines.
        ("local", "0.5.23", False, "", TOP_P, None),
        ("sglang", "0.5.23", False, "", TOP_P, "train_sampling_params"),
        ("vllm", "0.32.0", False, "", TOP_P, "train_sampling_params"),
        ("vllm", "0.32.0", False, "", TOP_P.replace("p=0.9", "k=5"), "train_sampling_params"),
        ("vllm", "0.32.0", False, "", TOP_P.replace("train", "test"), None),
        ("local", "0.5.23", False, "", MIN_P, None),
        ("sglang", "0.5.23", False, "", MIN_P, "train_sampling_params"),
        ("vllm", "0.32.0", False, "", MIN_P.replace("train", "test"), None),
        ("server", None, True, SEGMENTS, SERVER, None),
        ("server", None, False, "", f"{SERVER} {TOP_P}", "train_sampling_params"),
    ],
)
def test_what_an_engine_refuses(
    base, monkeypatch, engine, release, has_gpu, allocator, word, refused
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("rl2.config.engines.installed_version", lambda *packages: release)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    keys = problem_keys("ppo", f"rollout.engine={engine}", *word.split())
    assert keys == ([f"rollout.{refused}"] if refused else [])


@pytest.mark.parametrize("missing", ["cuda/bin/nvcc", "bin/ninja", "bin/c++"])
def test_a_machine_without_the_compilers_of_sglang_is_refused(base, monkeypatch, tmp_path, missing):
    sglang = "rollout.engine=sglang"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("rl2.config.engines.installed_version", lambda *packages: "0.5.23")
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("CXX", raising=False)
    for name in ("cuda/bin/nvcc", "bin/ninja", "bin/c++"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch(mode=0o755)
    assert problem_keys("ppo", sglang) == []
    (tmp_path / missing).unlink()
    [problem] = find_problems("ppo", [sglang])
    name = missing.removeprefix("bin/")
    assert problem.key == "rollout.engine" and f"{name}. Set CUDA_HOME" in problem.text


def test_help_names_sections_or_their_keys(base, capsys):
    for root in ROOTS.values():
        sections = [name for name in schema_keys(root) if "." not in name]
        lines = explain_usage(root).splitlines()
        assert {line.split()[0] for line in lines if line.startswith("  ")} == set(sections)
    for topic, included, left_out in [
        ([], "actor.model_name=...", "actor.lr"),
        (["actor"], "actor.share_prompts=true", "data.path"),
        (["actor.clip"], "actor.clip_high=null", "actor.dual_clip="),
        (["all"], "critic.lr=5e-06", "nothing"),
    ]:
        assert run_main(main, "ppo", "--help", *topic, "actor.lr=1") == 0
        text = capsys.readouterr().out
        assert included in text and left_out not in text


def test_commands(capsys):
    assert run_main(main) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in ("ppo", "sft", "dpo", "rm"))
    assert "torchrun --nproc_per_node=N -m rl2 COMMAND" in text
    assert run_main(main, "--version") == 0
    assert capsys.readouterr().out.startswith(f"rl2 {__version__}, Python 3.")
    assert run_main(main, "pop", "actor.lr=1") == 2
    assert "did you mean ppo?" in capsys.readouterr().err


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_trainer_finds_the_key(name):
    found = set()
    for root in ROOTS.values():
        keys = [name for name, key in schema_keys(root).items() if not key.is_section]
        keys += ["algo"] * (root is PPOConfig)
        assert name not in keys
        meant = set(OTHER_NAMES[name]) & set(keys)
        if meant:
            assert set(near_keys(name, keys)) == meant
            assert set(near_keys(f"algorithm.{name}", keys)) == meant
            for section in {key.split(".")[0] for key in meant}:
                own = {key for key in meant if key.split(".")[0] == section}
                assert set(near_keys(f"{section}.optim.{name}", keys)) == own
        found |= meant
    assert found == set(OTHER_NAMES[name])


def test_problems_of_data_and_env_come_in_one_round(base, tmp_path):
    row = '{"messages": [{"role": "user", "content": "x"}]}\n'
    (tmp_path / "train.jsonl").write_text(row)
    (tmp_path / "test.jsonl").write_text(row + '{"messages": []}\n')
    (tmp_path / "env.py").write_text("def reward_fn(messages, answer): return 0")
    config = parse(PPOConfig, [*base, "data.test_path=test.jsonl"])
    with pytest.raises(ValueError) as error:
        read_ppo_inputs(config)
    of_rows, of_env = str(error.value).split("\n", 1)
    assert "test.jsonl" in of_rows and "'answer'" in of_env


def test_every_estimator_loss_and_average_is_explained():
    """docs/algorithms.md has a row for each, and names no other."""
    text = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    tables = (
        ("adv.estimator", ADVANTAGE_ESTIMATORS),
        ("actor.loss", POLICY_LOSSES),
        ("actor.average", TOKEN_AVERAGES),
    )
    for key_name, names in tables:
        table = text.partition(f"| `{key_name}` |")[2].partition("\n\n")[0]
        assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(names)
