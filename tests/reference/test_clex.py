"""A tiny model with CLEX, from its folder to its answers, against transformers under the frequencies of each length."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from model_patches.geometry import RopeGeometry
from model_patches.loading.clex_weights import TENSORS
from model_patches.plan import PositionPlan, make_plan
from service.build import inspect
from service.core import Sequence
from service.engine.runner import ModelRunner
from service.errors import StartupError
from service.settings import Settings
from tests.reference.growing import SHAPE, tiny
from tests.reference.harness import reference_logits
from tests.serving import HttpServer, byte_tokenizer, error_of, real_server

NATIVE, MAX_FACTOR = 64, 6
BLOCK = {"type": "clex", "max_factor": MAX_FACTOR, "param_factor": 2, "act": "silu", "factor": 1, "time_dt": 0.01}
CONFIG = LlamaConfig(**SHAPE, dtype="float32")
SETTINGS: dict[str, Any] = {"device": "cpu", "kv_cache_memory": "16MiB", "max_batch_tokens": 48, "max_running": 8}
TOLERANCE = 1e-4


def network() -> dict[str, torch.Tensor]:
    """Trained enough to turn every pair elsewhere than NTK does; heads are 8 wide."""
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(4, 16, generator=generator) * 0.3, torch.randn(16, 4, generator=generator) * 0.02
    return {TENSORS["ode_up_proj"]: up, TENSORS["ode_down_proj"]: down}


def write_folder(folder: Path, changes: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """The tiny model in a folder, its config changed and tensors added."""
    tiny(CONFIG).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(weights), **tensors}, weights, metadata={"format": "pt"})
    content = json.loads(config.read_text())
    theta = content.pop("rope_parameters")["rope_theta"]
    config.write_text(json.dumps({**content, "rope_theta": theta, **changes}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("clex"), {"rope_scaling": BLOCK}, network())


def plan_at(t: int) -> PositionPlan:
    """The plan of t native lengths, from the numbers above alone."""
    options = {option: network()[name].tolist() for option, name in TENSORS.items()}
    geometry = RopeGeometry(8, 1e4, NATIVE, NATIVE, "clex", parameters={"max_factor": MAX_FACTOR, **options})
    return make_plan(geometry, "clex", t, t * NATIVE)


@dataclass
class Recorded:
    """A server of the model, and the rows of logits that tokens were chosen from since the last request."""

    server: HttpServer
    rows: list[torch.Tensor] = field(default_factory=list)

    def ask(self, prompt: list[int], max_tokens: int, **rope: Any) -> dict[str, Any]:
        self.rows.clear()
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "rope": rope}
        answer = self.server.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        self.server.wait_until_idle()
        content: dict[str, Any] = answer.json()
        return content

    def attach(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = runner.forward

        def recorded(step: Mapping[Sequence, int]) -> torch.Tensor:
            logits = forward(step)
            self.rows.extend(logits)
            return logits

        monkeypatch.setattr(runner, "forward", recorded)


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Iterator[Recorded]:
    with pytest.MonkeyPatch.context() as patch, real_server(model=str(folder), **SETTINGS) as server:
        assert server.loaded is not None
        runner = server.loaded.engine._engine._runner
        assert isinstance(runner, ModelRunner)
        keeper = Recorded(server)
        keeper.attach(runner, patch)
        yield keeper


def random_prompt(length: int) -> list[int]:
    return torch.randint(4, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def test_the_plans_differ_by_the_network_and_by_t() -> None:
    plain = RopeGeometry(8, 1e4, NATIVE, NATIVE)
    assert plan_at(1).inv_freq == pytest.approx(make_plan(plain, "default", 1.0, NATIVE).inv_freq, rel=1e-15)
    for t in range(2, MAX_FACTOR + 1):
        assert plan_at(t).inv_freq != pytest.approx(plan_at(t - 1).inv_freq, rel=1e-2)
        assert plan_at(t).inv_freq != pytest.approx(make_plan(plain, "ntk", 2 * t - 1, NATIVE).inv_freq, rel=1e-2)


@pytest.mark.parametrize(
    ("length", "mode", "t"),
    [
        (5, "native", 1),
        (56, "native", 1),
        (65, "static", 2),
        (120, "static", 2),
        (121, "static", 3),
        (370, "static", 6),
    ],
)
def test_each_length_has_the_logits_of_transformers_under_its_own_frequencies(
    recorded: Recorded, length: int, mode: str, t: int
) -> None:
    prompt = random_prompt(length)
    answer = recorded.ask(prompt, 8)
    rope = answer["rope"]
    assert (rope["scheme"], rope["mode"], rope["factor"], rope["native_length"]) == ("clex", mode, t, NATIVE)
    expected = reference_logits(tiny(CONFIG), plan_at(t), prompt + answer["token_ids"][:-1], length - 1)
    assert float((torch.stack(recorded.rows) - expected).abs().max()) <= TOLERANCE


def test_a_request_grows_from_one_t_to_the_next(recorded: Recorded) -> None:
    prompt = random_prompt(60)
    answer = recorded.ask(prompt, 80, growth="reprefill")
    assert (answer["rope"]["mode"], answer["rope"]["factor"]) == ("dynamic", 3.0)
    rows = torch.stack(recorded.rows)
    tokens = prompt + answer["token_ids"][:-1]
    first = 0
    for t, last in ((1, NATIVE), (2, 2 * NATIVE), (3, len(tokens))):  # the last length under each plan
        expected = reference_logits(tiny(CONFIG), plan_at(t), tokens[:last], len(prompt) - 1 + first)
        until = last - len(prompt) + 1
        assert float((rows[first:until] - expected).abs().max()) <= TOLERANCE, t
        first = until
    assert first == len(rows) == 80


def test_cached_keys_are_rotated_on_from_one_t_to_the_next(recorded: Recorded) -> None:
    rope = recorded.ask(random_prompt(60), 80)["rope"]
    assert (rope["scheme"], rope["mode"], rope["factor"], rope["rerotations"]) == ("clex", "dynamic", 3.0, 2)


def test_no_other_scheme_or_factor_is_to_be_had(recorded: Recorded) -> None:
    for rope in ({"scheme": "yarn"}, {"factor": 1.5}):
        answer = recorded.server.client.post("/generate", json={"prompt": "a", "rope": rope})
        assert answer.status_code == 400
        assert "clex" in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {**BLOCK, "param_factor": 1}}, r"'clex' do not fit the config: .* \(4, 16\)"),
        ({"rope_scaling": BLOCK, "log_scale": True}, "log_scale is true: .* not supported"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_port_is_opened(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartupError, match=said):
        inspect(Settings(model=str(write_folder(tmp_path, changes, network())), **SETTINGS))


def test_a_folder_without_the_networks_weights_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, {"rope_scaling": BLOCK, "log_scale": False}, {})
    with pytest.raises(StartupError, match=r"lack .*ode_up_proj, which scheme 'clex' needs"):
        inspect(Settings(model=str(tmp_path), **SETTINGS))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(StartupError, match="scheme 'clex' needs trained weights of its own"):
        inspect(Settings(model=str(tmp_path), **SETTINGS))
