"""From the text that a model wrote to what it meant: content, reasoning and tool calls."""
