"""Hosts that the ranks of one machine believe to be on: UTS namespaces with hostnames of their own.

    python -m tests.hosts NAME COMMAND...     runs a command on a host of that name

NCCL and jaxmagi tell hosts apart by boot id and hostname, so that rows between these hosts go through NCCL's
sockets, over the loopback interface. NCCL can be told that they are one host after all: then rows go through
memory of the host, which is faster and whose rate changes less, while jaxmagi does all that it does between
hosts. Hosts take Linux and the rights of root.
"""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Literal

type Network = Literal["sockets", "memory"]

COUNT = "JAXMAGI_TEST_HOSTS"
"""The variable by which ranks know how many hosts there are; each has as many ranks as the others."""


def name_of(host: int) -> str:
    """Returns the hostname of a host.

    It is an address, because gloo looks the name of its host up, and an address needs no line in /etc/hosts.
    """
    return f"127.0.0.{host + 2}"


def count() -> int:
    """Returns the number of hosts that the ranks of this program are on."""
    return int(os.environ.get(COUNT, "1"))


def host_environment(hosts: int, network: Network) -> dict[str, str]:
    """Returns the variables of the ranks on so many hosts."""
    if hosts == 1:
        return {}
    sockets = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    threads = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    one_host = {"NCCL_HOSTID": "one", "NCCL_P2P_DISABLE": "1"} if network == "memory" else {}
    return {COUNT: str(hosts)} | sockets | threads | one_host


def command_on(host: int, command: list[str]) -> list[str]:
    """Returns the command that runs another one on a host, in the same process."""
    return [sys.executable, "-m", "tests.hosts", name_of(host), *command]


@functools.cache
def why_not() -> str | None:
    """Returns why this machine cannot have several hosts, None where it can."""
    command = command_on(0, [sys.executable, "-c", "import socket; print(socket.gethostname())"])
    root = Path(__file__).parent.parent
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if run.returncode == 0 and run.stdout.strip() == name_of(0):
        return None
    return (run.stderr.strip().splitlines() or [f"a host {name_of(0)} is called {run.stdout.strip()}"])[-1]


def main(name: str, *command: str) -> None:
    """Replaces this process by the command, which sees the hostname ``name``; other processes do not."""
    try:
        os.unshare(os.CLONE_NEWUTS)
        socket.sethostname(name)
    except OSError as error:
        sys.exit(f"a process cannot have a hostname of its own ({error}): that takes the rights of root")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
