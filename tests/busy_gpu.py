"""Holds multiprocessors of a GPU by a kernel beside which nothing else finds room, through the CUDA driver.

A CTA of the kernel has all the shared memory of a multiprocessor. Any other CTA needs some, at least the
kilobyte that the system reserves, and so has to wait until the kernel gives the multiprocessor back.
"""

import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import jax

_THREADS = 1024
_PATIENCE = 60.0
"""Seconds until a kernel that does not come to the GPU, or does not end, is an error."""

# Values of the driver's enumerations.
_MULTIPROCESSORS, _MOST_SHARED_BYTES = 16, 97  # CUdevice_attribute
_DYNAMIC_SHARED_BYTES = 8  # CUfunction_attribute
_NON_BLOCKING = 1  # CUstream_flags
_PORTABLE, _MAPPED = 1, 2  # of cuMemHostAlloc

# Each CTA writes a slot when it begins and when it ends. It ends when the time is over, or, if there are
# slots of a partner, when the partner's CTA of the same number has begun.
_PTX = b"""
.version 8.0
.target sm_90
.address_size 64

.visible .entry hold(.param .u64 slots, .param .u64 partner, .param .u64 nanoseconds)
.maxntid 1024, 1, 1
{
    .reg .pred %p, %is_other, %is_alone;
    .reg .b32 %thread, %cta, %sm;
    .reg .b64 %slot, %partner, %offset, %limit, %begin, %now, %passed, %other;

    mov.u32 %thread, %tid.x;
    setp.ne.u32 %is_other, %thread, 0;
    @%is_other bra together;

    ld.param.u64 %slot, [slots];
    ld.param.u64 %partner, [partner];
    ld.param.u64 %limit, [nanoseconds];
    setp.eq.u64 %is_alone, %partner, 0;
    mov.u32 %cta, %ctaid.x;
    mul.wide.u32 %offset, %cta, 32;
    add.u64 %slot, %slot, %offset;
    add.u64 %partner, %partner, %offset;
    mov.u32 %sm, %smid;
    st.relaxed.sys.u32 [%slot+20], %sm;
    mov.u64 %begin, %globaltimer;
    st.release.sys.u64 [%slot], %begin;

again:
    @%is_alone bra sleep;
    ld.acquire.sys.u64 %other, [%partner];
    setp.ne.u64 %p, %other, 0;
    @%p bra met;
sleep:
    nanosleep.u32 1000;
    mov.u64 %now, %globaltimer;
    sub.u64 %passed, %now, %begin;
    setp.lt.u64 %p, %passed, %limit;
    @%p bra again;
    bra end;
met:
    st.relaxed.sys.u32 [%slot+16], 1;
end:
    mov.u64 %now, %globaltimer;
    st.release.sys.u64 [%slot+8], %now;

together:
    bar.sync 0;
    ret;
}
"""


class Slot(ctypes.Structure):
    """What a CTA of the kernel has written, in memory of the host that all GPUs access.

    Attributes:
        begin: nanoseconds of the GPU's clock, 0 before.
        end: nanoseconds of the same clock when it ended, 0 before.
        has_met: 1 if it ended because the partner's CTA had begun.
        multiprocessor: the number of the one that it ran on.
    """

    begin: int
    end: int
    has_met: int
    multiprocessor: int
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("has_met", ctypes.c_uint32),
        ("multiprocessor", ctypes.c_uint32),
        ("unused", ctypes.c_uint64),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    if status := library.cuInit(0):
        raise RuntimeError(f"cuInit failed with error {status}.")
    return library


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of the driver; RuntimeError with the name of its error if it fails."""
    status = getattr(_driver(), name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name} failed with error {status} ({(text.value or b'unknown').decode()}).")


def _attribute(gpu: Any, attribute: int) -> int:
    value = ctypes.c_int()
    _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, gpu.local_hardware_id)
    return value.value


def num_multiprocessors(gpu: Any) -> int:
    """Returns how many multiprocessors the GPU has."""
    return _attribute(gpu, _MULTIPROCESSORS)


@functools.cache
def _primary_context(ordinal: int) -> ctypes.c_void_p:
    """Returns the context that JAX uses, too. It is kept until the process ends."""
    context = ctypes.c_void_p()
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    return context


@contextmanager
def _on(gpu: Any) -> Iterator[None]:
    """Makes the GPU the one that the driver's functions are about."""
    _call("cuCtxPushCurrent_v2", _primary_context(gpu.local_hardware_id))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _load(gpu: Any) -> ctypes.c_void_p:
    """Returns the kernel, which stays loaded until the process ends."""
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    with _on(gpu):
        _call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_PTX))
        _call("cuModuleGetFunction", ctypes.byref(kernel), module, b"hold")
        _call("cuFuncSetAttribute", kernel, _DYNAMIC_SHARED_BYTES, _attribute(gpu, _MOST_SHARED_BYTES))
    return kernel


