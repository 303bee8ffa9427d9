"""Moore Threads GPUs (MUSA)."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

MUSA = register_accelerator(
    AcceleratorType(
        name="MUSA",
        visible_devices_variable="MUSA_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_MUSA_VISIBLE_DEVICES",),
        models=("MTT", "MUSA", "Moore-Threads"),
        device_files=("/dev/mtgpu*",),
    )
)
