"""Places fp32 weights at random in the rounding cells of bf16, so that small updates show.

A weight that is stored in bf16 and trained in fp32 starts in the middle of its rounding cell: the
fp32 numbers that round to one bf16 number. The forward pass uses its bf16 copy, which stays the
same until the updates add up to half a cell. At a random place of the cell, the probability that an
update crosses the border is its size in cells. So the copies move by the update on average.
"""

import hashlib
import struct

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl2.model.attachment import Attachment, ModelSettings
from rl2.parallel.device import device_kind

# In bits of fp32, of which bf16 has the upper half
HALF_CELL = 1 << 15
LOWER_HALF = (1 << 16) - 1
MANTISSA = (1 << 23) - 1
SMALLEST, INFINITE = 2 << 23, 0xFF << 23  # magnitudes from 2^-125 on, below infinity and NaN
MAGNITUDE = 0x7FFFFFFF
# Elements that are computed at a time: on a CPU they stay in the cache of a core, on a GPU few
# kernels compute them.
CHUNK_SIZES = {"cpu": 2**18, "cuda": 2**24}


class Dither(Attachment):
    """Places for all weights of a model that is trained whole and computes in bf16.

    They depend on the seed that torch's generator last got.
    """

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "Dither | None":
        is_whole = settings.trainable and not settings.freezes_base
        is_rounded = is_whole and settings.dtype == torch.bfloat16
        return cls() if is_rounded and settings.config.dither_weights else None

    def change(self, name: str, weight: Tensor) -> Tensor:
        if weight.dtype != torch.float32:  # what is frozen in bf16
            return weight
        return dither_(torch.initial_seed(), name, weight)


def dither_(seed: int, name: str, weight: Tensor) -> Tensor:
    """Moves each bf16 number of an fp32 tensor to a random place of its rounding cell, in place.

    All places are equally likely, and each rounds to the number itself. They depend on the seed,
    the name and the position alone: not on the device, nor on what else was drawn. Zeros,
    magnitudes below 2^-125, infinities, NaN and numbers that bf16 does not have stay as they are.
    Returns the tensor.
    """
    assert weight.dtype == torch.float32, weight.dtype
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    first_key, second_key = struct.unpack("<ii", digest[:8])
    bits = weight.view(torch.int32).view(-1)
    size = CHUNK_SIZES[device_kind(weight.device)]
    for start in range(0, len(bits), size):
        chunk = bits[start : start + size]
        positions = torch.arange(len(chunk), dtype=torch.int32, device=bits.device)
        positions += (start + 2**31) % 2**32 - 2**31  # modulo 2^32, as int32
        chunk += _offsets(chunk, _hash_(positions, first_key, second_key))
    return weight


def _offsets(bits: Tensor, random: Tensor) -> Tensor:
    """Returns how far each number moves, as a difference of its bits, from 32 random bits each."""
    # Neither end is reached: half a cell is a tie, which may round to the neighbor.
    offset = ((random & LOWER_HALF) - HALF_CELL).clamp_(min=1 - HALF_CELL)
    # Below a power of two, numbers are half as far apart: the lower part of its cell has half the
    # width of the upper part, and as many fp32 numbers. A third of the draws fall there.
    scaled = ((offset + HALF_CELL) * 3 >> 2) - HALF_CELL // 2
    of_power = torch.where(scaled < 0, (2 * scaled).clamp_(min=1 - HALF_CELL), scaled)
    offset = torch.where(bits & MANTISSA == 0, of_power, offset)
    magnitude = bits & MAGNITUDE
    is_moved = (bits & LOWER_HALF == 0) & (magnitude >= SMALLEST) & (magnitude < INFINITE)
    return offset * is_moved


def _hash_(x: Tensor, first_key: int, second_key: int) -> Tensor:
    """Hashes each int32 to 32 bits that look random, in place.

    The multipliers and shifts are those of lowbias32 (Wellons, "Prospecting for hash functions",
    2018). A second key between its rounds keeps tensors from having shifted copies of one sequence.
    """
    x ^= first_key
    x ^= (x >> 16) & 0xFFFF  # int32 shifts copies of the sign in
    x *= 0x7FEB352D
    x ^= second_key
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
