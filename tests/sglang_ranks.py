"""Checks of the SGLang engine with a stand-in for SGLang; started as a process or by launch.py.

sglang_ranks.py CHECK MODEL DEVICE
"""

import os
import sys
import threading
import time
from dataclasses import replace

import torch
import torch.distributed as dist
from fake_sglang import FlattenedTensorBucket, install
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rl2 import progress
from rl2.engine import sglang
from rl2.engine.base import EngineSettings, SamplingParams, TrainerMemory
from rl2.parallel.mesh import COLLECTIVE_TIMEOUT, all_gather_objects, init_distributed

GIB = 2**30


def make_engine(name, device, gpu_memory_utilization=0.5, **changes):
    """An engine of all ranks."""
    settings = EngineSettings(
        name,
        torch.bfloat16,
        torch.device(device),
        tp_size=dist.get_world_size(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        gpu_memory_utilization=gpu_memory_utilization,
        **changes,
    )
    return sglang.SGLangEngine(settings)


def check_weights(name, device):
    """Every scheduler reads all weights, of several dtypes and sizes, from its own rank."""
    install()
    engine = make_engine(name, device)
    sglang.BUCKET_SIZE_BYTES = 64
    dtypes = [torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]
    sizes = [3, 5, 7, 100, 20]  # 3 numbers of bf16 end where none of fp32 may begin
    weights = {
        f"weight.{i}": torch.arange(size, dtype=dtype) + i
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    }
    engine.load_weights(weights.items(), 1)
    num_patches = sys.modules["sglang.srt.utils.patch_torch"].num_patches
    assert bool(num_patches) == (device != "cpu"), "handles of GPUs alone have another form"
    if engine.index is None:
        return
    manager = engine.engine.tokenizer_manager
    assert len(manager.weights) == dist.get_world_size()
    for loaded in manager.weights:
        assert loaded.keys() == weights.keys()
        for key, weight in weights.items():
            assert loaded[key].dtype == weight.dtype and loaded[key].equal(weight), key
    assert set(manager.load_formats) == {"flattened_bucket"}
    assert all(len(dtypes) == 1 for dtypes in manager.dtypes)
    assert len(manager.load_formats) == 5
    engine.close()


def check_experts(name, device):
    """The weights of a mixture of experts arrive as its files have them."""
    install()
    engine = make_engine(name, device)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    engine.load_weights([(key, x.detach()) for key, x in model.named_parameters()], 1)
    (weights,) = engine.engine.tokenizer_manager.weights
    stored = load_file(f"{name}/model.safetensors")
    assert weights.keys() == stored.keys() and any(".experts.3." in key for key in stored)
    assert all(torch.equal(weights[key], stored[key]) for key in stored)
    engine.close()


def check_overlap(name, device):
    """SGLang loads a bucket while the next one is gathered; one bucket at a time is there twice.

    Each bucket has one weight. It is full, and sent, when the next weight has been gathered. So the
    one after that is gathered while SGLang loads it.
    """
    gathered = [threading.Event() for _ in range(5)]
    loaded_meanwhile = []

    def wait_for_next(number):
        if number + 2 < len(gathered):
            loaded_meanwhile.append(gathered[number + 2].wait(timeout=2))

    def gather():
        for number, event in enumerate(gathered):
            event.set()
            yield f"weight.{number}", torch.full((16,), float(number))

    install(before_load=wait_for_next)
    engine = make_engine(name, device)
    sglang.BUCKET_SIZE_BYTES = 64
    engine.load_weights(gather(), 1)
    assert loaded_meanwhile == [True] * 3, "SGLang waited for the next bucket"
    (weights,) = engine.engine.tokenizer_manager.weights
    for number in range(5):
        assert weights[f"weight.{number}"].eq(number).all()
    assert FlattenedTensorBucket.most_alive == 1
    engine.close()


def check_environment(name, device):
    """SGLang's processes find libcudart beside the user's folders, and start without an alarm.

    Afterwards the variables of NCCL are those of ranks without an engine; the user's own ones stay.
    """
    is_expected = []
    install(start=lambda: is_expected.append(progress.is_expecting()))
    sglang.cudart_folder = lambda: "/site-packages/nvidia/cu13/lib"
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    for folders in (None, "/own"):
        os.environ.pop("LD_LIBRARY_PATH", None)
        if folders:
            os.environ["LD_LIBRARY_PATH"] = folders
        engine = make_engine(name, device)
        seen = engine.engine.environment["LD_LIBRARY_PATH"].split(":")
        assert seen == [*filter(None, [folders]), "/site-packages/nvidia/cu13/lib"], seen
        assert os.environ.get("LD_LIBRARY_PATH") == folders
        variables = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
        assert variables == {"NCCL_NVLS_ENABLE": "1"}, variables
        engine.close()
    assert is_expected == [True, True]


def check_evaluation(name, device):
    """An engine that was never sent weights answers with version 0, also if a user names others."""
    install()
    for arguments, version in (({}, 0), ({"weight_version": "mine"}, 0)):
        engine = make_engine(name, device, engine_args=arguments)
        answer = engine.loop.run_until_complete(
            engine.generate([3], SamplingParams(max_new_tokens=1), (0,))
        )
        assert (answer.tokens, answer.version) == ([1], version)
        engine.close()


def check_routing(name, device):
    """Of three layers the last two have routers, and an answer tells of them alone."""
    install()
    engine = make_engine(name, device, with_experts=True)

    def ask(**params):
        request = engine.generate([3, 4, 5], SamplingParams(max_new_tokens=1, **params), (0,))
        return engine.loop.run_until_complete(request)

    assert ask(experts_from=1).experts.tolist() == [[[11, 12], [12, 13]], [[21, 22], [22, 23]]]
    assert ask().experts is None
    engine.close()


def check_arguments(name, device):
    """Graphs reach up to the requests that run, and a scheduler sleeps while the trainer works."""
    install()
    for requests, graphs in ((48, 48), (512, 512), (2000, 512)):
        engine = make_engine(name, device, max_running_requests=requests)
        arguments = engine.engine.arguments
        assert arguments["max_running_requests"] == requests
        assert arguments["cuda_graph_max_bs_decode"] == graphs
        assert arguments["sleep_on_idle"] is True
        engine.close()


def check_buffers(name, device):
    """Buffers that SGLang alone has keep their values while its weights are compared.

    Releases that cannot keep them load the weights without a comparison.
    """
    buffer, weight = "model.layers.0.conv._state_indices", "model.layers.0.mlp.gate_up_proj.weight"
    for keeps_tensors in (True, False):
        install(keeps_tensors=keeps_tensors)
        engine = make_engine(name, device)
        model = engine.engine.tokenizer_manager.model
        model.update({buffer: torch.arange(3.0), weight: torch.arange(4.0)})
        engine.verify_weights([(weight, torch.arange(4.0))], 0)
        assert model[buffer].equal(torch.arange(3.0)), "noise in a tensor that nobody sends"
        assert model[weight].equal(torch.arange(4.0)) and engine.version == 0
        try:
            engine.verify_weights([(weight, torch.zeros(4))], 0)
        except RuntimeError as error:
            assert keeps_tensors and weight in str(error)
        else:
            assert not keeps_tensors
        engine.close()


def check_release(name, device):
    """`sleep` returns when the rank's own GPU has its memory back, which takes rank 1 longer.

    A GPU that does not get it back is an error.
    """
    store = dist.PrefixStore("gpu", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    seconds = 0.5

    def release_elsewhere():
        time.sleep(seconds)
        store.set("1", str(38 * GIB))  # less than on the first GPU, within what is usual

    def release():
        threading.Thread(target=release_elsewhere, daemon=True).start()
        store.set("0", str(39 * GIB))

    def free_bytes(device):
        return 30 * GIB + int(store.get(str(rank)))

    install(release=release, free_bytes=free_bytes)
    store.set(str(rank), "0")
    engine = make_engine(name, device)
    backend = engine.group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == COLLECTIVE_TIMEOUT
    engine.sleep()
    assert free_bytes(device) > 60 * GIB, f"rank {rank} trains before SGLang's memory is free"
    engine.wake()
    store.set(str(rank), "0")
    seconds = 5
    sglang.SECONDS_TO_RELEASE = 0.2
    try:
        engine.sleep()
    except RuntimeError as error:
        assert rank == 1
        message = str(error)
        assert "gave back 39.0 GiB on the first GPU" in message and "0.0 on cuda:0" in message
    else:
        assert rank == 0
    dist.barrier()
    engine.close()


def check_kept(name, device):
    """An engine that gives too little of its memory back is an error, not an update that fails."""
    free = [70 * GIB]
    given = [0]

    def start():
        free[0] -= 40 * GIB

    def release():
        free[0] += given[0]

    install(start=start, release=release, free_bytes=lambda device: free[0])
    engine = make_engine(name, device)
    given[0] = 36 * GIB  # it keeps its context and its graphs
    engine.sleep()
    free[0] -= given[0]
    for few in (0, 3 * GIB):
        given[0] = few
        try:
            engine.sleep()
        except RuntimeError as error:
            assert "took 40.0 GiB" in str(error) and f"gave back {few / GIB:.1f}" in str(error)
        else:
            raise AssertionError(f"{few} bytes were enough")
    engine.close()


def check_share(name, device):
    """With auto SGLang takes what the trainer leaves; a number is obeyed.

    The figures are those of a 7B model on two GPUs, in GB: weights and optimizer take 46.
    """
    gb = 10**9
    total, allocated, free = 85 * gb, 46 * gb, 38 * gb
    trainer = TrainerMemory(sending=3 * gb, engine_weights=15 * gb)
    install(free_bytes=lambda device: free, total_bytes=total)
    torch.cuda.memory_allocated = lambda device: allocated

    def share_with(trainer, gpu_memory_utilization="auto"):
        engine = make_engine(name, device, gpu_memory_utilization, trainer=trainer)
        share = engine.engine.arguments["mem_fraction_static"]
        engine.close()
        return share

    share = share_with(trainer)
    assert 0.99 * free < 0.15 * total + share * free <= free  # room to generate
    sending = replace(trainer, sending=24 * gb)  # the keys and values are there meanwhile
    share = share_with(replace(sending, engine_weights=gb))
    assert 0.99 * free < sending.sending + 2**30 + 0.05 * total + share * free <= free
    assert share_with(trainer, gpu_memory_utilization=0.6) == 0.6
    try:
        share_with(sending)
    except RuntimeError as error:
        assert "the trainer keeps 42.8 GiB" in str(error)
        assert "actor.offload_optimizer=true" in str(error)
    else:
        raise AssertionError("the weights of SGLang have no room")


def check_ports(name, device):
    """No connection of another program gets a rank's ports before SGLang listens there."""
    ports = sglang._free_ports(2)
    all_ports = [port for of_rank in all_gather_objects(ports) for port in of_rank]
    assert len(set(all_ports)) == 2 * dist.get_world_size()
    first_of_connections = 32_768  # the default of Linux
    assert max(all_ports) < first_of_connections, all_ports


if __name__ == "__main__":
    init_distributed()
    check, *arguments = sys.argv[1:]
    globals()[f"check_{check}"](*arguments)
    dist.destroy_process_group()
