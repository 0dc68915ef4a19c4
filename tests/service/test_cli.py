"""The command line: which source wins, one clear line for what is wrong, and `ropewalk plan`."""

import json
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from model_patches.rope_config import read_geometry
from service.__main__ import main
from service.cli import load_settings
from service.errors import StartupError
from service.scaling.explain import explain
from service.scaling.policy import Policy, RopeWish
from service.settings import Settings

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1000,
    "rope_theta": 10000.0,
}
POLICY = Policy(read_geometry(CONFIG))

Served = Callable[..., Settings]


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"ROPEWALK_{name.upper()}", raising=False)


@pytest.fixture(autouse=True)
def signal_handlers_put_back() -> Iterator[None]:
    """`ropewalk serve` sets its own, even where it then ends early."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder that has a config.json and nothing else."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """Runs `ropewalk serve ...` up to its settings."""
    seen: list[Settings] = []
    monkeypatch.setattr("service.commands.serve.serve", lambda arguments: seen.append(load_settings(arguments)))

    def run(*arguments: str) -> Settings:
        main(["serve", *arguments])
        return seen.pop()

    return run


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("ropewalk: error: ")
    return line


class TestPrecedence:
    def test_command_line_then_environment_then_file_then_default(
        self, served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "settings.yaml"
        file.write_text("port: 1\nmax_queued: 1\nmax_running: 1\nmodel: from-file\n", encoding="utf-8")
        monkeypatch.setenv("ROPEWALK_PORT", "2")
        monkeypatch.setenv("ROPEWALK_MAX_QUEUED", "2")
        settings = served("--port", "3", "--config", str(file))
        assert (settings.port, settings.max_queued, settings.max_running) == (3, 2, 1)
        assert settings.host == "127.0.0.1"
        assert settings.model == "from-file"
        assert served("given", "--config", str(file)).model == "given"

    def test_without_anything_the_defaults_hold(self, served: Served) -> None:
        assert served().model_dump() == load_settings({}).model_dump()
        assert served().port == 8000

    @pytest.mark.parametrize("name", [name for name in Settings.model_fields if name != "model"])
    def test_every_setting_is_an_option_and_a_variable(
        self, served: Served, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        values = {"trust_remote_code": "true", "otel": "true", "device": "cpu", "dtype": "float32", "growth": "stop"}
        values |= {"native_rope": "config", "prefix_reuse": "rerotate", "rope_requests_may_choose": "scheme,mode"}
        values |= {
            "cpu_operators": "false",
            "cuda_graphs": "false",
            "deterministic": "true",
            "num_speculative_tokens": "7",
        }
        values |= {"metrics_need_key": "true", "cors_origins": "https://a.example", "log_format": "json"}
        values |= {"prefix_caching": "false", "kv_cache_dtype": "fp32", "log_level": "debug", "kv_cache_memory": "1GiB"}
        values |= {"playground": "false", "quantization": "int8"}
        value = values.get(name, "77")
        if name in ("metrics_need_key", "max_requests_per_key"):
            monkeypatch.setenv("ROPEWALK_API_KEY", "k")
        if name in ("ray_min", "ray_cpus"):
            monkeypatch.setenv("ROPEWALK_RAY", "99")
        option = ("--no-" if value == "false" else "--") + name.replace("_", "-")
        given = getattr(served(option) if value in ("true", "false") else served(option, value), name)
        monkeypatch.setenv(f"ROPEWALK_{name.upper()}", value)
        assert getattr(served(), name) == given
        assert given != getattr(Settings.model_construct(), name)


SERVE = " is not an option of ropewalk serve"


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--max-running", "x"], ["--max-running: ", "'x'", "integer"]),
            (["--port", "70000"], ["--port: ", "65535", "'70000'"]),
            (["--native-length", "99999999999"], ["--native-length: ", "2147483647", "'99999999999'"]),
            (["--max-model-len", "99999999999"], ["--max-model-len: ", "2147483647", "'99999999999'"]),
            (["--rope-ladder", "2,x"], ["--rope-ladder, 1, factor: must be a number, it is 'x'"]),
            (["--cors-origins", "a.example"], ["--cors-origins, 0: must be an origin without a path", "'a.example'"]),
            (["--max-body-bytes", "lots"], ["--max-body-bytes: must be a size in bytes (1000, 16MiB), it is 'lots'"]),
            (["--api-key", ""], ["--api-key: must be a string that is not empty"]),
            (["--rope-policy", "/nowhere/policy.yaml"], ["/nowhere/policy.yaml does not exist"]),
            (["--dtype", "int4"], ["dtype", "bfloat16", "'int4'"]),
            (["--kv-cache-memory", "lots"], ["kv-cache-memory", "'lots'"]),
            (["--max-running", "600"], ["max_batch_tokens (512) must be at least max_running (600)"]),
            (["--config", "/nowhere/settings.toml"], ["/nowhere/settings.toml does not exist"]),
            (["/nowhere/model"], ["/nowhere/model", "not found"]),
        ],
    )
    def test_a_wrong_value_ends_in_one_line_and_status_2(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], said: list[str]
    ) -> None:
        line = refusal(capsys, "serve", *arguments)
        assert all(part in line for part in said), line

    @pytest.mark.parametrize(
        ("name", "text"), [("s.toml", "max_runing = 5"), ("s.yaml", "max_runing: 5"), ("s.yml", "max_runing: 5")]
    )
    def test_an_unknown_name_in_a_file_is_refused_by_name(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str
    ) -> None:
        (tmp_path / name).write_text(text, encoding="utf-8")
        line = refusal(capsys, "serve", "--config", str(tmp_path / name))
        assert line.endswith(f"{tmp_path / name}: max_runing is not a setting: did you mean max_running?")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("max-running = 8", "max-running is not a setting: did you mean max_running?"),
            ("theta = 8", "theta is not a setting"),
            ("rope_ladder = [{factor = 2, shceme = 'ntk'}]", "one of its options: did you mean scheme?"),
            ("rope_ladder = [{scheme = 'ntk'}]", "rope_ladder, 0, factor is missing"),
            ("rope_ladder = [true]", "rope_ladder, 0: must be an object with factor, scheme, it is True"),
        ],
    )
    def test_names_in_a_file_are_told_in_full(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
    ) -> None:
        (tmp_path / "s.toml").write_text(text, encoding="utf-8")
        line = refusal(capsys, "serve", "--config", str(tmp_path / "s.toml"))
        assert f"{tmp_path / 's.toml'}: " in line
        assert line.endswith(said)

    def test_a_key_is_not_shown_whatever_is_wrong_with_it(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        (tmp_path / "s.toml").write_text("api_key = 836251", encoding="utf-8")
        line = refusal(capsys, "serve", "--config", str(tmp_path / "s.toml"))
        assert line.endswith("api_key: must be a string that is not empty")

    @pytest.mark.parametrize("command", ["serve", "plan", "fetch-default"])
    def test_a_variable_that_is_no_setting_is_refused_by_every_command(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, command: str
    ) -> None:
        monkeypatch.setenv("ROPEWALK_MAX_RUNING", "5")
        arguments = {"serve": [str(folder)], "plan": [str(folder), "--prompt-tokens", "5"], "fetch-default": []}
        line = refusal(capsys, command, *arguments[command])
        assert line.endswith("ROPEWALK_MAX_RUNING is not a setting: did you mean ROPEWALK_MAX_RUNNING?")

    def test_a_service_link_in_a_settings_place_is_told_with_its_cure(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, served: Served
    ) -> None:
        monkeypatch.setenv("ROPEWALK_PORT", "tcp://10.0.0.1:8000")
        assert served("--port", "5").port == 5
        line = refusal(capsys, "serve")
        assert "ROPEWALK_PORT: must be an integer, it is 'tcp://10.0.0.1:8000'" in line
        assert "enableServiceLinks: false" in line
        monkeypatch.setenv("ROPEWALK_PORT", "tcp")
        assert "enableServiceLinks" not in refusal(capsys, "serve")

    def test_an_empty_variable_counts_as_not_set(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, served: Served, tmp_path: Path
    ) -> None:
        for name in Settings.model_fields:
            monkeypatch.setenv(f"ROPEWALK_{name.upper()}", "")
        assert served().model_dump() == Settings.model_construct().model_dump()
        (tmp_path / "s.yaml").write_text("port: x", encoding="utf-8")
        assert f"{tmp_path / 's.yaml'}: port: " in refusal(capsys, "serve", "--config", str(tmp_path / "s.yaml"))

    def test_a_broken_file_ends_in_one_line(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "s.yaml").write_text("port: [1", encoding="utf-8")
        assert "cannot be read" in refusal(capsys, "serve", "--config", str(tmp_path / "s.yaml"))

    def test_a_wrong_variable_is_refused_like_an_option(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ROPEWALK_MAX_QUEUED", "0")
        assert "ROPEWALK_MAX_QUEUED: " in refusal(capsys, "serve")

    def test_the_source_that_is_named_is_the_one_that_won(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = tmp_path / "s.yaml"
        file.write_text("port: a\nmax_queued: a\nmax_running: a\n", encoding="utf-8")
        monkeypatch.setenv("ROPEWALK_PORT", "b")
        monkeypatch.setenv("ROPEWALK_MAX_QUEUED", "b")
        line = refusal(capsys, "serve", "--port", "c", "--config", str(file))
        for part in ("--port: .*'c'", "ROPEWALK_MAX_QUEUED: .*'b'", f"{file}: max_running: .*'a'"):
            assert re.search(part, line), line

    def test_several_wrong_values_are_all_named(self) -> None:
        with pytest.raises(StartupError, match=r"port: .*; --max-running: "):
            load_settings({"port": "x", "max_running": "y"})

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (
                ["serve", "--max-runing", "5"],
                "--max-runing is not an option of ropewalk serve: did you mean --max-running?",
            ),
            (
                ["serve", "--max_running=5"],
                "--max_running is not an option of ropewalk serve: did you mean --max-running?",
            ),
            (
                ["serve", "--max-runnin", "8"],
                "--max-runnin is not an option of ropewalk serve: did you mean --max-running?",
            ),
            (["serve", "--theta", "5"], f"--theta{SERVE}"),
            (["serve", "a", "b"], "b is not an argument of ropewalk serve"),
            (["--versoin", "serve"], "--versoin is not an option of ropewalk: did you mean --version?"),
            (["plan", "--prompt-token", "8"], "required: --prompt-tokens (see ropewalk plan --help)"),
            (["plan", "--prompt-tokens", "x"], "invalid int value: 'x' (see ropewalk plan --help)"),
            (["plan", "--prompt-tokens", "5", "--mode", "statik"], "it is 'statik': did you mean static?"),
            (
                ["plan", "--prompt-tokens", "5", "--mode", "x"],
                "--mode: must be one of native, static, dynamic, it is 'x'",
            ),
            (["srve"], "it is 'srve': did you mean serve?"),
            ([], "the following arguments are required: COMMAND (see ropewalk --help)"),
        ],
    )
    def test_what_the_command_line_does_not_know_is_refused_in_one_line_with_what_was_meant(
        self, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
    ) -> None:
        assert refusal(capsys, *arguments).endswith(said)

    def test_an_unknown_command_is_told_what_there_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = refusal(capsys, "run")
        assert all(command in line for command in ("serve", "plan", "fetch-default"))

    @pytest.mark.parametrize("arguments", [["plan", "--prompt-tokens", "5"], ["serve"]])
    def test_what_is_wrong_with_the_policy_is_told_with_where_it_was_written(
        self,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        tmp_path: Path,
        arguments: list[str],
    ) -> None:
        policy, settings = tmp_path / "p.yaml", tmp_path / "s.toml"
        policy.write_text("ladder: [2]\nreserve: 5\nmax_length: 64\n", encoding="utf-8")
        settings.write_text(f"rope_policy = '{policy}'\nnative_length = 100\n", encoding="utf-8")
        monkeypatch.setenv("ROPEWALK_MAX_MODEL_LEN", "300")
        command, *rest = arguments
        line = refusal(capsys, command, str(folder), *rest, "--config", str(settings))
        assert line.endswith(
            f"(max_length: ROPEWALK_MAX_MODEL_LEN; ladder: the policy file {policy}; "
            f"native_length: {settings}: native_length)"
        )
        line = refusal(capsys, command, str(folder), *rest, "--rope-scheme", "ntkk")
        assert line.endswith("it is 'ntkk': did you mean ntk? (scheme: --rope-scheme)")


class TestVersion:
    def test_it_is_the_packages(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["--version"])
        assert ended.value.code == 0
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        assert capsys.readouterr().out == f"ropewalk {project['version']}\n"


class TestPlan:
    def planned(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
        main(["plan", *arguments, "--json"])
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    @pytest.mark.parametrize(
        ("prompt", "most"), [(1, 1), (900, 100), (900, 101), (999, None), (1000, None), (1001, 5), (3999, 1)]
    )
    def test_json_tells_what_the_policy_chooses_from_config_json_alone(
        self, capsys: pytest.CaptureFixture[str], folder: Path, prompt: int, most: int | None
    ) -> None:
        limit = [] if most is None else ["--max-tokens", str(most)]
        facts = self.planned(capsys, str(folder), "--prompt-tokens", str(prompt), *limit)
        assert facts == explain(POLICY.choose(prompt, most), POLICY, prompt)

    def test_a_wish_is_passed_on(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        arguments = ("--prompt-tokens", "10", "--scheme", "linear", "--factor", "2", "--mode", "dynamic")
        facts = self.planned(capsys, str(folder), *arguments, "--growth", "stop")
        wish = RopeWish(scheme="linear", mode="dynamic", factor=2.0, growth="stop")
        assert facts == explain(POLICY.choose(10, None, wish), POLICY, 10)

    def test_settings_shape_the_policy(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        lengths = ("--native-length", "100", "--max-model-len", "300", "--rope-reserve", "20")
        facts = self.planned(capsys, str(folder), "--prompt-tokens", "110", *lengths)
        policy = Policy(read_geometry(CONFIG), native_length=100, max_length=300, reserve=20)
        assert facts == explain(policy.choose(110, None), policy, 110)

    def test_a_policy_file_shapes_the_policy_and_settings_win_over_it(
        self, capsys: pytest.CaptureFixture[str], folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = folder / "policy.yaml"
        file.write_text("scheme: ntk\nladder: [2, 8]\nreserve: 7\nprefix_reuse: rerotate\n", encoding="utf-8")
        settings = folder / "settings.toml"
        settings.write_text(f'rope_policy = "{file}"\nrope_reserve = 9\n', encoding="utf-8")
        monkeypatch.setenv("ROPEWALK_ROPE_LADDER", "2,4")
        arguments = ("--prompt-tokens", "1995", "--config", str(settings), "--rope-scheme", "linear")
        facts = self.planned(capsys, str(folder), *arguments)
        policy = Policy(read_geometry(CONFIG), scheme="linear", ladder=[2, 4], reserve=9, prefix_reuse="rerotate")
        assert facts == explain(policy.choose(1995, None), policy, 1995)
        assert (facts["scheme"], facts["factor"]) == ("linear", 4.0)

    def test_a_yarn_block_is_the_operators_to_interpret(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
        qwen = CONFIG | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": scaling}
        (folder / "config.json").write_text(json.dumps(qwen), encoding="utf-8")
        for interpretation, native_length in (("config", 4000), ("unscaled", 1000)):
            facts = self.planned(capsys, str(folder), "--prompt-tokens", "10", "--native-rope", interpretation)
            assert facts["native_length"] == native_length

    def test_for_people_it_says_the_same(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        main(["plan", str(folder), "--prompt-tokens", "1500", "--max-tokens", "10"])
        lines = capsys.readouterr().out.splitlines()
        choice = POLICY.choose(1500, 10)
        shown = dict(re.split(r"\s+", line, maxsplit=1) for line in lines[:8])
        assert [line[18:] for line in lines if line.startswith("grows through")] == [
            " -> ".join(f"yarn, factor {plan.factor:g}, up to {plan.max_length} tokens" for plan in choice.rungs[1:])
        ]
        assert sum(
            f"factor {rung.factor:g}, up to {rung.covers} tokens" in text
            for rung in POLICY.rungs
            for text in lines
            if "->" not in text
        ) == len(POLICY.rungs)
        assert shown["reason"] == choice.reason
        assert float(shown["factor"]) == choice.plan.factor
        assert len([line for line in lines if re.match(r" +\d+ ", line)]) == len(choice.plan.inv_freq)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--prompt-tokens", "4000"], ["4000", "maximum length is 4000"]),
            (["--prompt-tokens", "3000", "--max-tokens", "1001"], ["3000", "1001", "4001", "4000"]),
            (["--prompt-tokens", "0"], ["prompt_tokens must be at least 1, it is 0"]),
            (["--prompt-tokens", "-5"], ["prompt_tokens must be at least 1, it is -5"]),
            (["--prompt-tokens", "5", "--max-tokens", "0"], ["max_tokens must be at least 1, it is 0"]),
            (["--prompt-tokens", "5", "--scheme", "magic"], ["'magic'", "yarn"]),
            (["--prompt-tokens", "5", "--factor", "7"], ["factor 7", "1.25, 1.5, 2"]),
            (["--prompt-tokens", "5", "--factor", "nan"], ["factor nan"]),
        ],
    )
    def test_what_would_be_refused_ends_in_one_line_and_status_2(
        self, capsys: pytest.CaptureFixture[str], folder: Path, arguments: list[str], said: list[str]
    ) -> None:
        line = refusal(capsys, "plan", str(folder), *arguments)
        assert all(part in line for part in said), line

    def test_a_folder_without_config_is_refused(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert "config.json" in refusal(capsys, "plan", str(tmp_path), "--prompt-tokens", "5")


def test_output_that_nobody_reads_to_its_end_is_no_error(folder: Path) -> None:
    command = [sys.executable, "-m", "service", "plan", str(folder), "--prompt-tokens", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
