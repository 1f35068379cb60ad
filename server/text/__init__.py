"""Parsing of a model's output text into content, reasoning and tool calls."""
