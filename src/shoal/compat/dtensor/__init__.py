"""TensorFlow's `tf.experimental.dtensor` API on JAX arrays.

Never imports TensorFlow; knows no other facade.
"""

from shoal.compat.dtensor.checkpoint import DTensorCheckpoint as DTensorCheckpoint
from shoal.compat.dtensor.config import client_id as client_id
from shoal.compat.dtensor.config import full_job_name as full_job_name
from shoal.compat.dtensor.config import gpu_use_nccl_communication as gpu_use_nccl_communication
from shoal.compat.dtensor.config import heartbeat_enabled as heartbeat_enabled
from shoal.compat.dtensor.config import is_local_mode as is_local_mode
from shoal.compat.dtensor.config import job_name as job_name
from shoal.compat.dtensor.config import jobs as jobs
from shoal.compat.dtensor.config import local_devices as local_devices
from shoal.compat.dtensor.config import num_clients as num_clients
from shoal.compat.dtensor.config import num_global_devices as num_global_devices
from shoal.compat.dtensor.config import num_local_devices as num_local_devices
from shoal.compat.dtensor.config import preferred_device_type as preferred_device_type
from shoal.compat.dtensor.config import use_multi_device_mode as use_multi_device_mode
from shoal.compat.dtensor.dataset import DTensorDataset as DTensorDataset
from shoal.compat.dtensor.device import DTensorDevice as DTensorDevice
from shoal.compat.dtensor.device import _dtensor_device as _dtensor_device
from shoal.compat.dtensor.device import _global_barrier as _global_barrier
from shoal.compat.dtensor.device import reset_dtensor_device as reset_dtensor_device
from shoal.compat.dtensor.layout import MATCH as MATCH
from shoal.compat.dtensor.layout import UNSHARDED as UNSHARDED
from shoal.compat.dtensor.layout import Layout as Layout
from shoal.compat.dtensor.mesh import Mesh as Mesh
from shoal.compat.dtensor.meshes import barrier as barrier
from shoal.compat.dtensor.meshes import create_distributed_mesh as create_distributed_mesh
from shoal.compat.dtensor.meshes import create_mesh as create_mesh
from shoal.compat.dtensor.meshes import create_tpu_mesh as create_tpu_mesh
from shoal.compat.dtensor.meshes import get_device_ids as get_device_ids
from shoal.compat.dtensor.meshes import get_device_locations as get_device_locations
from shoal.compat.dtensor.moves import call_with_layout as call_with_layout
from shoal.compat.dtensor.moves import check_layout as check_layout
from shoal.compat.dtensor.moves import copy_to_mesh as copy_to_mesh
from shoal.compat.dtensor.moves import default_mesh as default_mesh
from shoal.compat.dtensor.moves import device_name as device_name
from shoal.compat.dtensor.moves import fetch_layout as fetch_layout
from shoal.compat.dtensor.moves import get_default_mesh as get_default_mesh
from shoal.compat.dtensor.moves import is_dtensor as is_dtensor
from shoal.compat.dtensor.moves import pack as pack
from shoal.compat.dtensor.moves import relayout as relayout
from shoal.compat.dtensor.moves import relayout_like as relayout_like
from shoal.compat.dtensor.moves import run_on as run_on
from shoal.compat.dtensor.moves import unpack as unpack
from shoal.compat.dtensor.saving import name_based_restore as name_based_restore
from shoal.compat.dtensor.saving import name_based_save as name_based_save
from shoal.compat.dtensor.saving import sharded_save as sharded_save
from shoal.compat.dtensor.start import (
    initialize_accelerator_system as initialize_accelerator_system,
)
from shoal.compat.dtensor.start import initialize_multi_client as initialize_multi_client
from shoal.compat.dtensor.start import (
    initialize_multi_client_cluster as initialize_multi_client_cluster,
)
from shoal.compat.dtensor.start import initialize_tpu_system as initialize_tpu_system
from shoal.compat.dtensor.start import is_initialized as is_initialized
from shoal.compat.dtensor.start import set_initialized as set_initialized
from shoal.compat.dtensor.start import shutdown_accelerator_system as shutdown_accelerator_system
from shoal.compat.dtensor.start import shutdown_tpu_system as shutdown_tpu_system
from shoal.compat.dtensor.text import DeviceSpec as DeviceSpec
from shoal.compat.dtensor.tpu import dtensor_initialize_tpu_system as dtensor_initialize_tpu_system
from shoal.compat.dtensor.tpu import dtensor_shutdown_tpu_system as dtensor_shutdown_tpu_system
from shoal.compat.dtensor.tpu import tpu_system_init_helper as tpu_system_init_helper
from shoal.compat.dtensor.variable import DVariable as DVariable
from shoal.compat.dtensor.variable import enable_save_as_bf16 as enable_save_as_bf16
