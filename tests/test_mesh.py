"""Tests how the ranks meet, and the groups that they make."""

import socket

import pytest
import torch.distributed as dist
from common import ROOT, launch

from rl2.parallel.mesh import init_distributed


def test_all_groups_have_the_same_timeout():
    launch(2, ROOT / "tests/group_timeouts.py")


@pytest.fixture
def rank_0_of_two_hosts(monkeypatch):
    """The store and the environment of a rank whose world has a rank on another host."""
    store = dist.HashStore()
    dist.PrefixStore("rl2/attempt_0", store).set("host/1", "another_host")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    joined = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: joined.append(1))
    return joined


def resolve_own_name_to(monkeypatch, address):
    def getaddrinfo(host, port, type):
        assert host == socket.gethostname()
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, type, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", None])
def test_a_host_that_others_cannot_reach_is_refused(monkeypatch, rank_0_of_two_hosts, address):
    """Debian's /etc/hosts gives the host's own name 127.0.1.1. gloo hands that to the others."""
    resolve_own_name_to(monkeypatch, address)
    with pytest.raises(RuntimeError, match="Set GLOO_SOCKET_IFNAME on every host"):
        init_distributed()
    assert not rank_0_of_two_hosts
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    init_distributed()
    assert rank_0_of_two_hosts == [1]


@pytest.mark.parametrize("address", ["10.0.0.7", "fe80::1%eth0"])
def test_a_host_that_others_can_reach_joins(monkeypatch, rank_0_of_two_hosts, address):
    resolve_own_name_to(monkeypatch, address)
    init_distributed()
    assert rank_0_of_two_hosts == [1]
