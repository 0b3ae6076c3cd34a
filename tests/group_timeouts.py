"""Makes every kind of group that rl2 makes and checks their time-outs; started under torchrun.

One that differs would end a run where a rank waits long for another one's environment.
"""

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from rl2.parallel.mesh import COLLECTIVE_TIMEOUT, init_distributed, make_mesh

device = init_distributed()
make_mesh(device, fsdp_size=1, sp_size=2)
make_mesh(device, tp_size=2)
names = [group.group_desc for group in _world.pg_map]
assert {"default_pg", "mesh_dp", "mesh_tp"} <= set(names), names
for group in _world.pg_map:
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    assert timeout == COLLECTIVE_TIMEOUT, (group.group_desc, timeout)
dist.destroy_process_group()
