"""What orchestrators and dashboards are told: alive, ready, and the numbers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.errors import StartupError
from tests.serving import MODEL, FakeServer, error_of, fake_server, read_stream, wait_until

FIRST_TOKEN: tuple[float, ...] = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
FIRST_TOKEN += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(2**power for power in range(18))

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio"}
COUNTERS = {"prompt_tokens", "generation_tokens", "num_preemptions", "request_success"}
HISTOGRAMS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
    "iteration_tokens": TOKENS,
}


@contextmanager
def loading_server() -> Iterator[tuple[FakeServer, threading.Event]]:
    """A server that loads until the event is set."""
    may_load = threading.Event()

    def wait() -> None:
        assert may_load.wait(60)

    with fake_server(before_load=wait, wait_ready=False) as server:
        try:
            yield server, may_load
        finally:
            may_load.set()


class TestLoading:
    def test_until_the_model_is_loaded_it_is_alive_but_not_ready(self) -> None:
        with loading_server() as (server, may_load):
            client = server.client
            assert client.get("/health").json() == {"status": "alive"}
            response = client.get("/ready")
            error = error_of(response)
            assert (response.status_code, error["code"]) == (503, "not_ready")
            assert f"the model {MODEL} is still loading" in error["message"]
            may_load.set()
            wait_until(lambda: client.get("/ready").status_code == 200, "the server is ready")
            assert client.get("/ready").json() == {"status": "ready", "model": MODEL}
            assert client.get("/health").status_code == 200

    @pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"])
    def test_until_then_requests_are_told_when_to_come_again(self, path: str) -> None:
        with loading_server() as (server, _):
            prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
            response = server.client.post(path, json=prompt)
            assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")
            assert int(response.headers["retry-after"]) >= 1

    def test_what_needs_no_weights_is_served_already(self) -> None:
        with loading_server() as (server, _):
            assert server.client.post("/v1/rope/plan", json={"prompt_tokens": 100}).json()["factor"] > 1
            assert server.client.get("/metrics").status_code == 200


def test_when_loading_fails_the_server_ends() -> None:
    may_fail = threading.Event()

    def fail() -> None:
        assert may_fail.wait(60)
        raise StartupError("the weights are gone")

    with fake_server(before_load=fail, wait_ready=False) as server:
        assert server.client.get("/health").status_code == 200
        may_fail.set()
        wait_until(lambda: not server.is_serving, "the server ends")
        assert [str(error) for error in server.failures] == ["the weights are gone"]


class TestUnwell:
    """Trouble that a restart would end makes /health a 503 that says what it is; /ready follows."""

    def assert_well(self, server: FakeServer) -> None:
        assert [server.client.get(path).status_code for path in ("/health", "/ready")] == [200, 200]

    def assert_unwell(self, server: FakeServer, message: str) -> None:
        for path in ("/health", "/ready"):
            response = server.client.get(path)
            error = error_of(response)
            assert (response.status_code, error["code"], error["message"]) == (503, "not_ready", message)

    def ask(self, server: FakeServer) -> int:
        return server.client.post("/generate", json={"prompt": "a", "max_tokens": 1}).status_code

    def test_after_so_many_failed_steps_in_a_row_until_one_succeeds(self, caplog: pytest.LogCaptureFixture) -> None:
        with fake_server(max_step_failures=2) as server:
            for _ in range(2):  # the count begins anew with each success
                server.gate.fault = ValueError("broken")
                assert self.ask(server) == 500
                self.assert_well(server)
                server.gate.fault = None
                assert self.ask(server) == 200
            server.gate.fault = ValueError("broken")
            assert [self.ask(server), self.ask(server)] == [500, 500]
            self.assert_unwell(server, "2 steps in a row have failed; the limit is 2")
            server.gate.fault = None
            assert self.ask(server) == 200
            self.assert_well(server)
            assert server.samples()["ropewalk_step_failures_total"] == 4
        told = [record.getMessage() for record in caplog.records if record.name == "service.api.state"]
        assert told.count("unwell: 2 steps in a row have failed; the limit is 2") == 1

    def test_while_a_step_takes_too_long(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        with fake_server(step_timeout_seconds=50) as server, server.new_client() as client:
            assert server.loaded is not None
            now = 1000.0
            monkeypatch.setattr(server.loaded.engine, "_clock", lambda: now)
            body = {"prompt": "a", "max_tokens": 2, "stream": True}
            with server.gate.closed(), client.stream("POST", "/generate", json=body) as stream:
                server.gate.wait_until_reached()
                now += 50
                self.assert_well(server)
                assert server.samples()["ropewalk_step_under_way_seconds"] == 50
                now += 1.4
                self.assert_unwell(server, "a step has been running for 51 s; the limit is 50 s")
                server.gate.open()
                assert '"finish_reason":"length"' in stream.read().decode()
            server.wait_until_idle()
            wait_until(lambda: server.client.get("/health").status_code == 200, "the step ends")
            now += 100
            self.assert_well(server)
            assert server.samples()["ropewalk_step_under_way_seconds"] == 0
        told = [record.getMessage() for record in caplog.records if record.name == "service.api.state"]
        assert "unwell: a step has been running for 51 s; the limit is 50 s" in told

    def test_is_logged_even_where_nobody_asks(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("service.app.SECONDS_BETWEEN_HEALTH_CHECKS", 0.001)
        with fake_server(max_step_failures=1) as server:
            server.gate.fault = ValueError("broken")
            assert self.ask(server) == 500
            wait_until(lambda: "unwell: " in caplog.text, "somebody notices")
            server.gate.fault = None


class TestDraining:
    """What a server says that finishes what runs: it must not be restarted, and gets nothing new."""

    def test_it_is_alive_and_takes_no_requests(self) -> None:
        with fake_server() as server:
            server.app.state.server.is_draining = True
            assert server.client.get("/health").status_code == 200
            assert server.client.get("/metrics").status_code == 200
            answers = [server.client.get("/ready")]
            answers += [
                server.client.post(path, json={"prompt": "a"}) for path in ("/generate", "/v1/completions", "/tokenize")
            ]
            for answer in answers:
                assert (answer.status_code, error_of(answer)["code"]) == (503, "shutting_down")
                assert int(answer.headers["retry-after"]) >= 1
            assert server.samples()["ropewalk_request_refused_total{code=shutting_down}"] == 3

    def test_an_engine_that_has_ended_then_is_no_reason_to_restart(self) -> None:
        with fake_server() as server:
            assert server.loaded is not None
            server.app.state.server.is_draining = True
            server.loaded.engine.stop()
            assert server.client.get("/health").status_code == 200


class TestMetrics:
    def test_everything_that_dashboards_expect_is_there_before_the_first_request(self) -> None:
        with fake_server() as server:
            response = server.client.get("/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        families = {family.name: family for family in text_string_to_metric_families(response.text)}
        for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (set(HISTOGRAMS), "histogram")):
            for name in names:
                assert families[f"ropewalk_{name}"].type == kind
        assert all(family.documentation for family in families.values())
        reasons = {sample.labels["finished_reason"] for sample in families["ropewalk_request_success"].samples}
        assert reasons == {"stop", "length", "cancelled", "error"}

    @pytest.mark.parametrize(("name", "buckets"), HISTOGRAMS.items())
    def test_histograms_have_the_expected_buckets(
        self, server: FakeServer, name: str, buckets: tuple[float, ...]
    ) -> None:
        prefix = f"ropewalk_{name}_bucket{{le="
        bounds = [key.removeprefix(prefix).rstrip("}") for key in server.samples() if key.startswith(prefix)]
        assert tuple(map(float, bounds)) == (*buckets, float("inf"))

    def test_requests_are_counted_with_their_tokens_times_and_plans(self) -> None:
        with fake_server() as server:
            short, scaled = {"prompt": "x" * 10, "max_tokens": 7}, {"prompt": "x" * 100, "max_tokens": 3}
            server.client.post("/generate", json=short)
            read_stream(server.client, "/v1/completions", short)
            server.client.post("/generate", json=scaled)
            server.wait_until_idle()
            samples = server.samples()
        expected = {
            "request_success_total{finished_reason=length}": 3,
            "request_success_total{finished_reason=cancelled}": 0,
            "request_plan_total{factor=1,mode=native,scheme=default}": 2,
            "request_plan_total{factor=2,mode=static,scheme=yarn}": 1,
            "prompt_tokens_total": 120,
            "generation_tokens_total": 17,
            "request_prompt_tokens_count": 3,
            "request_prompt_tokens_sum": 120,
            "request_generation_tokens_sum": 17,
            "time_to_first_token_seconds_count": 3,
            "inter_token_latency_seconds_count": 14,
            "e2e_request_latency_seconds_count": 3,
            "request_queue_time_seconds_count": 3,
            "request_prefill_time_seconds_count": 3,
            "request_decode_time_seconds_count": 3,
            "iteration_tokens_sum": 120 + 17 - 3,
            "step_failures_total": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_cache_usage_ratio": 0,
            "kv_cache_used_bytes": 0,
        }
        assert {name: samples[f"ropewalk_{name}"] for name in expected} == expected

    def test_a_running_and_a_waiting_request_show(self) -> None:
        with fake_server(max_running=1, num_pages=128) as server, server.new_client() as client:
            body = {"prompt": "x" * 10, "max_tokens": 2, "stream": True}
            with server.gate.closed(), client.stream("POST", "/generate", json=body) as first:
                server.gate.wait_until_reached()
                with client.stream("POST", "/generate", json=body) as second:
                    # The engine takes the second in and shows both once it has made a step.
                    server.gate.pass_one_step()
                    samples = server.samples()
                    server.gate.open()
                    second.read()
                first.read()
        assert samples["ropewalk_num_requests_running"] == 1
        assert samples["ropewalk_num_requests_waiting"] == 1
        assert samples["ropewalk_kv_cache_usage_ratio"] == pytest.approx(3 / 128)
        assert samples["ropewalk_kv_cache_used_bytes"] == 300

    def test_two_servers_share_no_number(self, client: httpx.Client) -> None:
        client.post("/generate", json={"prompt": "a", "max_tokens": 1})
        with fake_server() as other:
            assert other.samples()["ropewalk_request_success_total{finished_reason=length}"] == 0


def test_asking_whether_it_is_ready_counts_as_no_refusal_and_a_refused_request_does() -> None:
    loading = threading.Event()

    def wait() -> None:
        assert loading.wait(60)

    with fake_server(before_load=wait, wait_ready=False) as server:
        assert server.client.get("/ready").status_code == 503
        refusals = {name: n for name, n in server.samples().items() if name.startswith("ropewalk_request_refused_tot")}
        assert not any(refusals.values())
        assert server.client.post("/generate", json={"prompt": "a"}).status_code == 503
        assert server.samples()["ropewalk_request_refused_total{code=not_ready}"] == 1
        loading.set()
        wait_until(lambda: server.client.get("/ready").status_code == 200, "the server is ready")


def test_a_request_leaves_one_line_in_the_log_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), fake_server() as server:
        answer = server.client.post("/generate", json={"prompt": "secret", "max_tokens": 5}).json()
        server.wait_until_idle()
    [line] = [record.getMessage() for record in caplog.records if answer["id"] in record.getMessage()]
    assert "6 + 5 tokens under default 1 (native), length after" in line
    assert "secret" not in line
    assert answer["text"] not in line
