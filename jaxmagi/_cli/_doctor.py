"""``doctor``: what is installed, which implementations can run here, and why not."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import jax

from .. import _native
from ..attention._lowering import unsupported_reason as attention_unsupported_reason
from ..collectives._support import unsupported_reason as collectives_unsupported_reason
from ._backends import backends

HELP = "what is installed, which implementations can run, and why not"
DESCRIPTION = (
    "Says what is installed, which implementations of attention and of the collectives run on which devices, "
    "and why not. The exit status is 1 where the CPU module or JAX's devices are missing, and 0 otherwise."
)
_PACKAGES = ("jaxmagi", "jax", "jaxlib", "flax", "numpy")
_OPTIONAL = {"rich": "cli", "matplotlib": "plot"}
_CUDA_PLUGINS = {"jax-cuda13-plugin": "cuda13", "jax-cuda12-plugin": "cuda12"}
_PLATFORMS = ("cpu", "cuda")

type _Line = tuple[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing, as the command has no options."""
    del parser


def run(options: argparse.Namespace) -> int:
    """Prints the report; returns 1 if the CPU module or JAX's devices are missing."""
    del options
    try:
        devices, complaint = _devices(), None
    except RuntimeError as error:
        devices, complaint = {}, str(error)
    sections = {
        "Installed": [*_versions(), *_cuda_tools()],
        "Compiled modules": [(f"jaxmagi._{name}", _module(name)) for name in _PLATFORMS],
        "Devices": [("error", complaint)] if complaint else list(_device_lines(devices)),
        "jaxmagi.attention": [] if complaint else list(_attention(devices)),
        "jaxmagi.collectives": [] if complaint else list(_collectives(devices)),
    }
    for title, lines in sections.items():
        _print_section(title, lines)
    return int(complaint is not None or _native.extension("cpu") is None)


def _print_section(title: str, lines: list[_Line]) -> None:
    if not lines:
        return
    print(title)
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"  {name:<{width}}  {value}")


def _versions() -> Iterator[_Line]:
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    for package in _PACKAGES:
        yield package, _version(package) or "not installed"
    for package, extra in _OPTIONAL.items():
        yield package, _version(package) or f"not installed: pip install jaxmagi[{extra}]"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_tools() -> Iterator[_Line]:
    found = [f"{plugin} {version}" for plugin in _CUDA_PLUGINS if (version := _version(plugin))]
    extras = " or ".join(f"jaxmagi[{extra}]" for extra in _CUDA_PLUGINS.values())
    yield "CUDA for JAX", ", ".join(found) or f"not installed: pip install {extras}"
    yield "nvcc", _nvcc()


def _nvcc() -> str:
    """Describes the CUDA compiler that a build would find."""
    candidates = [os.environ.get("CUDACXX"), "nvcc"]
    if home := os.environ.get("CUDA_HOME"):
        candidates.append(f"{home}/bin/nvcc")
    candidates.append("/usr/local/cuda/bin/nvcc")
    path = next((found for name in candidates if name and (found := shutil.which(name))), None)
    if path is None:
        return "none in CUDACXX, PATH, CUDA_HOME or /usr/local/cuda (only builds for GPUs need it)"
    try:
        banner = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, which does not run: {error}"
    release = next((line.strip() for line in banner.splitlines() if "release" in line), "of unknown version")
    return f"{path}, {release}"


def _module(name: str) -> str:
    """Says whether a module was built; with a broken one jaxmagi cannot be imported."""
    module = _native.extension(name)
    if module is not None:
        return f"loaded, {len(module.registrations())} handlers ({module.__file__})"
    reason = "planning needs it" if name == "cpu" else "for GPUs only"
    return f"not built ({reason})"


def _devices() -> dict[str, list[Any]]:
    """Returns the devices of each platform of JAX, by XLA's name of the platform."""
    return {name: jax.local_devices(backend=name) for name in backends()}


def _device_lines(devices: dict[str, list[Any]]) -> Iterator[_Line]:
    for name, found in devices.items():
        for kind in sorted({device.device_kind for device in found}):
            same = [device for device in found if device.device_kind == kind]
            capability = getattr(same[0], "compute_capability", None)
            suffix = f", compute capability {capability}" if capability else ""
            yield name, f"{len(same)} x {kind}{suffix}"
    if "cuda" not in devices:
        yield "cuda", "none that JAX sees"


def _attention(devices: dict[str, list[Any]]) -> Iterator[_Line]:
    for name in _all_platforms(devices):
        limits = " (bfloat16, float16; head dimensions up to 256)" if name == "cuda" else ""
        yield (
            f'"ffi" on {name}',
            _verdict(_absence(name, devices), attention_unsupported_reason(name), limits=limits),
        )
        yield f'"xla" on {name}', _verdict(_absence(name, devices))


def _collectives(devices: dict[str, list[Any]]) -> Iterator[_Line]:
    reasons = _absence("cuda", devices), collectives_unsupported_reason()
    yield '"native" on cuda', _verdict(*reasons, limits=" (between GPUs of one host)")
    yield '"nccl" on cuda', _verdict(*reasons)
    for name in _all_platforms(devices):
        yield f'"xla" on {name}', _verdict(_absence(name, devices))


def _all_platforms(devices: dict[str, list[Any]]) -> list[str]:
    return list(dict.fromkeys([*_PLATFORMS, *devices]))


def _absence(name: str, devices: dict[str, list[Any]]) -> str | None:
    return None if devices.get(name) else f"JAX sees no {name} device"


def _verdict(*reasons: str | None, limits: str = "") -> str:
    reasons = tuple(reason for reason in reasons if reason)
    return f"cannot run: {'; '.join(reasons)}" if reasons else f"runs{limits}"
