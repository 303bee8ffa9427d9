"""Intel GPUs (Level Zero). Ray before 2.5x set the oneAPI selector instead of the mask."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

INTEL = register_accelerator(
    AcceleratorType(
        name="Intel",
        visible_devices_variable="ZE_AFFINITY_MASK",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_ZE_AFFINITY_MASK", "RAY_EXPERIMENTAL_NOSET_ONEAPI_DEVICE_SELECTOR"),
        models=("Intel-GPU", "Intel-Data-Center-GPU"),
    )
)
