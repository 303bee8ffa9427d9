"""Huawei Ascend NPUs."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

ASCEND = register_accelerator(
    AcceleratorType(
        name="Ascend",
        visible_devices_variable="ASCEND_RT_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",),
        ray_resource="NPU",
        noun="NPU",
    )
)
