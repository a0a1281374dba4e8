""".ci/check_machine_code complains of copies that may be unread when threads sleep, and of nothing else."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

CHECK = Path(__file__).parent.parent / ".ci" / "check_machine_code"

COPY = "UTMALDG.4D [UR8], [UR14]"
TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R4+UR4], R6"
SLEEP = "@!P1 NANOSLEEP.SYNCS 0x989680"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    """Returns the script as a module."""
    if not CHECK.exists():
        pytest.skip("the tests run without the checks of CI")
    loader = SourceFileLoader("check_machine_code", str(CHECK))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def instruction(address: int, text: str, cycles: int = 2, reads: int = 7, waits: tuple[int, ...] = ()) -> str:
    """Returns the two lines of an instruction in a listing."""
    control = cycles | 1 << 4 | 7 << 5 | reads << 8 | sum(1 << scoreboard for scoreboard in waits) << 11
    return f"        /*{address:04x}*/  {text} ;  /* {0x79C8:#018x} */\n  /* {control << 41:#018x} */\n"


def listing(*instructions: str) -> str:
    return "\t\tFunction : planted\n" + "".join(instructions)


def wait_for_mbarrier(address: int, waits: tuple[int, ...] = (), sleep: str = SLEEP) -> str:
    """Returns a wait that sleeps in a loop until the mbarrier's phase is complete, and the kernel's end."""
    return (
        instruction(address, TRY)
        + instruction(address + 16, f"@P1 BRA {address + 64:#x}", waits=waits)
        + instruction(address + 32, sleep)
        + instruction(address + 48, f"BRA {address:#x}")
        + instruction(address + 64, "EXIT")
    )


def complaints(check: ModuleType, text: str) -> list[tuple[int, int]]:
    """Returns the addresses of copies and of the sleeps before which they may not have been read."""
    return [
        (copy.address, at.address)
        for _, code in check.kernels(text)
        for copy, at in check.unread_at_sleep(code)
    ]


def test_copy_that_nobody_waits_for(check: ModuleType) -> None:
    text = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10))
    assert complaints(check, text) == [(0, 0x30)]


def test_wait_before_the_sleep(check: ModuleType) -> None:
    text = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10, waits=(1,)))
    assert complaints(check, text) == []


def test_wait_for_another_scoreboard(check: ModuleType) -> None:
    text = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10, waits=(0, 2, 3, 4, 5)))
    assert complaints(check, text) == [(0, 0x30)]


@pytest.mark.parametrize(("cycles", "found"), [(1, [(0, 0x40)]), (2, [])])
def test_wait_before_the_scoreboard_has_counted(
    check: ModuleType, cycles: int, found: list[tuple[int, int]]
) -> None:
    """A wait in the next cycle finds the scoreboard at zero."""
    waits = instruction(0x10, "NOP", waits=(1,))
    text = listing(instruction(0, COPY, cycles, reads=1), waits, wait_for_mbarrier(0x20))
    assert complaints(check, text) == found


def test_one_of_two_ways_waits(check: ModuleType) -> None:
    """The branch that ptxas 13.0 forgets: what waits comes behind it, on the other way."""
    text = listing(
        instruction(0, COPY, reads=1),
        instruction(0x10, "@P0 BRA 0x40"),
        instruction(0x20, "NOP", waits=(1,)),
        instruction(0x30, "EXIT"),
        wait_for_mbarrier(0x40),
    )
    assert complaints(check, text) == [(0, 0x60)]


def test_loop_back_to_a_sleep(check: ModuleType) -> None:
    text = listing(
        instruction(0, TRY),
        instruction(0x10, SLEEP),
        instruction(0x20, COPY, reads=3),
        instruction(0x30, "@P0 BRA 0x0"),
        instruction(0x40, "EXIT"),
    )
    assert complaints(check, text) == [(0x20, 0x10)]


def test_copy_without_a_scoreboard(check: ModuleType) -> None:
    """Nothing can wait for it."""
    text = listing(instruction(0, COPY), wait_for_mbarrier(0x10, waits=(0, 1, 2, 3, 4, 5)))
    assert complaints(check, text) == [(0, 0x30)]


@pytest.mark.parametrize(
    "sleep",
    [
        "YIELD",
        "BSYNC B3",
        "WARPSYNC.ALL",
        "BAR.SYNC.DEFER_BLOCKING 0x1",
        "ACQBULK",
        "CALL.REL.NOINC 0x40",
        "BRX R2 -0x40",
    ],
)
def test_other_sleeps(check: ModuleType, sleep: str) -> None:
    text = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10, sleep=sleep))
    assert complaints(check, text) == [(0, 0x30)]


@pytest.mark.parametrize("branch", ["BRA.DIV UR8, 0x40", "BRA.CONV UR4, 0x40", "@!P3 BRA 0x40"])
@pytest.mark.parametrize(("waits_ahead", "found"), [(True, [(0, 0x60)]), (False, [(0, 0x20)])])
def test_both_ways_of_a_branch(
    check: ModuleType, branch: str, waits_ahead: bool, found: list[tuple[int, int]]
) -> None:
    ahead = instruction(0x20, "NOP", waits=(1,)) if waits_ahead else instruction(0x20, "YIELD")
    behind = wait_for_mbarrier(0x40, waits=() if waits_ahead else (1,))
    text = listing(
        instruction(0, COPY, reads=1), instruction(0x10, branch), ahead, instruction(0x30, "EXIT"), behind
    )
    assert complaints(check, text) == found


def test_each_function_is_read(check: ModuleType) -> None:
    clean = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10, waits=(1,)))
    planted = listing(instruction(0x10, COPY, reads=1), wait_for_mbarrier(0x20))
    assert complaints(check, clean + planted) == complaints(check, planted + clean) == [(0x10, 0x40)]


@pytest.mark.parametrize(
    "copy", ["@P2 UBLKCP.S.G [UR16], [UR4], UR22", "UBLKRED.G.S.ADD.F32.RN [UR4], [UR5], UR6"]
)
def test_other_copies(check: ModuleType, copy: str) -> None:
    text = listing(instruction(0, copy, reads=0), wait_for_mbarrier(0x10))
    assert complaints(check, text) == [(0, 0x30)]


def test_module_without_copies_is_not_taken_for_clean(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = listing(instruction(0, COPY, reads=1), wait_for_mbarrier(0x10, waits=(1,)))
    monkeypatch.setattr(check, "disassemble", {Path("full.so"): full, Path("empty.so"): "unknown"}.get)
    monkeypatch.setattr("sys.argv", ["check_machine_code", "full.so"])
    assert check.main() == 0
    monkeypatch.setattr("sys.argv", ["check_machine_code", "full.so", "empty.so"])
    assert check.main() == 1
    assert "empty.so has not one asynchronous copy" in capsys.readouterr().err
