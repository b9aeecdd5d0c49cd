"""TensorFlow's device names: /job:localhost/replica:0/task:0/device:CPU:3."""

from __future__ import annotations

import dataclasses
import re

from shoal.errors import UsageError, UsageTypeError

__all__ = ["DeviceSpec", "spec_of"]

_SHORT = re.compile(r"(CPU|GPU|TPU)(?::(\d{1,18}|\*))?", re.IGNORECASE | re.ASCII)
_FIELD = re.compile(r"(job|replica|task):(.*)", re.DOTALL)
_DEVICE = re.compile(r"device:([A-Za-z]\w*)(?::(\d{1,18}|\*))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class DeviceSpec:
    """One device: the process (`task`) that has it, its type, and its index there.

    >>> spec = DeviceSpec.from_string("/job:worker/task:1/device:CPU:3")
    >>> spec.task, spec.device_type, spec.device_index, spec.to_string()
    (1, 'CPU', 3, '/job:worker/task:1/device:CPU:3')
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    device_type: str | None = None
    device_index: int | None = None

    @classmethod
    def from_string(cls, spec: str) -> DeviceSpec:
        """Read a name; fields that it lacks are None.

        Raises:
          UsageError: a part of it is not one of job, replica, task and device.
        """
        if not isinstance(spec, str):
            raise UsageTypeError(f"dtensor.DeviceSpec: {spec!r} must be the name of a device")
        found: dict[str, str | int | None] = {}
        for part in filter(None, spec.split("/")):
            found |= _read(part, spec)
        return cls(**found)  # type: ignore[arg-type]

    def replace(self, **fields: str | int | None) -> DeviceSpec:
        """Return the same with other values of some fields."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to_string(self) -> str:
        """Return the name that `from_string` reads."""
        fields = {"job": self.job, "replica": self.replica, "task": self.task}
        text = "".join(f"/{name}:{value}" for name, value in fields.items() if value is not None)
        if self.device_type is None:
            return text
        index = "*" if self.device_index is None else self.device_index
        return f"{text}/device:{self.device_type}:{index}"


def _read(part: str, spec: str) -> dict[str, str | int | None]:
    device = _DEVICE.fullmatch(part) or _SHORT.fullmatch(part)
    if device:
        index = device[2]
        number = None if index in (None, "*") else int(index)
        return {"device_type": device[1].upper(), "device_index": number}
    field = _FIELD.fullmatch(part)
    if field and field[1] == "job":
        return {"job": field[2] or None}
    if field and re.fullmatch(r"\d{1,18}", field[2], re.ASCII):
        return {field[1]: int(field[2])}
    raise UsageError(
        f"dtensor.DeviceSpec: {part!r} in {spec!r} is not part of a device's name, such as "
        "/job:localhost/replica:0/task:0/device:CPU:0"
    )


def spec_of(device: DeviceSpec | str) -> DeviceSpec:
    """Return a device, given as such or by its name.

    Raises:
      UsageError: it is neither.
    """
    if hasattr(device, "to_string"):  # ours, or TensorFlow's
        device = str(device.to_string())
    return DeviceSpec.from_string(device)
