"""A speculator server: one speculator lane, several executors that share it. Each of them is a client."""
