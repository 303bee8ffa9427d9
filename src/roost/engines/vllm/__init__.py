"""vLLM as an engine: its own server as a child process, and a plugin that loads weights in its workers."""
