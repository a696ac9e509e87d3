"""Streaming parsers of model output: reasoning, content, tool calls."""
