"""Zigzag ring attention over packed segments; with one process it is packed attention without
communication.

Keys and values travel around the ring (Liu et al., 2023, arXiv:2310.01889) while the next block is
computed. blocks.py says which queries meet which keys.

Shapes: L local packed tokens, H query heads, G key heads, D head size.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rl2.attention.blocks import Blocks, Chunks, Layout, Prefix
from rl2.attention.kernels import (
    backward_block,
    forward_block,
    merge,
    merge_sinks,
    sinks_gradient,
)
from rl2.attention.pages import Pages
from rl2.progress import mark


@dataclass
class Transfer:
    """A message on its way to the next rank, and one on its way to us from the previous rank."""

    sent: Tensor  # its memory must live until the message has left
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """The processes of `group` in a circle; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    def pass_on(self, tensor: Tensor, length: int) -> Transfer:
        """Begins to send `tensor` [n, rows, ...] to the next rank.

        The transfer gives what the previous rank sends, [n, length, ...].
        """
        tensor = tensor.contiguous()
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        received = tensor.new_empty(tensor.shape[0], length, *tensor.shape[2:])
        operations = [
            dist.P2POp(dist.isend, tensor, group=self.group, group_peer=following),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=previous),
        ]
        return Transfer(tensor, received, dist.batch_isend_irecv(operations))


class PackedAttention:
    """The attention of one pack: every layer of its forward pass is given it as `attend`.

    `chunks` and `prefixes` are those of Layout. In step i of the ring we have the keys of rank
    `sources[i]`. Step 0 has our own keys. With `exact`, for one process, the forward pass has the
    bits of the engine's decoding steps.

    No dataclass: FSDP would copy it, and its blocks, at every layer.
    """

    living: WeakValueDictionary[int, "PackedAttention"] = WeakValueDictionary()  # by their numbers

    def __init__(
        self,
        chunks: list[Chunks],
        prefixes: list[Prefix],
        device: torch.device,
        ring: Ring | None = None,
        exact: bool = False,
    ):
        self.ring = ring or Ring()
        self.exact = exact
        self.layout = Layout(chunks, prefixes, device, self.ring.rank)
        # [size], tokens on each rank. A rank without a token of this pack runs one that nobody
        # sees.
        self.lengths = [max(1, starts[-1]) for starts in self.layout.starts]
        size = self.ring.size
        self.sources = [(self.ring.rank - step) % size for step in range(size)]
        self.blocks: dict[int | None, Blocks] = {}  # by the window of the layer
        self.number = id(self)
        self.living[self.number] = self

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, H, L, D], key [1, G, L, D] and value [1, G, L, V] -> [1, L, H, V].

        With `sliding_window` a token sees at most that many tokens, the last of which is itself.
        `sinks` [H] are one more score of each softmax, of a value of 0.
        """
        width = value.shape[-1]
        if width != query.shape[-1]:
            # The kernels want equal head sizes, which latent attention (DeepSeek) does not have.
            value = F.pad(value, (0, query.shape[-1] - width))
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
        if torch.compiler.is_dynamo_compiling():
            out, _ = torch.ops.rl2.attend(q, k, v, sinks, self.number, sliding_window, scaling)
        else:
            out = _Attention.apply(q, k, v, sinks, self, sliding_window, scaling)
        return out[None, ..., :width]

    def blocks_of(self, window: int | None) -> Blocks:
        if window is not None and window >= self.layout.longest_document:
            window = None  # it hides nothing
        if window not in self.blocks:
            self.blocks[window] = (
                self.layout.full_blocks(self.sources)
                if window is None
                else self.layout.window_blocks(self.sources, window)
            )
            if self.exact:
                self.blocks[window].pages = Pages(self.layout.documents(), window)
        return self.blocks[window]

    def next_length(self, step: int) -> int:
        """Tokens of the rank whose keys come after those of `step`."""
        return self.lengths[(self.ring.rank - step - 1) % self.ring.size]

    def travel(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values of each step; those of the next one are on their way meanwhile.

        In a ring they are one tensor [2, L, G, D], so that one message carries both.
        """
        if self.ring.size == 1:
            yield k, v
            return
        kv = torch.stack((k, v))
        for step in range(self.ring.size - 1):
            pending = self.ring.pass_on(kv, self.next_length(step))
            yield kv[0], kv[1]
            kv = pending.wait()
        yield kv[0], kv[1]


class _LayerRun:
    """A context in which a checkpointed layer runs, for the first time or again."""

    current: "_LayerRun | None" = None  # layers do not contain each other

    def __init__(self, results: deque, is_again: bool):
        self.results = results  # (out, lse) of the layer's attention, in the order of the calls
        self.is_again = is_again

    def __enter__(self) -> None:
        _LayerRun.current = self

    def __exit__(self, *error: object) -> None:
        _LayerRun.current = None


