"""Kunlunxin XPUs: their runtime reads the CUDA variable."""

from roost.hardware.accelerators import AcceleratorType, register_accelerator

KUNLUN = register_accelerator(
    AcceleratorType(
        name="Kunlun",
        visible_devices_variable="CUDA_VISIBLE_DEVICES",
        noset_variables=("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",),
        noun="XPU",
        models=("Kunlun", "P8"),
        device_files=("/dev/xpuctrl",),
    )
)
