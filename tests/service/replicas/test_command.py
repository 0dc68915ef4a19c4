"""`ropewalk serve --ray N` as far as it goes without Ray, and one replica as Ray would make it."""

import asyncio
import sys
from pathlib import Path

import pytest

from service.cli import load_settings
from service.commands.serve import serve
from service.errors import NotReadyError, StartupError
from service.replicas.asgi import CarriedRequest
from service.replicas.replica import Replica
from service.settings import Settings
from tests.model_patches.loading.conftest import tiny_folder, tiny_model

__all__ = ["tiny_folder", "tiny_model"]  # fixtures


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ray" or name == "service.replicas.run"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(StartupError, match=r"ray \(2\) needs the extra ray: pip install 'ropewalk\[ray\]'"):
        serve({"ray": "2"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ray": "2", "ray_min": "3"}, r"ray_min \(3\) must be at most ray \(2\)"),
        ({"ray_min": "1"}, r"ray_min \(1\) needs ray"),
        ({"ray_cpus": "2"}, r"ray_cpus \(2\) needs ray"),
        ({"ray": "2", "tensor_parallel": "2"}, r"tensor_parallel \(2\) does not go with ray"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        load_settings(given)


def settings(folder: Path, **options: object) -> Settings:
    return Settings.model_validate({"model": str(folder), "kv_cache_memory": 10**6, "max_running": 4, **options})


def test_a_replica_answers_and_says_how_busy_it_is(tiny_folder: Path) -> None:
    async def live() -> None:
        replica = Replica(settings(tiny_folder, cpu_operators=False))
        await replica.wait_until_loaded()
        free = replica.record_routing_stats()["free_tokens"]
        assert free > 0
        assert free % 16 == 0
        assert replica.record_autoscaling_stats() == {"waiting": 0, "in_use": 0.0}
        replica.check_health()
        body = b'{"prompt": "the", "max_tokens": 400, "ignore_eos": true, "stream": true}'
        scope = {"type": "http", "method": "POST", "path": "/generate", "query_string": b""}
        headers = [(b"content-type", b"application/json")]
        answer = replica.answer(CarriedRequest({**scope, "headers": headers}, body))
        assert await anext(answer) == []  # it has come
        while not any(message.get("body") for message in await anext(answer)):
            pass
        assert replica.record_routing_stats()["free_tokens"] < free
        assert replica.record_autoscaling_stats()["in_use"] >= 0.25  # one of four places
        await answer.aclose()  # type: ignore[attr-defined]
        await replica.stop()
        with pytest.raises(NotReadyError, match="the engine has stopped"):
            replica.check_health()

    asyncio.run(live())


def test_a_replica_that_cannot_load_says_why(tiny_folder: Path) -> None:
    async def fail() -> None:
        replica = Replica(settings(tiny_folder, kv_cache_memory=100))
        with pytest.raises(StartupError, match="kv-cache-memory is 100 bytes"):
            await replica.wait_until_loaded()
        await replica.stop()

    asyncio.run(fail())
