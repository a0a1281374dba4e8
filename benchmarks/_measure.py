"""Times calls, tells what machine and software they ran on, and saves results."""

import ctypes
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

from jaxmagi import _native
from jaxmagi.calibration._timing import Timing, time_in_turns

RESULTS = Path(__file__).parent / "results"


def time_interleaved(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Timing]:
    """Times several calls in turns, so that a slow phase of the machine hits all of them alike."""

    def seconds(name: str) -> float:
        start = time.perf_counter()
        jax.block_until_ready(calls[name]())
        return time.perf_counter() - start

    for call in calls.values():
        jax.block_until_ready(call())
    return time_in_turns(calls, repeats, seconds)


def environment() -> dict[str, Any]:
    """Returns what a committed result says about the machine and the software."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join([f"python -m {__package__}.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        "device": str(jax.devices()[0].device_kind),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": package_version("jaxlib"),
    }


def package_version(name: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def _nccl() -> str | None:
    """Returns the version of the library that this process has loaded, which need not be the package's."""
    try:
        library = ctypes.CDLL("libnccl.so.2", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    return ".".join(map(str, (version.value // 10000, version.value // 100 % 100, version.value % 100)))


def built_hash() -> str | None:
    """Returns the hash of the sources that the CUDA module was built from; None without the module."""
    return _native.kernel_sources()


def card() -> str:
    """Returns the short name of the GPU, for names of results: h100 for "NVIDIA H100 80GB HBM3"."""
    kind = jax.devices()[0].device_kind
    found = re.search(r"[A-Z]+\d+", kind)
    return (found[0] if found else kind).lower()


def gpu_environment() -> dict[str, Any]:
    """Returns the GPUs and the software of this process; None for what cannot be told."""
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin")
    return {
        "date": datetime.date.today().isoformat(),
        "gpu": jax.devices()[0].device_kind,
        "gpus": len(jax.devices()),
        "driver": _driver(),
        "nccl": _nccl(),
        "platform": " ".join(backend.get_backend().platform_version.split()),
        "sources": built_hash(),
        **{name: package_version(name) for name in packages},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")


def save(name: str, rows: list[Any], folder: Path = RESULTS, **more: Any) -> Path:
    """Writes rows (dataclasses or dicts), the environment and what else belongs to it to FOLDER/NAME.json."""
    path = folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = [row if isinstance(row, dict) else asdict(row) for row in rows]
    path.write_text(json.dumps({"environment": environment() | more, "rows": plain}, indent=1) + "\n")
    return path
