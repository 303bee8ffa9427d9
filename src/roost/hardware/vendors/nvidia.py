"""NVIDIA GPUs."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

NVIDIA = register_accelerator(
    AcceleratorType(
        name="NVIDIA",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",),
        # Without it CUDA numbers unequal cards by speed, and the driver library by bus.
        environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )
)