def keep_attention() -> tuple[_LayerRun, _LayerRun]:
    """The contexts of a layer's two runs: what its attention gives in the first one is kept for the
    second one (Li et al., 2023, arXiv:2310.03294).

    It takes as much memory as the input of the layer, and spares the kernels and the ring.
    """
    results: deque[tuple[Tensor, Tensor]] = deque()
    return _LayerRun(results, is_again=False), _LayerRun(results, is_again=True)


def _from_first_run(compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What `compute` gives, or what it gave when this layer ran for the first time."""
    run = _LayerRun.current
    if run and run.is_again and run.results:
        return run.results.popleft()
    out, lse = compute()
    if run and not run.is_again:
        run.results.append((out.detach(), lse))  # `out` itself would keep the graph alive
    return out, lse


def _forward(q, k, v, sinks, attention, window, scale) -> tuple[Tensor, Tensor]:
    """(out [L, H, D], lse [L, H])."""
    mark()
    blocks = attention.blocks_of(window)
    if blocks.pages:
        return blocks.pages.attend(q, k, v, scale, sinks)
    for step, (keys, values) in enumerate(attention.travel(k, v)):
        if step == 0:
            out, lse = forward_block(q, keys, values, blocks.causal, scale)
        for block in blocks.cross[step]:
            rows = block.queries
            block_out, block_lse = forward_block(
                q[rows], keys[block.keys], values[block.keys], block, scale
            )
            out = out.float()
            out[rows], lse[rows] = merge(out[rows], lse[rows], block_out.float(), block_lse)
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def _backward(attention, window, scale, d_out, q, k, v, out, lse) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    blocks = attention.blocks_of(window)
    if attention.ring.size == 1 and not blocks.cross[0]:  # a sum of one block
        return backward_block(d_out, q, k, v, out, lse, blocks.causal, scale)
    pending_dkv = None
    for step, (keys, values) in enumerate(attention.travel(k, v)):
        # dq and dkv are sums over blocks, in fp32.
        if step == 0:
            dq, dk, dv = backward_block(d_out, q, keys, values, out, lse, blocks.causal, scale)
            dq = dq.float()
            dkv = torch.stack((dk, dv)).float()
        else:
            dkv = torch.zeros(2, *keys.shape, device=q.device)
        for block in blocks.cross[step]:
            rows = block.queries
            block_dq, block_dk, block_dv = backward_block(
                d_out[rows],
                q[rows],
                keys[block.keys],
                values[block.keys],
                out[rows],
                lse[rows],
                block,
                scale,
            )
            dq.index_add_(0, rows, block_dq.float())
            dkv.index_add_(1, block.keys, torch.stack((block_dk, block_dv)).float())
        # The gradient follows its keys around the ring and ends at their rank.
        if pending_dkv is not None:
            dkv += pending_dkv.wait()
        if attention.ring.size > 1:
            pending_dkv = attention.ring.pass_on(dkv, attention.next_length(step))
    dk, dv = dkv if pending_dkv is None else pending_dkv.wait()
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype, copy=True)


class _Attention(torch.autograd.Function):
    """q [L, H, D], k and v [L, G, D], sinks [H] or None -> [L, H, D].

    The blocks of all steps are merged in fp32. The sinks are merged last, and once.
    """

    @staticmethod
    def forward(ctx, q, k, v, sinks, attention, window, scale):
        out, lse = _from_first_run(lambda: _forward(q, k, v, sinks, attention, window, scale))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.settings = attention, window, scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        d_sinks = None if sinks is None else sinks_gradient(d_out, out, lse, sinks)
        attention, window, scale = ctx.settings
        gradients = _backward(attention, window, scale, d_out, q, k, v, out, lse)
        return *gradients, d_sinks, None, None, None


@torch.library.custom_op("rl2::attend", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, n: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`_forward` of pack `n` for compiled layers, which see one operator and do not look into it.

    They take the memory of its results, and rely on the strides.
    """
    attention, run = PackedAttention.living[n], _LayerRun.current
    out, lse = _from_first_run(lambda: _forward(q, k, v, sinks, attention, window, scale))
    if run and not run.is_again:  # it keeps these
        out, lse = out.clone(), lse.clone()
    return out.contiguous(), lse.T.contiguous().T


@torch.library.custom_op("rl2::attend_backward", mutates_args=())
def _attend_backward(
    tensors: list[Tensor], n: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _backward(PackedAttention.living[n], window, scale, *tensors)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _save(ctx, inputs, output):
    q, k, v, sinks, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sinks, *output)


def _gradients(ctx, d_out, _):
    q, k, v, sinks, out, lse = ctx.saved_tensors
    d_sinks = None if sinks is None else sinks_gradient(d_out, out, lse, sinks)
    return *_attend_backward([d_out, q, k, v, out, lse], *ctx.settings), d_sinks, None, None, None


_attend.register_fake(
    lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[1::-1], dtype=torch.float32).T)
)
_attend_backward.register_fake(lambda x, *_: tuple(qkv.new_empty(qkv.shape) for qkv in x[1:4]))
_attend.register_autograd(_gradients, setup_context=_save)
