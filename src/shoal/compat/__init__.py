"""The predecessors' APIs as thin facades over shoal: change the import, keep the program.

`shoal.compat.multihost_utils` replaces `jax.experimental.multihost_utils`, `shoal.compat.torch_xla`
`torch_xla.distributed.spmd`, and `shoal.compat.dtensor` `tf.experimental.dtensor`. A facade
decides, sends and places nothing itself, and knows no other facade. Its errors are shoal's, and
also instances of the types that the predecessor raised.

Functions that only a predecessor's programs need are here too, in a form for JAX: `pack` and
`unpack`, `enter_manual` and `leave_manual`, `fence`, `linear`.
"""

from shoal.arrays.placing.pack import pack as pack
from shoal.arrays.placing.pack import unpack as unpack
from shoal.arrays.traced.enter_manual import enter_manual as enter_manual
from shoal.arrays.traced.enter_manual import leave_manual as leave_manual
from shoal.arrays.traced.fence import fence as fence
from shoal.arrays.traced.linear import linear as linear

__all__ = ["enter_manual", "fence", "leave_manual", "linear", "pack", "unpack"]
