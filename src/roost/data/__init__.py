"""What travels between the groups of a job: samples, the buffer that holds them, and the lock around weights."""
