"""One module per accelerator vendor; a new one is found by being here."""
