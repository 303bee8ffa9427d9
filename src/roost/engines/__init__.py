"""Inference engines: what each must be able to do, their servers and clients, and the router in front of them."""
