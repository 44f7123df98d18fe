"""The HTTP server: OpenAI's interface over one executor, its metrics and its page."""