def _make_stream() -> ctypes.c_void_p:
    """Returns a stream whose kernels get multiprocessors that become free before others do."""
    lowest, highest, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    _call("cuCtxGetStreamPriorityRange", ctypes.byref(lowest), ctypes.byref(highest))
    _call("cuStreamCreateWithPriority", ctypes.byref(stream), _NON_BLOCKING, highest)
    return stream


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    """Waits on the host; TimeoutError if it takes a minute."""
    deadline = time.monotonic() + _PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} takes more than {_PATIENCE:g} s.")
        time.sleep(1e-4)


class Holder:
    """Holds multiprocessors of a GPU of this process, again and again.

    It is a context manager, which waits for its kernel and frees what it has. All that takes time or waits
    for the GPU is done before `launch`, which only puts the kernel into a stream.

    Attributes:
        slots: of the CTAs of the kernel that was launched last.
    """

    def __init__(self, gpu: Any, count: int) -> None:
        """Holds ``count`` multiprocessors for a moment, which also loads the kernel.

        Raises:
            ValueError: this is not a GPU of this process, or it does not have so many multiprocessors.
            RuntimeError: a function of the driver failed.
        """
        if gpu.platform != "gpu" or gpu.process_index != jax.process_index():
            raise ValueError(f"{gpu} is not a GPU of this process.")
        if not 1 <= count <= num_multiprocessors(gpu):
            raise ValueError(
                f"count must be from 1 to {num_multiprocessors(gpu)} for {gpu}, but it is {count}."
            )
        self._gpu, self._count, self._kernel = gpu, count, _load(gpu)
        self._memory, self._shared_bytes = ctypes.c_void_p(), _attribute(gpu, _MOST_SHARED_BYTES)
        size = ctypes.c_size_t(count * ctypes.sizeof(Slot))
        with _on(gpu):
            self._stream = _make_stream()
            _call("cuMemHostAlloc", ctypes.byref(self._memory), size, _PORTABLE | _MAPPED)
        self.slots = (Slot * count).from_address(self._memory.value or 0)
        self.launch(0)
        self.wait()
        self._clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with _on(self._gpu):
            _call("cuStreamSynchronize", self._stream)
            _call("cuStreamDestroy_v2", self._stream)
            _call("cuMemFreeHost", self._memory)

    def launch(self, seconds: float, partner: "Holder | None" = None) -> None:
        """Launches the kernel, which holds each multiprocessor that it gets for so long.

        With a partner, a CTA ends earlier when the CTA of the same number has begun in the kernel that the
        partner launches next. Kernels that are each other's partners wait as those of a collective do.
        """
        self._clear()
        addresses = self._memory.value, partner._memory.value if partner else 0
        values = [ctypes.c_uint64(value or 0) for value in (*addresses, round(seconds * 1e9))]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        grid, block = (self._count, 1, 1), (_THREADS, 1, 1)
        with _on(self._gpu):
            _call(
                "cuLaunchKernel",
                self._kernel,
                *grid,
                *block,
                self._shared_bytes,
                self._stream,
                pointers,
                None,
            )

    def _clear(self) -> None:
        ctypes.memset(self._memory, 0, ctypes.sizeof(self.slots))

    def holds_all(self) -> bool:
        """Returns whether the kernel has all of its multiprocessors now."""
        return all(slot.begin and not slot.end for slot in self.slots)

    def wait_until_held(self) -> None:
        """Waits until the kernel has all of its multiprocessors, each CTA another one."""
        _wait_until(self.holds_all, "getting multiprocessors")
        assert len({slot.multiprocessor for slot in self.slots}) == self._count

    def wait(self) -> None:
        """Waits until the kernel has given all multiprocessors back."""
        _wait_until(lambda: all(slot.end for slot in self.slots), "giving multiprocessors back")
