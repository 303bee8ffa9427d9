"""SGLang as an engine: its own server as a child process, commanded over its documented HTTP API."""
