"""One module per accelerator vendor; all modules of this package are imported."""
