"""vLLM as an engine: its own server as a child process, and a way for weights into its workers."""
