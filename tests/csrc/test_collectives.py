"""Programs that test csrc/collectives without XLA and NCCL."""

import signal
import subprocess
from pathlib import Path

import pytest

from ..sanitizer import check_memory
from .programs import assert_all_ok, build, build_for_host, succeed


def sources(*names: str) -> list[str]:
    return [f"collectives/{name}" for name in names]


def test_descriptor_exchange(tmp_path: Path) -> None:
    program = build_for_host("descriptor_units", sources("descriptor_exchange.cc"), tmp_path)
    assert_all_ok(succeed(program))


def test_messages(tmp_path: Path) -> None:
    assert_all_ok(succeed(build_for_host("message_units", sources("messages.cc"), tmp_path)))


@pytest.mark.gpu
def test_xla_pool(tmp_path: Path) -> None:
    assert_all_ok(succeed(build("pool_units", sources("xla_pool.cc", "descriptor_exchange.cc"), tmp_path)))


@pytest.mark.gpu
def test_transfer_order_and_watchdog(tmp_path: Path) -> None:
    program = build("transfer_units", sources("transfer_order.cc", "nccl_watchdog.cc"), tmp_path)
    assert_all_ok(succeed(program))
    for reason, found in (("quick", "rank 1 is late; "), ("slow", ""), ("failing", "")):
        absent = subprocess.run([program, reason], capture_output=True, text=True, timeout=30)
        assert absent.returncode == -signal.SIGABRT
        message = f"jaxmagi: rank 0 of 2 waited for 200 ms until NCCL had come together; {found}another rank"
        assert absent.stderr.count(message) == 1


@pytest.mark.gpu
def test_kernels_and_their_memory(tmp_path: Path) -> None:
    """Tests here since compute-sanitizer takes minutes for NCCL's kernels, and would make ranks wait."""
    kernels = ("group_cast.cu", "group_reduce.cu", "remote_kernels.cu")
    host = ("remote_rows.cc", "messages.cc", "nccl.cc", "nccl_watchdog.cc", "statistics.cc")
    program = build("collective_units", sources(*kernels, *host), tmp_path)
    assert_all_ok(succeed(program))
    report = check_memory([program]).splitlines()
    assert_all_ok("\n".join(line for line in report if not line.startswith("=")))
