"""Session set-up: eight CPU devices, strict promotion, GPU tests skipped where there is no GPU and logged."""

import contextlib
import functools
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import gpu_log
from jaxmagi.collectives import _process

from . import gpu_sharing, launcher

if not jax.distributed.is_initialized():  # or a launcher has said how many
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser: pytest.Parser) -> None:
    gpu_log.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """``-m gpu`` runs on the GPUs that there are, everything else on the CPU, also where there are GPUs."""
    if config.option.markexpr == "gpu":
        # Off here and in the processes that tests start: NVLink multicast does not work on all hosts.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        gpu_sharing.prepare(config)
        gpu_log.prepare(config)
    else:
        # Compiling is most of what the CPU does here, and in the processes that tests start.
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        jax.config.update("jax_platforms", "cpu")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Returns the scheduler of GPU tests, None for the default of pytest-xdist."""
    return gpu_sharing.make_scheduler(config, log) if config.option.markexpr == "gpu" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    turns = gpu_sharing.turns() if item.config.option.markexpr == "gpu" else None
    with turns.take(item.nodeid, nextitem.nodeid if nextitem else "") if turns else contextlib.nullcontext():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_sharing.sort(items)
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def x64() -> Iterator[None]:
    """Runs the test with 64-bit types enabled (they are off by default, as they are for users)."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the time limit of collectives after the test, which may set it."""
    monkeypatch.setattr(_process, "_timeout_ms", _process._timeout_ms)


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Events of JAX tracing, lowering and compiling while the test runs. May be cleared."""
    events: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's own name: fresh inputs per test, the same on every run."""
    return np.random.default_rng(list(request.node.nodeid.encode()))


@pytest.fixture
def launch(tmp_path: Path) -> launcher.Launch:
    """Starts several processes of a function: see `launcher.launch`. Skips the test in such a process."""
    if jax.process_count() > 1:
        pytest.skip("starts processes itself")
    return functools.partial(launcher.launch, directory=tmp_path)
