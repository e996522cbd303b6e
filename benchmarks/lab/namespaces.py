"""Hosts on one machine: network namespaces whose links to a switch have a given rate. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.lab.cluster import Cluster

__all__ = ["Network", "cluster", "hosts"]

SUBNET = "192.168.232"
INTERFACE = "paro0"


@dataclass(frozen=True)
class Network:
    """How to start processes on hosts that have it between them, as :class:`~benchmarks.lab.cluster.Cluster` takes it.

    Attributes:
        description: What it is.
        prefixes: By host; None if there is one host only, in truth.
        interface: The network interface of every host.
        address: Of the first host.
    """

    description: str
    prefixes: list[list[str]] | None
    interface: str
    address: str


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@contextlib.contextmanager
def hosts(count: int, mbit: int) -> Iterator[Network]:
    """``count`` hosts that send and receive ``mbit`` Mbit/s each; one loopback where they cannot be made."""
    names = [f"paro{os.getpid()}{name}" for name in ["switch", *(f"host{number}" for number in range(count))]]
    try:
        try:
            if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
                raise OSError("that needs root and iproute2")
            _make(names, mbit)
        except (subprocess.SubprocessError, OSError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip()
            yield Network(f"loopback, no slow link: no network namespaces here ({why})", None, "lo", "127.0.0.1")
        else:
            prefixes = [["ip", "netns", "exec", name] for name in names[1:]]
            told = f"network namespaces, {mbit} Mbit/s to and from each"
            yield Network(told, prefixes, INTERFACE, f"{SUBNET}.1")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=20)


@contextlib.contextmanager
def cluster(count: int, mbit: int) -> Iterator[Cluster]:
    """Two ranks on each of ``count`` such hosts, on the CPU."""
    with hosts(count, mbit) as network:
        print(f"{count} hosts x 2: {network.description}")
        over = {"prefixes": network.prefixes, "interface": network.interface, "address": network.address}
        with Cluster(count, per_host=2, gpus=0, network=network.description, **over) as ranks:
            yield ranks


def _make(names: list[str], mbit: int) -> None:
    switch, *others = names
    for name in names:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    for number, name in enumerate(others, start=1):
        port = f"port{number}"
        _ip("link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", name, "address", "add", f"{SUBNET}.{number}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", INTERFACE, "up")
        for namespace, device in ((name, INTERFACE), (switch, port)):
            shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
            _ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", device, "root", *shape)
