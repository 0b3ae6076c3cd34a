"""A stand-in for the package sglang, with the calls that rl2/engine/sglang.py makes.

Its scheduler is a thread that loads weights from the handles of all ranks, as SGLang's processes
do. `install` also replaces what the engine calls of torch.cuda, so that the paths of a GPU run on a
CPU. What SGLang itself does is tested in tests/sglang.
"""

import asyncio
import io
import itertools
import os
import pickle
import queue
import sys
import threading
from base64 import b64encode
from multiprocessing.reduction import ForkingPickler
from types import ModuleType, SimpleNamespace

import numpy as np
import torch


class FlattenedTensorBucket:
    """Tensors behind each other in one tensor of bytes, as SGLang has it."""

    num_alive = 0
    most_alive = 0

    def __init__(self, named_tensors):
        self.metadata = []
        end = 0
        for name, tensor in named_tensors:
            start, end = end, end + tensor.nbytes
            self.metadata.append((name, tensor.shape, tensor.dtype, start, end))
        self.flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])
        FlattenedTensorBucket.num_alive += 1
        FlattenedTensorBucket.most_alive = max(self.most_alive, self.num_alive)

    def __del__(self):
        FlattenedTensorBucket.num_alive -= 1

    def get_flattened_tensor(self):
        return self.flat

    def get_metadata(self):
        return self.metadata


class MultiprocessingSerializer:
    @staticmethod
    def serialize(value):
        file = io.BytesIO()
        ForkingPickler(file).dump(value)
        return file.getvalue()


class Manager:
    """SGLang's tokenizer manager, and a scheduler thread that loads the weights it is sent."""

    def __init__(self, before_load):
        self.before_load = before_load  # called in the scheduler with the number of the bucket
        self.weights = []  # by rank of the engine: name -> tensor
        self.load_formats = []
        self.dtypes = []  # of each bucket
        self.model = {}  # a scheduler's own tensors by name: what is checked and overwritten
        self.requests = queue.Queue()
        threading.Thread(target=self._schedule, daemon=True).start()

    def auto_create_handle_loop(self):
        pass

    async def flush_cache(self, timeout_s=None):
        return SimpleNamespace(success=True)

    async def check_weights(self, request):
        """Checksums of the model, or noise in all tensors that are not kept."""
        if request.action == "reset_tensors":
            kept = getattr(request, "skip_tensor_list", None) or []
            for name, tensor in self.model.items():
                if name not in kept:
                    tensor.fill_(7)
        checksums = {name: str(tensor.tolist()) for name, tensor in self.model.items()}
        return True, "checked", [{"checksums": checksums}]

    async def update_weights_from_tensor(self, request, _):
        loop = asyncio.get_running_loop()
        answer = loop.create_future()

        def send_answer(success, message):
            loop.call_soon_threadsafe(answer.set_result, (success, message))

        self.requests.put((request, send_answer))
        return await answer

    def _schedule(self):
        for number in itertools.count():
            request, send_answer = self.requests.get()
            self.before_load(number)
            try:
                self._load(request)
            except Exception as error:
                send_answer(False, repr(error))
            else:
                send_answer(True, "loaded")

    def _load(self, request):
        self.load_formats.append(request.load_format)
        for rank, handle in enumerate(request.serialized_named_tensors):
            if rank == len(self.weights):
                self.weights.append({})
            payload = pickle.loads(handle)
            for name, shape, dtype, start, end in payload["metadata"]:
                values = payload["flattened_tensor"][start:end].view(dtype).reshape(shape)
                self.weights[rank][name] = values.clone()
                if name in self.model:
                    self.model[name].copy_(values)
        self.dtypes.append({entry[2] for entry in payload["metadata"]})


class FakeEngine:
    """SGLang's Engine. `release` and `before_load` are what a test wants to happen."""

    def __init__(self, before_load, release, **arguments):
        self.arguments = arguments
        self.environment = dict(os.environ)  # of its processes
        os.environ["NCCL_CUMEM_ENABLE"] = "0"
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        self.release = release
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager(before_load)

    def release_memory_occupation(self, tags):
        self.release()

    async def async_generate(
        self,
        input_ids,
        sampling_params,
        return_logprob,
        return_routed_experts=False,
        routed_experts_start_len=0,
    ):
        """An answer of one token, which is 1.

        The two experts of token t in layer l are 10 t + l and one more, in three layers.
        """
        version = self.arguments.get("weight_version", "default")
        meta = {"output_token_logprobs": [(-0.5, 1, None)], "finish_reason": {"type": "length"}}
        if return_routed_experts and self.arguments.get("enable_return_routed_experts"):
            tokens = np.arange(routed_experts_start_len, len(input_ids))[:, None, None]
            experts = 10 * tokens + np.arange(3)[:, None] + np.arange(2)
            meta["routed_experts"] = b64encode(experts.astype(np.int32).tobytes()).decode()
        return {"meta_info": {**meta, "weight_version": version}}

    def resume_memory_occupation(self, tags):
        pass

    def flush_cache(self):
        pass

    def shutdown(self):
        pass


def install(
    before_load=lambda number: None,
    release=lambda: None,
    free_bytes=lambda device: 0,
    total_bytes=80 * 2**30,
    start=lambda: None,
    keeps_tensors=True,
) -> None:
    """Puts the stand-ins in place of sglang and torch.cuda, until the process ends.

    `start` is called while an engine starts; `keeps_tensors`: as since release 0.5.21.
    """
    names = ["", ".srt", ".srt.utils", ".srt.utils.patch_torch", ".srt.weight_sync"]
    names += [".srt.weight_sync.tensor_bucket", ".srt.managers", ".srt.managers.io_struct"]
    modules = {name: ModuleType(f"sglang{name}") for name in names}
    sys.modules.update({f"sglang{name}": module for name, module in modules.items()})

    def make_engine(**arguments):
        start()
        return FakeEngine(before_load, release, **arguments)

    modules[""].Engine = make_engine
    modules[".srt.utils"].MultiprocessingSerializer = MultiprocessingSerializer
    patch_torch = modules[".srt.utils.patch_torch"]
    patch_torch.num_patches = 0

    def monkey_patch_torch_reductions():
        """With SGLang's, tensors of a CPU can no longer be sent."""
        patch_torch.num_patches += 1

    patch_torch.monkey_patch_torch_reductions = monkey_patch_torch_reductions
    modules[".srt.weight_sync.tensor_bucket"].FlattenedTensorBucket = FlattenedTensorBucket
    request = modules[".srt.managers.io_struct"]
    request.UpdateWeightsFromTensorReqInput = SimpleNamespace
    fields = {"skip_tensor_list": None} if keeps_tensors else {}
    request.CheckWeightsReqInput = type("CheckWeightsReqInput", (SimpleNamespace,), fields)
    for name in ("synchronize", "ipc_collect", "empty_cache"):
        setattr(torch.cuda, name, lambda: None)
    torch.cuda.mem_get_info = lambda device: (free_bytes(device), total_bytes)
