"""Tests how the ranks meet, and the groups that they make."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from common import launch, run
from torch.distributed.distributed_c10d import _world

from rl2.parallel import device, mesh, processor
from rl2.parallel.mesh import init_distributed


@pytest.mark.parametrize(
    ("amx", "avx512_bf16", "vendor", "expected"),
    [
        (True, True, "GenuineIntel", torch.bfloat16),
        (False, True, "GenuineIntel", torch.float32),  # a virtual machine that hides AMX
        (False, True, "AuthenticAMD", torch.bfloat16),
        (False, True, None, torch.bfloat16),  # not Linux
        (False, False, "AuthenticAMD", torch.float32),
    ],
)
def test_auto_computes_in_the_dtype_that_the_processor_is_faster_at(
    tmp_path, monkeypatch, amx, avx512_bf16, vendor, expected
):
    cpuinfo = tmp_path / "cpuinfo"
    if vendor is not None:
        cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    assert device.compute_dtype("auto", torch.device("cpu")) == expected
    assert device.compute_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize("vendor", ["GenuineIntel", "AuthenticAMD"])
def test_mkl_is_asked_for_equal_rows_on_intel_alone(tmp_path, monkeypatch, vendor):
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setenv("MKL_CBWR", "")  # so that it is taken back after the test
    monkeypatch.delenv("MKL_CBWR")
    processor.ask_for_equal_rows()
    assert ("MKL_CBWR" in os.environ) == (vendor == "GenuineIntel")


@pytest.mark.skipif(not processor.is_intel(), reason="other processors have other kernels")
def test_a_row_has_the_same_bits_however_many_share_its_product():
    """Of 57 to 128 rows MKL would divide the sums among its threads."""
    code = """
import torch, rl2
rows, weight = torch.randn(600, 1536), torch.randn(576, 1536)
expected = rows @ weight.T
assert all(torch.equal(rows[:n] @ weight.T, expected[:n]) for n in (16, 57, 64, 100, 128, 300))
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_all_groups_have_the_same_timeout():
    """One that differs would end a run where a rank waits long for another one's environment."""
    launch(2, __file__)


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", None, "10.0.0.7", "fe80::1%eth0"])
def test_a_host_that_others_cannot_reach_is_refused(monkeypatch, address):
    """Debian's /etc/hosts gives the host's own name 127.0.1.1. gloo hands that to the others."""

    def getaddrinfo(host, port, type):
        assert host == socket.gethostname()
        if address is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, type, 6, "", (address, 0))]

    store = dist.HashStore()
    dist.PrefixStore("rl2/attempt_0", store).set("host/1", "another_host")
    joined = []
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(dist, "rendezvous", lambda url, timeout: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: joined.append(1))
    if address not in ("10.0.0.7", "fe80::1%eth0"):
        with pytest.raises(RuntimeError, match="Set GLOO_SOCKET_IFNAME on every host"):
            init_distributed()
        assert not joined
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    init_distributed()
    assert joined == [1]


@pytest.mark.parametrize("interface", ["", "lo"])
def test_a_gloo_group_has_one_thread(monkeypatch, interface):
    """torch's two threads of a group may free the same memory twice, which ends the process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    init_distributed()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist.destroy_process_group()
    assert backend.options._threads == 1


ONE_PROCESS = """
import os

import torch
import torch.distributed as dist

from rl2.parallel.mesh import all_gather_objects, init_distributed

def threads():
    return set(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else set()

init_distributed()
torch.ones(10**6) + 1
before = threads()
value = b"x" * 10**6
assert all_gather_objects(value) == [value]
assert threads() <= before, "a gloo thread that copies starts a second team of OpenMP threads"
# gloo's threads hold the last reference to the tensors: without the pause at exit this aborts.
for _ in range(50):
    dist.all_reduce(torch.ones(100_000), async_op=True)
"""


def test_one_process_keeps_its_threads_and_may_end_right_behind_a_collective():
    run("-c", ONE_PROCESS, env={"OMP_NUM_THREADS": "2"})


@pytest.mark.parametrize(
    ("has_gpu", "cuda", "visible", "is_refused"),
    [
        (True, "13.0", None, True),
        (True, "13.0", "0", True),
        (True, "13.0", "", False),
        (True, None, None, False),
        (False, "13.0", None, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_ends_the_run(
    tmp_path, monkeypatch, has_gpu, cuda, visible, is_refused
):
    """With an old driver torch warns and sees no GPU; the run would train on the CPU."""

    def fail():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(mesh, "GPU_FILE", str(tmp_path / "nvidia0"))
    if has_gpu:
        (tmp_path / "nvidia0").touch()
    if is_refused:
        reason = (
            "driver on your system is too old .found version 12040.(?s:.*)CUDA_VISIBLE_DEVICES="
        )
        with pytest.raises(RuntimeError, match=reason):
            init_distributed()
    else:
        assert init_distributed() == torch.device("cpu")
        dist.destroy_process_group()


if __name__ == "__main__":  # a process of the test of time-outs
    cpu = init_distributed()
    mesh.make_mesh(cpu, fsdp_size=1, sp_size=2)
    mesh.make_mesh(cpu, tp_size=2)
    names = [group.group_desc for group in _world.pg_map]
    assert {"default_pg", "mesh_dp", "mesh_tp"} <= set(names), names
    for group in _world.pg_map:
        timeout = group._get_backend(cpu).options._timeout
        assert timeout == mesh.COLLECTIVE_TIMEOUT, (group.group_desc, timeout)
    dist.destroy_process_group()
