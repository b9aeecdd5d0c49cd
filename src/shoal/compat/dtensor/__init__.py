"""TensorFlow's `tf.experimental.dtensor`, by its own names, on arrays of JAX."""

from shoal.compat.dtensor.device_spec import DeviceSpec as DeviceSpec
from shoal.compat.dtensor.layout import MATCH as MATCH
from shoal.compat.dtensor.layout import UNSHARDED as UNSHARDED
from shoal.compat.dtensor.layout import Layout as Layout
from shoal.compat.dtensor.mesh import Mesh as Mesh
