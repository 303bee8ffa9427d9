"""AMD GPUs (ROCm)."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

AMD = register_accelerator(
    AcceleratorType(
        name="AMD",
        visible_devices_variable="HIP_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",),
        models=("AMD-", "MI2", "MI3"),
        device_files=("/dev/kfd",),
    )
)
