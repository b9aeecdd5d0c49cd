"""Planning without devices and without JAX: what a mesh, a layout or a move will cost.

NumPy only. `topology` describes hardware; `place` orders a mesh on it; `cost`, `links_of`,
`traffic_of` estimate; `owners` and `region` tell which device holds what; `plan_transfer` and
`bounds` plan a move. The classes are what these return.
"""

from shoal.plan import topology as topology
from shoal.plan.compiled import Collective as Collective
from shoal.plan.compiled import collectives_of as collectives_of
from shoal.plan.compiled import received_bytes_of as received_bytes_of
from shoal.plan.cost import Cost as Cost
from shoal.plan.cost import cost as cost
from shoal.plan.hardware.links import Link as Link
from shoal.plan.hardware.links import Links as Links
from shoal.plan.hardware.links import links_of as links_of
from shoal.plan.hardware.wiring import Numbering as Numbering
from shoal.plan.hardware.wiring import Topology as Topology
from shoal.plan.hlo import hlo_text as hlo_text
from shoal.plan.hlo_reading import layout_of_text as layout_of_text
from shoal.plan.placement import Rings as Rings
from shoal.plan.placement import place as place
from shoal.plan.shards import Owners as Owners
from shoal.plan.shards import owners as owners
from shoal.plan.shards import region as region
from shoal.plan.shards import replica_index as replica_index
from shoal.plan.transfer.bounds import Bounds as Bounds
from shoal.plan.transfer.bounds import DeviceBound as DeviceBound
from shoal.plan.transfer.bounds import bounds as bounds
from shoal.plan.transfer.move_steps import Step as Step
from shoal.plan.transfer.plan import Transfer as Transfer
from shoal.plan.transfer.plan import plan_transfer as plan_transfer
from shoal.plan.transfer.point_to_point import KeptBox as KeptBox
from shoal.plan.transfer.point_to_point import PointToPoint as PointToPoint
from shoal.plan.transfer.point_to_point import Send as Send
from shoal.plan.transfer.traffic import StepTraffic as StepTraffic
from shoal.plan.transfer.traffic import Traffic as Traffic
from shoal.plan.transfer.traffic import traffic_of as traffic_of

__all__ = [
    "Bounds",
    "Collective",
    "Cost",
    "DeviceBound",
    "KeptBox",
    "Link",
    "Links",
    "Numbering",
    "Owners",
    "PointToPoint",
    "Rings",
    "Send",
    "Step",
    "StepTraffic",
    "Topology",
    "Traffic",
    "Transfer",
    "bounds",
    "collectives_of",
    "cost",
    "hlo_text",
    "layout_of_text",
    "links_of",
    "owners",
    "place",
    "plan_transfer",
    "received_bytes_of",
    "region",
    "replica_index",
    "topology",
    "traffic_of",
]
