"""How many pages the cache gets: what fits in its memory, or a refusal in numbers if the longest request does not."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.cache.needs import PageNeeds
from service.cache.pool import CacheShape
from service.cache.sizing import CPU_SHARE, CUDA_SHARE, choose_num_pages
from service.errors import StartupError

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, page_size=4, kv_heads=3, key_dim=8, value_dim=8, dtype=torch.bfloat16)
PAGE_BYTES = 768


def set_machine(monkeypatch: pytest.MonkeyPatch, *, available: int, group: Path) -> None:
    """Pretend that so much memory is free and that the control group's files are in that folder."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr("service.cache.sizing.CONTROL_GROUP", group)


@settings(deadline=None)
@given(memory=st.integers(PAGE_BYTES, 10**9))
def test_as_many_pages_as_fit_in_the_memory(memory: int) -> None:
    num_pages = choose_num_pages(SHAPE, CPU, memory, max_length=4)
    assert num_pages * PAGE_BYTES <= memory < (num_pages + 1) * PAGE_BYTES


@pytest.mark.parametrize(("max_length", "needed"), [(1, 1), (4, 1), (5, 2), (400, 100), (401, 101)])
def test_the_longest_request_fits_or_the_server_does_not_start(max_length: int, needed: int) -> None:
    assert choose_num_pages(SHAPE, CPU, needed * PAGE_BYTES, max_length) == needed
    with pytest.raises(StartupError):
        choose_num_pages(SHAPE, CPU, needed * PAGE_BYTES - 1, max_length)


def test_a_refusal_names_the_setting_and_every_number() -> None:
    with pytest.raises(StartupError) as refusal:
        choose_num_pages(SHAPE, CPU, 10 * PAGE_BYTES + 5, max_length=41)
    assert str(refusal.value) == (
        "kv-cache-memory is 7685 bytes, which holds 40 tokens; one request of the maximum length 41 needs 8448 bytes: "
        "raise kv-cache-memory or lower max-model-len"
    )


def test_of_windowed_groups_the_longest_request_needs_what_it_ever_holds_at_once() -> None:
    needs = PageNeeds(4, (None, 6), max_batch_tokens=8)  # 25 pages of 100 tokens, and 4
    assert choose_num_pages(SHAPE, CPU, 29 * PAGE_BYTES, 100, needs=needs) == 29
    with pytest.raises(StartupError) as refusal:
        choose_num_pages(SHAPE, CPU, 28 * PAGE_BYTES, 100, needs=needs)
    assert str(refusal.value).startswith(
        "kv-cache-memory is 21504 bytes, which holds 96 tokens; one request of the maximum length 100 needs 22272 bytes"
    )


def test_a_refusal_of_the_default_says_that_it_is_a_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_machine(monkeypatch, available=8000, group=tmp_path)
    with pytest.raises(StartupError, match=r"share of the free memory that the cache takes is 2000 bytes, which holds"):
        choose_num_pages(SHAPE, CPU, None, max_length=1000)


@pytest.mark.parametrize(
    ("limit", "counts"),
    [
        pytest.param(None, 10**9, id="no control group"),
        pytest.param("max\n", 10**9, id="no limit"),
        pytest.param("2000000000\n", 10**9, id="a limit above what is free"),
        pytest.param("100000000\n", 10**8, id="a limit below what is free"),
    ],
)
def test_the_default_is_a_share_of_what_is_free_within_the_containers_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str | None, counts: int
) -> None:
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    set_machine(monkeypatch, available=10**9, group=tmp_path)
    assert choose_num_pages(SHAPE, CPU, None, max_length=4) == int(counts * CPU_SHARE) // PAGE_BYTES


@pytest.mark.parametrize(("in_use", "free"), [(30_000_000, 10**8 - 20_000_000), (2 * 10**8, 0)])
def test_what_a_container_uses_already_is_not_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_use: int, free: int
) -> None:
    (tmp_path / "memory.max").write_text("100000000\n")
    (tmp_path / "memory.current").write_text(f"{in_use}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 10000000\nactive_file 7\n")
    set_machine(monkeypatch, available=10**9, group=tmp_path)
    if free:
        assert choose_num_pages(SHAPE, CPU, None, max_length=4) == int(free * CPU_SHARE) // PAGE_BYTES
    else:
        with pytest.raises(StartupError, match="is 0 bytes"):
            choose_num_pages(SHAPE, CPU, None, max_length=4)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_share_is_of_what_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float) -> None:
    set_machine(monkeypatch, available=10**9, group=tmp_path)
    assert choose_num_pages(SHAPE, CPU, share, max_length=4) == int(10**9 * share) // PAGE_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10**8, 10**9))
    assert choose_num_pages(SHAPE, torch.device("cuda"), share, max_length=4) == int(10**8 * share) // PAGE_BYTES


def test_a_share_of_a_cpus_memory_is_for_all_processes_that_take_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_machine(monkeypatch, available=10**9, group=tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10**9, 10**9))
    for device, pages in ((CPU, 10**8 // PAGE_BYTES), (torch.device("cuda"), 4 * 10**8 // PAGE_BYTES)):
        assert choose_num_pages(SHAPE, device, 0.4, max_length=4, sharers=4) == pages
        assert choose_num_pages(SHAPE, device, 7 * PAGE_BYTES, max_length=4, sharers=4) == 7


def test_a_refusal_of_a_share_says_how_many_bytes_that_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_machine(monkeypatch, available=8000, group=tmp_path)
    with pytest.raises(StartupError) as refusal:
        choose_num_pages(SHAPE, CPU, 0.5, max_length=1000)
    assert str(refusal.value).startswith(
        "kv-cache-memory, 0.5 of the free memory, is 4000 bytes, which holds 20 tokens; one request"
    )


def test_memory_that_was_asked_for_is_taken_whatever_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_machine(monkeypatch, available=1, group=tmp_path)
    assert choose_num_pages(SHAPE, CPU, 7 * PAGE_BYTES, max_length=4) == 7


def test_the_default_on_cuda_is_a_share_of_the_devices_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (10**8, 10**9))
    assert choose_num_pages(SHAPE, torch.device("cuda"), None, max_length=4) == int(10**8 * CUDA_SHARE) // PAGE_BYTES
