"""Data that travels between worker groups: samples, the buffer that holds them, and the lock around weights."""
