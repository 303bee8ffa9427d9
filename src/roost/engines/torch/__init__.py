"""The built-in engine: it serves any causal language model that is a torch module."""
